"""Collects the private names of torch that fsdp2 uses outside of its core, each with its reason.

Those that the engine uses most stand in torch_private/compat.py, those of DTensor in torch_private/dtensor.py.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef

from . import compat
from .compat import PLAIN, inner_tensors
from .lookup import are_there, load, optional, required
from .once import once
from .when_imported import when_imported

if TYPE_CHECKING:
    from torch.distributed._composable_state import _State
    from torch.distributed.tensor.placement_types import _StridedShard
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
else:
    TorchDispatchMode = required("torch.utils._python_dispatch.TorchDispatchMode")
    _StridedShard = optional("torch.distributed.tensor.placement_types._StridedShard", "tensor parallelism")
    _State = optional("torch.distributed._composable_state._State", "other composable APIs of torch")

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


# The files through which dynamo traces: they have functions around torch's own, or around methods of users.
_TRACED = ("entry_points.py", "forward_method.py", "module_class.py")


@once
def keep_out_of_graphs() -> None:
    """Has dynamo, as soon as it is imported, trace no file of fsdp2 but those in `_TRACED`."""
    when_imported("torch._dynamo", _skip_ours)


def _skip_ours(dynamo: Any) -> None:
    rules, package = dynamo.trace_rules, Path(__file__).parents[1]
    for folder in {path.parent for path in package.rglob("*.py")} - {package}:
        files = {path.name for path in folder.glob("*.py")}
        has_traced = not files.isdisjoint(_TRACED)
        rules.SKIP_DIRS.extend(str(folder / each) for each in files.difference(_TRACED)) if has_traced else (
            rules.SKIP_DIRS.append(f"{folder}/")
        )
    rules.SKIP_DIRS.extend(map(str, package.glob("*.py")))
    rules.add(__name__)  # takes 10 ms, to compile a pattern of all


def replace_hooks(tensor: Tensor, hook: Callable[[Tensor], Any]) -> None:
    """Makes `hook` the only hook on the gradient of `tensor`. The hooks before may be those of another tensor now."""
    tensor._post_accumulate_grad_hooks = None  # type: ignore[assignment]
    tensor._backward_hooks = OrderedDict({0: hook})  # does what register_hook does, at a tenth of the cost


ComposableState = _State
_COMPOSABLE = "what torch's other composable APIs know of sharded modules"


def register_composable(module: nn.Module, reference: weakref.ref[_State], name: str) -> None:
    """Lets torch's other composable APIs know that `name` manages `module`.

    DDP's `replicate` refuses such a module, and leaves its parameters alone below another. Tools look for the state in
    torch's table, which does not keep it alive: it gets `reference`, a weak one.
    """
    states = _states_of_modules()
    # Imported at the first call, because it imports DDP.
    key = optional("torch.distributed._composable.contract.REGISTRY_KEY", _COMPOSABLE)
    item = optional("torch.distributed._composable.contract.RegistryItem", _COMPOSABLE)
    if states is not None and are_there(key, item):
        module.__dict__.setdefault(key, {})[name] = item()
        states[module] = reference


@once
def _states_of_modules() -> dict[nn.Module, Any] | None:
    """Returns torch's table of modules that a composable API manages. None: it has none, which a warning says."""
    found = optional("torch.distributed._composable_state._module_state_mapping", _COMPOSABLE, instead=None)
    return cast("dict[nn.Module, Any] | None", found)


def state_in_table(module: nn.Module) -> _State | None:
    """Returns the state that a composable API of torch has noted for `module`, or None."""
    found = (_states_of_modules() or {}).get(module)
    return found() if isinstance(found, weakref.ref) else found


def is_traced() -> bool:
    """Returns True while torch.compile traces code on this thread, and asks objects what they are."""
    if "torch._dynamo" not in sys.modules:
        return False
    return load("torch._guards.TracingContext", "torch.compile of sharded models").try_get() is not None


def is_replicated_by_ddp(module: nn.Module) -> bool:
    """Returns True if torch's composable `replicate` was applied to `module`: it has DDP around its parameters from the
    first forward on.
    """
    contract: Any = sys.modules.get("torch.distributed._composable.contract")
    key = getattr(contract, "REGISTRY_KEY", None)  # another thread may be importing the module
    return key is not None and "replicate" in vars(module).get(key, ())


