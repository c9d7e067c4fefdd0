"""Explains what to write where a sharded tensor is refused: by an operation with a plain tensor, as in
`torch.gather(p, 0, rows)`, by one that DTensor has no rule for, by a collective of `torch.distributed`, and by a reader
of memory addresses (safetensors, NumPy).

Torch's errors say neither which parameter is meant nor what to do. What to do depends on who calls, which is found on
the stack: a user can't change the code of DDP, of pruning, or of an optimizer.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from ..calls.callers import optimizer_that_calls
from ..calls.nested import tensors_in
from ..engine.owners import Owned, all_groups, owners_by_id, sharded_in, sharded_owner, some_of
from ..engine.state import names_below
from ..parameters.replacements import REPLACE_BEFORE
from ..torch_private.dtensor import name_of, spec_of
from ..torch_private.internals import local_of
from .crossings import owner_of
from .sharded_dtensor import explain_errors, handle_operations, replace_attribute

_COLLECTIVES = (
    *("broadcast_", "allreduce_", "allreduce_coalesced_", "reduce_", "gather_", "scatter_", "send", "recv_"),
    *("allgather_", "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_"),
    *("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"),
    *("alltoall_", "alltoall_base_", "recv_any_source_"),
)
# Methods that give memory to other libraries.
_METHODS = ("tolist", "numpy", "__dlpack__", "__dlpack_device__")
# Modules, and what is inside them, that read or write as many elements behind an address as the full tensor has.
_READERS = ("bitsandbytes", "safetensors", "transformers.modeling_utils", "triton")

# Texts in torch's errors: plain tensors among DTensors; operations for which DTensor has no rule, or none that fits;
# operands of different dtypes.
_MIXED = "mixed torch.Tensor and DTensor"
_LACKS = ("sharding strategy registered", "Sharding propagation failed", "into a corresponding shard_order")
_DTYPES = ("expected dtype", "expected scalar type")

# ---- what to do, by who calls

# Class whose `__init__` is on the stack.
_AROUND = {
    "DistributedDataParallel": "Remove DistributedDataParallel: fully_shard averages the gradients. Of a model that is "
    "sharded in part, apply fully_shard or fsdp2.replicate to the whole, too.",
    "FullyShardedDataParallel": "Remove FullyShardedDataParallel, and apply fully_shard to the whole model, too; or "
    "pass what is sharded as ignored_states.",
}
# Module of torch that is on the stack.
_INSIDE = {
    "torch.nn.utils.prune": "Prune before fully_shard, or inside `with fsdp2.full_params(module, writeback=True):`, "
    "then prune.remove.",
    "torch.nn.utils.parametrize": "On every rank, use the parametrized weight inside `with "
    "fsdp2.full_params(module):`.",
    "torch.nn.utils.clip_grad": "torch can't clip gradients on several meshes, or plain and sharded ones together. "
    "Call fsdp2.clip_grad_norm_(parameters, max_norm): it returns the norm, too.",
}
_OPTIMIZER = (
    "This operation of {} takes no DTensors. Call fsdp2.flatten_optimizer(optimizer) before the first step; if that "
    "refuses it, use an optimizer that takes DTensors, as those of torch.optim and torchao do, or have it step on this "
    "rank's shards, as examples/guides/lora.md shows."
)
# Nobody else: what the user's own code is to write.
_CONSTANT = (
    "or make a constant of its shape, which is the same on every rank, a DTensor: distribute_tensor(constant, "
    "p.device_mesh, p.placements)."
)
_GRADIENT = f"On every rank, call full_tensor() on it; {_CONSTANT}"
_WRITE = f"On every rank, write inside `with fsdp2.full_params(module, writeback=True):`; {_CONSTANT}"
_WRITE_RESULT = (
    "On every rank, write to a whole one, `whole = x.full_tensor()` of the gradient or result x, and copy it back, "
    "`x.copy_(distribute_tensor(whole, x.device_mesh, x.placements))`."
)
_READ = "On every rank, call full_tensor() on it, or compute inside `with fsdp2.full_params(module):`."
_LOAD = (
    "To load a full state dict, call torch.distributed.checkpoint.state_dict.set_model_state_dict(model, state_dict, "
    "options=StateDictOptions(full_state_dict=True)) on every rank. To write to one parameter, copy "
    "distribute_tensor(plain, p.device_mesh, p.placements)."
)
_COPY_TO_PLAIN = (
    "Call full_tensor() on the DTensor, on every rank. To load the state dict of a sharded model into a plain one, get "
    "it by torch.distributed.checkpoint.state_dict.get_model_state_dict(model, "
    "options=StateDictOptions(full_state_dict=True)) on every rank. To resize a parameter (an embedding, for new "
    "tokens), do so before fully_shard."
)
_ADD_TO_PLAIN = "Call full_tensor() on the DTensor, on every rank (`total += p.grad.norm().full_tensor()`)."
_COLLECTIVE = (
    "Call full_tensor(), on every rank, for the whole tensor. Gradients of sharded parameters are averaged already. To "
    "give all ranks the same weights, do so before fully_shard, or load them afterwards."
)
_ADDRESS = (
    "Call full_tensor() first, on every rank. To save a model, call fsdp2.hf.save_model(model, folder), or "
    "fsdp2.hf.save_adapter, on every rank, which write the files of save_pretrained; or call "
    "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)) on every rank, and "
    "save the result on the first (`model.save_pretrained(folder, state_dict=state)`)."
)


def advise(name: str, operands: Sequence[Any]) -> str:
    """Returns what to write in place of the operation `name` on `operands`, of which one is a DTensor."""
    owned = _owner_of(_first_in(operands))
    about_caller = _advice_about_caller()
    if about_caller is not None:
        return about_caller
    if owned is not None and _has_left(owned):
        return f"The module that had it is not in the model any more. {REPLACE_BEFORE}"
    is_write = name.endswith("_")
    return _advice_about_optimizer() or (
        (_WRITE_RESULT if is_write else _GRADIENT) if owned is None else _WRITE if is_write else _READ
    )


def _has_left(owned: Owned) -> bool:
    """Returns True if the modules that had the parameter when fully_shard was applied are not in the model any more."""
    inside = names_below(owned.group.state.outermost.modules)
    return not any(slot.module in inside for slot in owned.param.slots)


def _advice_about_caller() -> str | None:
    """Returns what to do if such code calls this, with the parameters that are meant; else None."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        inside = _INSIDE.get(frame.f_globals.get("__name__", ""))
        if inside is not None:
            return inside
        if frame.f_code.co_name == "__init__":
            name = type(frame.f_locals.get("self")).__name__
            if name in _AROUND:
                return f"{name}: {_managed(frame.f_locals.get('module'))}{_AROUND[name]}"
        frame = frame.f_back
    return None


