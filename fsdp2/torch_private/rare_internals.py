"""Collects the private names of torch that the engine and its rooms use seldom, each with its reason.

Those of a step stand in torch_private/internals.py.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef

from . import internals
from .internals import PLAIN, inner_tensors
from .lookup import load, optional, required

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import _StridedShard
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
else:
    TorchDispatchMode = required("torch.utils._python_dispatch.TorchDispatchMode")
    _StridedShard = optional("torch.distributed.tensor.placement_types._StridedShard", "tensor parallelism")

Function = TypeVar("Function", bound=Callable[..., Any])


# (tensors, counters): sets the version counters of tensors. The public context manager around it can only restore them.
set_versions: Callable[[tuple[Tensor, ...], tuple[int, ...]], None] = required(
    "torch._C._autograd._unsafe_set_version_counter"
)


SPMD_TYPE, SPMD_PARTS = "_local_type", "_partition_spec"
"""The attributes in which the package spmd_types, which torch's FSDP2 reads, keeps what an axis of a mesh holds of a
tensor, and which dims axes cut."""

ZERO_OPS = (torch.ops.aten.zero_.default, required("torch.ops.aten._foreach_zero_.default"))
"""The operations that `zero_grad(set_to_none=False)` calls on gradients, one by one or all at once."""
ZERO_FUNCTIONS = (Tensor.zero_, required("torch._foreach_zero_"))
"""The same operations, as `__torch_function__` sees them."""

_COMPUTED_ATTRIBUTES = {"data", "T", "H", "mT", "mH", "real", "imag"}
_METADATA_METHODS = (
    *(Tensor.size, Tensor.dim, Tensor.stride, Tensor.numel, Tensor.element_size, Tensor.storage_offset),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous, Tensor.requires_grad_, Tensor.detach_),
    *(Tensor.__hash__, Tensor.__len__, Tensor.register_hook),
)


def reads_metadata(func: Any) -> bool:
    """Returns True if `func`, as `__torch_function__` gets it, computes nothing from the values of a tensor."""
    attribute = getattr(getattr(func, "__self__", None), "__name__", None)
    if getattr(func, "__name__", "") in ("__get__", "__set__"):
        return attribute not in _COMPUTED_ATTRIBUTES
    return func in _METADATA_METHODS


# (tensor) -> a view of all of it. Its gradient takes no operation; that of `view_as` takes one.
alias: Callable[[Tensor], Tensor] = torch.ops.aten.alias.default


class Memory(NamedTuple):
    """The place of a tensor: its storage, and the address of its first element.

    `part`: None if the tensor fills the storage; else its itemsize, size and strides.
    """

    storage: StorageWeakRef
    start: int
    part: tuple[int, tuple[int, ...], tuple[int, ...]] | None = None

    def end(self) -> float:
        """Returns the address behind the last element; infinity if the tensor fills the storage."""
        if self.part is None:
            return math.inf
        itemsize, size, stride = self.part
        return self.start + _span(size, stride) * itemsize

    def overlaps(self, other: Memory) -> bool:
        """Returns True if the two tensors have an element in common."""
        if self.storage != other.storage or self.end() <= other.start or other.end() <= self.start:
            return False
        if self.part is None or other.part is None:
            return True
        (itemsize, size, stride), (other_itemsize, other_size, other_stride) = self.part, other.part
        are_dense = math.prod(size) == _span(size, stride) and math.prod(other_size) == _span(other_size, other_stride)
        if are_dense or itemsize != other_itemsize or 0 in (*stride, *other_stride):
            return True
        # Columns of one matrix, for example. Of all elements from the first to the last, one tensor marks its own.
        start = min(self.start, other.start)
        length = int(max(self.end(), other.end()) - start) // itemsize
        marks = torch.zeros(length, dtype=torch.bool, device="cpu")
        marks.as_strided(size, stride, (self.start - start) // itemsize).fill_(True)
        return bool(marks.as_strided(other_size, other_stride, (other.start - start) // itemsize).any())


def _span(size: Iterable[int], stride: Iterable[int]) -> int:
    """Returns the number of elements in memory from the first to the last one of a tensor."""
    return 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))


def memory_of(tensor: Tensor) -> Memory | None:
    """Returns where a tensor is; of a wrapper, its first plain tensor.

    None: the tensor has no elements, no data (meta), or no strides.
    """
    data = tensor if type(tensor) in PLAIN else inner_tensors(tensor)[0]
    nbytes = data.nbytes if data.layout == torch.strided and not data.is_meta else 0
    if not nbytes:
        return None
    storage = data.untyped_storage()
    # Each parameter comes here: `Memory(...)` would be one call more.
    part = None if storage.nbytes() == nbytes else (data.element_size(), data.size(), data.stride())
    return tuple.__new__(Memory, (StorageWeakRef(storage), data.data_ptr(), part))


def is_alone(tensor: Tensor) -> bool:
    """Returns True if a plain tensor is the only tensor that uses its storage, hence shares no memory."""
    return type(tensor) in PLAIN and internals.storage_uses(internals.storage_address(tensor)) == 1


def saved_by(node: Any) -> list[Any]:
    """Returns the values that a graph node has saved for its gradient; none, if a backward has freed them."""
    names = [name for name in dir(node) if name.startswith("_saved_")]
    try:
        return [getattr(node, name) for name in names]
    except RuntimeError:
        return []


_TRANSFORMS = "torch.func around a sharded module"
# (tensor that a transform of torch.func has wrapped) -> the tensor inside.
unwrapped: Callable[[Tensor], Tensor] = optional("torch._C._functorch.get_unwrapped", _TRANSFORMS)
is_wrapped: Callable[[Tensor], bool] = optional("torch._C._functorch.is_functorch_wrapped_tensor", _TRANSFORMS)


def transform_stacks() -> tuple[Callable[[], Any], Callable[[list[Any]], Any]]:
    """Returns two context managers: one suspends the transforms that run, and yields their list; the other resumes such
    a list.
    """
    # Takes 100 ms, if torch.func was not used before.
    clear = load("torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack", _TRANSFORMS)
    restore = load("torch._functorch.pyfunctorch.temporarily_restore_interpreter_stack", _TRANSFORMS)
    return clear, restore


def has_backend(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Returns True if `group` says that it can communicate tensors on `device`. One in Python may not."""
    try:
        group._get_backend(device)
    except RuntimeError:
        return False
    return True


