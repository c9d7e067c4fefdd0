"""Tests pairwise exchange over gloo: every byte arrives, in any order of waiting, and none is sent twice."""

import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp2 import fully_shard
from fsdp2.checks.headers import HEADER_NBYTES
from fsdp2.checks.named_comm import NamedPairwiseComm
from fsdp2.collectives import choose
from fsdp2.collectives.any_group import AnyComm
from fsdp2.collectives.choose import make_comm
from fsdp2.collectives.coalesced import CoalescedComm
from fsdp2.collectives.gloo import PairwiseComm
from fsdp2.engine.comm import Comm, CommLabel
from fsdp2.engine.reduce import exchange_and_sum
from fsdp2.ranks import rank_facts
from helpers import run_checks, run_ranks, world_sizes

NUMELS = [1, 2, 3, 5, 16, 17, 1001, 65537]
MOVED = [torch.bool, torch.uint8, torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64]
SUMMED = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
WIRES = [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float32, torch.float64)]
"""(dtype in which gradients travel, dtype in which they are summed)"""
STRESS = 400


def values(seed: int, numel: int, dtype: torch.dtype) -> Tensor:
    """The same on every rank, for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(2, (numel,), generator=generator).bool()
    if not dtype.is_floating_point:
        return torch.randint(0, 200, (numel,), generator=generator).to(dtype)
    return torch.randn(numel, generator=generator, dtype=torch.float64).to(dtype)


def mean_in_rank_order(parts: list[Tensor]) -> Tensor:
    """In the dtype of the parts, every step rounded to it; fp16 in fp32, because sums of many ranks would overflow."""
    total = parts[0].float() if parts[0].dtype == torch.float16 else parts[0].clone()
    for part in parts[1:]:
        total += part
    return (total / len(parts)).to(parts[0].dtype)


# ---- what each rank checks; `check` returns nothing and raises


def all_gather_gathers(comm: PairwiseComm) -> None:
    """Odd sizes, several tensors of different dtypes in one call."""
    for numel in NUMELS:
        inputs = [values(comm.rank * 10 + i, numel + i, dtype) for i, dtype in enumerate(MOVED)]
        outputs = [torch.zeros(t.numel() * comm.size, dtype=t.dtype) for t in inputs]
        comm.all_gather(outputs, inputs).wait()
        for i, (dtype, output) in enumerate(zip(MOVED, outputs, strict=True)):
            expected = torch.cat([values(rank * 10 + i, numel + i, dtype) for rank in range(comm.size)])
            assert torch.equal(output, expected), (numel, dtype)


def all_gather_in_place(comm: PairwiseComm) -> None:
    """The input is its own slot of the output, as after a cast; views into one larger buffer."""
    for numel in NUMELS:
        buffer = torch.full((numel * comm.size + 7,), -1.0)
        output = buffer[3:-4]
        own = output[comm.rank * numel : (comm.rank + 1) * numel]
        own.copy_(values(comm.rank, numel, torch.float32))
        comm.all_gather([output], [own]).wait()
        assert torch.equal(output, torch.cat([values(r, numel, torch.float32) for r in range(comm.size)]))
        assert buffer[:3].eq(-1).all()
        assert buffer[-4:].eq(-1).all()


def all_gather_leaves_its_input(comm: PairwiseComm) -> None:
    own = values(comm.rank, 33, torch.float32)
    output = torch.zeros(33 * comm.size)
    comm.all_gather([output], [own]).wait()
    assert torch.equal(own, values(comm.rank, 33, torch.float32))


def reduce_scatter_averages_bitwise(comm: PairwiseComm) -> None:
    """The same order of summation on every rank, so that no rank's shard depends on who computed it."""
    for numel in NUMELS:
        whole = [
            [values(rank * 10 + i, numel * comm.size, dtype) for i, dtype in enumerate(SUMMED)]
            for rank in range(comm.size)
        ]
        inputs = [tensor.clone() for tensor in whole[comm.rank]]
        outputs = [torch.zeros(numel, dtype=dtype) for dtype in SUMMED]
        comm.reduce_scatter(outputs, inputs, comm.size).wait()
        for i, (dtype, output) in enumerate(zip(SUMMED, outputs, strict=True)):
            parts = [tensors[i].view(comm.size, numel)[comm.rank] for tensors in whole]
            assert torch.equal(output, mean_in_rank_order(parts)), (numel, dtype)
            assert torch.equal(inputs[i], whole[comm.rank][i]), "inputs must not change"


