"""Views of DTensors: `p[2]`, `p.split(4)[0]`, `p.diagonal()`, which torch hands out as copies where ranks hold rows,
and `p.view(-1)`, which it refuses where they hold different numbers of rows.

What is written to a copy is lost silently: `embedding.weight[padding_idx].zero_()`, or rows of a gradient that are
cleared. The views made here know their base, and write to it, as views of plain tensors do.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..core.compat import local_of
from ..ext.nested import map_tensors
from .compat import (
    cut,
    dtensor,
    dtensor_like,
    full_tensor_of,
    is_masked,
    is_partial,
    is_sharded_nowhere,
    refuse_plain_target,
    spec_of,
)
from .copied_views import as_views, begin_dispatch
from .sharded_dtensor import ShardedDTensor, call_unhandled, handle_operations

_aten = torch.ops.aten
# Views for which torch gathers; for the last, from 2.15 on, if there are fewer rows than ranks. All other views lie in
# the memory of their base.
_VIEWS = (
    _aten.select.int,
    _aten.slice.Tensor,
    _aten.split.Tensor,
    _aten.split_with_sizes.default,
    _aten.diagonal.default,
    _aten.as_strided.default,
    _aten.unbind.int,
    _aten.t.default,
)


def write_through_views() -> None:
    """Has writes to a view of a DTensor write to the DTensor, and makes `p[...] = 0` possible.

    A write gathers the full tensor on every rank, each of which must do it, as each must to take the view.
    """
    begin_dispatch()
    handle_operations(_VIEWS, _take_view)
    handle_operations([_aten.view.default], _reshape)
    handle_operations([_aten.detach.default, _aten.alias.default], _share)
    handle_operations([_aten.fill_.Tensor], _fill)


def _take_view(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    base = args[0]
    if is_sharded_nowhere(base):
        return _take_local_view(op, args, kwargs)
    if op is _aten.unbind.int and Shard([*args[1:], 0][0] % base.dim()) in base.placements:
        return _unbind_rows(op, args, kwargs)
    result = call_unhandled(op, args, kwargs)
    return as_views(result, base, op, args, kwargs) if _writes_through(base) else result


def _take_local_view(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Takes views of each rank's memory, where no rank holds a shard. From 2.15 on torch would reduce norms and
    products to other memory.
    """
    views = op(local_of(args[0]), *args[1:], **kwargs)
    return map_tensors(views, partial(dtensor_like, args[0]))


def _unbind_rows(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Serves `for row in p`: each rank gets all rows, as by `p[i]`, by one gather. Torch refuses to."""
    base, mesh = args[0], args[0].device_mesh
    rows = op(full_tensor_of(base).clone(), *args[1:], **kwargs)
    replicated = [cut(each.contiguous(), mesh, [Replicate()] * mesh.ndim) for each in rows]
    return as_views(replicated, base, op, args, kwargs) if _writes_through(base) else replicated


def _share(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Detaches any DTensor in less time than torch."""
    if is_masked(args[0]):
        return call_unhandled(op, args, kwargs)
    return dtensor(op(local_of(args[0])), spec_of(args[0]))


def _reshape(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Serves `p.view(-1)`. The ranks' rows are shards of it only if each rank has as many; torch refuses, or copies."""
    base = args[0]
    try:
        result = call_unhandled(op, args, kwargs)
        return as_views(result, base, op, args, kwargs) if _writes_through(base) else result
    except RuntimeError:  # of planning: on every rank
        if not _writes_through(base) or is_partial(base):
            raise
    if tuple(args[1]) == tuple(base.shape):
        return dtensor(local_of(base).view(local_of(base).shape), spec_of(base))
    reshaped = op(full_tensor_of(base).contiguous(), *args[1:], **kwargs)
    replicated = cut(reshaped, base.device_mesh, [Replicate()] * base.device_mesh.ndim)
    return as_views(replicated, base, op, args, kwargs)


def _writes_through(base: DTensor) -> bool:
    """Returns True if writes to views of `base` must reach it. They need not if it is an activation, whose views
    autograd follows; and what torch.compile traces has no memory.
    """
    is_activation = torch.is_grad_enabled() and base.grad_fn is not None
    return type(base) in (DTensor, ShardedDTensor) and not is_activation and type(local_of(base)) is Tensor


def _fill(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Fills with a tensor, as `p[:, 1] = 0` does. Torch refuses to."""
    target, value = args
    refuse_plain_target(op, target)
    if is_partial(target):
        return call_unhandled(op, args, kwargs)
    local_of(target).fill_(full_tensor_of(value) if isinstance(value, DTensor) else value)
    return target