def _managed(module: Any) -> str:
    """Returns which parameters of `module` fully_shard manages."""
    if not isinstance(module, nn.Module):
        return ""
    owners = owners_by_id()
    names = [name for name, param in module.named_parameters() if id(param) in owners]
    return f"fully_shard manages {names[0]} ({len(names)} parameters in all). " if names else ""


def _advice_about_optimizer() -> str | None:
    """Returns what to do if a step of an optimizer calls this; else None."""
    optimizer = optimizer_that_calls()
    if optimizer is None:
        return None
    names = []
    for param in (param for entry in optimizer.param_groups for param in entry["params"]):
        owned = sharded_owner(param) if isinstance(param, DTensor) else None
        if owned is None:
            continue
        names.append(owned.param.name)
        if not isinstance(param.grad, (DTensor, type(None))):
            return (
                f"The gradient of {owned.param.name} is a plain tensor: something has assigned it to .grad. Assign "
                "distribute_tensor(gradient, p.device_mesh, p.placements) of the whole gradient, on every rank; a hook "
                "of the parameter may return the whole gradient as it is."
            )
    return _OPTIMIZER.format(type(optimizer).__name__) + (f" DTensors are {some_of(names)}." if names else "")


# ---- what is refused


def explain_refusals() -> None:
    """Makes collectives of `torch.distributed` on a ShardedDTensor raise an error that says what to do, and tensor
    parallelism of a model that is sharded already, and these methods, however the calling library was imported:

    - `data_ptr()` of its storage, typed or not, which safetensors and `save_pretrained` of transformers and peft call;
    - `data_ptr()` of the tensor, for libraries that are known to read there; others get the address of the shard, by
      which accelerate finds a parameter again, and torch itself 0: copying and pickling learn from it that the tensor
      has no memory;
    - `tolist()`, `numpy()`, and `__dlpack__`, whose readers would crash.
    """
    explain_errors(_explain)
    replace_attribute("device_mesh", lambda _: property(_device_mesh))
    collectives = (getattr(torch.ops.c10d, name, None) for name in _COLLECTIVES)  # releases of torch add and drop some
    handle_operations((each.default for each in collectives if each is not None), _refuse_collective)
    replace_attribute("untyped_storage", lambda _: _untyped_storage)
    replace_attribute("data_ptr", lambda _: _data_ptr)
    for name in _METHODS:
        replace_attribute(name, partial(_refusing, name))