def what_travels_in_fewer_bits_is_summed_in_more(comm: Comm) -> None:
    """Bitwise the mean of the slices in the wider dtype: two of them added in the narrower one would be rounded.

    Several tensors in one call, each of dtypes of its own, into views of a larger buffer.
    """
    for numel in NUMELS:
        whole = [
            [values(rank * 10 + i, numel * comm.size, wire) for i, (wire, _) in enumerate(WIRES)]
            for rank in range(comm.size)
        ]
        inputs = [tensor.clone() for tensor in whole[comm.rank]]
        buffers = [torch.full((numel + 6,), -1.0, dtype=summed) for _, summed in WIRES]
        for divisor in (comm.size, 3.0):
            work = exchange_and_sum(comm, [buffer[3:-3] for buffer in buffers], inputs, divisor)
            work.wait()
            work.wait()
            for i, (_, summed) in enumerate(WIRES):
                parts = [tensors[i].view(comm.size, numel)[comm.rank].to(summed) for tensors in whole]
                total = parts[0].clone()
                for part in parts[1:]:
                    total += part
                assert torch.equal(buffers[i][3:-3], total / divisor), (numel, WIRES[i], divisor)
                assert buffers[i][:3].eq(-1).all()
                assert buffers[i][-3:].eq(-1).all()
                assert torch.equal(inputs[i], whole[comm.rank][i]), "inputs must not change"


def exchange_exchanges(comm: Comm) -> None:
    """Row r of what arrives is this rank's slice of rank r: bytes of any dtype, several tensors of odd sizes."""
    for numel in NUMELS:
        whole = [
            [values(rank * 10 + i, (numel + i) * comm.size, dtype) for i, dtype in enumerate(MOVED)]
            for rank in range(comm.size)
        ]
        sent = [tensor.clone() for tensor in whole[comm.rank]]
        work, rows = comm.exchange(sent)
        work.wait()
        for i, dtype in enumerate(MOVED):
            for rank in range(comm.size):
                expected = whole[rank][i].view(comm.size, -1)[comm.rank]
                assert torch.equal(rows[i][rank], expected), (numel, dtype, rank)
            assert torch.equal(sent[i], whole[comm.rank][i]), "inputs must not change"


def sums_of_float16_do_not_overflow(comm: Comm) -> None:
    """4 times 60000, summed where it arrives, is a float32."""
    output = torch.zeros(8)
    exchange_and_sum(comm, [output], [torch.full((8 * comm.size,), 60000.0, dtype=torch.float16)], 1).wait()
    assert output.eq(torch.tensor(60000.0, dtype=torch.float16).float() * comm.size).all()


def float16_means_do_not_overflow(comm: PairwiseComm) -> None:
    """4 times 30000 is not a float16; their mean is."""
    output = torch.zeros(8, dtype=torch.float16)
    comm.reduce_scatter([output], [torch.full((8 * comm.size,), 30000.0, dtype=torch.float16)], comm.size).wait()
    assert output.isfinite().all()
    torch.testing.assert_close(output, torch.full_like(output, 30000.0), rtol=2e-3, atol=0)


def nothing_to_do(comm: PairwiseComm) -> None:
    """A group may have nothing to send, on all ranks alike."""
    comm.all_gather([], []).wait()
    comm.reduce_scatter([], [], comm.size).wait()
    comm.exchange([])[0].wait()


def waiting_twice_is_harmless(comm: PairwiseComm) -> None:
    """Abandoned after an error, then waited for once more: gloo's own works hang then."""
    output = torch.zeros(4)
    work = comm.reduce_scatter([output], [torch.ones(4 * comm.size)], comm.size)
    work.wait()
    work.wait()
    assert torch.equal(output, torch.ones(4))
    gathered = torch.zeros(4 * comm.size)
    work = comm.all_gather([gathered], [output])
    work.wait()
    work.wait()
    assert torch.equal(gathered, torch.ones(4 * comm.size))


