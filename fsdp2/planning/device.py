"""Simulates a device whose tensors have sizes and no memory, and the ranks that share a model on it.

Its tensors are on meta. The engine shards, gathers and reduces them as any others (`devices/simulation.py`), by its own
Comms over process groups that send nothing. A meter counts the bytes of their storages, and a `Traffic` those that are
sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ..calls.user_code import hidden
from ..collectives.coalesced import CoalescedComm
from ..collectives.gloo import GATHERING, PairwiseComm
from ..devices.simulation import SimulatedGroup, simulated
from ..devices.streams import AllWork, Transfers, Work
from ..engine import events
from ..engine.comm import Comm, CommLabel
from ..engine.mesh import DataMesh
from ..features.large_submodules import gather_when_called, plan_large_submodules
from ..torch_private.plans import mesh_of_numbers, no_dispatch
from .meter import StorageMeter
from .settings import Setting
from .times import InFlight, Machine, Traffic

# ---- memory


_aten = torch.ops.aten
# Operations that write to tensors that are there: without values they do nothing. And those that do so given `out`.
_FILLS = {
    *(_aten.copy_, _aten._foreach_copy_, _aten.zero_, _aten.fill_),
    *(_aten.add_, _aten.mul_, _aten.div_, _aten._foreach_div_),
}
_FILLS_OUT = {_aten.split_with_sizes_copy, _aten._chunk_cat, _aten.add, _aten.sub, _aten.mul, _aten.sum}
# Those of them whose kernels compute in one dtype, to which those of the CPU cast all tensors first.
_PROMOTES = {_aten.add_, _aten.mul_, _aten.add, _aten.sub, _aten.mul}


class StorageMeterOfSteps(StorageMeter):
    """Counts what is alive in a step: what the engine allocates, and what the model has made (`activations`).

    `doing`: what runs; `peak_at`: what ran at the peak.

    Args:
        on_cpu: kernels allocate what those of the CPU do: operands in the dtype in which they add up, and padded copies
            of what they cut into chunks.
    """

    sees_fsdp2 = True

    def __init__(self, on_cpu: bool) -> None:
        super().__init__()
        self.activations = 0
        self.doing = self.peak_at = ""
        self._on_cpu = on_cpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        if packet in _FILLS or (packet in _FILLS_OUT and "out" in kwargs):
            target = kwargs.get("out", args[0])
            if self._on_cpu and packet in _PROMOTES:
                self.note(_cast_nbytes([target, *args]))
            if self._on_cpu and packet is _aten._chunk_cat:
                self.note(_padded_nbytes(*args))
            return target if func._schema.returns else None
        out = func(*args, **kwargs)
        self.see(out)
        return out

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns a new tensor, and counts it, in half the time of `torch.empty`."""
        with no_dispatch():
            found = torch.empty(shape, dtype=dtype, device="meta")
        self._enter(found, True)
        return found

    def begin(self) -> None:
        """Begins a step."""
        self.peak, self.peak_at, self.activations = self.live, "", 0

    def change(self, nbytes: int, more: int) -> None:
        if more:
            self.note(more)
        self.live += nbytes
        self.note()

    def note(self, more: int = 0) -> None:
        """Notes how many bytes are alive: those that are counted, and so many more for a moment."""
        total = self.live + self.activations + more
        if total > self.peak:
            self.peak, self.peak_at = total, self.doing


def _cast_nbytes(tensors: Sequence[Any]) -> int:
    """Returns the bytes of the copies that an elementwise kernel makes of tensors of other dtypes than the widest.

    The first one is the output. In place it is an operand, too: then there is a copy of each.
    """
    operands = [each for each in tensors if isinstance(each, Tensor)]
    computed = reduce(torch.promote_types, {each.dtype for each in operands})
    return sum(each.numel() * computed.itemsize for each in operands if each.dtype != computed)


def _padded_nbytes(tensors: Sequence[Tensor], dim: int, num_chunks: int) -> int:
    """Returns the bytes of the copies that `_chunk_cat` makes of tensors that `num_chunks` does not divide."""
    uneven = [each for each in tensors if each.shape[dim] % num_chunks]
    return sum(each.nbytes // each.shape[dim] * num_chunks * -(-each.shape[dim] // num_chunks) for each in uneven)


# ---- communication


class RanksOfSizes(SimulatedGroup):
    """Stands for the process group of rank 0 of so many, which are equally far apart among `span` neighbouring ones."""

    def __init__(self, device: DeviceOfSizes, size: int, span: int) -> None:
        super().__init__(0, size)  # type: ignore[call-arg]
        self.device, self._span = device, span
        self._among: dict[int, RanksOfSizes] = {}

    def make_comm(self, comm_label: CommLabel) -> Comm:
        kind: Any = _PairwiseOfSizes if self.device.machine.backend == "gloo" else CoalescedComm
        comm: Comm = kind(self, comm_label)
        return comm

    def among(self, ranks: Sequence[int]) -> SimulatedGroup:
        number = len(ranks)
        if number not in self._among:
            self._among[number] = RanksOfSizes(self.device, number, self._span * number // self.size())
        return self._among[number]

    def begin(self, kind: str, tensors: Sequence[Tensor], is_ring: bool = True, launches: int = 1) -> InFlight:
        """Begins a collective. `tensors`: those that have the bytes of all ranks."""
        nbytes = sum([each.nbytes for each in tensors])
        is_ring = is_ring and self.device.machine.backend != "gloo"
        size, span = self.size(), self._span
        return self.device.traffic.communicate(kind, nbytes, size, span, self, launches, is_ring, tensors)

    # The methods of process groups that Comms call.

    def _allgather_base(self, output: Tensor, source: Tensor, *_: Any) -> Any:
        return self.begin("all_gather", [output])

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, *_: Any) -> Any:
        return self.begin("all_gather", outputs)

    def _reduce_scatter_base(self, output: Tensor, source: Tensor, *_: Any) -> Any:
        return self.begin("reduce_scatter", [source])

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, *_: Any) -> Any:
        return self.begin("reduce_scatter", inputs)

    def alltoall_base(self, output: Tensor, source: Tensor, *_: Any) -> Any:
        return self.begin("reduce_scatter", [source], is_ring=False)

    def allreduce(self, tensors: Any, *_: Any) -> Any:
        return self.begin("all_reduce", tensors)


