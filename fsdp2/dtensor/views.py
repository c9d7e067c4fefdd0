"""Makes views of DTensors write to their base, as views of plain tensors do.

Torch returns copies for `p[2]`, `p.split(4)[0]` and `p.diagonal()` where ranks hold rows, and refuses `p.view(-1)`
where they hold different numbers of rows. A write to a copy is silently lost, as in
`embedding.weight[padding_idx].zero_()`, or when rows of a gradient are cleared.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..engine.compat import local_of
from ..engine.nested import map_tensors
from .compat import (
    cut,
    dtensor,
    dtensor_like,
    full_tensor_of,
    is_sharded_nowhere,
    is_strided,
    spec_of,
)
from .copied_views import as_views
from .sharded_dtensor import ShardedDTensor, call_unhandled, handle_operations

_aten = torch.ops.aten
# The views for which torch gathers: for the last one from 2.15 on, if there are fewer rows than ranks. All other views
# are in the memory of their base.
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
    """Makes writes to a view of a DTensor write to the DTensor.

    A write gathers the full tensor. Every rank must take the view, and write to it.
    """
    handle_operations(_VIEWS, _take_view)
    handle_operations([_aten.view.default], _reshape)
    handle_operations([_aten.detach.default, _aten.alias.default], _share)


def _take_view(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    base = args[0]
    if is_sharded_nowhere(base):
        return _take_local_view(op, args, kwargs)
    if op is _aten.unbind.int and Shard([*args[1:], 0][0] % base.dim()) in base.placements:
        return _view_gathered(op, args, kwargs)
    try:
        result = call_unhandled(op, args, kwargs)
    except ValueError:  # torch 2.11, of a dim that two mesh axes cut
        if not is_strided(base):
            raise
        return _view_gathered(op, args, kwargs)
    return as_views(result, base, op, args, kwargs) if _writes_through(base) else result


def _take_local_view(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Takes views of each rank's memory, for tensors that are not sharded."""
    views = op(local_of(args[0]), *args[1:], **kwargs)
    return map_tensors(views, partial(dtensor_like, args[0]))


def _view_gathered(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Takes a view that torch refuses, as in `for row in p`: each rank gets all of it by one gather, as by `p[i]`."""
    base, mesh = args[0], args[0].device_mesh
    views = op(full_tensor_of(base).clone(), *args[1:], **kwargs)
    replicated = map_tensors(views, lambda each: cut(each.contiguous(), mesh, [Replicate()] * mesh.ndim))
    return as_views(replicated, base, op, args, kwargs) if _writes_through(base) else replicated


def _share(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carries out `detach` and `alias` in less time than torch."""
    return dtensor(op(local_of(args[0])), spec_of(args[0]))


def _reshape(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Carries out `p.view(-1)`, which torch refuses, or copies, if ranks have different numbers of rows."""
    base = args[0]
    try:
        result = call_unhandled(op, args, kwargs)
        return as_views(result, base, op, args, kwargs) if _writes_through(base) else result
    except RuntimeError:  # torch raises it when it plans the operation, on every rank
        if not _writes_through(base):
            raise
    if tuple(args[1]) == tuple(base.shape):
        return dtensor(local_of(base).view(local_of(base).shape), spec_of(base))
    reshaped = op(full_tensor_of(base).contiguous(), *args[1:], **kwargs)
    replicated = cut(reshaped, base.device_mesh, [Replicate()] * base.device_mesh.ndim)
    return as_views(replicated, base, op, args, kwargs)


def _writes_through(base: DTensor) -> bool:
    """Returns True if writes to views of `base` must write to `base`.

    They need not if it is an activation, whose views autograd tracks, or a tensor without memory that torch.compile
    traces.
    """
    is_activation = torch.is_grad_enabled() and base.grad_fn is not None
    return type(base) in (DTensor, ShardedDTensor) and not is_activation and type(local_of(base)) is Tensor
