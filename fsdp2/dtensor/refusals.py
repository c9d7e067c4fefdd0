"""Says what to write where an operation on a sharded tensor is refused: one with a plain tensor, as in
`torch.gather(p, 0, rows)`, one that DTensor has no rule for, a collective of `torch.distributed`.

Torch's errors say neither which parameter is meant nor what to do.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from ..engine.callers import optimizer_that_calls
from ..engine.compat import local_of
from ..engine.nested import tensors_in
from ..engine.owners import Owned, all_groups, has_left, sharded_in, sharded_owner
from ..engine.replacements import REPLACE_BEFORE
from .compat import name_of, spec_of
from .crossings import owner_of
from .sharded_dtensor import explain_errors, handle_operations, replace_attribute
from .wrapped_after import advice_about_caller, advice_about_optimizer

_COLLECTIVES = (
    *("broadcast_", "allreduce_", "allreduce_coalesced_", "reduce_", "gather_", "scatter_", "send", "recv_"),
    *("allgather_", "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_"),
    *("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"),
    *("alltoall_", "alltoall_base_", "recv_any_source_"),
)
_UNKNOWN = "a DTensor"
# Texts in torch's errors about an operation for which DTensor has no rule, or none that fits.
_LACKS = ("sharding strategy registered", "Sharding propagation failed")
# Texts in torch's errors about operands of different dtypes.
_DTYPES = ("expected dtype", "expected scalar type")


def explain_refusals() -> None:
    """Makes the errors of operations with plain tensors, and of those that DTensor has no rule for, say what to do.
    They begin with the parameter's name if an operand is a parameter or its gradient. The collectives of
    `torch.distributed` raise such an error, too, and so does tensor parallelism of a model that is sharded already.
    """
    replace_attribute("device_mesh", lambda _: property(_device_mesh))
    explain_errors(_explain)
    collectives = (getattr(torch.ops.c10d, name, None) for name in _COLLECTIVES)  # releases of torch add and drop some
    handle_operations((each.default for each in collectives if each is not None), _refuse_collective)


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


def _explain(error: Exception, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    text = str(error)
    if "Torch says" not in text and any(each in text for each in _DTYPES) and _explain_dtypes(error):
        return
    if "mixed torch.Tensor and DTensor" in text:
        _explain_mixed(error, name_of(op), tensors_in(args, kwargs))
    elif "Torch says" not in text and any(each in text for each in _LACKS):
        _explain_lack(error, op, args, kwargs)


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


def _explain_mixed(error: Exception, name: str, operands: Iterable[Any]) -> None:
    text = str(error)
    if "mixed torch.Tensor and DTensor" not in text or "Torch says" in text:
        return
    if name == "copy_":  # load_state_dict copies each tensor, and shows this once for each
        error.args = (
            f"{describe(operands)}: a plain tensor can't be copied into it, of which each rank holds a shard. To load "
            "a full state dict, call torch.distributed.checkpoint.state_dict.set_model_state_dict(model, state_dict, "
            "options=StateDictOptions(full_state_dict=True)) on every rank. To write to one parameter, copy "
            "distribute_tensor(plain, p.device_mesh, p.placements).",
        )
        return
    operands = [*operands]
    error.args = (
        f"{describe(operands)}: each rank holds a shard of it, and {name} can't combine that with a plain tensor. "
        f"{_advise(name, operands)} Torch says: {error}",
    )


def _advise(name: str, operands: Sequence[Any]) -> str:
    """Returns what to write in place of an operation with plain tensors."""
    owned = _owner_of(_first_in(operands))
    constant = (
        "or make a constant of its shape, which is the same on every rank, a DTensor: distribute_tensor(constant, "
        "p.device_mesh, p.placements)."
    )
    about_caller = advice_about_caller()
    if about_caller is not None:
        return about_caller
    if owned is not None and has_left(owned.param, owned.group):
        return f"The module that had it is not in the model any more. {REPLACE_BEFORE}"
    about_optimizer = advice_about_optimizer()
    if about_optimizer is not None:
        return about_optimizer
    if owned is None:  # a gradient
        return f"On every rank, call full_tensor() on it; {constant}"
    if name.endswith("_"):
        return f"On every rank, write inside `with fsdp2.full_params(module, writeback=True):`; {constant}"
    return "On every rank, call full_tensor() on it, or compute inside `with fsdp2.full_params(module):`."


def _explain_lack(error: Exception, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    name, operand = name_of(op), describe(tensors_in(args, kwargs))
    advice = (
        advice_about_optimizer()
        or advice_about_caller()
        or "On every rank, call full_tensor() on it, or compute inside `with fsdp2.full_params(module):`."
    )
    error.args = (
        f"{operand}: DTensor can't do {name} on it, of which each rank holds a shard. {advice} Torch says: {error}",
    )


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
    return next(names, f"{_UNKNOWN} of global shape {tuple(first.shape)}")


def _first_in(operands: Iterable[Any]) -> DTensor:
    """Returns the first DTensor; for a view that can be written to, the DTensor that it is a view of."""
    first = next(each for each in operands if isinstance(each, DTensor))
    while (base := vars(first).get("_base_tensor")) is not None:
        first = base
    return first


def _owner_of(tensor: DTensor) -> Owned | None:
    """Returns the owner of the parameter that `tensor` is, is a view of, or is computed from."""
    param = sharded_in(local_of(tensor))
    return owner_of(tensor) if param is None else sharded_owner(param.sharded)


def _refuse_collective(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses a collective on a DTensor.

    Raises:
        NotImplementedError: always, on every rank.
    """
    name = op._schema.name.removeprefix("c10d::").strip("_")
    first = next(each for each in tensors_in(args, kwargs) if isinstance(each, DTensor))
    advice = advice_about_caller() or (
        "Call full_tensor(), on every rank, for the whole tensor. Gradients of sharded parameters are averaged "
        "already. To give all ranks the same weights, do so before fully_shard, or load them afterwards."
    )
    raise NotImplementedError(
        f"torch.distributed's {name} of a DTensor of global shape {tuple(first.shape)}: each rank holds another shard "
        f"of it. {advice}"
    )