def many_in_flight(comm: PairwiseComm) -> None:
    """Hundreds of interleaved messages of different sizes, waited for in another order on every rank.

    Messages of two ranks are matched by their order alone: a single one out of place shifts all that follow.
    """
    plan = random.Random(7)
    own_order = random.Random(comm.rank)
    waiting: list[tuple[Any, Callable[[], Tensor], Tensor]] = []
    for number in range(STRESS):
        dtype = plan.choice(SUMMED)
        numel = plan.choice(NUMELS[:-1])
        if plan.random() < 0.5:
            output = torch.zeros(numel * comm.size, dtype=dtype)
            work = comm.all_gather([output], [values(number * 8 + comm.rank, numel, dtype)])
            expected = torch.cat([values(number * 8 + r, numel, dtype) for r in range(comm.size)])
        else:
            output = torch.zeros(numel, dtype=dtype)
            whole = [values(number * 8 + r, numel * comm.size, dtype) for r in range(comm.size)]
            work = comm.reduce_scatter([output], [whole[comm.rank]], comm.size)
            expected = mean_in_rank_order([tensor.view(comm.size, numel)[comm.rank] for tensor in whole])
        waiting.append((work, output, expected))
        while len(waiting) > 60 or (waiting and own_order.random() < 0.3):
            assert_done(*waiting.pop(own_order.randrange(len(waiting))))
    own_order.shuffle(waiting)
    for each in waiting:
        assert_done(*each)


def assert_done(work: Any, output: Tensor, expected: Tensor) -> None:
    work.wait()
    assert torch.equal(output, expected)


def beside_the_users_messages(comm: PairwiseComm) -> None:
    """A user's own sends and collectives on the same group, between ours, meet only each other."""
    to, source = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    gathered, received = torch.zeros(5 * comm.size), torch.zeros(5)
    work = comm.all_gather([gathered], [torch.full((5,), float(comm.rank))])
    if comm.size > 1:
        requests = [dist.isend(torch.full((5,), 100.0 + comm.rank), to), dist.irecv(received, source)]
        total = torch.ones(5)
        dist.all_reduce(total)
        for request in requests:
            request.wait()
        assert received.eq(100.0 + source).all()
        assert total.eq(comm.size).all()
    work.wait()
    assert torch.equal(gathered, torch.arange(comm.size).repeat_interleave(5).float())


CHECKS = [
    all_gather_gathers,
    all_gather_in_place,
    all_gather_leaves_its_input,
    reduce_scatter_averages_bitwise,
    exchange_exchanges,
    what_travels_in_fewer_bits_is_summed_in_more,
    sums_of_float16_do_not_overflow,
    float16_means_do_not_overflow,
    nothing_to_do,
    beside_the_users_messages,
    many_in_flight,
]


@pytest.mark.parametrize("world_size", world_sizes(1, 3, nightly=(2, 4)))
def test_pairwise_exchange(world_size: int) -> None:
    run_on_comm(world_size, CHECKS)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_all_to_all_exchange(world_size: int) -> None:
    """What NCCL and others do where gradients travel in fewer bits, on gloo, which has that collective, too."""
    checks = [exchange_exchanges, what_travels_in_fewer_bits_is_summed_in_more, sums_of_float16_do_not_overflow]
    run_on_comm(world_size, checks, CoalescedComm)


@pytest.mark.parametrize("world_size", [3])
def test_each_function_that_a_group_may_lack_has_a_replacement(world_size: int) -> None:
    """On gloo, which has all: the first of them, the second without that, and so on, do the same."""

    def without_the_first(count: int) -> Comm:
        comm = AnyComm(dist.group.WORLD, CommLabel())  # type: ignore[arg-type]
        for first_offered in (comm._gather, comm._scatter, comm._exchange):
            del first_offered._functions[: min(count, len(first_offered._functions) - 1)]
        return comm

    checks: list[Callable[[Any], None]] = [
        all_gather_gathers,
        all_gather_in_place,
        all_gather_leaves_its_input,
        reduce_scatter_averages,
        all_reduce_averages,
        exchange_exchanges,
        what_travels_in_fewer_bits_is_summed,
        sums_of_float16_do_not_overflow,
        float16_means_do_not_overflow,
        nothing_to_do,
        waiting_twice_is_harmless,
    ]
    named = [
        (f"{check.__name__}, without {count}", lambda check=check, count=count: check(without_the_first(count)))  # type: ignore[misc]
        for check in checks
        for count in range(3)
    ]
    run_checks(world_size, named, timeout=30)


