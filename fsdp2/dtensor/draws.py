"""Random values drawn into DTensors, or for others like them: torch gives each rank's part the same ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from ..core.comm import broadcast_over, moves_data
from .compat import argument_names, cut, local_of, whole_of
from .sharded_dtensor import call_unhandled, handle_operations

_aten = torch.ops.aten
_DRAW_IN_PLACE = (
    _aten.normal_.default,
    _aten.uniform_.default,
    _aten.bernoulli_.float,
    _aten.exponential_.default,
    _aten.log_normal_.default,
    _aten.cauchy_.default,
    _aten.geometric_.default,
    _aten.random_.default,
    _aten.random_.to,
    getattr(_aten.random_, "from"),
)
_DRAW_LIKE = (
    _aten.rand_like.default,
    _aten.randn_like.default,
    _aten.randint_like.default,
    _aten.randint_like.low_dtype,
)
# The values of the first argument matter, too.
_DRAW_FROM = (
    _aten.bernoulli.default,
    _aten.multinomial.default,
    _aten.normal.Tensor_float,
    _aten.normal.float_Tensor,
    _aten.normal.Tensor_Tensor,
    _aten.poisson.default,
)


def draw_like_plain_tensors() -> None:
    """What draws random values into a ShardedDTensor on a mesh of CPUs, or for one like it, gives each rank its
    part of what a plain tensor would get from the same seed, for any number of ranks. What ranks hold alike is drawn
    alike, whatever their seeds: from the generator of the first of them.

    `rrelu` in training raises: each rank would draw slopes of its own.
    """
    handle_operations(_DRAW_IN_PLACE, _draw_in_place)
    handle_operations(_DRAW_LIKE, partial(_draw, _blank))
    handle_operations(_DRAW_FROM, partial(_draw, whole_of))
    handle_operations([_aten.rrelu_with_noise.default, _aten.rrelu_with_noise_.default], _rrelu)


def _draw_in_place(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    target = args[0]
    if _is_drawn_by_torch(target):
        return call_unhandled(op, args, kwargs)
    local_of(target).copy_(local_of(_drawn(_blank, op, args, kwargs)))
    return target


def _draw(whole: Callable[[DTensor], Tensor], op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    first = next(each for each in args if isinstance(each, DTensor))
    return call_unhandled(op, args, kwargs) if _is_drawn_by_torch(first) else _drawn(whole, op, args, kwargs)


def _is_drawn_by_torch(target: DTensor) -> bool:
    return local_of(target).device.type != "cpu" or any(each.is_partial() for each in target.placements)


def _drawn(whole: Callable[[DTensor], Tensor], op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DTensor:
    """This rank's part of what `op` makes of plain tensors: of `whole(each)` in place of each DTensor."""
    first = next(each for each in args if isinstance(each, DTensor))
    mesh, generator = first.device_mesh, kwargs.get("generator") or torch.default_generator
    before = generator.get_state()
    plain = [whole(each) if isinstance(each, DTensor) else each for each in args]
    drawn = op(*plain, **kwargs)
    placements = first.placements if drawn.shape == first.shape else [Replicate()] * mesh.ndim
    shared = _state_among_replicas(before, mesh, placements)
    if not torch.equal(shared, before):
        after = generator.get_state()
        generator.set_state(shared)
        drawn = op(*plain, **kwargs)
        generator.set_state(after)
    return cut(drawn, mesh, placements)


def _state_among_replicas(own: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> Tensor:
    """The state of the first of those generators whose ranks are to draw the same. All of these must call it."""
    axes = [axis for axis, placement in enumerate(placements) if placement.is_replicate() and mesh.size(axis) > 1]
    groups = [mesh.get_group(axis) for axis in axes]
    shared = own.clone()
    if moves_data(groups, own.device):
        broadcast_over(shared, groups)
    return shared


def _blank(like: DTensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, device="cpu")


def _rrelu(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """
    Raises:
        NotImplementedError: it draws.
    """
    given = {**dict(zip(argument_names(op), args, strict=False)), **kwargs}
    if given.get("training", False):
        raise NotImplementedError(
            f"rrelu of a DTensor of global shape {tuple(args[0].shape)}: each rank would draw slopes of its own. Use "
            "full_tensor(), on every rank, after the same torch.manual_seed."
        )
    return call_unhandled(op, args, kwargs)
