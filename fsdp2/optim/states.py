"""The state of a flat optimizer step, between flat tensors and one DTensor for each parameter.

What torch's optimizers keep of a parameter is a dict. Its entries are tensors of the parameter's shape (*elements*), or
one number (*numbers*): the count of steps, for example. A span has one such dict, whose elements are flat; parameters
are joined to a span only if their numbers are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..shards.tensors import dtensor, dtensor_spec, local_of, own_storage_view, spec_of
from .spans import Member, Packed, Place, Span

State = dict[str, Any]


def is_elements(value: Any, flat: Tensor) -> bool:
    """Returns True if `value`, of the state of `flat`, has one element for each of `flat`'s."""
    return isinstance(value, Tensor) and value.dim() == 1 and value.shape == flat.shape


def copy_number(value: Any) -> Any:
    """Returns what another parameter may keep of a number: a step adds to its count in place."""
    return value.clone() if isinstance(value, Tensor) else value


def split(state: State, span: Span, part: Span) -> State:
    """Returns the state of `part`, some parameters of a span: views of that of the span, if it is a run."""
    if not state:
        return {}
    start_of = {id(member.parameter): member for member in span.members}
    members = [start_of[id(member.parameter)] for member in part.members]
    if isinstance(span, Packed) or isinstance(part, Packed):
        return join([_part_of(state, span, member) for member in members], part)
    first = next((member.start for member in members if member.numel), 0)
    numel = part.flat.numel()
    return {
        name: value.narrow(0, first, numel) if is_elements(value, span.flat) else copy_number(value)
        for name, value in state.items()
    }


def _part_of(state: State, span: Span, member: Member) -> State:
    return {
        name: member.of(value) if is_elements(value, span.flat) else copy_number(value) for name, value in state.items()
    }


def show(state: State, span: Span, member: Member) -> State:
    """Returns the state of one parameter, as an ordinary optimizer has it: DTensors over the memory of the span's."""
    return {
        name: _as_dtensor(value, member.place) if is_elements(state[name], span.flat) else value
        for name, value in _part_of(state, span, member).items()
    }


def _as_dtensor(elements: Tensor, place: Place) -> DTensor:
    dtype = elements.dtype
    begin, memory = int(elements.storage_offset()) * dtype.itemsize, elements.untyped_storage()
    bytes_ = torch.empty(0, dtype=torch.uint8, device=elements.device).set_(memory)
    local = own_storage_view(bytes_, begin, tuple(place.local.shape), dtype)
    spec = spec_of(place.parameter)
    if spec.tensor_meta is None or spec.tensor_meta.dtype != dtype:
        spec = dtensor_spec(spec.mesh, spec.placements, tuple(spec.shape), dtype)
    return dtensor(local, spec)


def read(state: State, place: Place, may_rest: bool = False) -> State | None:
    """Returns the state of one parameter with plain tensors of one dim as elements; None if an entry is neither of the
    parameter's shape, sharded as the parameter is, nor a number.

    `may_rest`: elements may be on the CPU, too.
    """
    found = {}
    for name, value in state.items():
        if isinstance(value, DTensor):
            local, spec = local_of(value), spec_of(place.parameter)
            is_alike = value.placements == spec.placements and value.device_mesh == spec.mesh
            if type(local) is not Tensor or not is_alike or local.shape != place.local.shape:
                return None
            is_near = local.device == place.local.device or (may_rest and local.device.type == "cpu")
            if not is_near or local.layout is not torch.strided:
                return None
            found[name] = local.reshape(-1)
        elif isinstance(value, Tensor):
            if type(value) is not Tensor or value.dim():
                return None
            found[name] = value
        elif isinstance(value, list | tuple | dict | set):
            return None
        else:
            found[name] = value
    return found


def can_join(one: State, other: State) -> bool:
    """Returns True if two parameters, whose states `read` has returned, can share the state of one span."""
    if one.keys() != other.keys():
        return False
    return all(_is_alike(value, other[name]) for name, value in one.items())


def _is_alike(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return type(one) is type(other) and bool(one == other)
    if one.dtype != other.dtype or one.device != other.device or one.dim() != other.dim():
        return False
    return one.dim() == 1 or one is other or torch.equal(one, other)


def join(states: Sequence[State], span: Span) -> State:
    """Returns the state of a span from those of its parameters, which `read` has returned and which can be joined."""
    joined: State = {}
    for name, value in states[0].items():
        is_number = not isinstance(value, Tensor) or value.dim() == 0
        if is_number or (len(states) == 1 and value.numel() == span.flat.numel()):
            joined[name] = value
        else:
            joined[name] = torch.zeros(span.flat.shape, dtype=value.dtype, device=value.device)
            for member, each in zip(span.members, states, strict=True):
                member.of(joined[name]).copy_(each[name])
    return joined
