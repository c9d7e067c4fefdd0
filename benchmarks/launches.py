"""Counts what a group costs a GPU: launches for one gather and for one reduction, collectives, operations, bytes.

It counts on one of N simulated ranks with real sizes; nothing that large is computed. A rule for each operation says
how many launches it needs on CUDA, after aten/src/ATen/native/cuda of torch 2.13.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from .alignment import Shape
from .jobs import Job
from .libraries import Library
from .meters import num_bytes, op_name
from .models import PRECISIONS, is_mixed
from .report import Row
from .timed_group import Link, SimulatedClock, start_timed_group
from .timing import repeat

_EXPERT = [(1408, 2048), (1408, 2048), (2048, 1408)]
MODELS: dict[str, list[Shape]] = {
    "GPT-2 124M": [
        *[(768,), (768,), (2304, 768), (2304,), (768, 768), (768,)],
        *[(768,), (768,), (3072, 768), (3072,), (768, 3072), (768,)],
    ],
    "Llama-7B": [*[(4096, 4096)] * 4, *[(11008, 4096)] * 2, (4096, 11008), (4096,), (4096,)],
    "64 experts": [*[(2048, 2048)] * 4, (64, 2048), *_EXPERT * 64, (2048,), (2048,)],
}
_LITTLE_NBYTES = 16 * 1024  # What takes no more is computed, since somebody may read it.
_CPU_KERNELS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_UNWRITTEN = ("aten.empty", "aten.new_empty", "aten.resize", "aten.set", "aten.detach", "aten.lift_fresh")

# ---- what is one launch on CUDA

# MultiTensorApply.cuh: elements of a chunk, chunks of a launch, and tensors of one, by the number of lists.
_CHUNK_NUMEL, _CHUNKS = 65536, 320
_MOST_TENSORS = {1: 110, 2: 64}
_MOST_CAT_INPUTS = 128  # Shape.cu


def _is_dense(tensor: Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def _of_foreach(*lists: Sequence[Tensor]) -> int:
    """Returns the launches of a foreach operation: one for as many chunks as fit into it, if all tensors are alike
    (ForeachBinaryOpList.cu, ForeachUtils.h): the tensors of each list have one dtype, those of one index equal sizes
    and strides, and all are dense. Else one for each.
    """
    alike = all(len({tensor.dtype for tensor in tensors}) == 1 for tensors in lists)
    for places in zip(*lists, strict=True):
        alike &= len({(place.shape, place.stride()) for place in places}) == 1 and all(map(_is_dense, places))
    numels = [tensor.numel() for tensor in lists[0] if tensor.numel()]
    if not alike:
        return len(numels)
    launches = tensors = chunks = 0
    for numel in numels:
        tensors += 1
        for last in range(-(-numel // _CHUNK_NUMEL), 0, -1):
            chunks += 1
            is_full = tensors == _MOST_TENSORS[len(lists)] and last == 1
            if is_full or chunks == _CHUNKS:
                launches += 1
                tensors, chunks = int(last > 1), 0
    return launches + (chunks > 0)


def _of_split(rows: Tensor, targets: Sequence[Tensor]) -> int:
    """Returns the kernel and the copy of its addresses, if all are dense and of one dtype (TensorShape.cu); else one
    each.
    """
    alike = all(_is_dense(each) and each.dtype == rows.dtype for each in [rows, *targets])
    return 2 if alike else len(targets)


def _of_chunk_cat(tensors: Sequence[Tensor], out: Tensor) -> int:
    """Returns the kernel and the copy of its addresses, if all are contiguous and of one dtype, or bf16 to fp32
    (TensorShape.cu); else each is padded, by a fill and a copy, before they are joined.
    """
    kinds = {(tensor.dtype, out.dtype) for tensor in tensors}
    casts = kinds in ({(out.dtype, out.dtype)}, {(torch.bfloat16, torch.float32)})
    if casts and _is_dense(out) and all(tensor.is_contiguous() for tensor in tensors):
        return 2
    return 2 * len(tensors) + -(-len(tensors) // _MOST_CAT_INPUTS)


def _of_one(*tensors: Tensor) -> int:
    return int(any(tensor.numel() for tensor in tensors))


_RULES: dict[str, Callable[[Sequence[Any], dict[str, Any]], int]] = {
    "aten._foreach_copy": lambda args, _: _of_foreach(args[0], args[1]),
    "aten._foreach_div": lambda args, _: _of_foreach(args[0]),
    "aten._foreach_mul": lambda args, _: _of_foreach(args[0]),
    "aten.split_with_sizes_copy": lambda args, kwargs: _of_split(args[0], kwargs["out"]),
    "aten._chunk_cat": lambda args, kwargs: _of_chunk_cat(args[0], kwargs["out"]),
    "aten.cat": lambda args, _: -(-len(args[0]) // _MOST_CAT_INPUTS),
    **dict.fromkeys(
        (
            f"aten.{name}"
            for name in ("copy", "_to_copy", "clone", "narrow_copy", "zero", "fill", "div", "mul", "add", "sum")
        ),
        lambda args, _: _of_one(args[0]),
    ),
    **dict.fromkeys(
        (f"aten.{name}" for name in ("zeros", "ones", "full", "new_zeros", "zeros_like", "ones_like")), lambda *_: 1
    ),
}


class LaunchMeter(TorchDispatchMode):
    """Counts launches as CUDA would make them. Large results are not computed, so that their memory stays unused."""

    sees_fsdp2 = True

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.written_nbytes = 0
        # Operations on much memory without a rule.
        self.unknown: set[str] = set()

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, op_name(func)
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local operations come back to us
        if func.namespace == "fsdp":  # torch's own name for several operations, which count
            with self:
                return func.redispatch(_CPU_KERNELS, *args, **kwargs)
        nbytes = sum(each.nbytes for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor))
        if name not in _RULES:
            if nbytes > _LITTLE_NBYTES and not _computes_nothing(func):
                self.unknown.add(name)
            return func(*args, **kwargs)
        self.launches[name] += _RULES[name](args, kwargs)
        written = kwargs.get("out", args[0]) if func._schema.is_mutable else None
        if nbytes <= _LITTLE_NBYTES and _numel_of_new(args) <= _LITTLE_NBYTES:
            out = func(*args, **kwargs)
        elif func._schema.is_mutable:
            out = written if func._schema.returns else None
        else:
            out = _uncomputed(func, args, kwargs)
        self.written_nbytes += num_bytes(out if written is None else written)
        return out


def _computes_nothing(func: OpOverload) -> bool:
    """Returns True for a view, for uninitialised memory, and for operations that do not reach a device."""
    returns = func._schema.returns
    views = bool(returns) and all(each.alias_info is not None and not each.alias_info.is_write for each in returns)
    return views or func.namespace == "prim" or op_name(func).startswith(_UNWRITTEN)


def _numel_of_new(args: Sequence[Any]) -> int:
    """Returns the number of elements of a tensor that is made by its sizes."""
    sizes = next(
        (each for each in args if isinstance(each, (list, tuple)) and all(isinstance(n, int) for n in each)), ()
    )
    return math.prod(sizes)


def _uncomputed(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Returns a tensor like the result of `func`, filled with zeros if it is small."""
    args, kwargs = tree_map_only(
        Tensor,
        lambda each: torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="meta"),
        (args, kwargs),
    )
    out = func(*args, **(kwargs | ({"device": torch.device("meta")} if "device" in kwargs else {})))
    # Clones of unsharded parameters, by which a check sees whether they were written to, must be equal.
    make = torch.zeros if out.numel() < _LITTLE_NBYTES or op_name(func) == "aten.clone" else torch.empty
    return make(out.shape, dtype=out.dtype)


