"""Makes the functions of `torch.nn.init` write the values of plain tensors to DTensors.

DTensor has no rule for some of their operations, and computes other results for some.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..engine.compat import local_of
from ..engine.owners import sharded_in
from ..engine.rank_facts import all_reduce_over
from .compat import cut, follow_local, is_partial, name_of, set_local_and_spec
from .sharded_dtensor import call_unhandled, handle_operations, handler_of

_aten = torch.ops.aten
_TRANSPOSES = {_aten.t_.default: _aten.t.default, _aten.transpose_.default: _aten.transpose.int}


def initialise_like_plain_tensors() -> None:
    """Makes every function of `torch.nn.init` give a sharded parameter the values of a plain one; the random functions
    do so on a mesh of CPUs, from the same seed (see random_ops.py).

    - `eye_` writes this rank's shard. Torch writes the full identity to each shard.
    - `q.t_()`, as in `orthogonal_`, works on every DTensor but a sharded parameter. Torch has no rule for it.
    - `p[indices, 3] = number`, as in `sparse_`, is exact if all ranks have the same indices, and else raises on all of
      them. Torch refuses plain indices.
    """
    handle_operations([_aten.eye.m_out], _eye)
    handle_operations(_TRANSPOSES, _transpose_in_place)
    put, fill = _aten.index_put_.default, _aten.index_fill_.int_Scalar
    handle_operations([put], partial(_put, handler_of(put)))
    handle_operations([fill], partial(_fill, handler_of(fill)))


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


def _put(handler: Callable[..., Any], op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target, indices, value, *rest = args
    is_number = isinstance(target, DTensor) and not isinstance(value, DTensor) and not value.dim()
    has_elements = is_number and not is_partial(target)
    if not has_elements or any(rest) or any(kwargs.values()) or not _are_plain_indices(indices):
        return handler(op, args, kwargs)
    op(local_of(target), [_mask_at(target, indices)], value)
    return target


def _fill(handler: Callable[..., Any], op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carries out the assignment of `_put` in torch 2.15, which fills along one dim of a view."""
    target, dim, indices, number = args
    placements = target.placements if isinstance(target, DTensor) else ()
    is_cut = any(each.is_shard() for each in placements) and not any(each.is_partial() for each in placements)
    if not is_cut or not _are_plain_indices([indices]):
        return handler(op, args, kwargs)
    before = [None] * (dim % target.dim())
    local_of(target).masked_fill_(_mask_at(target, [*before, indices]), number)
    return target


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
