"""Makes reductions of DTensors those of the full tensor: mean losses, extremes, numbers, and reductions over dims.

What DTensor leaves Partial, sharded_dtensor.py reduces. Here is what DTensor computes of each rank's shard by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from ..calls.nested import map_tensors
from ..torch_private.dtensor import FINDS_GLOBAL_INDICES, IS_OLD, argument_names, full_tensor_of, may_be_empty
from .foreach_operations import specs_of
from .making import cut
from .sharded_dtensor import call_unhandled, handle_operations, handler_of

_aten = torch.ops.aten
# Operations that return indices; norms, some of which are extremes; and all operations that fail without elements.
_INDICES = (_aten.max.dim, _aten.min.dim, _aten.argmax.default, _aten.argmin.default)
_NORMS = (_aten.linalg_vector_norm.default, _aten._foreach_norm.Scalar)
_EXTREMES = (
    *(_aten.max.default, _aten.amax.default, _aten.min.default, _aten.amin.default, _aten.aminmax.default),
    *(_aten._foreach_max.default, *_INDICES, *_NORMS),
)
# Operations for which the dims `()` mean all dims.
_OVER_DIMS = (
    *(_aten.sum.dim_IntList, _aten.nansum.default, _aten.mean.dim, _aten.amax.default, _aten.amin.default),
    *(_aten.var.correction, _aten.std.correction, _aten.var_mean.correction, _aten.linalg_vector_norm.default),
    *(_aten.count_nonzero.dim_IntList,),
)
_NONE, _MEAN = 0, 1  # values of a loss's argument `reduction`
_MEAN_LOSSES = {
    _aten.mse_loss.default: _aten.mse_loss_backward.default,
    _aten.smooth_l1_loss.default: _aten.smooth_l1_loss_backward.default,
    _aten.huber_loss.default: _aten.huber_loss_backward.default,
    _aten.soft_margin_loss.default: _aten.soft_margin_loss_backward.default,
    _aten.binary_cross_entropy.default: _aten.binary_cross_entropy_backward.default,
}


def reduce_full_tensors() -> None:
    """Makes these reductions those of the full tensor. All ranks must call them.

    - `mse_loss` and similar losses are the mean over all elements, also if ranks hold different numbers of them.
    - Extremes, and norms that are extremes, are those of all elements, also where some rank holds none. Their indices
      are those of the full tensor; torch 2.11 returns those of a rank's shard.
    - `item()` of a sharded tensor of one element returns it on all ranks.
    - Reductions over the dims `()`, which occur in the gradients of extremes, are over all dims. The gradient of
      `p.select(-1, 0)` is that of the last dim: torch before 2.15 takes a negative dim for another one.
    """
    handle_operations(_MEAN_LOSSES.keys(), _mean_loss)
    handle_operations(_MEAN_LOSSES.values(), _mean_loss_backward)
    handle_operations([_aten.binary_cross_entropy_with_logits.default], _mean_loss)
    handle_operations(_EXTREMES, _extreme)
    handle_operations([_aten._local_scalar_dense.default], _item)
    for op in _OVER_DIMS:
        handle_operations([op], partial(_over_all_dims, handler_of(op)))
    if IS_OLD:
        handle_operations([_aten.select_backward.default], _select_backward)


def _mean_loss(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    each = _before_mean(op, args, kwargs)
    return call_unhandled(op, args, kwargs) if each is None else each.mean()


def _mean_loss_backward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    each = _before_mean(op, args, kwargs)
    return call_unhandled(op, args, kwargs) if each is None else each / args[1].numel()


def _before_mean(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the result of `op` with `reduction="none"`, or None if its reduction is not the mean."""
    names = argument_names(op)
    index = names.index("reduction")
    rest = {**dict(zip(names[index:], args[index:], strict=False)), **kwargs}
    if rest.get("reduction", _MEAN) != _MEAN:
        return None
    return op(*args[:index], **{**rest, "reduction": _NONE})


def _extreme(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, *rest = args
    is_sum = op in _NORMS and not math.isinf(rest[0] if rest else kwargs.get("ord", 2))
    if is_sum and (isinstance(target, Tensor) or None not in specs_of(target)):
        return call_unhandled(op, args, kwargs)
    if not isinstance(target, Tensor):
        return [each for one in target for each in _extreme_of_one(op, one, [one], rest, kwargs)]
    return _extreme_of_one(op, target, target, rest, kwargs)


def _extreme_of_one(op: Any, target: Any, given: Any, rest: list[Any], kwargs: dict[str, Any]) -> Any:
    """Returns the result of `op` for `target`. `given`: the target, or a list that holds it."""
    needs_all = isinstance(target, DTensor) and (may_be_empty(target) or (op in _INDICES and not FINDS_GLOBAL_INDICES))
    if not needs_all:
        return call_unhandled(op, (given, *rest), kwargs)
    mesh, full = target.device_mesh, full_tensor_of(target)
    found = op(full if given is target else [full], *rest, **kwargs)
    return map_tensors(found, lambda each: cut(each, mesh, [Replicate()] * mesh.ndim))


def _item(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the number of a tensor of one element, which only one rank may hold."""
    (target,) = args
    return op(full_tensor_of(target))


def _over_all_dims(handler: Callable[..., Any], op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Calls `handler` with all dims of the first argument in place of the dims `()`."""
    index = argument_names(op).index("dim")
    dims = args[index] if len(args) > index else kwargs.get("dim")
    if isinstance(dims, list | tuple) and not dims:
        every = list(range(args[0].dim()))
        if len(args) > index:
            args = (*args[:index], every, *args[index + 1 :])
        else:
            kwargs = {**kwargs, "dim": every}
    return handler(op, args, kwargs)


def _select_backward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    gradient, shape, dim, *rest = args
    return call_unhandled(op, (gradient, shape, dim % len(shape), *rest), kwargs)
