"""Collects the private names of torch that the engine uses, each with the reason why no public name will do.

A plain training needs those that are `required`, from bf16 and checkpointing to state dicts.
"""

from __future__ import annotations

import inspect
import math
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import cache, partial
from operator import attrgetter
from sys import getrefcount
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad, profiler
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.nn import Parameter

from .lookup import are_there, load, optional, required

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
    from torch.distributed.tensor._dtensor_spec import TensorMeta as TensorMeta

    from ..engine.parameter import FSDPParam
else:
    DTensorSpec = required("torch.distributed.tensor._dtensor_spec.DTensorSpec")
    TensorMeta = required("torch.distributed.tensor._dtensor_spec.TensorMeta")

Function = TypeVar("Function", bound=Callable[..., Any])


# ---- tensors

# Copies, divides: one launch for all tensors of a list, where the device allows it. Lists must not be empty.
copy_all: Callable[[list[Tensor], list[Tensor]], Any] = required("torch._foreach_copy_")
divide_each: Callable[[list[Tensor], float], Any] = required("torch._foreach_div_")
quotients: Callable[[list[Tensor], float], Any] = required("torch._foreach_div")

# Context without autograd, and without its records: a view that is made there is no view to autograd, and has a version
# counter of its own; writes are not counted. Small operations take two thirds of the time.
below_autograd: Callable[[], Any] = required("torch._C._AutoDispatchBelowADInplaceOrView")

PLAIN = (Tensor, Parameter)
# (device) -> its type. Torch makes that string anew each time, which takes 3 thousand instructions.
type_of: Callable[[torch.device], str] = cache(attrgetter("type"))
required("torch.Tensor._version")
# Reads in C what Python code reads in several steps. The first is the version counter of a tensor.
version_of, requires_grad_of = attrgetter("_version"), attrgetter("requires_grad")


class GradDtype(NamedTuple):
    """Holds a `grad_dtype` that a user has chosen. `dtype` None: gradients may have any dtype."""

    dtype: torch.dtype | None


# Torch says of a tensor if a `grad_dtype` was chosen, since 2.15.
_TELLS_CHOICES = hasattr(Tensor, "_has_grad_dtype_override")


_are_functions_overridden: Callable[[], bool] = required("torch._C._is_torch_function_enabled")


def chosen_grad_dtype(tensor: Any) -> GradDtype | None:
    """Returns the `grad_dtype` that a user has chosen for a tensor; None: nobody has. Torch before 2.15 does not tell a
    choice of the tensor's own dtype from none.
    """
    if type(tensor) is not Parameter and _are_functions_overridden():
        with no_torch_function():
            return chosen_grad_dtype(tensor)
    is_chosen = tensor._has_grad_dtype_override if _TELLS_CHOICES else tensor.grad_dtype != tensor.dtype
    return GradDtype(tensor.grad_dtype) if is_chosen else None


# (tensor, dtype): sets `grad_dtype`, also where a class of fsdp2 has a property of that name.
set_grad_dtype: Callable[[Tensor, torch.dtype | None], None] = required("torch._C.TensorBase.grad_dtype.__set__")


# (tensors, 0, W, out=out): writes chunk r along dim 0 of all `tensors`, each flattened, one behind the other, to
# out[r].
chunk_cat: Callable[..., Any] = required("torch._chunk_cat")
# (plain tensor) -> address of the storage behind it, also while that is freed (`data_ptr` is 0 then).
storage_address: Callable[[Tensor], int] = required("torch._C._storage_address")
# (storage, slice of bytes) -> a storage over this part of it. `storage[...]` asks for the device first, in Python.
part_of_storage: Callable[[torch.UntypedStorage, slice], torch.UntypedStorage] = required(
    "torch._C.StorageBase.__getitem__"
)
# (tensor) -> False if there is none: sparse tensors, functorch's wrappers.
has_storage: Callable[[Tensor], bool] = required("torch._C._has_storage")


