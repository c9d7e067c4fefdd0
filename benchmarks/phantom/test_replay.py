"""Tests the replay of recorded calls on records whose times can be worked out by hand."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.phantom import agree, timeline, unchecked
from benchmarks.phantom.prices import Machine, Prices, Ring, kind_of

ABOUT = {"model": "1B", "layers": 1, "tokens": 1, "rows": 1, "fp32": False, "ranks": 8, "replicas": 1}
FREE_HOST = {"host_scale": 0.0, "launch_us": 0.0, "event_us": 0.0, "nccl_us": 0.0, "nccl_op_us": 0.0}
WIRE: dict[str, float] = {"base_us": 10.0, "inside_us": 0.0, "between_us": 0.0, "nvlink": 1.0}
MACHINE = Machine(**FREE_HOST, **WIRE, flops=1e12, gemm_us=0.0, memory=1e12, floor_us=1.0, gap_us=0.0)


def call(kind: str, stream: int = 0, *numbers: int, name: str = "") -> list[Any]:
    return [0, 1, kind, stream, *(numbers + (0,) * 5)[:5], name]


def gemm(us: int) -> list[Any]:
    """A matrix product of as many microseconds: 2 m n k / 1e12 flops, with few bytes."""
    return call("gemm", 0, 100, 100, us * 50, 1, 2)


def gather(kilobytes: int, stream: int = 7, comm: int = 1) -> list[Any]:
    """Seven peers send so many kilobytes of bf16 each: 7 us each at 1 GB/s, and 10 of latency."""
    return call("ncclAllGather", stream, 500 * kilobytes, 9, -1, comm, 8)


def waits(*streams: int) -> list[list[Any]]:
    """The compute stream waits for these."""
    return [each for s in streams for each in (call("cudaEventRecord", s, s), call("cudaStreamWaitEvent", 0, s, s))]


def replay(*calls: list[Any], machine: Machine = MACHINE, **more: Any) -> dict[str, Any]:
    """Returns a step in which streams 7 and 8 begin when the last step has ended."""
    begin = [call("cudaEventRecord", 0, 9), *(call("cudaStreamWaitEvent", stream, 9) for stream in (7, 8))]
    return timeline.replay({"about": ABOUT, "calls": [*begin, *calls], **more}, machine)


def test_work_of_a_stream_is_in_order() -> None:
    result = replay(gemm(30), gemm(20))
    assert result["step"] == pytest.approx(50)
    assert result["busy"] == pytest.approx(50)
    slow = replace(MACHINE, gemm_us=3.0, gap_us=1.5)  # each takes longer, and leaves a gap
    assert replay(gemm(30), gemm(20), machine=slow)["step"] == pytest.approx(50 + 2 * 4.5)


@pytest.mark.parametrize(
    ("label", "names"),
    [
        ("matrix products", ("gemm", "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT")),
        (
            "attention, forward",
            ("_ZN13pytorch_flash16flash_fwd_kernelI23Flash", "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma"),
        ),
        (
            "norm, gradient of the weight",  # the namespace of both has the name of a file, layer_norm_kernel.cu
            (
                "_ZN2at6native53_GLOBAL__N__21739cd4_20_layer_norm_kernel_cu_9c5ada8a35GammaBetaBackwardCUDAKernel",
                "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<c10::BFloat16, float",
            ),
        ),
        (
            "foreach casts",
            (
                "_ZN2at6native25multi_tensor_apply_kernelINS1_11CopyFunctorIN3c108BFloat16EfLi2E",
                "multi_tensor_apply_kernel<at::native::CopyFunctor<c10::BFloat16, float, 2, 1, 1>",
            ),
        ),
        (
            "foreach copies",
            (
                "_ZN2at6native25multi_tensor_apply_kernelINS1_11CopyFunctorIN3c108BFloat16ES7_Li2E",
                "multi_tensor_apply_kernel<UnaryOpFunctor<c10::BFloat16, 2, 1, 1>, at::native::Copy<c10::BFloat16, ",
            ),
        ),
        ("strided copies", ("_ZN2at6native18elementwise_kernelILi128", "void at::native::elementwise_kernel<128, 4")),
        ("other", ("my_own_kernel",)),
    ],
)
def test_a_kernel_is_of_one_kind_by_its_name_mangled_or_not(label: str, names: Sequence[str]) -> None:
    assert {kind_of(name).label for name in names} == {label}


def test_prices_of_kernels() -> None:
    """Of 4,096 tokens of the 1B model, in us: near to what an H100 takes for them."""
    prices = Prices(Machine(), {**ABOUT, "tokens": 4096})
    assert prices.gemm(8192, 4096, 2048, 1, 14) == pytest.approx(175, rel=0.03)
    assert prices.gemm(512, 4096, 2048, 1, 14) == pytest.approx(15.4, rel=0.15)
    assert prices.kernel("_ZN13pytorch_flash16flash_fwd_kernelI", 32, 1, 32, 128, 0) == pytest.approx(188, rel=0.03)
    fill = "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEESt5arrayIPcLm1EEEEviT0_T1_"
    assert prices.kernel(fill, 1, 1, 1, 128, 4096 * 128256) == pytest.approx(636, rel=0.03)
    assert prices.kernel(fill, 1, 1, 1, 128, 1) == 1.0
    cast = "multi_tensor_apply_kernelINS1_18TensorListMetadataILi2EEENS1_11CopyFunctorIN3c108BFloat16EfLi2E"
    assert prices.kernel(cast, 17, 1, 1, 512, 950_000) == pytest.approx(16.0, rel=0.1), "few blocks: one takes so long"
    assert prices.kernel(cast, 127, 1, 1, 512, 8_208_400) == pytest.approx(27.4, rel=0.1)
    assert not prices.guessed
    prices.kernel("my_own_kernel", 1, 1, 1, 128, 0)
    assert prices.guessed == {"my_own_kernel": 1}


def test_a_collective_beside_compute_is_hidden_and_what_waits_for_it_shows_the_rest() -> None:
    """It takes 10 + 7 us. The second product waits for it, and the first one has taken 5."""
    record = (gather(1), call("cudaEventRecord", 7, 1), gemm(5), call("cudaStreamWaitEvent", 0, 1, 7), gemm(4))
    result = replay(*record)
    assert result["step"] == pytest.approx(5 + 12 + 4)
    assert result["exposed gather"] == pytest.approx(12)


def test_forward_waits_for_what_the_step_before_has_issued() -> None:
    """Events are other ones in each step: a wait is for the record at the same place of the step before."""

    def step(event: int, last: int) -> list[list[Any]]:
        """20 us of compute, behind a gather of 24 us that the step before has issued last."""
        waited = [call("cudaStreamWaitEvent", 0, last)] if last else []
        ends = [call("cudaEventRecord", 0, 50), call("cudaStreamWaitEvent", 7, 50), gather(2)]
        return [*waited, gemm(20), *ends, call("cudaEventRecord", 7, event)]

    before, recorded, unlinked = step(21, 0), step(22, 21), step(22, 21)
    timeline.link_events(before, recorded)
    assert [each[4] for each in recorded if each[2].startswith("cudaEvent")] == [0, 1]
    assert [each[4] for each in recorded if each[2] == "cudaStreamWaitEvent"] == [1, 0]
    assert timeline.replay({"about": ABOUT, "calls": recorded}, MACHINE)["step"] == pytest.approx(44)
    assert timeline.replay({"about": ABOUT, "calls": unlinked}, MACHINE)["step"] < 44
    with pytest.raises(RuntimeError, match=r"as many events, got \[0, 2\]"):
        timeline.link_events([], step(22, 21))


def test_a_group_of_collectives_has_one_latency() -> None:
    together = [call("ncclGroupStart"), gather(1), gather(1), call("ncclGroupEnd")]
    wait = [call("cudaEventRecord", 7, 1), call("cudaStreamWaitEvent", 0, 1, 7), gemm(1)]
    assert replay(*together, *wait)["step"] == pytest.approx(10 + 14 + 1)
    assert replay(gather(1), gather(1), *wait)["step"] == pytest.approx(20 + 14 + 1)


def test_one_collective_of_a_communicator_runs_at_a_time() -> None:
    """On whatever streams."""
    assert replay(gather(1, 7), gather(1, 8), *waits(8), gemm(1))["step"] == pytest.approx(2 * 17 + 1)


def test_communicators_share_links_and_no_latency() -> None:
    """10 us of latency each, at once; then 7 us of bytes each, one after the other."""
    calls = (gather(1, 7, 1), gather(1, 8, 2), *waits(7, 8), gemm(1))
    assert replay(*calls)["step"] == pytest.approx(10 + 2 * 7 + 1)
    assert replay(*calls, machine=replace(MACHINE, own_links=True))["step"] == pytest.approx(10 + 7 + 1)
    # Of two machines of four ranks, the second communicator has one rank of each: it uses cards, and the first NVLink.
    apart = {"comms": {"1": [0, 1, 2, 3], "2": [0, 4]}}
    machine = replace(MACHINE, ranks_per_machine=4, cards=4, card=1.0, decay=0.0)
    calls = (
        call("ncclAllGather", 7, 3500, 9, -1, 1, 4),  # 7 KB of each rank, at 1 GB/s
        call("ncclAllReduce", 8, 3500, 9, 0, 2, 2),  # 7 KB of all, twice half of it
        *waits(7, 8),
        gemm(1),
    )
    assert replay(*calls, machine=machine, **apart)["step"] == pytest.approx(10 + 3 * 7 + 1)


def test_bytes_that_pass_a_link_together_share_it() -> None:
    """The second one, of 42 us, begins before the first one, of 7 us, which waits for 30 us of compute."""
    first = (call("cudaEventRecord", 0, 1), call("cudaStreamWaitEvent", 7, 1), gather(1, 7, 1))
    calls = (gemm(30), *first, gather(6, 8, 2))
    # The second is alone from 10 to 40; then both share the link until 54, when the first has passed; 5 us are left.
    assert replay(*calls, *waits(7), gemm(1), *waits(8))["step"] == pytest.approx(59)
    assert replay(*calls, *waits(7), gemm(9), *waits(8))["step"] == pytest.approx(54 + 9)


@pytest.mark.parametrize(
    ("ranks", "microseconds", "gbs", "by_own_card"),
    [
        (range(8), 11 + 7 * 2.6, 370.0, None),
        (range(16), 11 + 14 * 2.6 + 7.5, 370.0, 47.5),  # two machines: 8 cards would do 380
        (range(64), 11 + 56 * 2.6 + 7 * 7.5, 340.0, 42.5),
        (range(512), 11 + 448 * 2.6 + 63 * 7.5, 280.0, 35.0),
        (range(0, 64, 8), 11 + 7 * 7.5, 42.5, 42.5),  # a rank on each machine, as HSDP's replicas
        (range(0, 64, 2), 11 + 24 * 2.6 + 7 * 7.5, 170.0, 42.5),  # every second rank: half of the cards
        ((0, 1), 11 + 2.6, 370.0, None),
        ((0, 8), 11 + 7.5, 47.5, 47.5),
    ],
)
def test_a_ring_by_where_its_ranks_are(
    ranks: Sequence[int], microseconds: float, gbs: float, by_own_card: float | None
) -> None:
    machine, ring = Machine(), Ring.of(ranks, Machine())
    for kind in ("ncclAllGather", "ncclReduceScatter"):
        assert ring.latency(machine, kind) == pytest.approx(microseconds)
        assert ring.latency(replace(machine, latency=0.5), kind) == pytest.approx(microseconds / 2)
    assert ring.latency(machine, "ncclAllReduce") == pytest.approx(2 * microseconds - 11)
    peers = len(ranks) - 1
    assert ring.time(machine, "ncclAllGather", 1e6) == pytest.approx(peers * 1e3 / gbs)
    assert ring.time(machine, "ncclReduceScatter", 1e6) == pytest.approx(peers * 1e3 / gbs)
    assert ring.time(machine, "ncclAllReduce", 1e6 * len(ranks)) == pytest.approx(2 * peers * 1e3 / gbs)
    far = sum(rank >= 8 for rank in ranks)
    expected = far * 1e3 / by_own_card if by_own_card else peers * 1e3 / 370
    assert ring.time(machine, "ncclAlltoAll", 1e6) == pytest.approx(expected)


def test_cards_of_a_machine_are_shared_by_its_ranks() -> None:
    """With one card for eight ranks a ring has all of it, and each of eight rings, or all-to-alls, an eighth."""
    machine = Machine(cards=1, decay=0.0)
    everyone, few = Ring.of(range(64), machine), Ring.of(range(0, 64, 8), machine)
    assert everyone.time(machine, "ncclAllGather", 1e6) == pytest.approx(63 * 1e3 / 50)
    assert few.time(machine, "ncclAllGather", 1e6) == pytest.approx(7 * 1e3 / (50 / 8))
    assert everyone.time(machine, "ncclAlltoAll", 1e6) == pytest.approx(56 * 1e3 / (50 / 8))
    pairs = Machine(ranks_per_machine=2, cards=2, decay=0.0)
    ring = Ring.of(range(64), pairs)
    assert ring == Ring(64, 32, 2)
    assert ring.time(pairs, "ncclAllGather", 1e6) == pytest.approx(63 * 1e3 / 100)
    assert ring.busy(pairs, "ncclAllGather", 1e6)["NVLink"] == pytest.approx(63 * 1e3 / 370)
    assert ring.time(replace(pairs, card=500.0), "ncclAllGather", 1e6) == pytest.approx(63 * 1e3 / 370)


@pytest.mark.parametrize(
    ("kind", "kilobytes"),
    [
        ("ncclAllGather", 7),  # of 1 KB of each rank
        ("ncclReduceScatter", 7),
        ("ncclAlltoAll", 7),  # 1 KB for each other rank
        ("ncclSend", 1),
        ("ncclRecv", 0),  # what comes passes what goes
        ("ncclAllReduce", 2 * 7 / 8),
    ],
)
def test_bytes_of_collectives(kind: str, kilobytes: float) -> None:
    assert Ring.of(range(8), MACHINE).time(MACHINE, kind, 1000) == pytest.approx(kilobytes)
    assert Ring.of(range(1), MACHINE).time(MACHINE, kind, 1000) == 0


def test_sends_to_all_others_take_as_long_as_an_all_to_all() -> None:
    for ranks in (range(8), range(64), range(0, 64, 8)):
        ring, machine = Ring.of(ranks, Machine()), Machine()
        sends = (len(ranks) - 1) * ring.time(machine, "ncclSend", 1e6)
        assert sends == pytest.approx(ring.time(machine, "ncclAlltoAll", 1e6))


def test_the_optimizer_reads_and_writes_the_shard() -> None:
    """After the compute stream has waited for all reductions; not if its kernels were recorded."""
    calls = (gemm(5), call("mark", name="optimizer"))
    elements = timeline.elements_of_shard(ABOUT)
    assert elements == pytest.approx((2 * 128256 * 2048 + 2048 + 60_821_504) / 8)
    assert replay(*calls)["step"] == pytest.approx(5 + 28 / 0.8 * elements / 1e6)
    assert replay(*calls, about={**ABOUT, "optimizer": True})["step"] == pytest.approx(5)
    assert replay(*calls, machine=replace(MACHINE, optimizer=0.0))["step"] == pytest.approx(5)


def test_extremes_whose_answer_is_known() -> None:
    """A wire without bytes or latency exposes nothing; latencies alone add up where nothing hides them."""
    calls = [call("mark", name="forward"), gather(4), *waits(7), gemm(3), gather(1), *waits(7), gemm(2)]
    record = {"about": ABOUT, "calls": [*calls, call("mark", name="optimizer")]}
    found = timeline.check(record, Machine(**FREE_HOST))
    assert found["parts / step"] == pytest.approx(1)
    assert found["lost"] == 0
    assert found["waits, host free"] == 0
    assert found["exposed, wire free"] == pytest.approx(0, abs=1e-3)
    assert found["collectives"] == 2
    plain = {"about": ABOUT, "calls": [gemm(3), gemm(2)]}
    result = timeline.replay(plain, MACHINE)
    assert result["step"] == result["busy"] == pytest.approx(5)
    assert timeline.sweep({"fsdp2": record, "torch": record}, MACHINE, "latency", [1, 2]).count("ratio 1.000") == 2


def test_where_values_are_not_compared_shapes_and_dtypes_are() -> None:
    same = unchecked.assert_same_kind
    same(torch.zeros(2), torch.ones(2), 0, 0, "w")
    same(None, None, 0, 0, "w")
    for other in (torch.zeros(3), torch.zeros(2, dtype=torch.int64), None):
        with pytest.raises(AssertionError, match="w: expected"):
            same(torch.zeros(2), other, 0, 0, "w")


def test_a_star_agrees_if_it_is_the_fastest_or_as_fast() -> None:
    """In the timeline; ratios are to the default."""
    case = agree.CASES[0]

    def result(by_plan: float, by_timeline: float) -> agree.Result:
        columns = ({agree.DEFAULT: 10.0, agree.KEEP: other} for other in (by_plan, by_timeline))
        return agree.Result(case, *columns, launches={})

    assert result(9, 8).agrees
    assert result(12, 20).agrees
    assert result(9, 10.05).agrees, "as fast"
    assert not result(9, 10.2).agrees
    assert not result(11, 8).agrees
    assert result(8, 10).off_by(agree.KEEP) == pytest.approx(0.8)


def test_settings_of_the_cases_are_recorded_as_they_are_named() -> None:
    assert len(agree.CASES) == len({*agree.CASES}) == 18
    for case in agree.CASES:
        assert case.settings[0] == agree.DEFAULT
        for setting in case.settings:
            options = agree.options_of(case, setting)
            shards, replicas = (int(options[options.index(name) + 1]) for name in ("--ranks", "--replicas"))
            assert shards * replicas == case.ranks
            assert (shards == 8 < case.ranks) == (setting == agree.HSDP)
