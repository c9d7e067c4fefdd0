"""Defines exact counters for one process: bytes copied, bytes sent, bytes allocated. None of them measures time."""

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COPY_OPS = {
    *("aten.copy", "aten._foreach_copy", "aten.clone", "aten._to_copy", "aten.cat", "aten.stack", "aten._chunk_cat"),
    *("aten.split_with_sizes_copy", "aten.split_copy", "aten.slice_scatter", "aten.select_scatter", "aten.index_copy"),
    *("aten.constant_pad_nd", "aten.index_select", "aten.repeat", "aten.unfold_copy", "aten.view_copy"),
    *("fsdp.all_gather_copy_in", "fsdp.split_with_sizes_copy", "fsdp.chunk_cat", "fsdp.copy"),
    # Writing zeros into padding moves memory like a copy does.
    *("aten.zero", "aten.fill", "aten._foreach_zero", "aten.zeros", "aten.full", "aten.new_zeros", "aten.zeros_like"),
}
ARITHMETIC_OPS = {
    *("aten.sum", "aten.mean", "aten.add", "aten.sub", "aten.mul", "aten.div", "aten.lerp", "aten.addcmul"),
    *("aten._foreach_add", "aten._foreach_sub", "aten._foreach_mul", "aten._foreach_div"),
}
KNOWN_NAMESPACES = {"aten", "prim", "prims", "c10d", "_c10d_functional", "fsdp", "profiler"}


def num_bytes(value: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(value) if isinstance(leaf, Tensor))


def op_name(func: OpOverload) -> str:
    """Returns the name of an op, `aten.copy` for `aten.copy_.default`: its in-place and functional forms are equal."""
    return str(func.overloadpacket).rstrip("_")


