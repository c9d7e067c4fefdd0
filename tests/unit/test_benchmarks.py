"""The suite that measures: its arithmetic, its table, and that it runs."""

import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks import gpu_session
from benchmarks.__main__ import main
from benchmarks.cuda import Setup, kind_of_call, measure_calls, measure_exposed, measure_memory, measure_time
from benchmarks.cuda_batches import batch_rows, find_largest
from benchmarks.cuda_group import start_wire_group
from benchmarks.cuda_models import GPTShape, LlamaShape
from benchmarks.overlap import floor_seconds
from benchmarks.report import Row, format_table, timed_row
from benchmarks.suites import SUITES
from benchmarks.timed_group import Clock, Link, SimulatedClock, start_timed_group


@pytest.fixture
def link() -> Iterator[Link]:
    """Of four ranks: 10 ms latency, and 100 ms for the three quarters that a rank lacks of 4,000 bytes."""
    link = Link(SimulatedClock(), latency=0.01, bandwidth=30_000)
    start_timed_group(4, link)
    yield link
    dist.destroy_process_group()


def lengths(link: Link) -> list[float]:
    return [end - begin for _, begin, end in link.transfers]


def test_a_collective_takes_latency_and_bytes_over_bandwidth(link: Link) -> None:
    group, full, shard = dist.group.WORLD, torch.zeros(1000), torch.zeros(250)
    group._allgather_base(full, shard)
    group._reduce_scatter_base(shard, full)
    group.allreduce([full])
    assert [kind for kind, _, _ in link.transfers] == ["gather", "reduce", "sum"]
    assert lengths(link) == pytest.approx([0.11, 0.11, 0.21])


def test_a_coalesced_call_has_one_latency(link: Link) -> None:
    full, shard = torch.zeros(500), torch.zeros(125)
    dist.group.WORLD.allgather_into_tensor_coalesced([full, full], [shard, shard])
    dist.group.WORLD.reduce_scatter_tensor_coalesced([shard, shard], [full, full])
    assert lengths(link) == pytest.approx([0.11, 0.11])


def test_collectives_pass_the_link_one_by_one(link: Link) -> None:
    full, shard = torch.zeros(4), torch.zeros(1)
    for _ in range(3):
        dist.group.WORLD._allgather_base(full, shard)
    (_, _, first), (_, second, then), (_, third, _) = link.transfers
    assert (first, then) == (second, third)


@pytest.mark.parametrize("clock", [Clock(), SimulatedClock()], ids=["real", "simulated"])
def test_waiting_lasts_until_the_collective_is_through_and_no_longer(clock: Clock) -> None:
    link, start = Link(clock, latency=0.05), clock.now()
    work = link.send("gather", 0)
    assert not work.is_completed()
    work.wait()
    assert work.is_completed()
    assert clock.now() - start >= 0.05
    before = clock.now()
    work.wait()
    assert clock.now() - before < 0.05, "it is through: nothing to wait for"


def test_public_functions_wait_where_they_are_called(link: Link) -> None:
    """`async_op=False`, as torch's FSDP2 has it on CPU, exposes all of it."""
    full, shard = torch.zeros(1000), torch.zeros(250)
    # The old name is deprecated, the new one younger than torch 2.11.
    getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(shard, full)
    assert link.clock.now() == pytest.approx(0.11)


def test_floor_of_exposed_communication() -> None:
    """Hidden where compute is longer; where nothing computes, all of it but the last block's second gather."""
    assert floor_seconds(transfer=2, forward=3, backward=6, blocks=5) == 4
    assert floor_seconds(transfer=1, forward=0, backward=0, blocks=5) == 5 + 4 + 5
    assert floor_seconds(transfer=3, forward=2, backward=4, blocks=4) == 6 + 3 * 1 + 2 * 2


def test_table_tells_ratio_and_distance_to_the_limit() -> None:
    rows = [
        Row("memory", "peak", "N=8", {"fsdp2": 3.0, "torch": 4.0}, limit=2.0),
        Row("traffic", "copies", "N=8", {"fsdp2": 0.0, "torch": 24.0}, limit=0.0),
        timed_row("host", "us", "N=8", {"fsdp2": [1.0, 2.0, 6.0], "torch": [4.0, 4.0, 4.0]}),
    ]
    header, _, memory, traffic, host = (
        [cell.strip() for cell in line.strip("| ").split("|")]
        for line in format_table(rows, ["fsdp2", "torch"]).splitlines()
    )
    assert header[5:] == ["fsdp2 / torch", "limit", "fsdp2 / limit", "torch / limit"]
    assert memory[3:] == ["3.00", "4.00", "0.75x", "2.00", "1.50", "2.00"]
    assert traffic[3:] == ["0", "24.00", "0.00x", "0", "1.00", "-"]
    assert host[3:] == ["2.00", "4.00", "0.50x (0.25 to 1.50)", "-", "-", "-"]