def _explain(error: Exception, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Makes an error of torch about `op` say which parameter is meant, and what to do."""
    text, name, operands = str(error), name_of(op), [*tensors_in(args, kwargs)]
    if "Torch says" in text or (any(each in text for each in _DTYPES) and _explain_dtypes(error)):
        return
    if _MIXED in text and name == "copy_":  # load_state_dict copies each tensor, and shows this once for each
        error.args = (f"{describe(operands)}: a plain tensor can't be copied into its shards. {_LOAD}",)
    elif _MIXED in text:
        what = f"each rank holds a shard of it, and {name} can't combine that with a plain tensor."
        error.args = (f"{describe(operands)}: {what} {advise(name, operands)} Torch says: {error}",)
    elif any(each in text for each in _LACKS):
        what = f"DTensor can't do {name} on it, of which each rank holds a shard."
        error.args = (f"{describe(operands)}: {what} {advise(name, operands)} Torch says: {error}",)


def _explain_dtypes(error: Exception) -> bool:
    """Returns True if it has explained the error of an optimizer whose gradients have another dtype than parameters."""
    optimizer = optimizer_that_calls()
    entries = [] if optimizer is None else optimizer.param_groups
    pairs = [(param, param.grad) for entry in entries for param in entry["params"] if param.grad is not None]
    mixed = [pair for pair in pairs if isinstance(pair[0], DTensor) and pair[1].dtype != pair[0].dtype]
    if not mixed:
        return False
    param, gradient = mixed[0]
    first_line = str(error).splitlines()[0]
    kind, dtype, of_gradient = type(optimizer).__name__, param.dtype, gradient.dtype
    error.args = (
        f"{describe([param])}: {kind} can't combine a parameter of {dtype} with a gradient of {of_gradient}, sharded "
        f"or not. Leave out what chooses {of_gradient} for gradients, MixedPrecisionPolicy(grad_dtype=) or the "
        f"parameter's grad_dtype; or keep the weights in {of_gradient}, and let them compute in {dtype}: "
        f"MixedPrecisionPolicy(param_dtype={dtype}, grad_dtype={of_gradient}). Torch says: {first_line}",
    )
    return True


def refuse_plain_target(op: Any, target: Any) -> None:
    """Refuses to write a DTensor to a plain tensor. Torch fails an assertion there.

    Raises:
        RuntimeError: `target`, to which `op` would write, is plain.
    """
    if isinstance(target, DTensor):
        return
    name = name_of(op)
    advice = _advice_about_caller() or _advice_about_optimizer() or _ADD_TO_PLAIN
    if name == "copy_" and optimizer_that_calls() is None:  # load_state_dict shows this once for each tensor
        advice = _COPY_TO_PLAIN
    raise RuntimeError(
        f"{name} of a plain tensor of shape {tuple(target.shape)} with a DTensor: this rank may hold only a shard of "
        f"the latter. {advice}"
    )


def _device_mesh(self: DTensor) -> DeviceMesh:
    """Returns the mesh of a sharded parameter. `distribute_tensor` asks for it first.

    Raises:
        ValueError: that asks, to distribute a parameter over another mesh, as parallelize_module does.
    """
    mesh = spec_of(self).mesh
    if not torch.compiler.is_compiling():
        frame = sys._getframe(1)
        if frame.f_code is distribute_tensor.__code__ and frame.f_locals["device_mesh"] != mesh:
            raise ValueError(
                f"{describe([self])}: fully_shard has sharded it, so it can't be distributed by parallelize_module or "
                "distribute_module any more. Call these before fully_shard."
            )
    return mesh


def _refuse_collective(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses a collective on a DTensor.

    Raises:
        NotImplementedError: always, on every rank.
    """
    name = op._schema.name.removeprefix("c10d::").strip("_")
    first = next(each for each in tensors_in(args, kwargs) if isinstance(each, DTensor))
    raise NotImplementedError(
        f"torch.distributed's {name} of a DTensor of global shape {tuple(first.shape)}: each rank holds another shard "
        f"of it. {_advice_about_caller() or _COLLECTIVE}"
    )


class _StorageOfDTensor(torch.UntypedStorage):
    """Torch's storage object of a DTensor, which only knows the size of the full tensor."""

    # The tensor, and its name in errors once it has been freed.
    _tensor: weakref.ref[DTensor]
    _name: str

    def data_ptr(self) -> int:
        raise self._error("its storage's data_ptr()")

    def resize_(self, size: int) -> Any:  # which FSDP1 asks for
        raise self._error("another size of its storage")

    def _error(self, what: str) -> RuntimeError:
        tensor = self._tensor()
        return _error_of_address(what, self._name if tensor is None else describe([tensor]))


def _untyped_storage(self: DTensor) -> torch.UntypedStorage:
    storage = Tensor.untyped_storage(self)
    if type(storage) is torch.UntypedStorage:
        storage.__class__ = _StorageOfDTensor
    if isinstance(storage, _StorageOfDTensor):
        param = sharded_in(local_of(self))
        storage._tensor, storage._name = weakref.ref(self), "a DTensor" if param is None else param.name
    return storage


def _data_ptr(self: DTensor) -> int:
    """Returns the address of this rank's shard, and 0 to callers in torch. It is 0 for an empty shard.

    Raises:
        RuntimeError: the caller would read more than the shard.
    """
    caller = sys._getframe(1).f_globals.get("__name__", "")
    if caller.partition(".")[0] == "torch":
        return Tensor.data_ptr(self)
    if any(caller == each or caller.startswith(f"{each}.") for each in _READERS):
        raise _error_of_address("data_ptr()", describe([self]))
    return local_of(self).data_ptr()


def _refusing(name: str, _: Any) -> Callable[..., Any]:
    def refuse(self: DTensor, *args: Any, **options: Any) -> Any:
        raise _error_of_address(f"{name}()", describe([self]))

    refuse.__name__ = refuse.__qualname__ = name
    return refuse


def _error_of_address(what: str, name: str) -> RuntimeError:
    # Kernels of a library's optimizers take addresses, too.
    advice = _advice_about_optimizer() or _advice_about_caller() or _ADDRESS
    return RuntimeError(f"{name}: {what} was asked of a DTensor, of which this rank holds only a shard. {advice}")


# ---- which tensor is meant


def describe(operands: Iterable[Any]) -> str:
    """Returns, for errors, the name of the parameter that the first DTensor is, is a view or gradient of, or is
    computed from; else its shape. It communicates nothing.
    """
    first = _first_in(operands)
    owned = _owner_of(first)
    if owned is not None:
        return owned.param.name
    params = (param for group in all_groups() for param in group.params)
    names = (f"the gradient of {param.name}" for param in params if param.sharded.grad is first)
    return next(names, f"a DTensor of global shape {tuple(first.shape)}")


def _first_in(operands: Iterable[Any]) -> DTensor:
    """Returns the first DTensor; for a copied view, the DTensor that it is a view of."""
    first = next(each for each in operands if isinstance(each, DTensor))
    while (base := vars(first).get("_base_tensor")) is not None:
        first = base
    return first


def _owner_of(tensor: DTensor) -> Owned | None:
    """Returns the owner of the parameter that `tensor` is, is a view of, or is computed from."""
    param = sharded_in(local_of(tensor))
    return owner_of(tensor) if param is None else sharded_owner(param.sharded)
