"""Clips gradients by their norm over all ranks, also if parameters are on different meshes."""

from __future__ import annotations

import math
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, compress, repeat
from operator import is_, not_
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..optim.spans import Extent, Place, Places, Runs, picker, runs
from ..shards.find import ClippedParameters, clipped_parameters, note_clipping, shard_of
from ..shards.ranks import Axis, CommLabel, all_reduce_over, sharding_axes
from ..shards.tensors import check_bool, local_of, no_torch_function, spec_of
from ..torch_private.optimizers import SMALL_NUMEL, flatten, grad_of, norm_each, scale_each


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    exact: bool = False,
) -> Tensor:
    """Scales gradients in place so that their norm, as if all were one vector, is at most `max_norm`; returns the norm.

    It does what `torch.nn.utils.clip_grad_norm_` does, but the parameters of one call may be on different meshes: plain
    tensors and DTensors, sharded or replicated on any axes, by fsdp2 or by torch's FSDP2. Every rank must call it, with
    the same parameters, max_norm and norm_type; ranks compare these when checks are due, before a later forward. A
    gradient may be None, on all ranks or on some.

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
        exact: the norm has the same bits however gradients are cut: the sum of squares is made of integers, which add
            up to the same in any order. That takes one more all-reduce per axis, and thirty times as long as a norm
            in fp32: on a CPU 5 ms for a million elements. The order is 2 or inf. Gradients of
            `accumulate(global_batches=)` need it.

    Returns:
        The norm before clipping: a plain scalar tensor, of equal value on every rank, on the device of the first
        gradient.

    Raises:
        TypeError, ValueError: a wrong argument, or a gradient that is sparse or not of a floating dtype.
        RuntimeError: the norm is not finite and `error_if_nonfinite`; or a gradient is unsynchronized; or gradients are
            of `accumulate(global_batches=)`, without `exact`.
        NotImplementedError: `exact` with another order.
    """
    order, limit = _number("norm_type", norm_type), _number("max_norm", max_norm)
    if not order > 0:
        raise ValueError(f"norm_type: expected a number above 0, got {norm_type!r}")
    if not limit >= 0:
        raise ValueError(f"max_norm: expected a number of at least 0, got {max_norm!r}")
    check_bool("error_if_nonfinite", error_if_nonfinite)
    check_bool("exact", exact)
    if exact and order not in (2, math.inf):
        raise NotImplementedError(f"norm_type: expected 2 or inf with exact=True, got {norm_type!r}")
    if not isinstance(foreach, bool | None):
        raise TypeError(f"foreach: expected a bool or None, got {foreach!r}")
    one_by_one, given = foreach is False, _listed(parameters)
    found = None if one_by_one else _find_usual(given)
    found = _find_any([*{id(each): each for each in given}.values()]) if found is None else found
    note_clipping(found.names, limit, order, exact)
    total = _exact_norm(found, one_by_one) if exact and order == 2 else _total_norm(found, order, one_by_one)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the norm of order {norm_type} over all gradients is {total.item()}: nothing was clipped. "
            "error_if_nonfinite=False scales by it anyway."
        )
    _scale([found.own] if found.is_alike and found.own else _alike(found.own), limit, total, one_by_one)
    return total


# ---- the parameters


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
    axes: tuple[Axis, ...]