def reduce_scatter_averages(comm: Comm) -> None:
    """In no order that the group promises."""
    for numel in NUMELS:
        for dtype, rtol in zip(SUMMED, (2e-2, 2e-3, 1e-5, 1e-12), strict=True):
            whole = [values(rank, numel * comm.size, dtype) for rank in range(comm.size)]
            own, output = whole[comm.rank].clone(), torch.zeros(numel, dtype=dtype)
            comm.reduce_scatter([output], [own], comm.size).wait()
            mean = torch.stack(whole).double().mean(0).view(comm.size, numel)[comm.rank]
            torch.testing.assert_close(output.double(), mean, rtol=rtol, atol=rtol)
            assert torch.equal(own, whole[comm.rank]), "inputs must not change"


def all_reduce_averages(comm: Comm) -> None:
    for dtype, rtol in zip(SUMMED, (2e-2, 2e-3, 1e-5, 1e-12), strict=True):
        whole = [values(rank, 33, dtype) for rank in range(comm.size)]
        tensor = whole[comm.rank].clone()
        comm.all_reduce(tensor, comm.size).wait()
        torch.testing.assert_close(tensor.double(), torch.stack(whole).double().mean(0), rtol=rtol, atol=rtol)
    large = torch.full((3,), 60000.0, dtype=torch.float16)
    comm.all_reduce(large, comm.size).wait()
    assert large.eq(60000.0).all(), "the sum would overflow"


def what_travels_in_fewer_bits_is_summed(comm: Comm) -> None:
    for wire, summed in WIRES:
        whole = [values(rank, 5 * comm.size, wire) for rank in range(comm.size)]
        output = torch.zeros(5, dtype=summed)
        exchange_and_sum(comm, [output], [whole[comm.rank]], 3.0).wait()
        total = torch.stack(whole).to(summed).sum(0).view(comm.size, 5)[comm.rank]
        torch.testing.assert_close(output, total / 3)


def test_other_errors_than_a_lack_are_raised_unchanged() -> None:
    """A group that fails, because another rank is gone say, isn't asked for something else in its place."""

    class Failing(AnyComm):
        says = ""

        def _fail(self, output: Tensor, source: Tensor) -> Any:
            raise RuntimeError(self.says)

    def body(rank: int, size: int) -> None:
        comm = Failing(dist.group.WORLD, CommLabel())  # type: ignore[arg-type]
        comm._gather._functions[0] = Failing._fail
        for comm.says in ("connection closed by peer", "connect: Operation not supported"):
            with pytest.raises(RuntimeError, match=comm.says):
                comm.all_gather([torch.zeros(2)], [torch.zeros(1)])
            assert len(comm._gather._functions) == 3

    run_ranks(2, body)


def test_gloo_is_refused_where_it_would_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads and writes a tensor's address on the CPU, wherever the tensor is."""
    monkeypatch.setattr(choose, "backend_name", lambda group, device: "gloo")
    with pytest.raises(NotImplementedError, match="cpu:gloo,cuda:nccl"):
        make_comm(object(), torch.device("cuda"), CommLabel())  # type: ignore[arg-type]


def test_a_second_wait_is_harmless() -> None:
    run_on_comm(2, [waiting_twice_is_harmless])


def run_on_comm(world_size: int, checks: list[Callable[[Any], None]], *kinds: Callable[..., Comm]) -> None:
    """Each check on a new comm, of each kind."""
    named = [
        (
            f"{check.__name__}, {kind.__name__}",
            lambda check=check, kind=kind: check(kind(dist.group.WORLD, CommLabel())),
        )  # type: ignore[misc]
        for kind in kinds or (NamedPairwiseComm, PairwiseComm)
        for check in checks
    ]
    run_checks(world_size, named, timeout=20)