class _StepMeter(TorchDispatchMode):
    """Sees every op below autograd, in forward and in a CPU backward (which runs in the calling thread)."""

    sees_fsdp2 = True

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor takes the op apart; its local ops come back to us
        out = func(*args, **(kwargs or {}))
        self.count(func, args, kwargs or {}, out)
        return out

    def count(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        raise NotImplementedError


class CopyMeter(_StepMeter):
    """Counts the bytes that copies read and write, and separately those of arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.copy_bytes = 0
        self.arithmetic_bytes = 0

    def count(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        name = op_name(func)
        if func.namespace not in KNOWN_NAMESPACES:
            raise RuntimeError(f"{func} is unknown to CopyMeter: say in meters.py which bytes it copies.")
        if name in COPY_OPS:
            self.copy_bytes += _bytes_moved(func, args, kwargs, out)
        elif name in ARITHMETIC_OPS:
            self.arithmetic_bytes += _bytes_moved(func, args, kwargs, out, reads_output=func._schema.is_mutable)


def _bytes_moved(func: OpOverload, args: Any, kwargs: Any, out: Any, reads_output: bool = False) -> int:
    if op_name(func) == "fsdp.all_gather_copy_in":
        # Writes into a slice of its second argument, which its schema does not call mutable.
        sources, gathered = args[0], args[1]
        return num_bytes(sources) + sum(source.numel() for source in sources) * gathered.element_size()
    read = written = 0
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += num_bytes(value)
        else:
            read += num_bytes(value)
    return read + (written if func._schema.is_mutable else num_bytes(out)) + (written if reads_output else 0)


@dataclass(frozen=True)
class Collective:
    """Holds one payload (a coalesced call has several): `payload_bytes` go to each peer, `sent_bytes` leave
    this rank.
    """

    kind: str
    payload_bytes: int
    sent_bytes: float


def _all_gather(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> Iterator[Collective]:
    for tensor in tensors:
        yield Collective("all_gather", num_bytes(tensor), num_bytes(tensor) * (group.size() - 1))


def _reduce_scatter(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> Iterator[Collective]:
    for tensor in tensors:
        payload = num_bytes(tensor) // group.size()
        yield Collective("reduce_scatter", payload, payload * (group.size() - 1))


def _all_reduce(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> Iterator[Collective]:
    for tensor in tensors:
        yield Collective("all_reduce", num_bytes(tensor), 2 * num_bytes(tensor) * (group.size() - 1) / group.size())


def _all_to_all(chunks: Sequence[int], group: dist.ProcessGroup) -> Iterator[Collective]:
    for peer, chunk_bytes in enumerate(chunks):
        if peer != group.rank():
            yield Collective("all_to_all", chunk_bytes, chunk_bytes)


def _send(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> Iterator[Collective]:
    for tensor in tensors:
        yield Collective("send", num_bytes(tensor), num_bytes(tensor))


# op -> (how its bytes are counted, position of the tensors that this rank puts in)
COLLECTIVES: dict[str, tuple[Callable[..., Iterator[Collective]], int]] = {
    "c10d._allgather_base": (_all_gather, 1),
    "c10d.allgather": (_all_gather, 1),
    "c10d.allgather_coalesced": (_all_gather, 1),
    "c10d.allgather_into_tensor_coalesced": (_all_gather, 1),
    "c10d._reduce_scatter_base": (_reduce_scatter, 1),
    "c10d.reduce_scatter_tensor_coalesced": (_reduce_scatter, 1),
    "c10d.allreduce": (_all_reduce, 0),
    "c10d.allreduce_coalesced": (_all_reduce, 0),
    "c10d.send": (_send, 0),
    "_c10d_functional.all_gather_into_tensor": (_all_gather, 0),
    "_c10d_functional.all_gather_into_tensor_out": (_all_gather, 0),
    "_c10d_functional.all_gather_into_tensor_coalesced": (_all_gather, 0),
    "_c10d_functional.reduce_scatter_tensor": (_reduce_scatter, 0),
    "_c10d_functional.reduce_scatter_tensor_out": (_reduce_scatter, 0),
    "_c10d_functional.reduce_scatter_tensor_coalesced": (_reduce_scatter, 0),
    "_c10d_functional.all_reduce": (_all_reduce, 0),
    "_c10d_functional.all_reduce_coalesced": (_all_reduce, 0),
}
SEND_NOTHING = {"c10d.barrier", "c10d.monitored_barrier", "c10d.recv", "_c10d_functional.wait_tensor"}
SEND_NOTHING |= {"_c10d_functional._wrap_tensor_autograd", "c10d.recv_any_source"}


class WireMeter(_StepMeter):
    """Counts what this rank sends, in every collective of torch.distributed and every functional collective.

    An unknown op is an error, so that no bytes are missed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.collectives: list[Collective] = []

    @property
    def sent_bytes(self) -> float:
        return sum(collective.sent_bytes for collective in self.collectives)

    def count(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        name = op_name(func)
        if func.namespace not in ("c10d", "_c10d_functional") or name in SEND_NOTHING:
            return
        self.calls += 1
        self.collectives += _collectives_of(name, args, _find_group(name, args))


def _collectives_of(name: str, args: Sequence[Any], group: dist.ProcessGroup) -> list[Collective]:
    if name in COLLECTIVES:
        count, position = COLLECTIVES[name]
        return list(count(tree_leaves(args[position]), group))
    if name == "c10d.broadcast":  # only the source sends, to each other rank
        sizes = map(num_bytes, args[0] if args[2] == group.rank() else [])
        return [Collective("broadcast", size, size * (group.size() - 1)) for size in sizes]
    if name == "c10d.reduce_scatter":  # one list of per-rank tensors for each output
        chunks = [(peer, num_bytes(tensor)) for row in args[1] for peer, tensor in enumerate(row)]
        return [Collective("reduce_scatter", size, size) for peer, size in chunks if peer != group.rank()]
    if name == "c10d.alltoall":
        return list(_all_to_all([num_bytes(tensor) for tensor in args[1]], group))
    if name in ("c10d.alltoall_base", "_c10d_functional.all_to_all_single"):
        tensor, splits = (args[1], args[4]) if name == "c10d.alltoall_base" else (args[0], args[2])
        return list(_all_to_all(_chunk_bytes(tensor, splits, group.size()), group))
    raise RuntimeError(f"{name} is unknown to WireMeter: say in meters.py what it sends.")


def _chunk_bytes(tensor: Tensor, splits: Sequence[int], world_size: int) -> list[int]:
    if not splits:
        return [num_bytes(tensor) // world_size] * world_size
    row_bytes = num_bytes(tensor) // max(1, tensor.size(0))
    return [rows * row_bytes for rows in splits]


def _find_group(name: str, args: Sequence[Any]) -> dist.ProcessGroup:
    if name.startswith("_c10d_functional"):
        return dist.distributed_c10d._resolve_process_group(args[-1])
    for argument in args:
        # A reduce op is boxed the same way, after the group in every signature.
        if isinstance(argument, torch.ScriptObject):
            return dist.ProcessGroup.unbox(argument)
    raise RuntimeError(f"{name}: no process group among its arguments.")


@dataclass
class AllocationMeter:
    """Records every allocation and release of the CPU allocator between `with` and its end, with storage resizes.

    Marks name regions in time. Memory that was allocated before the meter started is unknown to it, unless an earlier
    meter saw it: then its release counts, so garbage is collected first. oneDNN is off meanwhile: on CPUs without bf16
    arithmetic its products take scratch memory.
    """

    _profile: profile = field(default_factory=lambda: profile(activities=[ProfilerActivity.CPU], profile_memory=True))
    _timeline: list[tuple[int, int]] = field(default_factory=list)
    _regions: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __enter__(self) -> "AllocationMeter":
        gc.collect()
        self._had_onednn, *_ = torch.backends.mkldnn.set_flags(_enabled=False)
        self._profile.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._profile.__exit__(*error)
        torch.backends.mkldnn.set_flags(_enabled=self._had_onednn)
        self._read_events()

    def region(self, name: str) -> record_function:
        return record_function(f"meter::{name}")

    def allocated_before(self, region: str) -> int:
        start, _ = self._regions[region]
        return max((entry for entry in self._timeline if entry[0] < start), default=(0, 0), key=lambda e: e[0])[1]

    def peak_during(self, region: str) -> int:
        start, end = self._regions[region]
        inside = [total for when, total in self._timeline if start <= when <= end]
        return max([self.allocated_before(region), *inside])

    def curve(self, region: str) -> list[tuple[float, int]]:
        """Returns pairs after each event: milliseconds since the region began, bytes above those allocated
        before it.
        """
        (start, end), before = self._regions[region], self.allocated_before(region)
        return [((when - start) / 1e6, total - before) for when, total in self._timeline if start <= when <= end]

    def allocated_at_end(self) -> int:
        return self._timeline[-1][1] if self._timeline else 0

    def _read_events(self) -> None:
        allocations, total = [], 0
        for event in self._profile.profiler.kineto_results.events():
            name = event.name()
            if name == "[memory]":
                allocations.append((event.start_ns(), event.nbytes()))
            elif name.startswith("meter::"):
                self._regions[name.removeprefix("meter::")] = (event.start_ns(), event.end_ns())
        for when, nbytes in sorted(allocations, key=lambda allocation: allocation[0]):
            total += nbytes
            self._timeline.append((when, total))