class _Chosen(threading.local):
    """The name of the process group that a thread is making. Ranks may be threads."""

    name: str | None = None


class _GroupNames:
    """Replaces torch's function that names process groups, while threads make some whose names are chosen."""

    def __init__(self) -> None:
        self._chosen = _Chosen()
        # Held while torch's function is replaced, or put back; how many threads need it to be replaced.
        self._lock, self._num_threads = threading.Lock(), 0
        self._usual: Callable[[list[int]], str]

    @contextmanager
    def choose(self, name: str) -> Iterator[None]:
        c10d: Any = dist.distributed_c10d
        load("torch.distributed.distributed_c10d._hash_ranks_to_str", "process groups of neighbouring ranks")
        with self._lock:
            if not self._num_threads:
                self._usual, c10d._hash_ranks_to_str = c10d._hash_ranks_to_str, self._hash_of
            self._num_threads += 1
        self._chosen.name = name
        try:
            yield
        finally:
            self._chosen.name = None
            with self._lock:
                self._num_threads -= 1
                if not self._num_threads:
                    c10d._hash_ranks_to_str = self._usual

    def _hash_of(self, ranks: list[int]) -> str:
        name = self._chosen.name
        return self._usual(ranks) if name is None else hashlib.sha256(name.encode()).hexdigest()


_group_names = _GroupNames()


def name_of_new_group(name: str) -> AbstractContextManager[None]:
    """Context: `new_group(..., use_local_synchronization=True)` on this thread names the group after `name`.

    torch names it after its ranks and the number of groups that the process has, and `new_group` has no argument for a
    name. Ranks that have made different numbers of groups before would wait for each other for ever.
    """
    return _group_names.choose(name)


def concatenate_meshes(first: DeviceMesh, second: DeviceMesh) -> DeviceMesh:
    """Returns the mesh of the axes of both, which must be slices of one mesh. There is no public way to build it.

    Raises:
        RuntimeError: they are not.
    """
    concatenate = load(
        "torch.distributed.device_mesh.DeviceMesh._concatenate", "tensor parallelism on a mesh of its own"
    )
    mesh: DeviceMesh = concatenate([first, second])
    return mesh


class _Returns(TorchDispatchMode):
    """Has every operation return `value`."""

    value: Tensor

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # to be skipped, dynamo would be imported: seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Tensor:
        return self.value


def share_versions(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Has the two tensors of each pair, a DTensor and its local tensor, share one version counter.

    Autograd has the result of `detach` share the counter of its input, and a dispatch mode chooses that result. Tensors
    made in inference mode have no counter.
    """
    with torch.inference_mode(False), torch.no_grad(), internals.no_torch_function(), _Returns() as returns:
        for tensor, local in pairs:
            if not (tensor.is_inference() or local.is_inference()):
                returns.value = local
                Tensor.detach(tensor)


def strided_shard(dim: int, split_factor: int) -> Placement:
    """Returns the placement of a tensor that is cut along `dim` after another mesh axis has cut it into so many parts.

    With plain Shards, axes to the left cut first. The data-parallel axis is to the left here, and must cut last.
    """
    return _StridedShard(dim, split_factor=split_factor)


def is_strided_placement(placement: Placement) -> bool:
    """Returns True for a placement that `strided_shard` returns, or one of torch like it."""
    return isinstance(placement, _StridedShard)


def cut(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], cls: type[DTensor]) -> DTensor:
    """Returns this rank's part of a tensor that all ranks have, as a DTensor of `cls`, without communication."""
    strided = {axis for axis, each in enumerate(placements) if isinstance(each, _StridedShard)}
    if not strided or not all(_cuts_last(axis, mesh, placements) for axis in strided):
        distributed: Any = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        distributed.__class__ = cls
        return cast(DTensor, distributed)
    # torch would cut uneven parts otherwise.
    local = whole
    for axis, each in sorted(enumerate(placements), key=lambda pair: pair[0] in strided):
        if isinstance(each, (Shard, _StridedShard)):
            parts, mine = local.chunk(mesh.size(axis), each.dim), mesh.get_local_rank(axis)
            local = parts[mine] if mine < len(parts) else local.narrow(each.dim, 0, 0)
    spec = internals.dtensor_spec(mesh, tuple(placements), tuple(whole.shape), whole.dtype)
    return internals.new_dtensor(cls, local.contiguous(), spec)


def _cuts_last(axis: int, mesh: DeviceMesh, placements: Sequence[Placement]) -> bool:
    """Returns True if a strided axis cuts what the axes to its right have cut. The axis of a view may not."""
    strided = cast(_StridedShard, placements[axis])
    later = [other for other in range(axis + 1, mesh.ndim) if placements[other] == Shard(strided.dim)]
    return strided.split_factor == math.prod(mesh.size(other) for other in later)


def symmetric_memory() -> Any:
    """Returns torch's module of symmetric memory, which few programs need and all would import."""
    return load("torch.distributed._symmetric_memory", "collectives on symmetric memory")
