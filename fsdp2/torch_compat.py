"""Private names of torch that fsdp2 uses, each with its reason. Nothing else in the package touches one."""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from pkgutil import iter_modules
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._dynamo import eval_frame
from torch.autograd import Variable, graph
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed._composable_state import _State as ComposableState
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._redistribute import redistribute_local_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.nn import Parameter

__all__ = [
    "DISPATCHES_TO_SUBCLASSES",
    "ZERO_FUNCTIONS",
    "ZERO_OPS",
    "ComposableState",
    "DTensorSpec",
    "active_pack_hook",
    "argument_names",
    "backend_name",
    "call_unhandled",
    "chunk_cat",
    "composable_states",
    "concatenate_meshes",
    "copy_all",
    "cut",
    "default_store",
    "disables_hooks",
    "distributed_parameter",
    "dtensor",
    "dtensor_spec",
    "find_accumulators_of",
    "gradient_hooks",
    "graph_task",
    "group_over",
    "handle_operations",
    "handler_of",
    "has_backend",
    "inner_tensors",
    "innermost_transform",
    "is_shared_with_ddp",
    "is_view",
    "is_wrapped",
    "keep_out_of_graphs",
    "local_if_any",
    "local_of",
    "mesh_over",
    "new_dtensor",
    "no_torch_function",
    "norm_each",
    "on_backward_end",
    "owned",
    "owns_memory",
    "reads_metadata",
    "register_composable",
    "replace_hooks",
    "returned_of",
    "scale_each",
    "set_local",
    "set_versions",
    "single_tensor_collectives",
    "spec_of",
    "storage_id",
    "strided_shard",
    "take_hooks",
    "transform_stacks",
    "untraced",
    "unwrapped",
    "views_and_writes",
    "watch_calls",
    "whole_of",
    "written_by",
]


