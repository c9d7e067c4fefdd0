"""Simulates a process group of any size on one GPU, whose collectives take their time on a stream, as NCCL's do.

Collectives spin on the wire for `latency + bytes / bandwidth` seconds, one by one; a grouped call is one. Asynchronous
ones run on a stream of the wire, after all work that the caller's stream has so far; others on the caller's, as NCCL
does since torch 2.7. `wait` makes the caller's stream wait. A spin takes one thread of one multiprocessor, and no
memory bandwidth: other kernels are as fast as without it. Nothing is moved, unless that is requested. On CPU
collectives take no time.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup


class Wire:
    """Holds the facts that all groups share.

    `bandwidth`: bytes a second each way; None: collectives take no time. `latency`: seconds that each call takes
    besides, where there is a bandwidth.
    `moves`: if True, outputs are filled as if all ranks held this one's values, and gradients' sum were this rank's.
    `sent_bytes`: the bytes that each rank has sent in all. `calls`: the number of collective calls.
    """

    def __init__(self, device: torch.device) -> None:
        self.bandwidth: float | None = None
        self.latency = 0.0
        self.moves = False
        self.sent_bytes = 0.0
        self.calls = 0
        self._has_streams = device.type == "cuda"
        if self._has_streams:
            self._stream = torch.cuda.Stream(device)
            self._last: torch.cuda.Event | None = None
            self._cycles_per_second = measure_clock()

    def send(self, nbytes: float, is_async: bool, move: Callable[[], None]) -> "WireWork":
        self.sent_bytes += nbytes
        self.calls += 1
        if not self._has_streams:
            if self.moves:
                move()
            return WireWork(None)
        current = torch.cuda.current_stream()
        stream = self._stream if is_async else current
        stream.wait_stream(current)
        if self._last is not None:
            stream.wait_event(self._last)
        with torch.cuda.stream(stream):
            if self.bandwidth is not None:
                torch.cuda._sleep(int((self.latency + nbytes / self.bandwidth) * self._cycles_per_second))
            if self.moves:
                move()
            self._last = torch.cuda.Event()
            self._last.record(stream)
        return WireWork(self._last)

    def settle(self) -> None:
        """Waits, between steps, until nothing is on the wire. A graph that is captured next must not depend on it."""
        if self._has_streams:
            torch.cuda.synchronize()
            self._last = None


class WireWork(dist.Work):
    def __init__(self, end: Any) -> None:
        super().__init__()
        self._end = end

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._end is not None:
            torch.cuda.current_stream().wait_event(self._end)
        return True


def measure_clock(cycles: int = 100_000_000) -> float:
    """Returns the cycles a second of the spin kernel. The GPU's clock changes with its load: a spin is exact to some
    percent.
    """
    torch.cuda._sleep(cycles)  # wakes the GPU up
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return cycles / (begin.elapsed_time(end) / 1e3)


class WireGroup(dist.ProcessGroup):
    """Sends all-gathers, reduce-scatters, all-reduces and all-to-alls over the wire."""

    wire: Wire

    def _send(
        self, full: Sequence[Tensor], options: Sequence[Any], move: Callable[[], None], times: int = 1
    ) -> WireWork:
        nbytes = sum(tensor.numel() * tensor.element_size() for tensor in full)
        is_async = all(getattr(option, "asyncOp", True) for option in options)
        return self.wire.send(times * nbytes * (self.size() - 1) / self.size(), is_async, move)

    def _gather_one(self, output: Tensor, own: Tensor, *options: Any) -> WireWork:
        return self._gather_all([output], [own], *options)

    def _gather_all(self, outputs: list[Tensor], inputs: list[Tensor], *options: Any) -> WireWork:
        def move() -> None:
            for output, own in zip(outputs, inputs, strict=True):
                output.view(self.size(), -1).copy_(own.reshape(1, -1).clone())  # it may be a part of the output

        return self._send(outputs, options, move)

    def _reduce_one(self, output: Tensor, whole: Tensor, *options: Any) -> WireWork:
        return self._reduce_all([output], [whole], *options)

    def _reduce_all(self, outputs: list[Tensor], inputs: list[Tensor], *options: Any) -> WireWork:
        def move() -> None:
            for output, whole in zip(outputs, inputs, strict=True):
                output.view(-1).copy_(whole.reshape(self.size(), -1)[self.rank()])

        return self._send(inputs, options, move)

    def allreduce(self, tensors: list[Tensor], *options: Any) -> WireWork:
        return self._send(tensors, options, lambda: None, times=2)

    def _exchange(
        self, output: Tensor, source: Tensor, received: list[int], sent: list[int], *options: Any
    ) -> WireWork:
        """Fills the output with what this rank sends to itself, over and over. It does so also where nothing else is
        moved, because what comes may be numbers that the host reads, or indices.
        """
        own = source.tensor_split(self.size())[0] if not sent else source[: sent[0]]

        def move() -> None:
            if len(own):
                output.copy_(torch.cat([own] * -(-len(output) // len(own)))[: len(output)])
            else:
                output.zero_()

        moves, self.wire.moves = self.wire.moves, True
        try:
            return self._send([source], options, move)
        finally:
            self.wire.moves = moves

    # Old and new names of the same call; torch uses one or the other, by version.
    _allgather_base = all_gather_single = _gather_one
    _reduce_scatter_base = reduce_scatter_single = _reduce_one
    allgather_into_tensor_coalesced = all_gather_single_coalesced = _gather_all
    alltoall_base = all_to_all_single = _exchange
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced = _reduce_all


def _create(wire: Wire, device: torch.device, common: Any, _options: Any) -> WireGroup:
    group = WireGroup(common.group_rank, common.group_size)
    group.wire = wire
    backend = FakeProcessGroup._create_internal(common.group_rank, common.group_size)
    group._register_backend(torch.device(device.type), dist.ProcessGroup.BackendType.CUSTOM, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    return group


def start_wire_group(world_size: int, device: torch.device) -> Wire:
    """Initialises the default process group. It and all its subgroups share the wire that is returned."""
    wire = Wire(device)
    dist.Backend.register_backend("wire", partial(_create, wire, device), extended_api=True, devices=[device.type])
    dist.init_process_group("wire", store=dist.HashStore(), rank=0, world_size=world_size)
    return wire
