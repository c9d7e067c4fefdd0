"""Private names of torch that fsdp2 uses, each with its reason.

Those of DTensor stand in dtensor_compat.py, those of process groups in group_compat.py.
"""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C._dynamo import eval_frame
from torch.autograd import Variable, graph
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed._composable_state import _State as ComposableState
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import Parameter

from .dtensor_compat import local_of
from .when_imported import when_imported

# What to do, in errors of ours, and, by a private attribute of functions, in those of dynamo.
EXPORT_PLAIN = (
    "To export or trace a sharded model, load its full state dict (get_model_state_dict, full_state_dict=True) into a "
    "plain one, and take that."
)

Function = TypeVar("Function", bound=Callable[..., Any])

# (tensors, counts): set their version counters, whatever they were. The public context manager around it can only
# restore them.
set_versions: Callable[[tuple[Tensor, ...], tuple[int, ...]], None] = torch._C._autograd._unsafe_set_version_counter


def concatenate_meshes(first: DeviceMesh, second: DeviceMesh) -> DeviceMesh:
    """The mesh of the axes of both, which must be parts of one mesh. There is no public way to build it.

    Raises:
        RuntimeError: they aren't.
    """
    return DeviceMesh._concatenate([first, second])


def mesh_over(mesh: DeviceMesh, axes: tuple[int, ...]) -> DeviceMesh:
    """The axes of `mesh` as one axis."""
    if mesh.ndim == 1:
        return mesh
    if mesh.mesh_dim_names is None:
        assert len(axes) == 1, "several axes are chosen by name"
        return DeviceMesh.from_group(mesh.get_group(axes[0]), mesh.device_type)
    chosen = mesh[tuple(mesh.mesh_dim_names[axis] for axis in axes)]
    return chosen if chosen.ndim == 1 else chosen._flatten()


ZERO_OPS = (torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default)
"""What `zero_grad(set_to_none=False)` calls on gradients, one by one or all at once."""
ZERO_FUNCTIONS = (Tensor.zero_, torch._foreach_zero_)
"""The same, as `__torch_function__` sees it."""

_COMPUTED_ATTRIBUTES = {"data", "T", "H", "mT", "mH", "real", "imag"}
_METADATA_METHODS = (
    *(Tensor.size, Tensor.dim, Tensor.stride, Tensor.numel, Tensor.element_size, Tensor.storage_offset),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous, Tensor.requires_grad_, Tensor.detach_),
    *(Tensor.__hash__, Tensor.__len__, Tensor.register_hook),
)


def reads_metadata(func: Any) -> bool:
    """Whether what `__torch_function__` is asked for computes nothing from the values."""
    attribute = getattr(getattr(func, "__self__", None), "__name__", None)
    if getattr(func, "__name__", "") in ("__get__", "__set__"):
        return attribute not in _COMPUTED_ATTRIBUTES
    return func in _METADATA_METHODS


def copy_all(destinations: list[Tensor], sources: list[Tensor]) -> None:
    """destinations[i] := sources[i], cast where dtypes differ; one launch where the device allows it."""
    if destinations:
        torch._foreach_copy_(destinations, sources)


def norm_each(tensors: list[Tensor], order: float, dtype: torch.dtype) -> list[Tensor]:
    """The norm of each, computed in `dtype`; one launch where the device allows it."""
    return list(torch._foreach_norm(tensors, order, dtype=dtype))


def scale_each(tensors: list[Tensor], factor: Tensor) -> None:
    """tensors[i] *= factor, a tensor without dims on their device; one launch where the device allows it."""
    torch._foreach_mul_(tensors, factor)


def divide_each(tensors: list[Tensor], divisor: float) -> None:
    """tensors[i] /= divisor; one launch where the device allows it."""
    torch._foreach_div_(tensors, divisor)


def quotients(tensors: list[Tensor], divisor: float) -> list[Tensor]:
    """tensors[i] / divisor; one launch where the device allows it."""
    return [*torch._foreach_div(tensors, divisor)]


# A view of all of a tensor, whose gradient takes no operation: that of `view_as` takes one.
alias: Callable[[Tensor], Tensor] = torch.ops.aten.alias.default


def chunk_cat(tensors: list[Tensor], out: Tensor) -> None:
    """out[r] := chunk r along dim 0 of all `tensors`, each flattened, one behind the other."""
    torch._chunk_cat(tensors, 0, out.shape[0], out=out)


_PLAIN = (Tensor, Parameter)


def inner_tensors(tensor: Tensor) -> list[Tensor]:
    """What a DTensor or another wrapper of tensors consists of; any other tensor: itself."""
    if type(tensor) in _PLAIN:
        return [tensor]
    if isinstance(tensor, DTensor):
        return inner_tensors(local_of(tensor))
    flatten = getattr(tensor, "__tensor_flatten__", None)
    names = flatten()[0] if flatten is not None else ()
    return [part for name in names for part in inner_tensors(getattr(tensor, name))] or [tensor]


