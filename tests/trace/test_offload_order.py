"""Tests what CPUOffloadPolicy copies, and when, on one of many ranks.

It has the order of events in one iteration, seconds on simulated links, and the bytes of page-locked memory.
"""

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import expecttest
import pytest
import torch
import torch.distributed as dist
from recorder import Root, in_text, record
from torch import Tensor, nn

from benchmarks.overlap import BLOCKS, DIM, FORWARD_SECONDS, LATENCY_SECONDS, LAYERS, Compute, SlowStack
from benchmarks.timed_group import Clock, Link, SimulatedClock, TimedWork, start_timed_group
from fsdp2 import CPUOffloadPolicy, fully_shard
from fsdp2.engine import buckets, schedule
from fsdp2.engine import group as groups
from fsdp2.engine.mesh import DataMesh
from fsdp2.engine.state import groups_below
from helpers import fake_world
from simulated_device import DEVICE, LateTransfer, SimulatedTransfers, simulated_device

OFFLOAD = CPUOffloadPolicy()


class TestOrder(expecttest.TestCase):
    def test_an_iteration(self) -> None:
        """The copy of the next group's shards begins before a group computes, and so do the returns of the last one's
        gradients, for which the host waits at the end only; at the end of forward it waits for nothing.
        """

        def begin(self: SimulatedTransfers, target: Tensor, source: Tensor, then: Callable[[], Any]) -> LateTransfer:
            transfer = start_in(self, target, source, then)
            self._run_first()  # gathers are traced where they are launched
            return transfer

        start_in = SimulatedTransfers.start_in
        with fake_world(4), simulated_device() as transfers, mock.patch.object(SimulatedTransfers, "start_in", begin):
            model = Root()
            for module in (*model.blocks(), model):
                fully_shard(module, offload_policy=OFFLOAD)
            transfers.log = lines = record(model)
            for _ in range(2):
                lines.clear()
                model(torch.ones(2, 4)).sum().backward()
                model.zero_grad()
        self.assertExpectedInline(
            in_text(lines),
            """\
in 32, gather root 128, wait 32, in 32, gather b0 128
run root, wait 32, in 32, gather b1 128
run b0, free b0, wait 32, in 32, gather b2 128
run b1, wait 32
run b2
back root, free root, reduce root 128
back b2, free b2, reduce b2 128, in 32, gather b0 128
back b1, free b1, out 32, reduce b1 128, wait 32
back b0, free b0, out 32, reduce b0 128, out 32, out 32, land 32, land 32, land 32, land 32""",
        )


# ---- seconds ---------------------------------------------------------------------------------------------------------


class _TimedTransfer:
    def __init__(self, work: TimedWork, result: Any) -> None:
        self._work, self._result = work, result

    def wait(self) -> Any:
        self._work.wait()
        return self._result

    finish = pass_on = wait


class TimedTransfers:
    """A link for each direction. What is launched behind a copy takes the collectives' link when that has arrived."""

    def __init__(self, clock: Clock, collectives: Link, bandwidth: float) -> None:
        self._collectives = collectives
        self._inward, self._outward = (Link(clock, LATENCY_SECONDS, bandwidth) for _ in range(2))

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype)

    def start_in(self, target: Tensor, source: Tensor, then: Callable[[], Any]) -> _TimedTransfer:
        work = self._inward.send("in", source.nbytes)
        self._collectives.free_at = max(self._collectives.free_at, self._inward.free_at)
        return _TimedTransfer(work, then())

    def start_out(self, source: Tensor) -> _TimedTransfer:
        return _TimedTransfer(self._outward.send("out", source.nbytes), self.allocate(source.numel(), source.dtype))

    def settle(self) -> None:
        pass


def exposed_seconds(per_collective: float, per_copy: float) -> float:
    """Of one step in steady state, if a block's collectives, and the copies of its shards and gradients, take these."""
    ranks, clock = 8, SimulatedClock()
    block = LAYERS * DIM**2 * 4
    link, compute = Link(clock, LATENCY_SECONDS, block * (ranks - 1) / ranks / per_collective), Compute(clock)
    start_timed_group(ranks, link)
    transfers = TimedTransfers(clock, link, block / ranks / per_copy)
    with (
        mock.patch.object(DataMesh, "device", DEVICE),
        mock.patch.object(groups, "make_transfers", return_value=transfers),
    ):
        model = SlowStack(compute)
        for module in (*model.blocks, model):
            fully_shard(module, mesh=dist.init_device_mesh("cpu", (ranks,)), offload_policy=OFFLOAD)
        for _ in range(3):
            before, start = compute.seconds, clock.now()
            model(torch.ones(1, DIM)).sum().backward()
            model.zero_grad()
            seconds = clock.now() - start - (compute.seconds - before)
    dist.destroy_process_group()
    return seconds


@pytest.mark.parametrize(("per_collective", "per_copy"), [(0.2, 0.2), (0.5, 0.4), (0.1, 0.8), (0.01, 0.9)])
def test_only_the_first_copy_and_the_last_return_are_exposed(per_collective: float, per_copy: float) -> None:
    """Of a block's time of compute. A copy on the stream that computes, or one that the host waits for, would show with
    its whole length in every block: nine gathers and five reductions here.
    """
    collective, copy = per_collective * FORWARD_SECONDS, per_copy * FORWARD_SECONDS
    exposed = exposed_seconds(collective, copy)
    ends = (collective + copy) * 1.25  # the last bucket is a quarter of a block
    assert ends <= exposed <= ends + copy + 10 * BLOCKS * LATENCY_SECONDS


# ---- memory ----------------------------------------------------------------------------------------------------------


class Stack(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*[nn.Linear(64, 64, bias=False) for _ in range(24)])


@pytest.fixture
def buckets_of_one(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Bytes of each bucket of the stack's gradients, on one of eight ranks."""
    with fake_world(8):
        yield 64 * 64 * 4 // 8


@pytest.mark.parametrize(("mode", "gradients_kept"), [("", 24), ("gradients add up", 24), ("in backward", 0)])
def test_page_locked_memory_is_bounded(buckets_of_one: int, mode: str, gradients_kept: int) -> None:
    """Shards, the gradients there are, and what at most MAX_RETURNING buckets bring: all else that is copied to the CPU
    finds its place again.
    """
    assert schedule.MAX_RETURNING == buckets.MAX_BUCKETS_OF_COPIES == 2 * buckets.MAX_BUCKETS
    with simulated_device() as transfers:
        model = Stack()
        for module in (*model, model):
            fully_shard(module, offload_policy=OFFLOAD)
        shards = sum(group.parameters.buffers.shards.nbytes for group in groups_below(model))  # type: ignore[union-attr]
        assert transfers.peak == shards == 24 * buckets_of_one
        if mode == "in backward":
            model.set_optimizer_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(4):
            model(torch.ones(2, 64)).sum().backward()
            if mode != "gradients add up":
                model.zero_grad()
        most = schedule.MAX_RETURNING + 1  # and the one whose place is sought
        assert transfers.peak <= shards + (gradients_kept + most) * buckets_of_one
        model.zero_grad()
        assert transfers.live == shards
