"""Carries out `torch._foreach_*` and fused steps of optimizers on lists of DTensors and plain tensors.

The plain tensors are ignored parameters, or buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from ..collectives.meshes import sharding_axes
from ..engine.comm import CommLabel
from ..ranks.rank_facts import all_reduce_over
from ..torch_private.dtensor import DTensorSpec, overloads, spec_of
from ..torch_private.internals import dtensor_spec, local_if_any
from .making import dtensor
from .sharded_dtensor import call_unhandled, handle_operations

_aten = torch.ops.aten
# Operations whose results depend on more than one element of each argument.
_NOT_ELEMENTWISE = ("_foreach_norm", "_foreach_max", "_foreach_powsum", "_foreach_mm")
# Fused steps of optimizers. Torch has no rule on DTensors for those of SGD and Adagrad.
_FUSED = ("_fused_sgd_", "_fused_adagrad_", "_fused_adam_", "_fused_adamw_")


def operate_on_lists() -> None:
    """Makes these operations possible where plain tensors are among ShardedDTensors, as in an optimizer's step.
    Operations in place increment the versions of the DTensors, as they do those of plain tensors. A GradScaler tells
    all ranks that hold a part of any of the gradients that one of these is not finite.
    """
    names = [name for name in dir(torch) if name.startswith("_foreach_") and name not in _NOT_ELEMENTWISE]
    written = [*_FUSED, *(name for name in names if name.endswith("_"))]
    handle_operations(overloads(written), _in_place)
    handle_operations(overloads(name for name in names if name not in written), _out_of_place)
    handle_operations([_aten._amp_foreach_non_finite_check_and_unscale_.default], _unscale)


def _in_place(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Carries out `op` on the lists in `args`; it writes to the first of them."""
    local_args = _local_arguments(args)
    if local_args is None or any(isinstance(each, DTensor) for each in kwargs.values()):
        call_unhandled(op, args, kwargs)
    else:
        op(*local_args, **kwargs)
    increment_version(args[0])


def _unscale(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Multiplies the gradients by a number, and sets `found_inf` to 1 if any rank has one that is not finite."""
    gradients, found_inf, factor = args
    op([*map(local_if_any, gradients)], found_inf, factor)
    increment_version(gradients)
    # By identity, because a mesh and its placements take long to compare.
    kinds = {(id(spec.mesh), id(spec.placements)): spec for spec in specs_of(gradients) if spec is not None}
    axes = dict.fromkeys(axis for spec in kinds.values() for axis in sharding_axes(spec.mesh, spec.placements))
    all_reduce_over(
        found_inf, [axis.group for axis in axes], largest=True, comm_label=CommLabel("gradients that a scaler divides")
    )


def _out_of_place(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    is_mixed = isinstance(args[0], list | tuple) and None in (specs := specs_of(args[0]))
    local_args = _local_arguments(args) if is_mixed else None
    if local_args is None:
        return call_unhandled(op, args, kwargs)
    return [_like(spec, each) for spec, each in zip(specs, op(*local_args, **kwargs), strict=True)]


def _like(spec: DTensorSpec | None, local: Tensor) -> Tensor:
    """Returns `local`, distributed as `spec` says; a plain tensor if that is None."""
    if spec is None:
        return local
    return dtensor(local, dtensor_spec(spec.mesh, spec.placements, tuple(spec.shape), local.dtype))


def _local_arguments(args: tuple[Any, ...]) -> list[Any] | None:
    """Returns the arguments with local tensors, or None if the operation can't be done on these, because operands are
    distributed in different ways. DTensor would spend more time on planning the operation than on computing it.
    """
    found, specs = [], specs_of(args[0])
    if any(spec is not None and any(each.is_partial() for each in spec.placements) for spec in set(specs)):
        return None
    for arg in args:
        if isinstance(arg, DTensor):
            return None
        if isinstance(arg, list | tuple) and arg and isinstance(arg[0], Tensor) and not _are_numbers(arg):
            if any(spec != other for spec, other in set(zip(specs, specs_of(arg), strict=False))):
                return None
            arg = list(map(local_if_any, arg))
        found.append(arg)
    return found


def _are_numbers(tensors: Sequence[Tensor]) -> bool:
    """Returns True for plain tensors without dims, such as the step counts of an optimizer, one for each parameter."""
    return all(type(each) is Tensor and each.dim() == 0 for each in tensors)


def specs_of(tensors: Sequence[Tensor]) -> list[DTensorSpec | None]:
    """Returns the specs of DTensors, and None in place of those of plain tensors."""
    try:
        return list(map(spec_of, tensors))
    except AttributeError:
        return [spec_of(each) if isinstance(each, DTensor) else None for each in tensors]