def storage_id(tensor: Tensor) -> int:
    """Identity of the storage behind a tensor, also while it is freed (then `data_ptr` is 0 for all).

    -1 for what has no storage, hence is no view of anything: sparse tensors, functorch's wrappers.
    """
    if type(tensor) not in _PLAIN:
        tensor = inner_tensors(tensor)[0]  # the storage of a wrapper itself is none
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return -1


Memory = tuple[StorageWeakRef, int]


def memory_of(tensor: Tensor) -> Memory | None:
    """Equal for tensors that begin at the same place of one storage, also when it is gone; None: there is nothing."""
    data = tensor if type(tensor) in _PLAIN else inner_tensors(tensor)[0]
    if data.numel() == 0 or data.is_meta or data.layout != torch.strided:
        return None
    return StorageWeakRef(data.untyped_storage()), data.data_ptr()


def owns_memory(tensor: Tensor) -> bool:
    """Whether `tensor` is all of its storage, and no other tensor has that."""
    if type(tensor) is not Tensor:
        return False
    storage = tensor.untyped_storage()
    is_all = storage.nbytes() == tensor.numel() * tensor.element_size()
    return is_all and torch._C._storage_Use_Count(storage._cdata) == 2  # the other one is `storage`


def owned(tensor: Tensor) -> Tensor:
    """`tensor`, or a copy if it shares its memory: autograd gives several parameters views of one gradient."""
    return tensor if owns_memory(tensor) else tensor.clone()


def saved_by(node: Any) -> list[Any]:
    """What an operation has saved for its gradient; nothing, where a backward has freed it."""
    names = [name for name in dir(node) if name.startswith("_saved_")]
    try:
        return [getattr(node, name) for name in names]
    except RuntimeError:
        return []


def graph_task() -> int:
    """Number of the backward pass that runs on this thread, or -1."""
    return torch._C._current_graph_task_id()


def find_accumulators_of(stand_in: Callable[[Tensor], Tensor]) -> None:
    """From now on, where `register_multi_grad_hook` asks which node yields the gradient of a tensor, it is told which
    yields that of `stand_in(tensor)`.
    """
    find = graph._get_grad_fn_or_grad_acc
    graph._get_grad_fn_or_grad_acc = lambda t: find(stand_in(t) if isinstance(t, Tensor) else t)


def on_backward_end(callback: Callable[[], None]) -> None:
    """Run `callback` when the running backward pass has computed all gradients. There is no public hook for that."""
    Variable._execution_engine.queue_callback(callback)


def active_pack_hook() -> Callable[[Tensor], Any] | None:
    """The pack function of the saved-tensor hooks in force on this thread: ours, activation checkpointing's, ..."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks[0] if hooks else None


def no_user_hook(pack: Function) -> Function:
    """Decorator of a pack hook: selective checkpointing of torch 2.15 warns about those that it takes for a user's."""
    pack._checkpoint_internal, pack._user_hooks = True, None  # type: ignore[attr-defined]
    return pack


def disables_hooks() -> bool:
    """Whether saved-tensor hooks may not be put in force on this thread now."""
    return torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None


# () -> whether one of torch.func's transforms runs on this thread. To ask for the innermost one would give the thread a
# list of transforms for good, which autograd copies into each node of each graph: 2 % of the instructions of a step.
runs_transform: Callable[[], bool] = partial(
    torch._C._dispatch_tls_is_dispatch_key_included, torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode
)
# What a tensor that such a transform has wrapped is seen as from outside it.
unwrapped: Callable[[Tensor], Tensor] = torch._C._functorch.get_unwrapped
is_wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor


def transform_stacks() -> tuple[Callable[[], Any], Callable[[list[Any]], Any]]:
    """Two contexts: without the transforms that run, as which it gives their list; and with those of such a list."""
    from torch._functorch import pyfunctorch  # some 100 ms, where nobody has used torch.func

    return pyfunctorch.temporarily_clear_interpreter_stack, pyfunctorch.temporarily_restore_interpreter_stack


def untraced(function: Function) -> Function:
    """Decorator: torch.compile breaks its graph at a call of `function` and runs it as it is, but may compile what it
    calls. Costs nothing per call, unlike `torch.compiler.disable`, which wraps, and imports dynamo: seconds.
    """
    actions = eval_frame._FrameAction
    strategy = eval_frame._FrameExecStrategy(actions.SKIP, actions.DEFAULT)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = f"fsdp2 gathers and frees parameters here, outside of graphs. {EXPORT_PLAIN}"  # type: ignore[attr-defined]
    return function


def makes_a_graph() -> bool:
    """Whether torch.export or torch.jit.trace runs what is called, to write it down."""
    return torch.compiler.is_exporting() or torch.jit.is_tracing()