# The `__torch_dispatch__` of classes that have none of their own.
_NO_DISPATCH = Tensor.__torch_dispatch__


def has_no_dispatch(cls: type[Tensor]) -> bool:
    """Returns True if a class has no `__torch_dispatch__` of its own: its tensors hold their values themselves."""
    return cls.__torch_dispatch__ == _NO_DISPATCH


def holds_values(tensor: Tensor) -> bool:
    """Returns True if the values of `tensor` lie in memory of its own, whatever its class: it is no wrapper of others.

    Only classes with a `__torch_dispatch__` can be wrappers, whose storage has a size and no address. On meta, where no
    storage has one, these count as wrappers.
    """
    cls = type(tensor)
    if cls in PLAIN or has_no_dispatch(cls):
        return True
    if isinstance(tensor, DTensor):
        return False
    with no_torch_function():
        if tensor.is_meta or not has_storage(tensor):
            return False
        try:
            tensor.untyped_storage().data_ptr()
        except RuntimeError:
            return False
    return True


def plain_values(tensor: Tensor) -> Tensor:
    """Returns the values of `tensor`, which holds some (see `holds_values`), as a plain tensor over the same memory.

    The class of `tensor`, which may override any operation, does not see it.
    """
    with no_torch_function():
        if has_no_dispatch(type(tensor)):
            return tensor.detach().as_subclass(Tensor)
        where = tensor.storage_offset(), tensor.shape, tensor.stride()
        return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage(), *where)


def is_only_of_class(tensor: Tensor) -> bool:
    """Returns True if a tensor of a user's class differs from a plain one in its class only: it has no attributes."""
    return has_no_dispatch(type(tensor)) and not vars(tensor)


_make_subclass: Callable[..., Any] = required("torch.Tensor._make_subclass")


def of_class(values: Tensor, cls: type[Tensor], requires_grad: bool = False) -> Any:
    """Returns a leaf of class `cls` over plain `values`. No method of `cls` runs."""
    return _make_subclass(cls, values, requires_grad)


def inner_tensors(tensor: Tensor) -> list[Tensor]:
    """Returns the plain tensors that a DTensor or another wrapper consists of; of any other tensor, itself."""
    if type(tensor) in PLAIN:
        return [tensor]
    if isinstance(tensor, DTensor):
        return inner_tensors(local_of(tensor))
    flatten = getattr(tensor, "__tensor_flatten__", None)
    names = flatten()[0] if flatten is not None else ()
    return [part for name in names for part in inner_tensors(getattr(tensor, name))] or [tensor]


def storage_id(tensor: Tensor) -> int:
    """Returns `storage_address` of any tensor; of a wrapper, that of the first tensor in it.

    Returns -1 for a tensor without a storage, which is no view of anything: a sparse one, functorch's wrappers.
    """
    if type(tensor) not in PLAIN:
        tensor = inner_tensors(tensor)[0]  # the wrapper's own storage holds nothing
    try:
        return storage_address(tensor)
    except (NotImplementedError, RuntimeError):
        return -1


# (storage._cdata) -> how many tensors, of any kind of view, and Python objects use the storage.
storage_uses: Callable[[int], int] = required("torch._C._storage_Use_Count")
required("torch.UntypedStorage._cdata")


def _is_counted_twice() -> bool:
    """Returns True if references from C++ count as one reference to the Python object, as in torch 2.13."""
    parameter = Parameter(torch.empty(0, device="cpu"))
    before = getrefcount(parameter)
    with torch.enable_grad():
        node = parameter.view_as(parameter).grad_fn
    return node is not None and getrefcount(parameter) > before


# (tensor) -> how many C++ references there are to it, that of its Python object included.
cpp_references: Callable[[Tensor], int] = required("torch.Tensor._use_count")
# From how many on those count as one reference to the Python object.
SHARED_IN_CPP = 2 if _is_counted_twice() else float("inf")


