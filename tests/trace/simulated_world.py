"""Simulates a process group like NCCL's on the streams of vector_clocks.py, and counts host synchronisations."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup
from torch.utils._python_dispatch import _disable_current_modes
from vector_clocks import Clock, Simulation, Stream

from fsdp2.devices import streams
from fsdp2.devices.streams import Transfers


class SimulatedWork(dist.Work):
    """A collective in flight, which holds no tensor."""

    def __init__(self, simulation: Simulation, what: str, clock: Clock) -> None:
        super().__init__()
        self._simulation, self._what, self._clock = simulation, what, clock

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._simulation.collective_waits[self._what, self._simulation.current.name] += 1
        self._simulation.current.come_behind(self._clock)
        return True


class SimulatedGroup(dist.ProcessGroup):
    """A process group as NCCL has it. Its ranks all hold what this one holds; a reduction is this rank's own part."""

    simulation: Simulation
    own_stream: Stream

    def _run(
        self, what: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor], move: Callable[[Tensor, Tensor], Any]
    ) -> dist.Work:
        simulation, stream = self.simulation, self.own_stream
        stream.come_behind(simulation.current.clock)
        for tensors in (outputs, inputs):
            assert len({tensor.dtype for tensor in tensors}) <= 1, "NCCL's coalesced collectives take one dtype"
        for tensor in (*outputs, *inputs):
            assert tensor.is_contiguous(), "NCCL takes contiguous tensors"
            assert tensor.data_ptr() % 16 == 0, "NCCL is slow where tensors are not aligned"
        simulation.run(what, inputs, outputs, stream)
        with _disable_current_modes(), torch.no_grad():
            for output, own in zip(outputs, inputs, strict=True):
                move(output.view(-1), own.reshape(-1))
        return SimulatedWork(simulation, what, stream.clock.copy())

    def _gather_all(self, outputs: list[Tensor], own: list[Tensor], *_: Any) -> dist.Work:
        return self._run("all-gather", outputs, own, lambda out, own: out.view(self.size(), -1).copy_(own.clone()))

    def _reduce_all(self, outputs: list[Tensor], whole: list[Tensor], *_: Any) -> dist.Work:
        rank, size = self.rank(), self.size()
        return self._run("reduce-scatter", outputs, whole, lambda out, own: out.copy_(own.view(size, -1)[rank]))

    def _gather(self, output: Tensor, own: Tensor, *_: Any) -> dist.Work:
        return self._gather_all([output], [own])

    def _reduce(self, output: Tensor, whole: Tensor, *_: Any) -> dist.Work:
        return self._reduce_all([output], [whole])

    def _exchange(self, output: Tensor, whole: Tensor, *_: Any) -> dist.Work:
        return self._run("all-to-all", [output], [whole], Tensor.copy_)

    def allreduce(self, tensors: list[Tensor], *_: Any) -> dist.Work:
        return self._run("all-reduce", tensors, tensors, lambda out, own: None)

    # Old and new names of the same call; torch uses one or the other, by version.
    _allgather_base = all_gather_single = _gather
    _reduce_scatter_base = reduce_scatter_single = _reduce
    alltoall_base = all_to_all_single = _exchange
    allgather_into_tensor_coalesced = all_gather_single_coalesced = _gather_all
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced = _reduce_all


def _create(simulation: Simulation, common: Any, _options: Any) -> SimulatedGroup:
    group = SimulatedGroup(common.group_rank, common.group_size)
    group.simulation = simulation
    group.own_stream = simulation.stream(f"collectives of {common.group_size} ranks")
    backend = FakeProcessGroup._create_internal(common.group_rank, common.group_size)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    return group


@contextmanager
def simulated_world(world_size: int, rank: int = 1, has_streams: bool = True) -> Iterator[Simulation]:
    """A default process group of any size, of which this process is one rank, on a CPU with streams.

    Without them, collectives alone run beside the one stream: as on a CPU, where other threads do that.
    Build the model inside, and run steps in `with simulation:`. Whatever was judged is in `simulation.problems`.
    """
    simulation = Simulation()
    names = (f"stream {number}" for number in range(2, sys.maxsize))
    resize, tolist = torch.UntypedStorage.resize_, Tensor.tolist
    resized: Any = lambda storage, size: simulation.resize(resize, storage, size)  # noqa: E731  a method
    read: Any = lambda tensor: simulation.read_on_host(tolist, tensor)  # noqa: E731  a method

    def record(tensor: Tensor, stream: Stream) -> None:
        simulation.record_stream(tensor, stream)

    allocate = Transfers.allocate

    def allocate_on_host(transfers: Transfers, numel: int, dtype: torch.dtype) -> Tensor:
        tensor = allocate(transfers, numel, dtype)
        simulation.lies_on_host(tensor)
        return tensor

    def make_stream(*_: Any, **__: Any) -> Stream:
        return simulation.stream(next(names))

    def find_current(*_: Any) -> Stream:
        return simulation.current

    def exist_on(device: torch.device) -> bool:
        return has_streams and device.type != "meta"

    with (
        mock.patch.object(torch.UntypedStorage, "resize_", resized),
        mock.patch.object(Tensor, "tolist", read),
        mock.patch.object(Transfers, "allocate", allocate_on_host),
        mock.patch.object(Tensor, "record_stream", record),
        mock.patch.object(torch, "Stream", make_stream),
        mock.patch.object(torch.accelerator, "current_stream", find_current),
        mock.patch.object(streams, "exist_on", exist_on),
    ):
        dist.Backend.register_backend("simulated", partial(_create, simulation), extended_api=True, devices=["cpu"])
        dist.init_process_group("simulated", store=dist.HashStore(), rank=rank, world_size=world_size)
        streams._side_stream_of.cache_clear()
        try:
            yield simulation
        finally:
            streams._side_stream_of.cache_clear()
            dist.destroy_process_group()


def count_host_waits(simulation: Simulation, step: Callable[[], object]) -> Counter[str]:
    """Runs `step` in the simulation, and returns what in fsdp2 made the host wait: what and where, how often.

    Example:
        with simulated_world(4) as simulation:
            model = fully_shard(...)
            waits = [count_host_waits(simulation, lambda: model(batch).sum().backward()) for _ in range(6)]
            assert not waits[-1]
    """
    before = simulation.host_waits.copy()
    with simulation:
        step()
    return simulation.host_waits - before
