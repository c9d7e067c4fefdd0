"""Operations that torch 2.11 to 2.15 carries out on DTensors otherwise than on plain tensors, silently; and some that
optimizers need and it has no rule for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from ..core.compat import dtensor_spec, local_if_any, local_of
from ..ext.nested import map_tensors, tensors_in
from .compat import (
    FINDS_PLACES,
    argument_names,
    cut,
    dtensor,
    full_tensor_of,
    is_partial,
    is_strided,
    partial_kinds,
    reduced,
    refuse_plain_target,
    spec_of,
)
from .foreach_operations import specs_of
from .partial_results import write_in_place
from .sharded_dtensor import call_unhandled, handle_operations, handler_of

_aten = torch.ops.aten
_NEW = (_aten.new_empty.default, _aten.new_zeros.default, _aten.new_ones.default, _aten.new_full.default)
_IN_PLACE = (
    *(_aten.add_.Tensor, _aten.sub_.Tensor, _aten.mul_.Tensor, _aten.div_.Tensor),
    *(_aten.copy_.default, _aten.lerp_.Scalar),
    *(_aten.addcmul_.default, _aten.addcdiv_.default),
    *(_aten.masked_fill_.Scalar, _aten.masked_fill_.Tensor),
)
_COLLECTIVES = (
    *("broadcast_", "allreduce_", "allreduce_coalesced_", "reduce_", "gather_", "scatter_", "send", "recv_"),
    *("allgather_", "_allgather_base_", "allgather_coalesced_", "allgather_into_tensor_coalesced_"),
    *("reduce_scatter_", "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"),
    *("alltoall_", "alltoall_base_", "recv_any_source_"),
)
# Operations that find places; norms, some of which are extremes; and all that have no value for no elements.
_PLACES = (_aten.max.dim, _aten.min.dim, _aten.argmax.default, _aten.argmin.default)
_NORMS = (_aten.linalg_vector_norm.default, _aten._foreach_norm.Scalar)
_EXTREMES = (
    *(_aten.max.default, _aten.amax.default, _aten.min.default, _aten.amin.default, _aten.aminmax.default),
    *(_aten._foreach_max.default, *_PLACES, *_NORMS),
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


def put_by_masks() -> None:
    """Makes `p[mask] = number` possible."""
    handle_operations([_aten.index_put_.default], _put)
    handle_operations([_aten.index_fill_.int_Scalar], _fill_places)


def write_uneven_shards() -> None:
    """Makes it possible to write to a tensor that two mesh axes cut unevenly along one dim, or that has fewer rows than
    ranks. `total += p.norm()`, where `total` is plain, raises an error that says what to do.
    """
    handle_operations(_IN_PLACE, _write)
    handle_operations(_NEW, _new)


def average_losses() -> None:
    """Has `mse_loss` and similar losses be the mean over all elements, also if ranks hold different numbers of them."""
    handle_operations(_MEAN_LOSSES.keys(), _mean_loss)
    handle_operations(_MEAN_LOSSES.values(), _mean_loss_backward)
    handle_operations([_aten.binary_cross_entropy_with_logits.default], _mean_loss)


def find_extremes() -> None:
    """Has extremes, and norms that are extremes, be those of all elements, also where some rank holds none. Their
    places are those in the full tensor; torch 2.11's are places in a rank's shard.
    """
    handle_operations(_EXTREMES, _extreme)


def reduce_over_all_dims() -> None:
    """Has reductions over the dims `()`, which occur in the gradients of extremes, reduce over all dims."""
    for op in _OVER_DIMS:
        handle_operations([op], partial(_over_all_dims, handler_of(op)))


def select_backward() -> None:
    """Has `p.select(-1, 0)` get its gradient. Torch takes a negative dim for another one."""
    handle_operations([_aten.select_backward.default], _select_backward)


def read_numbers() -> None:
    """Has `item()` of a Partial number raise, for one rank alone may call it, to print it. All ranks come to
    `if p.isnan().any():`, which reduces; and all must read a sharded parameter of one element.
    """
    handle_operations([_aten._local_scalar_dense.default], _item)


def refuse_collectives() -> None:
    """Has the collectives of `torch.distributed` raise an error that says what to do."""
    collectives = (getattr(torch.ops.c10d, name, None) for name in _COLLECTIVES)  # releases of torch add and drop some
    handle_operations((each.default for each in collectives if each is not None), _refuse_collective)


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


def _mean_loss(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    each = _before_mean(op, args, kwargs)
    return call_unhandled(op, args, kwargs) if each is None else each.mean()


def _mean_loss_backward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    each = _before_mean(op, args, kwargs)
    return call_unhandled(op, args, kwargs) if each is None else each / args[1].numel()


def _before_mean(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns what `op` returns with `reduction="none"`; None if it takes no mean."""
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
    """Returns what `op` finds in `target`. `given`: the target, or a list of it."""
    if op in _NORMS and partial_kinds(target):  # torch would take those of the ranks' largest, without their signs
        target = reduced(target)
        given = [target] if isinstance(given, list) else target
    needs_all = isinstance(target, DTensor) and (_may_be_empty(target) or (op in _PLACES and not FINDS_PLACES))
    if not needs_all:
        return call_unhandled(op, (given, *rest), kwargs)
    mesh, full = target.device_mesh, full_tensor_of(target)
    found = op(full if given is target else [full], *rest, **kwargs)
    return map_tensors(found, lambda each: cut(each, mesh, [Replicate()] * mesh.ndim))