def owns_memory(tensor: Tensor) -> bool:
    """Returns True if `tensor` covers all of its storage, and no other tensor uses that."""
    if type(tensor) is not Tensor:
        return False
    storage = tensor.untyped_storage()
    is_all = storage.nbytes() == tensor.numel() * tensor.element_size()
    return is_all and storage_uses(storage._cdata) == 2  # the second user is `storage`


def owned(tensor: Tensor) -> Tensor:
    """Returns `tensor`, or a copy if it shares memory: autograd gives several parameters views of one gradient."""
    return tensor if owns_memory(tensor) else tensor.clone()


# ---- autograd

# () -> number of the backward pass that runs on this thread, or -1. There is no public function.
graph_task: Callable[[], int] = required("torch._C._current_graph_task_id")
# () -> (pack, unpack) of the innermost saved-tensor hooks in force on this thread, or None.
top_saved_tensor_hooks: Callable[[bool], Any] = required("torch._C._autograd._top_saved_tensors_default_hooks")


def are_of_checkpointing(pack: Callable[[Tensor], Any]) -> bool:
    """Returns True if this pack hook belongs to torch's activation checkpointing: there is no public name for it."""
    return getattr(pack, "__module__", None) == "torch.utils.checkpoint"


# () -> why saved-tensor hooks may not be put in force on this thread, or None: `torch.func.grad` forbids them.
why_no_hooks: Callable[[], str | None] = required("torch._C._autograd._saved_tensors_hooks_get_disabled_error_message")
# () -> True if one of torch.func's transforms runs on this thread. To ask for the innermost one would give the thread a
# list of transforms for good, which autograd copies into each node of each graph: 2 % of the instructions of a step.
runs_transform: Callable[[], bool] = partial(
    required("torch._C._dispatch_tls_is_dispatch_key_included"),
    required("torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode"),
)
# () -> torch's module of compiled autograd, or None if nobody has imported it; (that module) -> True while it runs a
# backward: it calls hooks, but not what is queued for the end.
compiled_autograd: Callable[[], Any] = partial(sys.modules.get, "torch._dynamo.compiled_autograd")
runs_compiled_backward: Callable[[Any], bool] = attrgetter("in_compiled_autograd_region")
# (that module) -> True if it would record a backward that begins now.
records_backward: Callable[[Any], bool] = attrgetter("compiled_autograd_enabled")


optional("torch.autograd.profiler._is_profiler_enabled", "names of groups in profiles", instead=False)
# () -> True while a profiler of torch runs: `profile`, `emit_nvtx` or `emit_itt`. It calls no Python function.
profiler_runs: Callable[[], bool] = partial(getattr, profiler, "_is_profiler_enabled", False)


optional("torch.autograd.forward_ad._current_level", "forward-mode autograd with inputs that forward changes", -1)


def has_tangents() -> bool:
    """Returns True while forward-mode autograd runs on this thread, outside of torch.func. Without torch's name for it
    False: an autograd function then runs, which torch refuses in forward mode.
    """
    return getattr(forward_ad, "_current_level", -1) >= 0


# Runs a function when the running backward pass has computed all gradients. There is no public hook for that.
on_backward_end: Callable[[Callable[[], None]], None] = required(
    "torch.autograd.Variable._execution_engine.queue_callback"
)
# The hooks of `register_module_full_backward_hook`.
hooks_of_all_modules: dict[int, Any] = required("torch.nn.modules.module._global_backward_hooks")

# The hooks of `register_hook` and of `register_post_accumulate_grad_hook`: autograd can't run them for us.
required("torch.Tensor._backward_hooks"), required("torch.Tensor._post_accumulate_grad_hooks")
backward_hooks_of, post_accumulate_hooks_of = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")


def no_user_hook(pack: Function) -> Function:
    """Decorator of a pack hook: selective checkpointing of torch 2.15 warns about hooks that it takes for a user's."""
    pack._checkpoint_internal, pack._user_hooks = True, None  # type: ignore[attr-defined]
    return pack


