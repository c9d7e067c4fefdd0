"""Simulates a process group of any size inside one process, whose collectives take time on one link, one by one.

Nothing is moved. A collective occupies the link for `latency + bytes / bandwidth` seconds from when it is issued, or
from when the one before it has ended; its Work sleeps until then. So a step on it waits exactly where the order of
collectives and compute makes it wait. No rank is late, and no thread of a backend takes a core.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup


class Clock:
    """Is the machine's clock: seconds since some moment."""

    def now(self) -> float:
        return time.perf_counter()

    def sleep_until(self, when: float) -> None:
        while (left := when - self.now()) > 0:
            time.sleep(left)


class SimulatedClock(Clock):
    """Advances only while a thread sleeps, and takes no real time: everything but sleep is infinitely fast."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def sleep_until(self, when: float) -> None:
        self._now = max(self._now, when)


@dataclass
class Link:
    """Sends and receives at the same time, `bandwidth` bytes a second each way."""

    clock: Clock
    latency: float = 0.0
    bandwidth: float = float("inf")
    free_at: float = 0.0
    # Kind, begin and end of each transfer, in order.
    transfers: list[tuple[str, float, float]] = field(default_factory=list)
    # How many operations each of them is: those of a coalesced call are one transfer.
    operations: list[int] = field(default_factory=list)

    def send(self, kind: str, nbytes: float) -> "TimedWork":
        begin = max(self.clock.now(), self.free_at)
        self.free_at = begin + self.latency + nbytes / self.bandwidth
        self.transfers.append((kind, begin, self.free_at))
        return TimedWork(self.clock, self.free_at)


class TimedWork(dist.Work):
    def __init__(self, clock: Clock, end: float) -> None:
        super().__init__()
        self._clock, self._end = clock, end

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._clock.sleep_until(self._end)
        return True

    def is_completed(self) -> bool:
        return self._clock.now() >= self._end


class TimedGroup(dist.ProcessGroup):
    """Makes all-gathers, reduce-scatters and all-reduces take their time. Any other collective returns at once."""

    link: Link

    def _send(self, kind: str, full: Sequence[Tensor], times: int = 1) -> TimedWork:
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in full)
        self.link.operations.append(len(full))
        return self.link.send(kind, times * nbytes * (self.size() - 1) / self.size())

    def _gather_one(self, output: Tensor, *_: Any, **__: Any) -> TimedWork:
        return self._send("gather", [output])

    def _gather_all(self, outputs: list[Tensor], *_: Any, **__: Any) -> TimedWork:
        return self._send("gather", outputs)

    def _gather_list(self, outputs: list[list[Tensor]], *_: Any, **__: Any) -> TimedWork:
        return self._send("gather", [tensor for row in outputs for tensor in row])

    def _reduce_one(self, _output: Tensor, whole: Tensor, *_: Any, **__: Any) -> TimedWork:
        return self._send("reduce", [whole])

    def _reduce_all(self, _outputs: list[Tensor], whole: list[Tensor], *_: Any, **__: Any) -> TimedWork:
        return self._send("reduce", whole)

    def allreduce(self, tensors: list[Tensor], *_: Any, **__: Any) -> TimedWork:
        return self._send("sum", tensors, times=2)

    # Old and new names of the same call; torch uses one or the other, by version.
    _allgather_base = all_gather_single = _gather_one
    _reduce_scatter_base = reduce_scatter_single = _reduce_one
    allgather = _gather_list
    allgather_into_tensor_coalesced = all_gather_single_coalesced = _gather_all
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced = _reduce_all


def _create(link: Link, common: Any, _options: Any) -> TimedGroup:
    group = TimedGroup(common.group_rank, common.group_size)
    group.link = link
    backend = FakeProcessGroup._create_internal(common.group_rank, common.group_size)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    return group


def start_timed_group(world_size: int, link: Link) -> None:
    """Initialises the default process group. It and all its subgroups share `link`."""
    dist.Backend.register_backend("timed", partial(_create, link), extended_api=True, devices=["cpu"])
    dist.init_process_group("timed", store=dist.HashStore(), rank=0, world_size=world_size)
