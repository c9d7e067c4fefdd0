"""Clips gradients by their norm over all ranks, also if parameters are on different meshes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..core.comm import Purpose
from ..ext.compat import norm_each, scale_each
from ..ext.rank_facts import all_reduce_over


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scales gradients in place so that their norm, as if all were one vector, is at most `max_norm`; returns the norm.

    It does what `torch.nn.utils.clip_grad_norm_` does, but the parameters of one call may be on different meshes: plain
    tensors and DTensors, sharded or replicated on any axes. Every rank must call it, with the same parameters in the
    same order; a gradient may be None, on all ranks or on some.

    Sharded gradients add up over ranks, replicated ones count once. Plain tensors count once, too; their gradients must
    therefore be the same on every rank. Parameters on a mesh that this rank is not part of (those of other pipeline
    stages) are not part of the norm.

    The norm is computed in fp32, or fp64 if a parameter is fp64. It takes one all-reduce of a few numbers per axis that
    shards any of the parameters (an axis is a set of ranks, however many meshes it is part of): one for FSDP and HSDP,
    two for FSDP with tensor parallelism. A gradient whose placements are not those of its parameter (a partial sum, for
    example) is redistributed to these first, for the norm only, which takes further collectives.

    Args:
        parameters: parameters with or without gradients. A parameter that is given twice counts once.
        max_norm: the largest norm that gradients may have afterwards, at least 0.
        norm_type: the order of the p-norm, above 0; `inf` for the largest absolute value.
        error_if_nonfinite: raise if the norm is infinite or NaN, on every rank and before anything is scaled.
        foreach: False handles the gradients one by one; otherwise they are handled together, in fewer launches.

    Returns:
        The norm before clipping: a plain scalar tensor, of equal value on every rank, on the device of the first
        gradient.

    Raises:
        TypeError, ValueError: a wrong argument, or a gradient that is sparse or not of a floating dtype.
        RuntimeError: the norm is not finite and `error_if_nonfinite`; or a gradient is unsynchronized.
    """
    order, limit = _number("norm_type", norm_type), _number("max_norm", max_norm)
    if not order > 0:
        raise ValueError(f"norm_type: expected a number above 0, got {norm_type!r}")
    if not limit >= 0:
        raise ValueError(f"max_norm: expected a number of at least 0, got {max_norm!r}")
    if not isinstance(error_if_nonfinite, bool):
        raise TypeError(f"error_if_nonfinite: expected a bool, got {error_if_nonfinite!r}")
    if not isinstance(foreach, bool | None):
        raise TypeError(f"foreach: expected a bool or None, got {foreach!r}")
    members = _members(parameters)
    one_by_one = foreach is False
    total = _total_norm(members, order, one_by_one)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the norm of order {norm_type} over all gradients is {total.item()}: nothing was clipped. "
            "error_if_nonfinite=False scales by it anyway."
        )
    _scale([member.own for member in members if member.own is not None], limit, total, one_by_one)
    return total


# ---- the parameters


@dataclass(frozen=True)
class _Axis:
    """Identifies the ranks among which parameters are sharded: axes of several meshes with the same ranks are equal."""

    ranks: tuple[int, ...]
    device_type: str
    group: dist.ProcessGroup = field(compare=False)


@dataclass(frozen=True)
class _Member:
    """Holds one parameter, and this rank's part of its gradient.

    `own`: the local tensor of the gradient itself.
    `counted`: the local tensor of the gradient, redistributed to the placements of the parameter.
    `axes`: the mesh axes that shard the parameter.
    """

    parameter: Tensor
    own: Tensor | None
    counted: Tensor | None
    axes: tuple[_Axis, ...]


def _number(name: str, value: Any) -> float:
    """Returns `value` as a number. Like torch, it takes what `float` takes: 'inf', and tensors of one element."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name}: expected a number, got {value!r}") from error


def _members(parameters: Any) -> list[_Member]:
    """Returns the parameters of this rank's meshes. All parameters are checked before anything is communicated."""
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    if not isinstance(parameters, Iterable):
        raise TypeError(f"parameters: expected tensors, e.g. model.parameters(), got a {type(parameters).__name__}")
    given = list(parameters)
    for i, parameter in enumerate(given):
        _check(i, parameter)
    unique = dict.fromkeys(given)
    axes: dict[Any, tuple[_Axis, ...]] = {}
    return [_member(parameter, axes) for parameter in unique if _is_on_own_mesh(parameter)]


def _check(i: int, parameter: Any) -> None:
    if not isinstance(parameter, Tensor):
        raise TypeError(f"parameters: expected tensors, got a {type(parameter).__name__} at index {i}")
    grad = parameter.grad
    if grad is None:
        return
    if not grad.is_floating_point():
        raise TypeError(f"parameters: expected gradients of floating dtypes, got {grad.dtype} at index {i}")
    local = grad.to_local() if isinstance(grad, DTensor) else grad  # an unsynchronized one raises
    if local.layout != torch.strided:
        raise TypeError(f"parameters: expected dense gradients, got {local.layout} at index {i}")