def stepped_on_accumulation() -> Collection[Tensor]:
    """Returns the parameters to which `_apply_optimizer_in_backward` has given an optimizer, and a hook for it."""
    module: Any = sys.modules.get("torch.distributed.optim.apply_optimizer_in_backward")
    found: Collection[Tensor] = getattr(module, "param_to_optim_hook_handle_map", ())
    return found


def is_sharded_by_fsdp1(parameter: Tensor) -> bool:
    """Returns True for what FullyShardedDataParallel, torch's or fairscale's, has made of parameters: each rank holds a
    part of its own, and trains it with a gradient that was reduced.
    """
    cls = type(parameter)
    is_fairscales = cls.__name__ == "FlatParameter" and cls.__module__.startswith("fairscale.")
    return is_fairscales or getattr(parameter, "_fsdp_flattened", False)


def watch_calls(module: nn.Module, key: str) -> dict[Any, Any]:
    """Returns the dict of the forward pre-hooks of `module`. A hook under `key` gets the keyword arguments, too.

    The engine writes and deletes that hook several times in each step. With the handles of torch's public function that
    takes ten times as long.
    """
    module._forward_pre_hooks_with_kwargs[key] = True  # type: ignore[index]
    return module._forward_pre_hooks


def size_at_first(group: dist.ProcessGroup) -> int:
    """Returns the number of ranks with which `group` was made, whatever its own `size` returns now."""
    return dist.ProcessGroup.size(group)


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


_WATCH = "the watch that has ranks raise which wait for each other in different collectives"
# () -> the store that all processes share from `init_process_group` on. torch has no public function for it.
default_store: Callable[[], dist.Store] = optional("torch.distributed.distributed_c10d._get_default_store", _WATCH)

# (name): the process group of that name on this rank. LookupError, or RuntimeError: there is none.
group_of_name: Callable[[Any], dist.ProcessGroup] = optional(
    "torch.distributed.distributed_c10d._resolve_process_group", _WATCH
)
_kind_of_work: Callable[[dist.Work], int] = optional("torch.distributed.Work._get_op_type", _WATCH)
_recorded: Callable[[], str] = optional("torch._C._distributed_c10d._dump_fr_trace_json", _WATCH)


def can_watch() -> bool:
    """Returns True if torch has all that the watch reads. Otherwise a warning says that it is off."""
    return are_there(default_store, group_of_name, _kind_of_work, _recorded)


class RecordedCollective(NamedTuple):
    """One collective that this process has begun, as torch's flight recorder knows it.

    `group`: name of the process group; `number`: its place among the collectives of that group, from 1, the same on all
    ranks; `thread`: identity of the thread that began it.
    """

    group: str
    number: int
    thread: int
    is_done: bool


# torch's numbers of messages between two ranks, and of works that do not say what they are.
_NO_COLLECTIVES = (12, 13, 14, 17, 100)


def is_collective(value: object) -> bool:
    """Returns True for the work of a collective; False for that of a message between two ranks, or anything else."""
    return isinstance(value, dist.Work) and _kind_of_work(value) not in _NO_COLLECTIVES


def recorded_collectives() -> tuple[list[RecordedCollective], bool] | None:
    """Returns the last collectives on gloo that this process has begun, in their order, and whether these are all since
    the process began. Messages between two ranks are not among them. None: the recorder is switched off.

    torch records the last 2,000 by default (`TORCH_FR_BUFFER_SIZE`). To read them takes up to 150 ms.
    """
    found = json.loads(_recorded())
    if not found.get("pg_config"):
        return None
    entries = found.get("entries", [])
    collectives = [
        RecordedCollective(
            entry["process_group"][0], entry["collective_seq_id"], int(entry["thread_id"]), entry["retired"]
        )
        for entry in entries
        if not entry["is_p2p"]
    ]
    return collectives, not entries or entries[0]["record_id"] == 0


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
    with torch.inference_mode(False), torch.no_grad(), compat.no_torch_function(), _Returns() as returns:
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
    spec = compat.dtensor_spec(mesh, tuple(placements), tuple(whole.shape), whole.dtype)
    return compat.new_dtensor(cls, local.contiguous(), spec)


def _cuts_last(axis: int, mesh: DeviceMesh, placements: Sequence[Placement]) -> bool:
    """Returns True if a strided axis cuts what the axes to its right have cut. The axis of a view may not."""
    strided = cast(_StridedShard, placements[axis])
    later = [other for other in range(axis + 1, mesh.ndim) if placements[other] == Shard(strided.dim)]
    return strided.split_factor == math.prod(mesh.size(other) for other in later)
