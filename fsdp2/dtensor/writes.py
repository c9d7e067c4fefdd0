"""Makes writes in place to DTensors those of plain tensors: each rank writes to its own shard.

DTensor has no rule for some of them, among which are some of `torch.nn.init`. Others it carries out on some ranks only,
or by what holds for the full tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..engine.compat import dtensor_spec, local_if_any, local_of
from ..engine.owners import sharded_in
from ..engine.rank_facts import all_reduce_over
from .compat import (
    REPLICATES_COPIED_GRADIENTS,
    cut,
    dtensor,
    follow_local,
    full_tensor_of,
    is_strided,
    may_be_empty,
    name_of,
    refuse_plain_target,
    set_local_and_spec,
    spec_of,
)
from .sharded_dtensor import call_unhandled, handle_operations

_aten = torch.ops.aten
_NEW = (_aten.new_empty.default, _aten.new_zeros.default, _aten.new_ones.default, _aten.new_full.default)
_IN_PLACE = (
    *(_aten.add_.Tensor, _aten.sub_.Tensor, _aten.mul_.Tensor, _aten.div_.Tensor),
    *(_aten.copy_.default, _aten.lerp_.Scalar),
    *(_aten.addcmul_.default, _aten.addcdiv_.default),
    *(_aten.masked_fill_.Scalar, _aten.masked_fill_.Tensor),
)
_TRANSPOSES = {_aten.t_.default: _aten.t.default, _aten.transpose_.default: _aten.transpose.int}


def write_to_shards() -> None:
    """Makes these writes possible, and exact:

    - `p.add_(q)` and others where two mesh axes cut a dim unevenly, or where there are fewer rows than ranks;
    - `p[mask] = number`, `p[:, 1] = 0`, and `p[indices, 3] = number`, as in `sparse_`, if all ranks have the same
      indices: else it raises on all of them;
    - `eye_`, of which each rank writes its shard. Torch writes the full identity to each shard;
    - `q.t_()`, as in `orthogonal_`, of every DTensor but a sharded parameter.

    `total += p.norm()`, where `total` is plain, raises an error that says what to do.
    """
    handle_operations(_IN_PLACE, _write)
    handle_operations(_NEW, _new)
    if REPLICATES_COPIED_GRADIENTS:
        handle_operations([_aten.new_empty_strided.default], _new_strided)
    handle_operations([_aten.fill_.Tensor], _fill)
    handle_operations([_aten.index_put_.default], _put)
    handle_operations([_aten.index_fill_.int_Scalar], _fill_at)
    handle_operations([_aten.eye.m_out], _eye)
    handle_operations(_TRANSPOSES, _transpose_in_place)


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
    may_torch = not (may_be_empty(target) or is_strided(target))
    if is_alike or may_torch or any(each.shape != target.shape for each in others):
        return call_unhandled(op, args, kwargs)
    op(local_of(target), *(_local_like(target, each) for each in rest), **kwargs)
    return target


def _write_alike(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Carries out `op`, which is elementwise, on local tensors, and returns True, if all operands are distributed
    alike. DTensor would spend more time on planning the operation than on computing it.
    """
    spec = spec_of(args[0])
    for each in args:
        if isinstance(each, Tensor) and not (isinstance(each, DTensor) and spec_of(each) == spec):
            return False
    op(*map(local_if_any, args), **kwargs)
    return True


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
    """Carries out `target[mask] = number` and `target[indices] = number`."""
    target, indices, value, *rest = args
    is_number = isinstance(target, DTensor) and not isinstance(value, DTensor) and not value.dim()
    if is_number and not any(rest) and not any(kwargs.values()) and _are_plain_indices(indices):
        op(local_of(target), [_mask_at(target, indices)], value)
        return target
    if is_number and len(indices) == 1 and _is_mask_of(target, indices[0]):
        op(local_of(target), [_local_like(target, indices[0])], value, *rest, **kwargs)
        return target
    return call_unhandled(op, args, kwargs)


def _fill_at(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carries out `target[indices] = number` in torch 2.15, which fills along one dim of a view."""
    target, dim, indices, number = args
    if not isinstance(target, DTensor) or not _are_plain_indices([indices]):
        return call_unhandled(op, args, kwargs)
    before = [None] * (dim % target.dim())
    local_of(target).masked_fill_(_mask_at(target, [*before, indices]), number)
    return target


def _is_mask_of(target: DTensor, mask: Any) -> bool:
    """Returns True if `mask` has a bool for each element of `target`."""
    is_mask = isinstance(mask, DTensor) and mask.dtype == torch.bool
    return is_mask and (target.shape, target.device_mesh) == (mask.shape, mask.device_mesh)


def _are_plain_indices(indices: Sequence[Any]) -> bool:
    given = [each for each in indices if each is not None]
    return all(type(each) is Tensor and each.dtype != torch.bool for each in given)


def _mask_at(target: DTensor, indices: Sequence[Tensor | None]) -> Tensor:
    """Returns a mask of the elements in this rank's shard of `target` that are at `indices` of the full tensor. Every
    rank must call it.

    Raises:
        RuntimeError: `indices` differ between ranks; on all of them.
    """
    mesh, device = target.device_mesh, local_of(target).device
    mask = torch.zeros(target.shape, dtype=torch.int8, device=device)
    mask[tuple(slice(None) if each is None else each.to(device) for each in indices)] = 1
    extremes = torch.stack([mask, -mask])
    all_reduce_over(extremes, [mesh.get_group(axis) for axis in range(mesh.ndim)], largest=True)
    if extremes.sum(0).any():
        raise RuntimeError(
            f"writing to indices of a DTensor of global shape {tuple(target.shape)}: expected the same indices on "
            "every rank, got others on some. Compute them after the same torch.manual_seed on every rank."
        )
    return local_of(cut(mask.bool(), mesh, target.placements))


def _eye(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carries out `nn.init.eye_`: each rank writes its shard."""
    out = kwargs["out"]
    if tuple(args) != tuple(out.shape):
        return call_unhandled(op, args, kwargs)
    local_of(out).copy_(local_of(cut(torch.eye(*args, dtype=out.dtype), out.device_mesh, out.placements)))
    return out


def _transpose_in_place(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Transposes a DTensor in place.

    Raises:
        NotImplementedError: it is a sharded parameter, whose shape the group relies on.
    """
    target = args[0]
    param = sharded_in(local_of(target))
    if param is not None:
        raise NotImplementedError(
            f"{param.name}: {name_of(op)} of a sharded parameter, which can't change its "
            "shape. Transpose it before fully_shard, or write p.t(), which is a new tensor."
        )
    transposed = _TRANSPOSES[op](*args, **kwargs)
    set_local_and_spec(target, local_of(transposed), transposed)
    return follow_local(op, args, kwargs)