def _may_be_empty(tensor: DTensor) -> bool:
    """Returns True if some rank may hold nothing of `tensor`; the same on all ranks."""
    ranks = [1] * tensor.dim()
    for axis, placement in enumerate(tensor.placements):
        dim = getattr(placement, "dim", None)
        if dim is not None:
            ranks[dim] *= tensor.device_mesh.size(axis)
    return any(n > 1 and (n - 1) * -(-rows // n) >= rows for rows, n in zip(tensor.shape, ranks, strict=True))


def _item(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the number that all ranks have in common.

    Raises:
        RuntimeError: the number is Partial.
    """
    (target,) = args
    partials = [each for each in target.placements if each.is_partial()]
    if partials and target.dtype != torch.bool:
        raise RuntimeError(
            f"item() of a DTensor of placement {partials[0]}: this rank holds a part of the number only. Call "
            "full_tensor().item() instead, on every rank."
        )
    is_everywhere = all(each.is_replicate() for each in target.placements)
    return call_unhandled(op, args, kwargs) if is_everywhere else op(full_tensor_of(target))


def _put(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Serves `target[mask] = number`: each rank writes to its own shard."""
    target, indices, value, *_ = args
    is_number = len(indices) == 1 and not isinstance(value, DTensor) and not value.dim()
    if not is_number or not (_is_mask_of(target, indices[0]) or _is_mask_of_scalar(target, indices[0])):
        return write_in_place(op, args, kwargs)
    op(local_of(target), [_local_like(target, indices[0])], *args[2:], **kwargs)
    return target


def _fill_places(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Serves `target[mask] = number` of a target without dims in torch 2.15, where that of others is `masked_fill_`."""
    target, dim, places, number = args
    if not _is_mask_of_scalar(target, places):
        return write_in_place(op, args, kwargs)
    op(local_of(target), dim, places, number)
    return target


def _write_alike(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Carries out `op` on local tensors if all operands are distributed alike, with nothing to reduce, and returns True
    then: it acts on each element by itself. To plan that takes DTensor longer than to compute.
    """
    spec = spec_of(args[0])
    for each in args:
        if isinstance(each, Tensor) and not (isinstance(each, DTensor) and spec_of(each) == spec):
            return False
    if any(each.is_partial() for each in spec.placements):
        return False
    op(*map(local_if_any, args), **kwargs)
    return True


def _write(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carries out `op` in place. An operand that is distributed in another way is redistributed like the target where
    torch might fail: some ranks hold nothing, or two axes cut the same dim.
    """
    target, *rest = args
    refuse_plain_target(op, target)
    if _write_alike(op, args, kwargs):
        return target
    others = [each for each in rest if isinstance(each, DTensor)]
    is_alike = all(each.placements == target.placements for each in others)
    may_torch = not (_may_be_empty(target) or is_strided(target))
    if is_alike or may_torch or any(each.shape != target.shape for each in others):
        return write_in_place(op, args, kwargs)
    op(local_of(target), *(_local_like(target, each) for each in rest), **kwargs)
    return target


def _local_like(target: DTensor, tensor: Any) -> Any:
    """Returns this rank's shard of `tensor`, distributed as `target` is; a plain value is equal on all ranks."""
    if not isinstance(tensor, DTensor):
        return tensor
    if (tensor.placements, tensor.device_mesh) == (target.placements, target.device_mesh):
        return local_of(tensor)
    return local_of(cut(full_tensor_of(tensor), target.device_mesh, target.placements))


def _new(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns a new tensor like one that two axes cut along one dim, perhaps unevenly: torch takes the numbers of rows
    of other ranks.
    """
    like, shape, *rest = args
    if tuple(shape) != tuple(like.shape) or not is_strided(like):
        return call_unhandled(op, args, kwargs)
    local = op(local_of(like), local_of(like).shape, *rest, **kwargs)
    return dtensor(local, dtensor_spec(like.device_mesh, like.placements, tuple(shape), local.dtype))


def _is_mask_of(target: Any, mask: Any) -> bool:
    """Returns True if `mask` has a bool for each element of `target`, which is not Partial."""
    if not (isinstance(target, DTensor) and isinstance(mask, DTensor)) or mask.dtype != torch.bool:
        return False
    is_like = (target.shape, target.device_mesh) == (mask.shape, mask.device_mesh)
    return is_like and not is_partial(target)


def _is_mask_of_scalar(target: Any, places: Any) -> bool:
    """Returns True if all ranks have the one element of `target`. Its mask comes as places, which Python has read."""
    is_one = isinstance(target, DTensor) and target.shape == (1,) and not isinstance(places, DTensor)
    return is_one and all(each.is_replicate() for each in target.placements)


def _refuse_collective(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses a collective on a DTensor.

    Raises:
        NotImplementedError: always, on every rank.
    """
    name = op._schema.name.removeprefix("c10d::").strip("_")
    first = next(each for each in tensors_in(args, kwargs) if isinstance(each, DTensor))
    raise NotImplementedError(
        f"torch.distributed's {name} of a DTensor of global shape {tuple(first.shape)}: each rank holds another part "
        "of it. full_tensor() has all of it, on every rank. Gradients of sharded parameters are averaged already; and "
        "have equal weights on all ranks before fully_shard, or load them after."
    )
