"""Results of which each rank has a part: torch leaves norms, sums, and whether any element is so, until somebody needs
the whole. Some operations take the parts for it, without a word.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor, Replicate

from .compat import (
    dtensor,
    dtensor_spec,
    local_of,
    parts_of,
    set_parts,
    whole_of,
    without_parts,
)
from .sharded_dtensor import call_unhandled, handle_operations
from .foreach_operations import overloads, specs_of

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
# Which do to a sum what they do to each addend: with addends, and with a number.
_ADDING = (_aten.add_.Tensor, _aten.sub_.Tensor, _aten.copy_.default)
_SCALING = (_aten.mul_.Tensor, _aten.div_.Tensor)


def find_whole_truths() -> None:
    """`any()` and `all()` are whole at once. Torch counts the ranks that have found one."""
    handle_operations(_TRUTHS, _find)


def sum_whole_norms() -> None:
    """Norms are whole before they are summed. Torch takes norms of the ranks' sums."""
    handle_operations(_SUMS, _sum)


def join_whole_parts() -> None:
    """What is stacked or concatenated is whole before, unless all are parts of the same kind. Torch makes parts of
    norms of all of them, which have no sign.
    """
    handle_operations(_JOINS, _join)


def divide_by_whole() -> None:
    """What is divided by is whole before. Torch 2.11 divides by the ranks' parts, also in gradients of extremes."""
    handle_operations([_aten.div.Tensor], _divide)


def write_whole_parts() -> None:
    """What is written in place to parts is written to the whole. Torch fills each part; or refuses."""
    handle_operations([_aten.fill_.Scalar], _fill)
    handle_operations(overloads(_IN_PLACE), write_in_place)


def _find(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, *rest = args
    return without_parts(call_unhandled(op, (without_parts(target), *rest), kwargs))


def _sum(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, *rest = args
    target = without_parts(target) if "norm" in parts_of(target) else target
    return call_unhandled(op, (target, *rest), kwargs)


def _divide(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dividend, divisor = args
    divisor = without_parts(divisor) if parts_of(divisor) else divisor
    return call_unhandled(op, (dividend, divisor), kwargs)


def _join(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensors, *rest = args
    specs = specs_of(tensors)
    meshes = {spec and spec.mesh for spec in specs}
    if len(meshes) == 1 and len({spec and spec.placements for spec in specs}) > 1:
        for axis in reversed(range(tensors[0].device_mesh.ndim)):
            tensors = _join_parts(tensors, axis)
    return call_unhandled(op, (tensors, *rest), kwargs)


def _join_parts(tensors: Sequence[DTensor], axis: int) -> Sequence[DTensor]:
    """All with parts of one kind along `axis`, or none; those alike at once, as norms are where some are replicated."""
    alike: dict[Any, list[int]] = {}
    for i, each in enumerate(tensors):
        alike.setdefault((each.placements, each.shape, each.dtype), []).append(i)
    if len({placements[axis] for placements, *_ in alike}) == 1:
        return tensors
    joined = list(tensors)
    for (placements, shape, dtype), places in alike.items():
        if placements[axis].is_partial():
            wholes = without_parts(cast(DTensor, torch.stack([tensors[i] for i in places])), axis)
            replicated = (*placements[:axis], Replicate(), *placements[axis + 1 :])
            spec = dtensor_spec(wholes.device_mesh, replicated, tuple(shape), dtype)
            # Not `wholes.unbind()`: torch 2.15 has no rule for what is still parts of a norm along another axis.
            for i, local in zip(places, local_of(wholes).unbind(), strict=True):
                joined[i] = dtensor(local, spec)
    return joined


def _fill(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, value = args
    kinds = parts_of(target)
    if not kinds:
        return call_unhandled(op, args, kwargs)
    if "norm" in kinds and value < 0:
        raise _negative_norm(op)
    set_parts(target, value)
    return target


def write_in_place(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`op` on its first argument, of which ranks may have parts.

    Raises:
        RuntimeError: they are parts of a norm, and it would be negative; on every rank.
    """
    target, *rest = args
    kinds = parts_of(target)
    if not kinds or (kinds <= {"sum", "avg"} and _is_linear(op, target, *rest)):
        return call_unhandled(op, args, kwargs)
    whole = without_parts(target)
    op(whole, *(without_parts(each) if isinstance(each, DTensor) else each for each in rest), **kwargs)
    if "norm" in kinds and bool((whole_of(whole) < 0).any()):
        raise _negative_norm(op)
    set_parts(target, local_of(whole))
    return target


def _is_linear(op: Any, target: DTensor, other: Any = None, *_: Any) -> bool:
    if op in _ADDING:
        return isinstance(other, DTensor) and other.placements == target.placements
    return op in _SCALING and not isinstance(other, DTensor)


def _negative_norm(op: Any) -> RuntimeError:
    name = op._schema.name.removeprefix("aten::")
    return RuntimeError(
        f"{name} on a norm of a DTensor, of which each rank holds a part, gives a negative number: there are no such "
        f"parts. Write norm = norm.full_tensor() before, on every rank, or {name.rstrip('_')} in place of {name}."
    )