_TRACED = ("autograd_inputs", "entry_points", "forward_method")


def keep_out_of_graphs() -> None:
    """Have dynamo, once it is there, compile none of our functions but those around users' methods, and torch's."""
    when_imported("torch._dynamo", _skip_ours)


def _skip_ours(dynamo: Any) -> None:
    rules = dynamo.trace_rules
    rules.SKIP_DIRS.extend(str(path) for path in Path(__file__).parent.rglob("*.py") if path.stem not in _TRACED)
    rules.add(__name__)  # takes 10 ms, to compile a pattern of all


def take_hooks(source: Tensor, target: Tensor) -> None:
    """Move the hooks registered on one tensor to another; their handles go on working, since the dicts move."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(source, name)
        if hooks:
            setattr(target, name, hooks)


def replace_hooks(tensor: Tensor, hook: Callable[[Tensor], Any]) -> None:
    """Have no other hook on the gradient of `tensor`, where another tensor may have taken the ones before."""
    tensor._post_accumulate_grad_hooks = None  # type: ignore[assignment]
    tensor._backward_hooks = OrderedDict({0: hook})  # what register_hook does, at the tenth part of the cost


def on_accumulated(tensor: Tensor, key: str, hook: Callable[[Tensor], None] | None) -> None:
    """Run `hook(tensor)`, and no other under `key`, when a gradient has been accumulated. None: run nothing any more.

    What `register_post_accumulate_grad_hook` does, but for the handle, which takes as long as all the rest.
    """
    hooks: Any = tensor._post_accumulate_grad_hooks
    if hooks is None:
        hooks = tensor._post_accumulate_grad_hooks = OrderedDict()  # as users' handles need it
    if hook is None:
        hooks.pop(key, None)
    else:
        hooks[key] = hook


def register_composable(module: nn.Module, state: ComposableState, name: str) -> None:
    """Let torch's other composable APIs know that `name` manages `module`.

    DDP's `replicate` refuses such a module, and leaves its parameters alone below another. Tools look for the state in
    torch's table, which does not keep it alive.
    """
    # At the first call rather than with this file: it brings DDP along.
    from torch.distributed._composable.contract import REGISTRY_KEY, RegistryItem

    module.__dict__.setdefault(REGISTRY_KEY, {})[name] = RegistryItem()
    _module_state_mapping[module] = weakref.ref(state)


def is_shared_with_ddp(module: nn.Module) -> bool:
    """Whether a user has told DDP to leave some of its parameters alone: the function for that is private, too."""
    return hasattr(module, "_ddp_params_and_buffers_to_ignore")


def wrap_total_norm(wrapper: Callable[[Any], Any]) -> None:
    """Have torch's own clipping, and torch.nn.utils.get_total_norm, call what `wrapper` makes of the latter."""
    clipping: Any = sys.modules["torch.nn.utils.clip_grad"]
    clipping._get_total_norm = torch.nn.utils.get_total_norm = wrapper(clipping._get_total_norm)


def stepped_on_accumulation() -> Collection[Tensor]:
    """Parameters to which `_apply_optimizer_in_backward` has given an optimizer, and a hook that steps it."""
    module: Any = sys.modules.get("torch.distributed.optim.apply_optimizer_in_backward")
    found: Collection[Tensor] = module.param_to_optim_hook_handle_map if module is not None else ()
    return found


# The hooks of `register_module_full_backward_hook`.
hooks_of_all_modules: dict[int, Any] = nn.modules.module._global_backward_hooks


def watch_calls(module: nn.Module, key: str) -> dict[Any, Any]:
    """Where, under `key`, a hook is to be written that runs before forward, with the keywords, too; and before others.

    Written and deleted there many a time in each step: handles take ten times as long.
    """
    module._forward_pre_hooks_with_kwargs[key] = True  # type: ignore[index]
    return module._forward_pre_hooks


def composable_states() -> list[Any]:
    """The states that torch's table has, of all modules that are alive: a parameter doesn't say who manages it.

    The table's own methods raise where another thread adds to it meanwhile.
    """
    states: dict[Any, Any] = vars(_module_state_mapping)["data"]
    return [state for reference in list(states.values()) if (state := reference()) is not None]


def gradient_hooks(tensor: Tensor) -> tuple[dict[int, Any] | None, dict[int, Any] | None]:
    """The hooks of `register_hook` and of `register_post_accumulate_grad_hook`: autograd can't run them for us."""
    return tensor._backward_hooks, tensor._post_accumulate_grad_hooks


_backward_hooks, _post_accumulate_hooks = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")


def have_gradient_hooks(tensors: Sequence[Tensor]) -> bool:
    """Whether any of them has some of these."""
    return any(map(_backward_hooks, tensors)) or any(map(_post_accumulate_hooks, tensors))