def _is_on_own_mesh(parameter: Tensor) -> bool:
    """Returns True for a plain tensor, and for a DTensor on a mesh that this rank is part of."""
    return not isinstance(parameter, DTensor) or parameter.device_mesh.get_coordinate() is not None


def _member(parameter: Tensor, known: dict[Any, tuple[_Axis, ...]]) -> _Member:
    grad = parameter.grad
    if not isinstance(parameter, DTensor):
        return _Member(parameter, grad, grad, ())
    mesh, placements = parameter.device_mesh, parameter.placements
    if (mesh, placements) not in known:
        known[mesh, placements] = _sharding_axes(parameter)
    axes = known[mesh, placements]
    if grad is None:
        return _Member(parameter, None, None, axes)
    assert isinstance(grad, DTensor), "a DTensor's gradient is one, too"
    own = grad.to_local()
    # Partial sums can be scaled, but their norm is not that of the sum.
    counted = own if grad.placements == placements else grad.redistribute(mesh, placements).to_local()
    return _Member(parameter, own, counted, axes)


def _sharding_axes(parameter: DTensor) -> tuple[_Axis, ...]:
    mesh = parameter.device_mesh
    groups = [
        mesh.get_group(axis)
        for axis, placement in enumerate(parameter.placements)
        if mesh.size(axis) > 1 and not placement.is_replicate()
    ]
    return tuple(_Axis(tuple(dist.get_process_group_ranks(group)), mesh.device_type, group) for group in groups)


# ---- the norm
#
# Between ranks a norm is two numbers: the sum of powers (for the order inf: the largest value) without NaN, and how
# many NaN there are. A maximum between ranks may lose a NaN, on some of them only.


def _total_norm(members: list[_Member], order: float, one_by_one: bool) -> Tensor:
    """Returns the norm over all members and ranks. The parameters alone decide which collectives it issues, because
    ranks may have different gradients.
    """
    dtype = torch.float64 if any(m.parameter.dtype == torch.float64 for m in members) else torch.float32
    device = next((m.own.device for m in members if m.own is not None), torch.device("cpu"))
    partial: dict[tuple[_Axis, ...], Tensor] = {}
    for axes in dict.fromkeys(member.axes for member in members):
        gradients = [m.counted for m in members if m.axes == axes and m.counted is not None]
        norms = [_norms(alike, order, one_by_one).to(device, dtype) for alike in _alike(gradients)]
        partial[axes] = _powers(torch.cat([torch.zeros(1, dtype=dtype, device=device), *norms]), order)
    purpose = Purpose("norms in clip_grad_norm_")
    for axis in dict.fromkeys(axis for axes in partial for axis in axes):
        cut = [axes for axes in partial if axis in axes]
        together = torch.stack([partial[axes] for axes in cut]).to(axis.device_type)
        all_reduce_over(together, [axis.group], largest=math.isinf(order), purpose=purpose)
        partial.update(zip(cut, together.to(device), strict=True))
    everything = torch.stack([torch.zeros(2, dtype=dtype, device=device), *partial.values()])
    value, num_nan = everything.amax(0) if math.isinf(order) else everything.sum(0)
    return torch.where(num_nan > 0, torch.nan, value if math.isinf(order) else value.pow(1 / order))


def _alike(gradients: list[Tensor]) -> list[list[Tensor]]:
    """Groups the gradients by device and dtype, because one launch can process those that have both in common. It
    leaves out empty gradients, which have no largest value and add nothing.
    """
    groups: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        if gradient.numel():
            groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    return list(groups.values())


def _norms(gradients: list[Tensor], order: float, one_by_one: bool) -> Tensor:
    """Returns the norm of each gradient, in at least fp32."""
    dtype = torch.promote_types(gradients[0].dtype, torch.float32)
    if one_by_one:
        return torch.stack([torch.linalg.vector_norm(gradient, order, dtype=dtype) for gradient in gradients])
    return torch.stack(norm_each(gradients, order, dtype))


def _powers(norms: Tensor, order: float) -> Tensor:
    """Returns the two numbers that ranks exchange."""
    is_nan = norms.isnan()
    known = norms.masked_fill(is_nan, 0)
    return torch.stack([known.amax() if math.isinf(order) else known.pow(order).sum(), is_nan.sum().to(norms.dtype)])


def _scale(gradients: list[Tensor], limit: float, total: Tensor, one_by_one: bool) -> None:
    """Scales gradients by a factor of at most 1. The host does not read the norm, for which it would have to wait."""
    factor = (limit / (total + 1e-6)).clamp(max=1.0)
    for alike in _alike(gradients):
        local_factor = factor.to(alike[0].device)
        if one_by_one:
            for gradient in alike:
                gradient.mul_(local_factor)
        else:
            scale_each(alike, local_factor)