def take_hooks(source: Tensor, target: Tensor) -> None:
    """Moves the hooks registered on one tensor to another; their handles go on working, since the dicts move."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(source, name)
        if hooks:
            setattr(target, name, hooks)


class _HooksOfUnsharded(dict[Any, Any]):
    """Holds the hooks that run when a gradient has been accumulated into an unsharded parameter: the engine's.

    A hook that a user registers, inside a forward, goes to the sharded parameter, which gets the `.grad`. torch's
    handles know the hook by a number in this dict. `param`: a weak reference to the FSDPParam.
    """

    param: weakref.ref[FSDPParam]

    def _of_user(self) -> dict[Any, Any]:
        param = self.param()
        assert param is not None, "its unsharded parameter is there"
        sharded: Any = param.sharded
        if sharded._post_accumulate_grad_hooks is None:
            sharded._post_accumulate_grad_hooks = OrderedDict()
        hooks: dict[Any, Any] = sharded._post_accumulate_grad_hooks
        return hooks

    def __setitem__(self, key: int, hook: Any) -> None:
        self._of_user()[key] = hook

    def __contains__(self, key: object) -> bool:
        return key in self._of_user()

    def __delitem__(self, key: int) -> None:
        del self._of_user()[key]


def hook_sharded(unsharded: Tensor, param: FSDPParam) -> None:
    """Has hooks that users register on `unsharded`, to run after its gradient, run after that of the sharded one."""
    unsharded._post_accumulate_grad_hooks = hooks = _HooksOfUnsharded()
    hooks.param = weakref.ref(param)


def on_accumulated(tensor: Tensor, key: str, hook: Callable[[Tensor], None] | None) -> None:
    """Runs `hook(tensor)`, and no other hook under `key`, when a gradient has been accumulated. None: removes it.

    `register_post_accumulate_grad_hook` does the same, and makes a handle, which takes as long as all the rest.
    """
    hooks: Any = tensor._post_accumulate_grad_hooks
    if hooks is None:
        hooks = tensor._post_accumulate_grad_hooks = OrderedDict()  # as users' handles need it
    kind: Any = dict if type(hooks) is _HooksOfUnsharded else OrderedDict
    if hook is None:
        kind.pop(hooks, key, None)
    else:
        kind.__setitem__(hooks, key, hook)


_COMPILE = "marks that keep torch.compile out of fsdp2 at no cost (torch.compiler.disable does it instead)"
_frame_action: Any = optional("torch._C._dynamo.eval_frame._FrameAction", _COMPILE)
_frame_strategy: Any = optional("torch._C._dynamo.eval_frame._FrameExecStrategy", _COMPILE)
_set_strategy: Any = optional("torch._C._dynamo.eval_frame.set_code_exec_strategy", _COMPILE)
_MARKS_CODE = are_there(_frame_action, _frame_strategy, _set_strategy)


def untraced(function: Function) -> Function:
    """Decorator: torch.compile breaks its graph at a call of `function` and runs it as it is, but may compile what it
    calls. It costs nothing per call; `torch.compiler.disable` wraps each call, and imports dynamo, which takes seconds.
    """
    message = f"fsdp2 gathers and frees parameters here, outside of graphs. {EXPORT_PLAIN}"
    if not _MARKS_CODE:
        return cast(Function, torch.compiler.disable(function, recursive=False, reason=message))
    _set_strategy(function.__code__, _frame_strategy(_frame_action.SKIP, _frame_action.DEFAULT))
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = message  # type: ignore[attr-defined]
    return function


EXPORT_PLAIN = (
    "To export or trace a sharded model, load its full state dict (get_model_state_dict, full_state_dict=True) into a "
    "plain one, and take that."
)

# ---- modes: public contexts can only add a mode to the stacks

_MODES = "TorchDispatchMode and TorchFunctionMode around a sharded module"
num_dispatch_modes: Callable[[], int] = required("torch._C._len_torch_dispatch_stack")
num_function_modes: Callable[[], int] = required("torch._C._len_torch_function_stack")
pop_dispatch_mode: Callable[[Any], Any] = optional("torch._C._pop_torch_dispatch_stack", _MODES)
push_dispatch_mode: Callable[[Any], None] = optional("torch._C._push_on_torch_dispatch_stack", _MODES)
pop_function_mode: Callable[[], Any] = optional("torch._C._pop_torch_function_stack", _MODES)
push_function_mode: Callable[[Any], None] = optional("torch._C._push_on_torch_function_stack", _MODES)


def is_of_torch(mode: Any) -> bool:
    """Returns True for a dispatch mode with which torch itself traces or simulates, such as FakeTensorMode."""
    return getattr(mode, "_mode_key", None) is not None


def are_tensors_fake() -> bool:
    """Returns True if FakeTensorMode is in force on this thread."""
    fake = load("torch._C._TorchDispatchModeKey.FAKE", _MODES)
    return load("torch._C._get_dispatch_mode", _MODES)(fake) is not None


# ---- process groups and meshes

required("torch.distributed.ProcessGroup._get_backend")
(
    required("torch.distributed.ProcessGroup._allgather_base"),
    required("torch.distributed.ProcessGroup._reduce_scatter_base"),
)


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """Returns 'gloo', 'nccl', 'fake', ...: `get_backend` names the default device's only, a group may have several.

    Returns '' for a group written in Python that has no backend, or has gloo: messages between pairs of ranks, which
    the engine sends over gloo, would bypass the collectives that such a group has of its own. Returns 'gloo' if the
    group says that it `is_like_gloo`.

    Raises:
        RuntimeError: any other group that has no backend for `device`.
    """
    is_python = is_python_group(group)
    if is_like_gloo(group):
        return "gloo"
    try:
        name = group._get_backend(device).name().lower()
    except RuntimeError as error:
        if is_python:
            return ""
        has = ", ".join(each.type for each in getattr(group, "_device_types", ()))
        raise RuntimeError(
            f"expected a process group with a backend for {device.type}, got one for {has or 'no device'}. Initialise "
            "it with one for each device: init_process_group('cpu:gloo,cuda:nccl'), for example."
        ) from error
    return "" if is_python and name == "gloo" else name


def is_like_gloo(group: dist.ProcessGroup) -> bool:
    """Returns True if a Python class implements `group` and says that messages between its ranks are as good as gloo's:
    that of simulated ranks.
    """
    return getattr(group, "is_like_gloo", False)


def is_python_group(group: dist.ProcessGroup) -> bool:
    """Returns True if a Python class implements `group`: torch's threads as ranks, or a fault-tolerant library."""
    return isinstance(group, dist.ProcessGroup) and type(group) is not dist.ProcessGroup