def _number(name: str, value: Any) -> float:
    """Returns `value` as a number. Like torch, it takes what `float` takes: 'inf', and tensors of one element."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name}: expected a number, got {value!r}") from error


def _listed(parameters: Any) -> list[Any]:
    """Returns what was given."""
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    if not isinstance(parameters, Iterable):
        raise TypeError(f"parameters: expected tensors, e.g. model.parameters(), got a {type(parameters).__name__}")
    return [*parameters]


@dataclass(frozen=True)
class _Found:
    """Holds the gradients that this rank has a part of, as plain tensors.

    `own`: what is to be scaled. `counted`: the axes that shard parameters -> what their norm is of, also where there is
    nothing. `is_double`: a parameter is fp64. `names`: those of the parameters that were given. `is_alike`: all have
    one device and dtype, and none is empty.
    """

    own: list[Tensor]
    counted: dict[tuple[Axis, ...], list[Tensor]]
    is_double: bool
    names: list[ClippedParameters]
    is_alike: bool = False


def _find_any(unique: list[Any]) -> _Found:
    """Looks at the parameters one by one. All are checked before anything is communicated."""
    for i, parameter in enumerate(unique):
        _check(i, parameter)
    axes: dict[Any, tuple[Axis, ...]] = {}
    members = [_member(parameter, axes) for parameter in unique if _is_on_own_mesh(parameter)]
    counted: dict[tuple[Axis, ...], list[Tensor]] = {member.axes: [] for member in members}
    for member in sorted(members, key=lambda member: _name_of(member.parameter)):
        if member.counted is not None:
            counted[member.axes].append(member.counted)
    is_double = any(member.parameter.dtype == torch.float64 for member in members)
    own = [member.own for member in members if member.own is not None]
    return _Found(own, counted, is_double, clipped_parameters(unique))


def _check(i: int, parameter: Any) -> None:
    if not isinstance(parameter, Tensor):
        raise TypeError(f"parameters: expected tensors, got a {type(parameter).__name__} at index {i}")
    grad = parameter.grad
    if grad is None:
        return
    if isinstance(parameter, DTensor) and not isinstance(grad, DTensor):
        raise TypeError(
            f"parameters: expected DTensors as gradients of DTensors, got a plain tensor at index {i}, of shape "
            f"{tuple(grad.shape)}. Assign distribute_tensor(gradient, p.device_mesh, p.placements) to its .grad."
        )
    if not grad.is_floating_point():
        raise TypeError(f"parameters: expected gradients of floating dtypes, got {grad.dtype} at index {i}")
    local = grad.to_local() if isinstance(grad, DTensor) else grad  # an unsynchronized one raises
    if local.layout != torch.strided:
        raise TypeError(f"parameters: expected dense gradients, got {local.layout} at index {i}")


def _is_on_own_mesh(parameter: Tensor) -> bool:
    """Returns True for a plain tensor, and for a DTensor on a mesh that this rank is part of."""
    return not isinstance(parameter, DTensor) or parameter.device_mesh.get_coordinate() is not None


def _member(parameter: Tensor, known: dict[Any, tuple[Axis, ...]]) -> _Member:
    grad = parameter.grad
    if not isinstance(parameter, DTensor):
        return _Member(parameter, grad, grad, ())
    mesh, placements = parameter.device_mesh, parameter.placements
    axes = _axes_of(parameter, known)
    if grad is None:
        return _Member(parameter, None, None, axes)
    assert isinstance(grad, DTensor), "_check has refused others"
    own = grad.to_local()
    # Partial sums can be scaled, but their norm is not that of the sum.
    counted = own if grad.placements == placements else grad.redistribute(mesh, placements).to_local()
    return _Member(parameter, own, counted, axes)


def _axes_of(parameter: DTensor, known: dict[Any, tuple[Axis, ...]]) -> tuple[Axis, ...]:
    """Returns the axes that shard a parameter. `known`: those of others."""
    key = (parameter.device_mesh, parameter.placements)
    if key not in known:
        known[key] = sharding_axes(*key)
    return known[key]


def _name_of(parameter: Tensor) -> str:
    """Returns a key for the order of adding: ranks may give the parameters in different orders, and replicas must get
    the same bits.
    """
    shard = shard_of(parameter)
    return "" if shard is None else shard.name


# ---- sharded parameters, with the gradients that reductions make


class _Prepared:
    """Holds what does not change between calls for the same sharded parameters: no step in Python for each of them.

    It keeps none of them alive, and has no weak reference to a parameter either: `Module.to` refuses to swap such ones.
    `absent`: which of the parameters have no gradient.
    """

    def __init__(self, parameters: list[DTensor], absent: Sequence[bool]) -> None:
        self._specs = [*map(spec_of, parameters)]
        self._locals = [weakref.ref(local_of(parameter)) for parameter in parameters]
        self._names = clipped_parameters(parameters)
        self.is_double = any(parameter.dtype == torch.float64 for parameter in parameters)
        kinds = {(local.dtype, local.device) for local in map(local_of, parameters) if local.numel()}
        self.is_alike = len(kinds) == 1
        known: dict[Any, tuple[Axis, ...]] = {}
        # The axes that shard some of them -> those that lie in no buffer, and those that do.
        single: dict[tuple[Axis, ...], list[DTensor]] = {}
        places, placed = Places(), []
        by_name = sorted(zip(parameters, absent, strict=True), key=lambda pair: _name_of(pair[0]))
        for parameter, is_absent in by_name:
            if _is_on_own_mesh(parameter):
                axes = _axes_of(parameter, known)
                others = single.setdefault(axes, [])
                if is_absent or not local_of(parameter).numel():
                    continue  # adds nothing to a norm
                place = places.find(parameter)
                if place is None:
                    others.append(parameter)
                else:
                    placed.append((place, axes))
        found: dict[tuple[Axis, ...], list[list[Place]]] = {axes: [] for axes in single}
        for run, axes in runs(placed):
            found[axes].append(run)
        # For each axes, how many lie in no buffer, and the runs. `_pick` picks them in this order, and then the rest
        # that has a gradient: all are checked, for ranks that hold nothing of them must find what the others do.
        self._parts = [(axes, len(others), Runs([*map(Extent, found[axes])])) for axes, others in single.items()]
        index = {id(parameter): i for i, parameter in enumerate(parameters)}
        placed_in = {axes: [place.parameter for run in found[axes] for place in run] for axes in single}
        order = [index[id(each)] for axes, others in single.items() for each in (*others, *placed_in[axes])]
        rest = {*compress(range(len(parameters)), map(not_, absent))}.difference(order)
        self._pick = picker([*order, *rest])
        self._classes = {*map(type, parameters)}
        # Reductions of other libraries may make gradients of any kind.
        self._is_foreign = DTensor in self._classes

    def is_of(self, parameters: list[Any]) -> bool:
        """Returns True if it was made of parameters with the same local tensors, distributed alike."""
        try:
            are_alike = all(map(is_, self._specs, map(spec_of, parameters)))
            return are_alike and all(map(is_, map(_referent, self._locals), map(local_of, parameters)))
        except AttributeError:  # a plain tensor at the address of a parameter that is gone
            return False

    def find(self, parameters: list[Any], gradients: list[Any]) -> _Found | None:
        """Returns the gradients, or None if some are not those that reductions make."""
        own = self._pick(gradients)
        if not self._classes.issuperset(map(type, own)):
            return None
        if not all(map(is_, map(spec_of, own), map(spec_of, self._pick(parameters)))):
            return None
        plain = [*map(local_of, own)]
        if self._is_foreign and not all(map(_is_usual, plain)):
            return None
        addresses = [*map(Tensor.data_ptr, plain)]
        counted: dict[tuple[Axis, ...], list[Tensor]] = {}
        begin = 0
        for axes, num_single, some in self._parts:
            middle = begin + num_single
            end = middle + some.num_filled
            counted[axes] = plain[begin:middle] + some.join(plain[middle:end], addresses[middle:end])
            begin = end
        own = [*chain.from_iterable(counted.values())]
        return _Found(own, counted, self.is_double, self._names, self.is_alike)


def _is_usual(local: Tensor) -> bool:
    return type(local) is Tensor and local.layout is torch.strided and local.is_floating_point()


_referent: Any = weakref.ref.__call__
# What was prepared last, by the identities of the parameters, and by which of them have no gradient. It has no other
# place, as the user gives a list of parameters, which may be those of several models.
_prepared: OrderedDict[tuple[tuple[int, ...], tuple[bool, ...]], _Prepared] = OrderedDict()
_MOST_PREPARED = 16


def _find_usual(parameters: list[Any]) -> _Found | None:
    """Returns the gradients of sharded parameters, each given once, if those are what reductions make; None for
    anything else.
    """
    with no_torch_function():
        try:
            gradients = [*map(grad_of, parameters)]
        except AttributeError:  # not all are tensors
            return None
        absent = tuple(map(is_, gradients, repeat(None)))
        key = tuple(map(id, parameters)), absent
        prepared = _prepared.get(key)
        if prepared is None or not prepared.is_of(parameters):
            if len({*key[0]}) < len(parameters) or not all(map(isinstance, parameters, repeat(DTensor))):
                return None
            prepared = _prepared[key] = _Prepared(parameters, absent)
            while len(_prepared) > _MOST_PREPARED:
                _prepared.popitem(last=False)
        return prepared.find(parameters, gradients)


# ---- the norm
#
# Between ranks a norm is the sum of powers, in which a NaN shows. For the order inf it is two numbers: the largest
# value but NaN, and how many NaN there are, for a maximum between ranks may lose a NaN, on some of them only.


def _total_norm(found: _Found, order: float, one_by_one: bool) -> Tensor:
    """Returns the norm over all gradients and ranks. The parameters alone decide which collectives it takes: ranks may
    have different gradients.
    """
    dtype, device = _kind_of_norm(found)
    is_largest = math.isinf(order)
    partial: dict[tuple[Axis, ...], Tensor] = {}
    for axes, gradients in found.counted.items():
        alike_ones = [gradients] if found.is_alike and gradients else _alike(gradients)
        norms = [_norms(alike, order, one_by_one).to(device, dtype) for alike in alike_ones]
        partial[axes] = _powers(norms, order, dtype, device)
    _reduce(partial, is_largest)
    parts = [*partial.values()] or [_powers([], order, dtype, device)]
    everything = parts[0] if len(parts) == 1 else torch.stack(parts)
    if not is_largest:
        return everything.sum().pow(1 / order)
    value, num_nan = everything.view(-1, 2).amax(0)
    return torch.where(num_nan > 0, torch.nan, value)


def _kind_of_norm(found: _Found) -> tuple[torch.dtype, torch.device]:
    return torch.float64 if found.is_double else torch.float32, found.own[0].device if found.own else torch.device(
        "cpu"
    )


def _reduce(partial: dict[tuple[Axis, ...], Tensor], is_largest: bool) -> None:
    """Replaces each value by its sum, or its largest, over the axes that shard what it is of."""
    comm_label = CommLabel("norms in clip_grad_norm_")
    for axis in dict.fromkeys(axis for axes in partial for axis in axes):
        cut = [axes for axes in partial if axis in axes]
        together = torch.stack([partial[axes] for axes in cut])
        sums = together.to(axis.device_type)
        all_reduce_over(sums, [axis.group], largest=is_largest, comm_label=comm_label)
        partial.update(zip(cut, sums.to(together.device), strict=True))


# ---- the norm whose bits do not depend on how gradients are cut
#
# If 2^e is the power of two above the largest magnitude m of all gradients, (x / 2^e)^2 lies in [0, 1]. Three integers
# hold its first 72 bits. Sums of these are exact in any order: in fp64 those of a chunk, in int64 those of 2^39
# elements. So the sum of the squares of n elements is too small by less than n 2^-70 m^2.

_BITS, _NUM_INTEGERS = 24, 3
_CHUNK_NUMEL = 1 << 15  # whose numbers in fp64 stay in a core's cache


def _exact_norm(found: _Found, one_by_one: bool) -> Tensor:
    """Returns the norm of order 2 over all gradients and ranks."""
    dtype, _ = _kind_of_norm(found)
    largest = _total_norm(found, math.inf, one_by_one).double()
    scale = torch.exp2(-torch.frexp(largest).exponent.double())
    partial = {axes: _sum_squares(gradients, scale) for axes, gradients in found.counted.items()}
    _reduce(partial, False)
    sums = torch.stack([*partial.values(), _sum_squares([], scale)]).sum(0).double()
    total = sum(each * 2.0 ** (-_BITS * (i + 1)) for i, each in enumerate(sums.unbind()))
    norm = torch.as_tensor(total).sqrt() / scale
    return torch.where(largest.isfinite() & (largest > 0), norm, largest).to(dtype)


def _sum_squares(gradients: list[Tensor], scale: Tensor) -> Tensor:
    """Returns the sum of the squares of the scaled gradients, as integers in units of 2^-24, 2^-48 and 2^-72."""
    total = torch.zeros(_NUM_INTEGERS, dtype=torch.int64, device=scale.device)
    for gradient in gradients:
        factor = scale.to(gradient.device)
        for chunk in gradient.reshape(-1).split(_CHUNK_NUMEL):
            rest, sums = chunk.double().mul_(factor).square_(), []
            for _ in range(_NUM_INTEGERS):
                integers = rest.mul_(2.0**_BITS).floor()
                rest.sub_(integers)
                sums.append(integers.sum())
            total += torch.stack(sums).to(total)
    return total


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
    """Returns norms, in at least fp32: of each gradient, or of several small ones together."""
    dtype = torch.promote_types(gradients[0].dtype, torch.float32)
    if one_by_one:
        return torch.stack([torch.linalg.vector_norm(gradient, order, dtype=dtype) for gradient in gradients])
    if len(gradients) > 1 and gradients[0].device.type == "cpu":
        small = [gradient for gradient in gradients if gradient.numel() <= SMALL_NUMEL]
        if len(small) > 1:
            together = flatten(small)
            gradients = [gradient for gradient in gradients if gradient.numel() > SMALL_NUMEL]
            gradients.append(together)
    return torch.stack(norm_each(gradients, order, dtype))


def _powers(norms: list[Tensor], order: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns what ranks exchange: the sum of powers, or, for the order inf, two numbers."""
    if not norms:
        return torch.zeros(2 if math.isinf(order) else 1, dtype=dtype, device=device)
    together = norms[0] if len(norms) == 1 else torch.cat(norms)
    if not math.isinf(order):
        return together.pow(order).sum(0, keepdim=True)
    is_nan = together.isnan()
    return torch.stack([together.masked_fill(is_nan, 0).amax(), is_nan.sum().to(dtype)])


def _scale(gradients: list[list[Tensor]], limit: float, total: Tensor, one_by_one: bool) -> None:
    """Scales gradients without reading the norm, for which the host would wait: a factor of 1 changes nothing.

    `gradients`: lists of one device and dtype each.
    """
    factor = (limit / (total + 1e-6)).clamp(max=1.0)
    for alike in gradients:
        local_factor = factor.to(alike[0].device)
        if one_by_one:
            for gradient in alike:
                gradient.mul_(local_factor)
        else:
            scale_each(alike, local_factor)
