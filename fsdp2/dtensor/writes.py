"""Makes writes in place to DTensors those of plain tensors: each rank writes to its own shard.

DTensor has no rule for some of them, among which are some of `torch.nn.init`. Others it carries out on some ranks only,
or by what holds for the full tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..engine.owners import sharded_in
from ..torch_private.dtensor import (
    REPLICATES_COPIED_GRADIENTS,
    follow_local,
    full_tensor_of,
    is_strided,
    may_be_empty,
    set_local_and_spec,
    spec_of,
)
from ..torch_private.internals import dtensor_spec, local_if_any, local_of
from .making import cut, dtensor
from .refusals import refuse_plain_target
from .sharded_dtensor import call_unhandled, handle_operations

_aten = torch.ops.aten
_NEW = (_aten.new_empty.default, _aten.new_zeros.default, _aten.new_ones.default, _aten.new_full.default)
_IN_PLACE = (
    *(_aten.add_.Tensor, _aten.sub_.Tensor, _aten.mul_.Tensor, _aten.div_.Tensor),
    *(_aten.copy_.default, _aten.lerp_.Scalar),
    *(_aten.addcmul_.default, _aten.addcdiv_.default),
    *(_aten.masked_fill_.Scalar, _aten.masked_fill_.Tensor),
)


def write_to_shards() -> None:
    """Makes these writes possible, and exact:

    - `p.add_(q)` and others where two mesh axes cut a dim unevenly, or where there are fewer rows than ranks;
    - `p[mask] = number` with a DTensor of the shape of `p`, as masks of pruning are;
    - `p[:, 1] = 0` where ranks hold rows;
    - `eye_`, of which each rank writes its shard: torch writes the full identity to each;
    - `q.t_()`, as in `orthogonal_`, of every DTensor but a sharded parameter.

    `total += p.norm()`, where `total` is plain, raises an error that says what to do.
    """
    handle_operations(_IN_PLACE, _write)
    handle_operations(_NEW, _new)
    if REPLICATES_COPIED_GRADIENTS:
        handle_operations([_aten.new_empty_strided.default], _new_strided)
    handle_operations([_aten.fill_.Tensor], _fill)
    handle_operations([_aten.index_put_.default], _put)
    handle_operations([_aten.eye.m_out], _eye)
    handle_operations([_aten.t_.default], _transpose_in_place)


def _write(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carries out `op`, which is elementwise, in place: on local tensors if all operands are distributed alike, for
    which DTensor would spend more time on planning than on computing. An operand that is distributed in another way is
    redistributed like the target where torch might fail: if some ranks hold no element, or two axes cut one dim.
    """
    target, *rest = args
    refuse_plain_target(op, target)
    spec, others = spec_of(target), [each for each in rest if isinstance(each, Tensor)]
    are_alike = all(isinstance(each, DTensor) and spec_of(each) == spec for each in others)
    if not are_alike:
        may_torch = not (may_be_empty(target) or is_strided(target))
        if may_torch or any(each.shape != target.shape if isinstance(each, DTensor) else each.dim() for each in others):
            return call_unhandled(op, args, kwargs)
        rest = [_local_like(target, each) for each in rest]
    op(local_of(target), *map(local_if_any, rest), **kwargs)
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
    if tuple(shape) != tuple(like.shape) or tuple(strides) != spec.stride or rest:
        return call_unhandled(op, args, kwargs)
    return dtensor(_aten.new_empty.default(local_of(like), local_of(like).shape, **kwargs), spec)


def _fill(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Fills `target` with a tensor, as `p[:, 1] = 0` does. Torch refuses it."""
    target, value = args
    refuse_plain_target(op, target)
    local_of(target).fill_(full_tensor_of(value) if isinstance(value, DTensor) else value)
    return target


def _put(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carries out `target[mask] = number`, where `mask` has a bool for each element of `target`."""
    target, (mask, *others), value, *rest = args
    is_mask = not others and isinstance(mask, DTensor) and mask.dtype == torch.bool
    is_number = isinstance(target, DTensor) and not isinstance(value, DTensor) and not value.dim()
    if not (is_mask and is_number and (target.shape, target.device_mesh) == (mask.shape, mask.device_mesh)):
        return call_unhandled(op, args, kwargs)
    op(local_of(target), [_local_like(target, mask)], value, *rest, **kwargs)
    return target


def _eye(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carries out `nn.init.eye_`: each rank writes its shard."""
    out = kwargs["out"]
    if tuple(args) != tuple(out.shape):
        return call_unhandled(op, args, kwargs)
    local_of(out).copy_(local_of(cut(torch.eye(*args, dtype=out.dtype), out.device_mesh, out.placements)))
    return out


def _transpose_in_place(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Transposes a DTensor in place, as `orthogonal_` does.

    Raises:
        NotImplementedError: it is a sharded parameter, whose shape the group relies on.
    """
    (target,) = args
    param = sharded_in(local_of(target))
    if param is not None:
        raise NotImplementedError(
            f"{param.name}: t_ of a sharded parameter, which can't change its shape. Transpose it before fully_shard, "
            "or write p.t(), which is a new tensor."
        )
    transposed = target.t()
    set_local_and_spec(target, local_of(transposed), transposed)
    return follow_local(op, args, kwargs)
