"""Makes operations on DTensors compute the results of plain tensors.

Torch 2.11 to 2.15 silently computes other results for some of them, and has no rule for some that optimizers need.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from ..engine.compat import dtensor_spec, local_if_any, local_of
from ..engine.nested import map_tensors, tensors_in
from .compat import (
    FINDS_GLOBAL_INDICES,
    REPLICATES_COPIED_GRADIENTS,
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
from .wrapped_after import advice_about_caller

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


def put_by_masks() -> None:
    """Makes `p[mask] = number` possible."""
    handle_operations([_aten.index_put_.default], _put)
    handle_operations([_aten.index_fill_.int_Scalar], _fill_indices)


def write_uneven_shards() -> None:
    """Makes it possible to write to a tensor that two mesh axes cut unevenly along one dim, or that has fewer rows than
    ranks, and makes `total += p.norm()`, where `total` is plain, raise an error that says what to do.
    """
    handle_operations(_IN_PLACE, _write)
    handle_operations(_NEW, _new)
    if REPLICATES_COPIED_GRADIENTS:
        handle_operations([_aten.new_empty_strided.default], _new_strided)


def average_losses() -> None:
    """Makes `mse_loss` and similar losses the mean over all elements, also if ranks hold different numbers of them."""
    handle_operations(_MEAN_LOSSES.keys(), _mean_loss)
    handle_operations(_MEAN_LOSSES.values(), _mean_loss_backward)
    handle_operations([_aten.binary_cross_entropy_with_logits.default], _mean_loss)


def find_extremes() -> None:
    """Computes extremes, and norms that are extremes, over all elements, also where some rank holds none. Their indices
    are those of the full tensor; torch 2.11 returns those of a rank's shard.
    """
    handle_operations(_EXTREMES, _extreme)


def reduce_over_all_dims() -> None:
    """Makes reductions over the dims `()`, which occur in the gradients of extremes, reduce over all dims."""
    for op in _OVER_DIMS:
        handle_operations([op], partial(_over_all_dims, handler_of(op)))


def select_backward() -> None:
    """Corrects the gradient of `p.select(-1, 0)`. Torch takes a negative dim for another one."""
    handle_operations([_aten.select_backward.default], _select_backward)


def read_numbers() -> None:
    """Makes `item()` of a Partial number raise, because one rank alone may call it, to print the number.

    Bools are reduced instead, because all ranks execute `if p.isnan().any():`. All ranks must call `item()` of a
    sharded parameter of one element, too.
    """
    handle_operations([_aten._local_scalar_dense.default], _item)


def refuse_collectives() -> None:
    """Makes the collectives of `torch.distributed` raise an error that says what to do."""
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
    if op in _NORMS and partial_kinds(target):  # torch would take the norm of each rank's unreduced value
        target = reduced(target)
        given = [target] if isinstance(given, list) else target
    needs_all = isinstance(target, DTensor) and (_may_be_empty(target) or (op in _INDICES and not FINDS_GLOBAL_INDICES))
    if not needs_all:
        return call_unhandled(op, (given, *rest), kwargs)
    mesh, full = target.device_mesh, full_tensor_of(target)
    found = op(full if given is target else [full], *rest, **kwargs)
    return map_tensors(found, lambda each: cut(each, mesh, [Replicate()] * mesh.ndim))


def _may_be_empty(tensor: DTensor) -> bool:
    """Returns True if some rank may hold no element of `tensor`. The result is the same on all ranks."""
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
            f"item() of a DTensor of placement {partials[0]}: this rank holds a value that is still to be reduced. "
            "Call full_tensor().item() instead, on every rank."
        )
    is_everywhere = all(each.is_replicate() for each in target.placements)
    return call_unhandled(op, args, kwargs) if is_everywhere else op(full_tensor_of(target))


def _put(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carries out `target[mask] = number`: each rank writes to its own shard."""
    target, indices, value, *_ = args
    is_number = len(indices) == 1 and not isinstance(value, DTensor) and not value.dim()
    if not is_number or not (_is_mask_of(target, indices[0]) or _is_mask_of_scalar(target, indices[0])):
        return write_in_place(op, args, kwargs)
    op(local_of(target), [_local_like(target, indices[0])], *args[2:], **kwargs)
    return target


def _fill_indices(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carries out `target[mask] = number` for a target without dims in torch 2.15, which calls `masked_fill_` for other
    targets.
    """
    target, dim, indices, number = args
    if not _is_mask_of_scalar(target, indices):
        return write_in_place(op, args, kwargs)
    op(local_of(target), dim, indices, number)
    return target


def _write_alike(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Carries out `op`, which is elementwise, on local tensors, and returns True, if all operands are distributed alike
    and none is Partial. DTensor would spend more time on planning the operation than on computing it.
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
    torch might fail: if some ranks hold no element, or if two axes cut the same dim.
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
    """Returns this rank's shard of `tensor`, distributed like `target`, or a plain value, which all ranks have."""
    if not isinstance(tensor, DTensor):
        return tensor
    if (tensor.placements, tensor.device_mesh) == (target.placements, target.device_mesh):
        return local_of(tensor)
    return local_of(cut(full_tensor_of(tensor), target.device_mesh, target.placements))


def _new(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns a new tensor like one that two axes cut along one dim, perhaps unevenly. Torch would give a rank the
    number of rows of another.
    """
    like, shape, *rest = args
    if tuple(shape) != tuple(like.shape) or not is_strided(like):
        return call_unhandled(op, args, kwargs)
    local = op(local_of(like), local_of(like).shape, *rest, **kwargs)
    return dtensor(local, dtensor_spec(like.device_mesh, like.placements, tuple(shape), local.dtype))


def _new_strided(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns a new tensor that is distributed like another one of its shape and contiguous strides."""
    like, shape, strides, *rest = args
    spec = dtensor_spec(like.device_mesh, like.placements, tuple(shape), kwargs.get("dtype") or like.dtype)
    is_like = tuple(shape) == tuple(like.shape) and not is_partial(like)
    if not is_like or tuple(strides) != spec.stride or rest:
        return call_unhandled(op, args, kwargs)
    return dtensor(_aten.new_empty.default(local_of(like), local_of(like).shape, **kwargs), spec)


def _is_mask_of(target: Any, mask: Any) -> bool:
    """Returns True if `mask` has a bool for each element of `target`, and `target` is not Partial."""
    if not (isinstance(target, DTensor) and isinstance(mask, DTensor)) or mask.dtype != torch.bool:
        return False
    is_like = (target.shape, target.device_mesh) == (mask.shape, mask.device_mesh)
    return is_like and not is_partial(target)


def _is_mask_of_scalar(target: Any, indices: Any) -> bool:
    """Returns True if all ranks have the one element of `target`. Torch has made plain indices of its mask."""
    is_one = isinstance(target, DTensor) and target.shape == (1,) and not isinstance(indices, DTensor)
    return is_one and all(each.is_replicate() for each in target.placements)


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