class _PairwiseOfSizes(PairwiseComm):
    """Exchanges messages as over gloo."""

    group: Any

    def all_reduce(self, tensor: Tensor, divisor: float, label: str = "") -> Work:
        return AllWork([self.group.begin("all_reduce", [tensor])], [tensor])

    def _exchange(
        self,
        kind: str,
        tensors: Sequence[Tensor],
        outgoing: Sequence[Sequence[Tensor] | Tensor],
        incoming: Sequence[Sequence[Tensor] | Tensor],
        label: str = "",
    ) -> Work:
        gathers = kind == GATHERING
        sent: Any = incoming if gathers else tensors
        work: Work = self.group.begin("all_gather" if gathers else "reduce_scatter", sent, False, len(tensors))
        return work


@dataclass(frozen=True)
class MeshOfSizes(DataMesh):
    """The mesh of rank 0 among ranks that this process does not have.

    `groups`: those that shard, and replicate. `offloads`: shards are on the CPU, which is another device than this one.
    """

    offloads: bool = field(kw_only=True)
    groups: tuple[RanksOfSizes, RanksOfSizes | None] = field(kw_only=True, compare=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.offloads:
            object.__setattr__(self, "_device", torch.device("meta", 0))  # does not equal that of the shards, "meta"

    @property
    def shard_group(self) -> Any:
        return self.groups[0]

    @property
    def replicate_group(self) -> Any:
        return self.groups[1]

    @property
    def rank(self) -> int:
        return 0

    @property
    def axis_groups(self) -> list[Any]:
        return [group for group in self.groups if group is not None and group.size() > 1]


class _TransfersOfSizes(Transfers):
    """Copies between the CPU, whose memory is not counted, and the device."""

    def __init__(self, device: DeviceOfSizes) -> None:
        self._traffic, self._meter = device.traffic, device.meter

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        with no_dispatch():
            found = torch.empty(numel, dtype=dtype, device="meta")
        self._meter.leave_out([found])
        return found

    def start_in(self, target: Tensor, source: Tensor, then: Callable[[], Any]) -> Any:
        return self._traffic.copy("to the device", source.nbytes, (target, source), then())

    def start_out(self, source: Tensor) -> Any:
        target = self.allocate(source.numel(), source.dtype)
        return self._traffic.copy("to the CPU", source.nbytes, source, target)

    def settle(self) -> None:
        pass


# ---- all of it


class DeviceOfSizes:
    """Simulates rank 0's device of a machine. `device`: what it stands for. See `Simulation`."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.device = machine, machine.torch_device
        self.traffic, self.meter = Traffic(machine), StorageMeterOfSteps(on_cpu=self.device.type == "cpu")
        self.transfers: Transfers = _TransfersOfSizes(self)

    def mesh(self, setting: Setting) -> Callable[[bool], DataMesh]:
        """Returns a function that returns the mesh of a setting, for groups whose shards are on the CPU, or not."""
        shards, ranks, replicas = setting.num_shards, setting.ranks, setting.replicas
        numbers = mesh_of_numbers((shards,) if replicas == 1 else (replicas, shards))
        own = RanksOfSizes(self, shards, shards)
        groups = own, RanksOfSizes(self, replicas, ranks) if replicas > 1 else None
        axes: Any = ((0,), ()) if replicas == 1 else ((1,), (0,))
        meshes = [MeshOfSizes(numbers, *axes, groups=groups, offloads=offloads) for offloads in (False, True)]
        return meshes.__getitem__

    @contextmanager
    def runs(self) -> Iterator[None]:
        """Context: the engine, without what watches it, runs on this device, on this thread."""
        token = simulated.set(self)
        try:
            with ExitStack() as stack:
                for context in (_without_watchers(), torch.enable_grad(), hidden(), self.meter, hidden()):
                    stack.enter_context(context)
                yield
        finally:
            simulated.reset(token)


def _without_watchers() -> AbstractContextManager[None]:
    return events.chosen(
        plan=(plan_large_submodules,),
        after_sharding=(gather_when_called,),
        features=(),
        observers=(),
        in_profiler=(),
        class_attributes=(),
        comm_watcher=None,
    )
