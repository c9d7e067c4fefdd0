"""Reduces results with Partial placements before operations that need the reduced value.

Torch leaves norms, sums, `any` and `all` unreduced until the value is needed. Some operations then silently compute
with each rank's value as if it were the reduced one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor, Replicate

from ..engine.compat import dtensor_spec, local_of
from .compat import dtensor, full_tensor_of, name_of, partial_kinds, reduced, set_partial
from .foreach_operations import overloads, specs_of
from .sharded_dtensor import call_unhandled, handle_operations

_aten = torch.ops.aten
_TRUTHS = (
    *(_aten.any.default, _aten.any.dim, _aten.any.dims),
    *(_aten.all.default, _aten.all.dim, _aten.all.dims),
)
_SUMS = (_aten.sum.default, _aten.sum.dim_IntList, _aten.nansum.default)
_JOINS = (_aten.stack.default, _aten.cat.default)
_IN_PLACE = (
    *("abs_", "clamp_", "clamp_max_", "clamp_min_", "exp_", "log_"),
    *("neg_", "pow_", "reciprocal_", "rsqrt_", "sqrt_"),
)
# Operations that do to a sum what they do to each addend: with a tensor of addends, and with a number.
_ADDING = (_aten.add_.Tensor, _aten.sub_.Tensor, _aten.copy_.default)
_SCALING = (_aten.mul_.Tensor, _aten.div_.Tensor)


def reduce_truths() -> None:
    """Reduces `any()` and `all()` at once. Torch counts the ranks that have found one."""
    handle_operations(_TRUTHS, _find)


def sum_reduced_norms() -> None:
    """Reduces norms before they are summed. Torch computes norms of the ranks' sums."""
    handle_operations(_SUMS, _sum)


def join_reduced_results() -> None:
    """Reduces results before they are stacked or concatenated, unless all are Partial of the same kind. Torch takes all
    of them for norms, which have no sign.
    """
    handle_operations(_JOINS, _join)


def divide_by_reduced() -> None:
    """Reduces a divisor first. Torch 2.11 divides by each rank's value, also in gradients of extremes."""
    handle_operations([_aten.div.Tensor], _divide)


def write_reduced_values() -> None:
    """Makes writes in place to a Partial result change its reduced value. Torch fills each rank's value, or refuses."""
    handle_operations([_aten.fill_.Scalar], _fill)
    handle_operations(overloads(_IN_PLACE), write_in_place)


def _find(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, *rest = args
    return reduced(call_unhandled(op, (reduced(target), *rest), kwargs))


def _sum(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, *rest = args
    target = reduced(target) if "norm" in partial_kinds(target) else target
    return call_unhandled(op, (target, *rest), kwargs)


def _divide(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dividend, divisor = args
    divisor = reduced(divisor) if partial_kinds(divisor) else divisor
    return call_unhandled(op, (dividend, divisor), kwargs)


def _join(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors, *rest = args
    specs = specs_of(tensors)
    meshes = {spec and spec.mesh for spec in specs}
    if len(meshes) == 1 and len({spec and spec.placements for spec in specs}) > 1:
        for axis in reversed(range(tensors[0].device_mesh.ndim)):
            tensors = _reduce_unlike(tensors, axis)
    return call_unhandled(op, (tensors, *rest), kwargs)


def _reduce_unlike(tensors: Sequence[DTensor], axis: int) -> Sequence[DTensor]:
    """Returns `tensors`, reduced along mesh axis `axis` unless all have one placement there. Tensors that are alike, as
    norms are where some parameters are replicated, are reduced together.
    """
    alike: dict[Any, list[int]] = {}
    for i, each in enumerate(tensors):
        alike.setdefault((each.placements, each.shape, each.dtype), []).append(i)
    if len({placements[axis] for placements, *_ in alike}) == 1:
        return tensors
    joined = list(tensors)
    for (placements, shape, dtype), indices in alike.items():
        if placements[axis].is_partial():
            stacked = reduced(cast(DTensor, torch.stack([tensors[i] for i in indices])), axis)
            replicated = (*placements[:axis], Replicate(), *placements[axis + 1 :])
            spec = dtensor_spec(stacked.device_mesh, replicated, tuple(shape), dtype)
            # Not `stacked.unbind()`: torch 2.15 has no rule for norms that are Partial along another axis.
            for i, local in zip(indices, local_of(stacked).unbind(), strict=True):
                joined[i] = dtensor(local, spec)
    return joined


def _fill(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, value = args
    kinds = partial_kinds(target)
    if not kinds:
        return call_unhandled(op, args, kwargs)
    if "norm" in kinds and value < 0:
        raise _negative_norm(op)
    set_partial(target, value)
    return target


def write_in_place(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carries out `op` in place on its first argument, which may have Partial placements, and returns that argument.

    Raises:
        RuntimeError: it is a norm, and would be negative. Every rank raises.
    """
    target, *rest = args
    kinds = partial_kinds(target)
    if not kinds or (kinds <= {"sum", "avg"} and _is_linear(op, target, *rest)):
        return call_unhandled(op, args, kwargs)
    value = reduced(target)
    op(value, *(reduced(each) if isinstance(each, DTensor) else each for each in rest), **kwargs)
    if "norm" in kinds and bool((full_tensor_of(value) < 0).any()):
        raise _negative_norm(op)
    set_partial(target, local_of(value))
    return target


def _is_linear(op: Any, target: DTensor, other: Any = None, *_: Any) -> bool:
    if op in _ADDING:
        return isinstance(other, DTensor) and other.placements == target.placements
    return op in _SCALING and not isinstance(other, DTensor)


def _negative_norm(op: Any) -> RuntimeError:
    name = name_of(op)
    return RuntimeError(
        f"{name} on a norm of a DTensor, which is still to be reduced, gives a negative number: no norm of the ranks' "
        f"shards can be negative. Write norm = norm.full_tensor() before, on every rank, or {name.rstrip('_')} in "
        f"place of {name}."
    )