def dtensor_spec(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> DTensorSpec:
    """Of a contiguous tensor. Prepared: `DTensor.from_local` builds one per call and takes 33 us, the constructor 2."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(torch.Size(shape), stride, dtype))


# (class, local tensor, spec) -> DTensor, without a copy, a check or an autograd node. The constructor is wrapped to be
# skipped by dynamo, which costs as much as itself again, on every gradient.
new_dtensor: Callable[[type[DTensor], Tensor, DTensorSpec], DTensor] = partial(
    inspect.unwrap(DTensor.__new__), requires_grad=False
)
dtensor: Callable[[Tensor, DTensorSpec], DTensor] = partial(new_dtensor, DTensor)


# (tensors, counts): set their version counters, whatever they were. The public context manager around it can only
# restore them.
set_versions: Callable[[tuple[Tensor, ...], tuple[int, ...]], None] = torch._C._autograd._unsafe_set_version_counter


# The very local tensor of a DTensor: `to_local()` returns a new view on each call, which has no identity.
local_of: Callable[[Tensor], Tensor] = attrgetter("_local_tensor")
# How it is distributed, its shape and dtype.
spec_of: Callable[[Tensor], DTensorSpec] = attrgetter("_spec")


def local_if_any(tensor: Tensor) -> Tensor:
    """The local tensor of a DTensor; any other tensor itself."""
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor


def distributed_parameter(local: Tensor, spec: DTensorSpec, requires_grad: bool) -> Parameter:
    """A parameter whose local tensor is `local` itself. `nn.Parameter` detaches, which a DTensor dispatches as an
    operation: half the time of a `fully_shard` call.
    """
    tensor = dtensor(local, spec)
    tensor._is_param = True  # what makes it an instance of nn.Parameter
    return cast(Parameter, tensor.requires_grad_(requires_grad))


def set_local(tensor: Tensor, local: Tensor, like: DTensor | None = None) -> None:
    """Put `local` behind an existing DTensor: users and optimizers hold that object. It has equal shape and dtype, or
    those of `like`, which says how it is distributed.
    """
    tensor._local_tensor = local  # type: ignore[attr-defined]
    if like is not None:
        tensor._spec = like._spec  # type: ignore[attr-defined]


def whole_of(tensor: DTensor) -> Tensor:
    """What `full_tensor()` returns, of the same memory where each rank has all: for handlers of operations, in which
    torch 2.11 can't run functions of autograd's. Every rank must call it.
    """
    spec = spec_of(tensor)
    replicated = DTensorSpec(spec.mesh, (Replicate(),) * spec.mesh.ndim, tensor_meta=spec.tensor_meta)
    return redistribute_local_tensor(local_of(tensor), spec, replicated)


def cut(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """This rank's part of what all ranks have, without communication."""
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def strided_shard(dim: int, split_factor: int) -> Placement:
    """The placement of what is cut along `dim` after another mesh axis has cut it into `split_factor` parts.

    Axes to the left cut first in a plain Shard; here the data-parallel axis stands left, and cuts last.
    """
    return _StridedShard(dim, split_factor=split_factor)


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


def group_over(mesh: DeviceMesh, axes: tuple[int, ...]) -> dist.ProcessGroup | None:
    """The process group of this rank along `axes`; several count as one, for which it makes a group, once."""
    if len(axes) < 2:
        return mesh.get_group(axes[0]) if axes else None
    return mesh_over(mesh, axes).get_group()


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """'gloo', 'nccl', 'fake', ...: `get_backend` names the default device's backend only, a group may have several."""
    return group._get_backend(device).name().lower()


def has_backend(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether `group` can communicate tensors on `device`."""
    try:
        group._get_backend(device)
    except RuntimeError:
        return False
    return True


# What the processes share from `init_process_group` on, whoever gave it. torch has no public way to it.
default_store: Callable[[], dist.Store] = dist.distributed_c10d._get_default_store


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


def chunk_cat(tensors: list[Tensor], out: Tensor) -> None:
    """out[r] := chunk r along dim 0 of all `tensors`, each flattened, one behind the other."""
    torch._chunk_cat(tensors, 0, out.shape[0], out=out)


def single_tensor_collectives(group: dist.ProcessGroup) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The group's all-gather and reduce-scatter of one tensor: (output, input) -> asynchronous Work.

    The public functions around them changed name in torch 2.13 and cost as much again; the public coalesced methods
    take three times as long to issue where there is but one tensor.
    """
    return group._allgather_base, group._reduce_scatter_base


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


def disables_hooks() -> bool:
    """Whether saved-tensor hooks may not be put in force on this thread now."""
    return torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is not None


# () -> the innermost of torch.func's transforms that run on this thread, or None.
innermost_transform: Callable[[], Any] = torch._C._functorch.peek_interpreter_stack
# What a tensor that such a transform has wrapped is seen as from outside it.
unwrapped: Callable[[Tensor], Tensor] = torch._C._functorch.get_unwrapped
is_wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor


def transform_stacks() -> tuple[Callable[[], Any], Callable[[list[Any]], Any]]:
    """Two contexts: without the transforms that run, as which it gives their list; and with those of such a list."""
    from torch._functorch import pyfunctorch  # some 100 ms, where nobody has used torch.func

    return pyfunctorch.temporarily_clear_interpreter_stack, pyfunctorch.temporarily_restore_interpreter_stack


# Context in which attributes of a DTensor are read three times as fast: torch doesn't look for a `__torch_function__`.
no_torch_function: Callable[[], Any] = torch._C.DisableTorchFunctionSubclass


Function = TypeVar("Function", bound=Callable[..., Any])


def untraced(function: Function) -> Function:
    """Decorator: torch.compile breaks its graph at a call of `function` and runs it as it is, but may compile what it
    calls. Costs nothing per call, unlike `torch.compiler.disable`, which wraps, and imports dynamo: seconds.
    """
    actions = eval_frame._FrameAction
    strategy = eval_frame._FrameExecStrategy(actions.SKIP, actions.DEFAULT)
    eval_frame.set_code_exec_strategy(function.__code__, strategy)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    return function


_dynamo_knows = False
_TRACED = ("autograd_inputs", "entry_points")


@untraced
def keep_out_of_graphs() -> None:
    """Tell dynamo, once it is there, to compile none of our functions but those around users' methods, and torch's."""
    global _dynamo_knows
    if not _dynamo_knows and "torch._dynamo" in sys.modules:
        _dynamo_knows = True
        rules, package = sys.modules["torch._dynamo"].trace_rules, sys.modules[__package__]
        first, *others = (module.name for module in iter_modules(package.__path__) if module.name not in _TRACED)
        # Each `add` takes 10 ms, to compile a pattern of all.
        rules.SKIP_DIRS.extend(f"{package.__path__[0]}/{name}.py" for name in others)
        rules.add(f"{__package__}.{first}")


# Held while an operation runs without its handler.
_unhandled = threading.RLock()


def handle_operations(ops: Iterable[Any], handler: Callable[..., Any]) -> None:
    """From now on `handler(op, args, kwargs)` runs in place of each of `ops` on DTensors, below autograd."""
    DTensor._op_dispatcher._custom_op_handlers.update(dict.fromkeys(ops, handler))


def handler_of(op: Any) -> Callable[..., Any]:
    """What runs in place of `op` on DTensors now."""
    handler: Callable[..., Any] = DTensor._op_dispatcher._custom_op_handlers.get(op, call_unhandled)
    return handler


def call_unhandled(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `op` does without the handler that it has."""
    handlers = DTensor._op_dispatcher._custom_op_handlers
    with _unhandled:
        handler = handlers.pop(op)
        try:
            return op(*args, **kwargs)
        finally:
            handlers[op] = handler


# Whether an operation on a subclass of DTensor calls its `__torch_dispatch__`.
DISPATCHES_TO_SUBCLASSES = torch.__version__ >= "2.13"


def views_and_writes() -> list[Any]:
    """The operations that return views, and those that write to an argument's memory."""
    packets = [getattr(torch.ops.aten, name) for name in dir(torch.ops.aten)]
    ops = [getattr(each, name) for each in packets if hasattr(each, "overloads") for name in each.overloads()]
    return [op for op in ops if (op._schema.is_mutable or is_view(op)) and op is not torch.ops.aten.detach_.default]


def argument_names(op: Any) -> list[str]:
    return [each.name for each in op._schema.arguments]


def is_view(op: Any) -> bool:
    """Whether `op` returns views of its first argument."""
    return any(each.alias_info is not None and not each.alias_info.is_write for each in op._schema.returns)


def written_by(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that `op` writes to, and what is in those that are lists."""
    if not op._schema.is_mutable:
        return []
    found: list[Any] = []
    for i, argument in enumerate(op._schema.arguments):
        if argument.is_write:
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            found += given if isinstance(given, list | tuple) else [given]
    return found


def returned_of(op: Any, written: Sequence[Tensor]) -> Any:
    """What `op`, which writes to `written`, returns of them: itself, each of several, or nothing."""
    count = len(op._schema.returns)
    return tuple(written) if count > 1 else written[0] if count else None


def take_hooks(source: Tensor, target: Tensor) -> None:
    """Move the hooks registered on one tensor to another; their handles go on working, since the dicts move."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        hooks = getattr(source, name)
        if hooks:
            setattr(target, name, hooks)


def replace_hooks(tensor: Tensor, hook: Callable[[Tensor], Any]) -> None:
    """Have no other hook on the gradient of `tensor`, where another tensor may have taken the ones before."""
    tensor._post_accumulate_grad_hooks = None  # type: ignore[assignment]
    tensor._backward_hooks = {0: hook}  # what register_hook does, at the tenth part of the cost


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


def watch_calls(module: nn.Module, key: str) -> dict[Any, Any]:
    """Where, under `key`, a hook is to be written that runs before forward, with the keywords, too; and before others.

    Written and deleted there many a time in each step: handles take ten times as long.
    """
    module._forward_pre_hooks_with_kwargs[key] = True  # type: ignore[index]
    return module._forward_pre_hooks


def composable_states() -> list[Any]:
    """The states that torch's table has, of all modules that are alive: a parameter doesn't say who manages it."""
    return [state for reference in list(_module_state_mapping.values()) if (state := reference()) is not None]


def gradient_hooks(tensor: Tensor) -> tuple[dict[int, Any] | None, dict[int, Any] | None]:
    """The hooks of `register_hook` and of `register_post_accumulate_grad_hook`: autograd can't run them for us."""
    return tensor._backward_hooks, tensor._post_accumulate_grad_hooks