def test_worlds_of_jobs() -> None:
    """Each world has a process of its own, unless the suite compares worlds; some suites have fixed ones."""
    assert SUITES["memory"].choose_worlds(quick=False, asked=None) == [(8,), (64,), (512,)]
    assert SUITES["memory"].choose_worlds(quick=True, asked=[16, 4]) == [(4,), (16,)]
    assert SUITES["init"].choose_worlds(quick=False, asked=None) == [(8, 512, 4096)]
    assert SUITES["gloo"].choose_worlds(quick=False, asked=[16]) == [(2,)]


def test_it_runs_and_writes_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One library beside itself, in a process of its own, as for any job."""
    arguments = ["init", "--quick", "--worlds", "4", "8", "--libraries", "fsdp2", "--out", str(tmp_path), "--name", "x"]
    monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    (report,) = tmp_path.glob("*-x.md")
    rows = [line for line in report.read_text().splitlines() if line.startswith("| init ")]
    assert len(rows) == 3, "two worlds, and the growth between them"


ON_CPU = Setup(
    device=torch.device("cpu"),
    world_size=4,
    llamas={"tiny": LlamaShape(blocks=2, dim=16, heads=4, kv_heads=2, hidden=32, vocab=32, tokens=4)},
    rounds=1,
    gb_per_second=(50,),
)


def test_what_needs_a_gpu_runs_on_a_cpu() -> None:
    """Where there is nothing to count, but each library is wrapped, and the wire counts bytes: two gathers, one sum."""
    rows = [row for part in (measure_calls, measure_memory, measure_time, measure_exposed) for row in part(ON_CPU)]
    assert {name for row in rows for name in row.values} == {"fsdp2", "torch"}
    (busy, *_) = (row for row in rows if row.quantity == "wire busy ms")
    (shape,) = ON_CPU.llamas.values()
    numel = shape.blocks * shape.block_numel + (2 * shape.vocab + 1) * shape.dim
    for milliseconds in busy.values.values():
        sent = milliseconds * 50e6 / (3 / 4)
        assert 6 * numel < sent < 1.3 * 8 * numel, "bf16 gathers, one of them spared for some; fp32 sums"


@pytest.mark.filterwarnings("ignore")  # FSDP1 and DDP are used in ways that they warn about
def test_the_largest_batch_of_each_library(capsys: pytest.CaptureFixture[str]) -> None:
    shape = GPTShape(blocks=2, dim=16, heads=2, vocab=32, tokens=4)
    rows = list(batch_rows({"tiny": shape}, torch.device("cpu"), largest_tried=2))
    sharded = {"fsdp2": 2, "torch": 2, "fsdp1": 2}
    assert [row.values for row in rows] == [{"ddp": 2}, sharded, sharded, {"fsdp2": 2, "torch": 2}]
    assert "fsdp1" in capsys.readouterr().err, "it can't offload without a GPU"


@pytest.mark.parametrize("largest", [0, 1, 2, 3, 12, 16, 23])
def test_bisection(largest: int) -> None:
    assert find_largest(lambda n: n <= largest, 16) == min(largest, 16)


def test_calls_of_the_runtime_are_told_from_kernels() -> None:
    assert kind_of_call("cudaLaunchKernelExC") == kind_of_call("cuLaunchKernel") == "kernel launches"
    assert kind_of_call("cudaMemcpyAsync") == "copies and fills"
    assert kind_of_call("cudaMemcpy") == kind_of_call("cudaStreamSynchronize") == "device-wide and stream waits"
    assert kind_of_call("cutlass_80_tensorop_Memcpy") is kind_of_call("Memcpy DtoD") is None


def test_the_wire_moves_what_one_rank_has() -> None:
    wire = start_wire_group(4, torch.device("cpu"))
    wire.moves = True
    full, shard = torch.zeros(8), torch.tensor([1.0, 2.0])
    dist.group.WORLD.allgather_into_tensor_coalesced([full], [shard])
    assert full.tolist() == [1, 2] * 4
    dist.group.WORLD.reduce_scatter_tensor_coalesced([shard], [torch.arange(8.0)])
    assert shard.tolist() == [0, 1]
    assert wire.sent_bytes == 2 * 8 * 4 * 3 / 4
    dist.destroy_process_group()


def test_a_session_without_a_gpu_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not torch.cuda.is_available():
        assert gpu_session.main(["--out", str(tmp_path)]) == 0
        assert "no CUDA device" in capsys.readouterr().out


def test_a_session_reports_what_it_has(tmp_path: Path) -> None:
    """Rows of parts that have ended, and the end of the log of one that had no time."""
    row = Row("cuda", "step ms", "N=64", {"fsdp2": 1.0, "torch": 2.0})
    (tmp_path / "rows.jsonl").write_text(json.dumps(dataclasses.asdict(row)) + "\n")
    outcome = gpu_session.run_part("time", tmp_path, deadline=time.monotonic())
    report = gpu_session.format_session({"time": outcome}, gpu_session.read_rows(tmp_path))
    assert "0.50x" in report
    assert "no time left" in report
