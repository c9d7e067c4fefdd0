"""The suite that measures: its arithmetic, its table, and that it runs."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.__main__ import main
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
