"""Simulates a device whose tensors have sizes and no memory, and the ranks that share a model on it.

Its tensors are on meta. The engine shards, gathers and reduces them as any others (`engine/simulation.py`), by its own
Comms over process groups that send nothing. A meter counts the bytes of their storages, and clocks say when the
collectives and the copies end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ..checks.headers import HEADER_NBYTES
from ..checks.level import is_on
from ..checks.named_comm import MAX_RIDER_NBYTES
from ..engine import events
from ..engine.build import Plan
from ..engine.comm import AnyComm, CoalescedComm, Comm, Purpose, Unwatched
from ..engine.gloo import GATHERING, PairwiseComm
from ..engine.mesh import DataMesh
from ..engine.simulation import SimulatedGroup, simulated
from ..engine.streams import AllWork, Transfers, Work
from ..engine.user_code import hidden
from ..features.large_submodules import gather_when_called, plan_large_submodules
from .clocks import Clocks, Machine
from .compat import mesh_of_numbers, no_dispatch
from .links import End
from .meter import StorageMeter
from .settings import Setting

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

    def change(self, place: str, nbytes: int, more: int) -> None:
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


class _Ends:
    """Is a collective or a copy in flight, which has an end. A copy has a result."""

    def __init__(self, clocks: Clocks, end: End, tensors: Sequence[Tensor] = (), result: Any = None) -> None:
        self._clocks, self._end, self._tensors, self._result = clocks, end, tensors, result

    def wait(self) -> Any:
        self._clocks.wait(self._end)
        return self._result

    finish = pass_on = wait


class RanksOfSizes(SimulatedGroup):
    """Stands for the process group of rank 0 of so many, which are equally far apart among `span` neighbouring ones."""

    def __init__(self, device: DeviceOfSizes, size: int, span: int) -> None:
        super().__init__(0, size)  # type: ignore[call-arg]
        self.device, self._span = device, span
        self._among: dict[int, RanksOfSizes] = {}

    def make_comm(self, purpose: Purpose) -> Comm:
        comm: Comm = _COMMS[self.device.machine.backend](self, purpose)
        return comm

    def among(self, ranks: Sequence[int]) -> SimulatedGroup:
        number = len(ranks)
        if number not in self._among:
            self._among[number] = RanksOfSizes(self.device, number, self._span * number // self.size())
        return self._among[number]

    def begin(self, kind: str, tensors: Sequence[Tensor], is_ring: bool = True, launches: int = 1) -> Any:
        """Begins a collective. `tensors`: those that have the bytes of all ranks."""
        clocks, nbytes = self.device.clocks, sum([each.nbytes for each in tensors])
        is_ring = is_ring and self.device.machine.backend != "gloo"
        end = clocks.communicate(kind, nbytes, self.size(), self._span, self, launches, is_ring)
        return _Ends(clocks, end, tensors)

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

    def all_to_all(self, output: Tensor, source: Tensor) -> Any:
        return self.begin("all_to_all", [source], is_ring=False)


class _AnyOfSizes(AnyComm):
    """Begins collectives of one tensor: torch's functions for that take no group that torch does not know."""

    group: Any

    def all_reduce(self, tensor: Tensor, divisor: float, what: str = "") -> Work:
        wide = tensor.float() if tensor.dtype == torch.float16 else tensor
        return AllWork([self.group.begin("all_reduce", [wide])], [wide])

    def _gather(self, output: Tensor, source: Tensor) -> Work:
        work: Work = self.group.begin("all_gather", [output])
        return work

    def _scatter(self, output: Tensor, source: Tensor) -> Work:
        work: Work = self.group.begin("reduce_scatter", [source])
        return work

    def _exchange(self, received: Tensor, source: Tensor) -> Work:
        work: Work = self.group.begin("reduce_scatter", [source], is_ring=False)
        return work


class _PairwiseOfSizes(PairwiseComm):
    """Exchanges messages as over gloo, with the memory of those that carry headers (checks/named_comm.py)."""

    group: Any

    def all_reduce(self, tensor: Tensor, divisor: float, what: str = "") -> Work:
        return AllWork([self._headers(0), self.group.begin("all_reduce", [tensor])], [tensor])

    def _exchange(
        self,
        kind: str,
        tensors: Sequence[Tensor],
        outgoing: Sequence[Sequence[Tensor] | Tensor],
        incoming: Sequence[Sequence[Tensor] | Tensor],
        what: str = "",
    ) -> Work:
        gathers = kind == GATHERING
        sent: Any = incoming if gathers else tensors
        work = self.group.begin("all_gather" if gathers else "reduce_scatter", sent, False, len(tensors))
        return AllWork([self._headers(outgoing[-1][0].nbytes), work])

    def _headers(self, rider_nbytes: int) -> Work:
        """Begins the messages with headers. `rider_nbytes`: what of the last tensor goes to each other rank; little
        travels in them.
        """
        others = self.size - 1
        most = MAX_RIDER_NBYTES // max(1, others)
        sent = HEADER_NBYTES + rider_nbytes if 0 < rider_nbytes <= most else 0
        nbytes = others * (HEADER_NBYTES + most + sent) if is_on() else 0
        return _Ends(self.group.device.clocks, End(0.0), [torch.empty(nbytes, dtype=torch.uint8, device="meta")])