# ---- a model of blocks with real sizes, which computes nothing


class _Use(torch.autograd.Function):
    """Is an identity that needs a parameter in both directions, and gives it a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Tensor) -> Tensor:
        ctx.save_for_backward(parameter)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.empty_like(ctx.saved_tensors[0])


class _Block(nn.Module):
    def __init__(self, shapes: Sequence[Shape]) -> None:
        super().__init__()
        self.params = nn.ParameterList(torch.empty(shape) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        for parameter in self.params:
            x = _Use.apply(x, parameter)
        return x.neg()  # torch warns of a view


class _Stack(nn.Module):
    def __init__(self, shapes: Sequence[Shape], blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(shapes) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@dataclass(frozen=True)
class Counts:
    """Holds the counts of one group: launches except collectives, collective calls, operations in all of these and in
    the largest of the counted kind, bytes that launches write.
    """

    launches: int
    calls: int
    operations: int
    largest_call: int
    written_nbytes: int

    def minus(self, other: "Counts") -> "Counts":
        return Counts(
            self.launches - other.launches,
            self.calls - other.calls,
            self.operations - other.operations,
            self.largest_call,
            self.written_nbytes - other.written_nbytes,
        )


def count_group(name: str, precision: str, library: Library, world_size: int) -> tuple[Counts, Counts]:
    """Counts one gather, and one reduction, of a block of `MODELS` in steady state, among `world_size` ranks."""
    link = Link(SimulatedClock())
    start_timed_group(world_size, link)
    mesh = dist.init_device_mesh("cpu", (world_size,))
    with (
        mock.patch("fsdp2.engine.gather.costs_launches", return_value=True),
        mock.patch("fsdp2.engine.buckets.costs_launches", return_value=True),
        mock.patch("fsdp2.engine.pack.costs_launches", return_value=True),
    ):
        few, more = (_count_steps(_Stack(MODELS[name], blocks), precision, library, mesh, link) for blocks in (3, 4))
    dist.destroy_process_group()
    gather, step = (mine.minus(others) for mine, others in zip(more, few, strict=True))
    return gather, step.minus(gather).minus(gather)


def _count_steps(
    model: nn.Module, precision: str, library: Library, mesh: DeviceMesh, link: Link
) -> tuple[Counts, Counts]:
    """Counts one forward without gradients, in which each block is gathered, and one training step. They are the sixth
    and fifth forward: at the first, second, fourth and eighth, fsdp2's checks read values.
    """
    x = torch.zeros(1, requires_grad=True)
    with LaunchMeter():
        library.shard(model, mesh, PRECISIONS[precision] if is_mixed(precision) else None)
        repeat(4, lambda: _train(model, x))
    step = _count(lambda: _train(model, x), link, "reduce")
    with torch.no_grad():
        return _count(lambda: model(x), link, "gather"), step


def _train(model: nn.Module, x: Tensor) -> None:
    model(x).sum().backward()
    model.zero_grad(set_to_none=True)
    x.grad = None


def _count(call: Callable[[], object], link: Link, kind: str) -> Counts:
    """Counts a step. `kind`: that of the collectives whose largest call counts."""
    link.operations.clear()
    link.transfers.clear()
    with LaunchMeter() as meter:
        call()
    if meter.unknown:
        raise RuntimeError(f"say in launches.py how many launches these are: {', '.join(sorted(meter.unknown))}")
    calls = link.operations
    largest = max(size for size, (each, _, _) in zip(calls, link.transfers, strict=True) if each == kind)
    return Counts(meter.launches.total(), len(calls), sum(calls), largest, meter.written_nbytes)


# ---- the suite


def measure_launches(job: Job, libraries: Sequence[Library]) -> list[Row]:
    (world_size,) = job.worlds
    return [row for name in MODELS for precision in PRECISIONS for row in _rows(name, precision, world_size, libraries)]


def _rows(name: str, precision: str, world_size: int, libraries: Sequence[Library]) -> Iterator[Row]:
    counts = {each.name: count_group(name, precision, each, world_size) for each in libraries}
    setting = f"N={world_size} {precision}, {name}"
    for place, what in enumerate(("gather", "reduction")):
        for quantity, value in _QUANTITIES.items():
            values = {library: value(both[place]) for library, both in counts.items()}
            yield Row("launches", f"{what}: {quantity}", setting, values)
    values = {library: 2 * gather.launches + reduction.launches for library, (gather, reduction) in counts.items()}
    yield Row("launches", "two gathers and a reduction: launches", setting, values)


_QUANTITIES: dict[str, Callable[[Counts], float]] = {
    "launches": lambda counts: counts.launches,
    "collective calls": lambda counts: counts.calls,
    "operations in them": lambda counts: counts.operations,
    "most in one call": lambda counts: counts.largest_call,
    "MiB written by launches": lambda counts: counts.written_nbytes / 2**20,
}