class CountingGroup:
    """A process group that counts bytes that are sent."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.sent = 0

    def rank(self) -> int:
        return self._group.rank()

    def size(self) -> int:
        return self._group.size()

    def send(self, tensors: list[Tensor], *args: Any) -> Any:
        self.sent += sum(tensor.nbytes for tensor in tensors)
        return self._group.send(tensors, *args)

    def recv(self, tensors: list[Tensor], *args: Any) -> Any:
        return self._group.recv(tensors, *args)


@pytest.mark.parametrize("world_size", [3])
def test_ranks_send_the_least_number_of_bytes(world_size: int) -> None:
    """(N - 1) / N of the unsharded parameter or gradient; gloo's own reduce-scatter is an all-reduce: twice that.

    Gradients that travel in half the bits: half of it. And a header to each other rank, if they carry names.
    """

    def sent(comm_class: Callable[..., Comm]) -> tuple[int, ...]:
        group = CountingGroup(dist.group.WORLD)
        comm = comm_class(group, CommLabel())
        full, shards = [torch.zeros(3000), torch.zeros(99)], [torch.zeros(1000), torch.zeros(33)]
        comm.reduce_scatter(shards, full, comm.size).wait()
        reduced = group.sent
        comm.all_gather(full, shards).wait()
        gathered = group.sent - reduced
        exchange_and_sum(comm, shards, [each.bfloat16() for each in full], comm.size).wait()
        return reduced, gathered, group.sent - reduced - gathered

    def body(rank: int, _: int) -> list[tuple[int, ...]]:
        return [sent(NamedPairwiseComm), sent(PairwiseComm)]

    nbytes, headers = 3099 * 4 * (world_size - 1) // world_size, (world_size - 1) * HEADER_NBYTES
    expected = [(nbytes + each, nbytes + each, nbytes // 2 + each) for each in (headers, 0)]
    assert run_ranks(world_size, body) == [expected] * world_size


class Calls(TorchDispatchMode):
    """The names of all operations that the dispatcher sees."""

    sees_fsdp2 = True

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


def collectives_of_a_step(hsdp: bool) -> None:
    """Two groups, which stay until backward: two gathers and two reductions, each a message to every other rank; and
    one before each sum between replicas, whose ranks compare headers first.
    """
    mesh = init_device_mesh("cpu", (2, 2) if hsdp else (4,))
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    for module in (model[0], model):
        fully_shard(module, mesh=mesh)
    for _ in range(4):  # in which ranks compare what they start from, and the ends of backward
        model(torch.ones(2, 3, requires_grad=True)).sum().backward()
    with CommDebugMode() as counted, Calls() as calls:
        model(torch.ones(2, 3, requires_grad=True)).sum().backward()
    peers = 1 if hsdp else 3
    assert calls.names.count("c10d.send") == calls.names.count("c10d.recv_") == (2 + 2 + 2 * hsdp) * peers
    assert calls.names.count("c10d.allreduce_") == counted.get_total_counts() == 2 * hsdp


def test_counts_on_gloo() -> None:
    """CommDebugMode knows no send and no receive; a dispatch mode does."""
    run_checks(4, [(f"{hsdp=}", lambda hsdp=hsdp: collectives_of_a_step(hsdp)) for hsdp in (False, True)])  # type: ignore[misc]


def test_tensors_go_one_by_one_where_torch_can_send_no_list() -> None:
    """At the level of TORCH_DISTRIBUTED_DEBUG=DETAIL, on the wrapped process groups of torch 2.11."""

    def body(rank: int, size: int) -> None:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        comm = CoalescedComm(dist.group.WORLD, CommLabel())  # type: ignore[arg-type]
        comm.force_sum = True  # gloo takes no means
        own = [torch.full((2,), float(rank)), torch.full((3,), 10.0 + rank)]
        gathered = [torch.empty(size * len(each)) for each in own]
        reduced = [torch.empty_like(each) for each in own]
        with mock.patch.object(comm, "group", None):  # nothing but single tensors is sent
            comm.all_gather(gathered, own).wait()
            comm.reduce_scatter(reduced, gathered, 4.0).wait()
        for each, whole, mean in zip(own, gathered, reduced, strict=True):
            expected = torch.stack([each - rank + other for other in range(size)])
            assert torch.equal(whole.view(size, -1), expected)
            assert torch.equal(mean, size * each / 4)

    run_ranks(2, body)


def test_only_simulated_backends_leave_tensors_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever real ones are called."""
    for name, moves in (("gloo", True), ("nccl2", True), ("fake", False)):
        monkeypatch.setattr(rank_facts, "backend_name", lambda group, device, name=name: name)
        assert rank_facts.moves_data([object()], torch.device("cpu")) == moves, name  # type: ignore[list-item]
    assert not rank_facts.moves_data([], torch.device("cpu"))