def size_may_change(group: dist.ProcessGroup) -> bool:
    """Returns True if `group` computes its own size: ranks may join and leave it (fault-tolerant libraries)."""
    return is_python_group(group) and type(group).size is not dist.ProcessGroup.size


def coalesces(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Returns True if the group's backend says that it launches several collectives at once, as NCCL does."""
    return bool(getattr(group._get_backend(device), "supports_coalescing", False))


def single_tensor_collectives(group: dist.ProcessGroup) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns the group's all-gather and reduce-scatter of one tensor: (output, input) -> asynchronous Work.

    The public functions around them changed name in torch 2.13 and cost as much again. The public coalesced methods
    take three times as long to issue for a single tensor.
    """
    return group._allgather_base, group._reduce_scatter_base


# The public functions of one tensor, which changed name in torch 2.13: (output, input, group=..., async_op=...) ->
# Work.
all_gather_one: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_one: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def mesh_over(mesh: DeviceMesh, axes: tuple[int, ...]) -> DeviceMesh:
    """Returns a mesh of one axis, which joins the axes `axes` of `mesh`."""
    if mesh.ndim == 1:
        return mesh
    if mesh.mesh_dim_names is None:
        assert len(axes) == 1, "several axes are chosen by name"
        return DeviceMesh.from_group(mesh.get_group(axes[0]), mesh.device_type)
    chosen = mesh[tuple(mesh.mesh_dim_names[axis] for axis in axes)]
    return chosen if chosen.ndim == 1 else _flattened(chosen)


def _flattened(mesh: DeviceMesh) -> DeviceMesh:
    flatten = load("torch.distributed.device_mesh.DeviceMesh._flatten", "parameters that several mesh axes shard")
    flat: DeviceMesh = flatten(mesh)
    return flat


def ranks_along(mesh: DeviceMesh, axes: tuple[int, ...]) -> list[list[int]]:
    """Returns the ranks of each process group along `axes`, which count as one, in the order of their coordinates. Of a
    slice, those of all slices: `mesh.mesh` has only this rank's, and ranks must refuse a mesh alike.
    """
    layout, rank_map = getattr(mesh, "_layout", None), getattr(mesh, "_rank_map", None)
    ranks = mesh.mesh.unsqueeze(0) if layout is None or rank_map is None else layout.remap_to_tensor(rank_map)
    last = [axis + 1 for axis in axes]
    first = [axis for axis in range(ranks.ndim) if axis not in last]
    size = math.prod(mesh.size(axis) for axis in axes)
    rows: list[list[int]] = ranks.permute(*first, *last).reshape(-1, size).tolist()
    return rows


# ---- DTensor

# The local tensor itself: `to_local()` returns a new view on each call, which has no identity.
required("torch.distributed.tensor.DTensor._local_tensor"), required("torch.distributed.tensor.DTensor._spec")
local_of: Callable[[Tensor], Tensor] = attrgetter("_local_tensor")
# The same, to ask which object it is: nothing is done before its memory may be read (features/late_steps.py).
peek_local: Callable[[Tensor], Tensor] = required("torch.distributed.tensor.DTensor._local_tensor.__get__")
set_local_unseen: Callable[[Tensor, Tensor], None] = required("torch.distributed.tensor.DTensor._local_tensor.__set__")
# How a DTensor is distributed, with its shape and strides.
spec_of: Callable[[Tensor], DTensorSpec] = attrgetter("_spec")
# Context in which attributes of a DTensor are read three times as fast: torch doesn't look for a `__torch_function__`.
no_torch_function: Callable[[], Any] = required("torch._C.DisableTorchFunctionSubclass")

# (class, local tensor, spec, requires_grad=False) -> DTensor, without a copy, a check or an autograd node. The
# constructor is wrapped to be skipped by dynamo, which costs as much as itself again, on every gradient.
new_dtensor: Callable[..., DTensor] = partial(inspect.unwrap(DTensor.__new__), requires_grad=False)


def local_if_any(tensor: Tensor) -> Tensor:
    """Returns the local tensor of a DTensor, and any other tensor itself."""
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor


def dtensor_spec(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> DTensorSpec:
    """Returns the spec of a contiguous DTensor. `DTensor.from_local` builds one in each call, and takes 33 us; the
    constructor takes 2 us with a prepared one.
    """
    stride = torch.empty(shape, device="meta").stride()
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(torch.Size(shape), stride, dtype))


def distributed_parameter(cls: type[DTensor], local: Tensor, spec: DTensorSpec, requires_grad: bool) -> Parameter:
    """Returns a DTensor of class `cls` that is a parameter. `nn.Parameter` detaches one, which a DTensor dispatches as
    an operation: half the time of a `fully_shard` call.
    """
    tensor: Any = new_dtensor(cls, local, spec, requires_grad=requires_grad)
    tensor._is_param = True  # what makes it an instance of nn.Parameter
    parameter: Parameter = tensor
    return parameter


def set_local(tensor: Tensor, local: Tensor) -> None:
    """Puts `local`, of equal shape and dtype, behind an existing DTensor: users and optimizers hold that object."""
    tensor._local_tensor = local  # type: ignore[attr-defined]