_COMMS: dict[str, Any] = {"nccl": CoalescedComm, "gloo": _PairwiseOfSizes, "other": _AnyOfSizes}


@dataclass(frozen=True)
class MeshOfSizes(DataMesh):
    """Is the mesh of rank 0 among ranks that this process does not have.

    `on_device`: the same mesh for parameters that stay on the device, if those of this one may rest on the CPU.
    """

    on_device: MeshOfSizes | None = field(default=None, kw_only=True, repr=False)
    groups: tuple[RanksOfSizes, RanksOfSizes | None] = field(kw_only=True, compare=False, repr=False)
    # Inside each replica, and between them, if they share what rests.
    groups_at_rest: tuple[RanksOfSizes, RanksOfSizes] | None = field(
        default=None, kw_only=True, compare=False, repr=False
    )

    @property
    def shard_group(self) -> Any:
        return self.groups[0]

    @property
    def replicate_group(self) -> Any:
        return self.groups[1]

    @property
    def shards_at_rest(self) -> Any:
        return self.groups_at_rest is not None

    @property
    def inner_group(self) -> Any:
        return self.groups_at_rest[0] if self.groups_at_rest is not None else self.groups[0]

    @property
    def outer_group(self) -> Any:
        return self.groups_at_rest[1] if self.groups_at_rest is not None else None

    @property
    def rank(self) -> int:
        return 0

    @property
    def axis_groups(self) -> list[Any]:
        return [group for group in self.groups if group is not None and group.size() > 1]


class _TransfersOfSizes(Transfers):
    """Copies between the CPU, whose memory is not counted, and the device."""

    def __init__(self, device: DeviceOfSizes) -> None:
        self._clocks, self._meter = device.clocks, device.meter

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        with no_dispatch():
            found = torch.empty(numel, dtype=dtype, device="meta")
        self._meter.leave_out([found])
        return found

    def start_in(self, target: Tensor, source: Tensor, then: Callable[[], Any]) -> Any:
        end = self._clocks.transfer(source.nbytes)
        with self._clocks.behind(end):
            return _Ends(self._clocks, end, (target, source), then())

    def start_out(self, source: Tensor) -> Any:
        end = self._clocks.transfer(source.nbytes)
        return _Ends(self._clocks, end, (source,), self.allocate(source.numel(), source.dtype))

    def settle(self) -> None:
        pass


# ---- all of it


class DeviceOfSizes:
    """Simulates rank 0's device of a machine. `device`: what it stands for. See `Simulation`."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.device = machine, machine.torch_device
        self.clocks, self.meter = Clocks(machine), StorageMeterOfSteps(on_cpu=self.device.type == "cpu")
        self.transfers: Transfers = _TransfersOfSizes(self)

    def beside(self) -> AbstractContextManager[None]:
        return self.clocks.beside()

    def record_event(self) -> Work:
        return _Ends(self.clocks, self.clocks.now())

    def mesh(self, setting: Setting) -> Callable[[bool], DataMesh]:
        """Returns a function that returns the mesh of a setting, for groups whose shards rest on the CPU, or not."""
        shards, ranks, at_rest = setting.num_at_rest, setting.ranks, None
        numbers = mesh_of_numbers((shards,) if shards == ranks else (setting.replicas, shards))
        own = RanksOfSizes(self, shards, shards)
        replicas = RanksOfSizes(self, setting.replicas, ranks) if setting.replicas > 1 else None
        if setting.shard_at_rest and replicas is not None:
            inside = setting.num_shards
            at_rest, replicas = (RanksOfSizes(self, inside, inside), replicas), None
        axes: Any = ((0,), ()) if replicas is None else ((1,), (0,))
        kinds: Any = {"groups": (own, replicas), "groups_at_rest": at_rest}
        on_device = MeshOfSizes(numbers, *axes, **kinds)
        apart = MeshOfSizes(numbers, *axes, on_device=on_device, **kinds)
        object.__setattr__(apart, "_device", torch.device("meta", 0))  # which does not equal where shards rest
        return lambda offloads: apart if offloads else on_device

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


def _keep_on_device(plan: Plan) -> None:
    """Gives parameters that stay on the device the mesh of those: on meta, a device and the CPU are one place."""
    mesh = plan.mesh
    if isinstance(mesh, MeshOfSizes) and mesh.on_device is not None:
        for name, each in plan.parameters.items():
            if not hasattr(each.offload, "pin_memory"):
                plan.parameters[name] = each._replace(mesh=mesh.on_device)


def _without_watchers() -> AbstractContextManager[None]:
    return events.chosen(
        plan=(plan_large_submodules, _keep_on_device),
        features=(gather_when_called,),
        observers=(),
        in_profiler=(),
        class_attributes=(),
        comm_watcher=Unwatched(),
    )
