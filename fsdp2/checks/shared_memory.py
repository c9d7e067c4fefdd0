"""Refuses parameters, buffers and attributes of modules over the memory of a parameter, which sharding would part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.build import Plan
from ..engine.events import extensions
from ..engine.parameter import Slot, fqn
from ..parameters.ties import original_of
from ..torch_private.rare_internals import Memory, is_alone, memory_of

# What each module has besides its own attributes.
_USUAL = frozenset(vars(nn.Module()))
# Types of attributes that hold no tensors.
_ATOMS = frozenset((str, bytes, int, float, bool, type(None), FunctionType, MethodType, torch.dtype, torch.device))


# Identity of a storage -> where parameters lie in it.
_Places = dict[int, list[tuple[Memory, Slot]]]


class _MemoryBefore(list[tuple[Memory, Slot]]):
    """The places in memory, before one call, of its parameters that were not alone in their storage."""


def check_memory(plan: Plan, parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuses tensors that share memory with a parameter, and notes where parameters lie that are not alone.

    Two parameters over the same memory, not being one object, would be two after sharding. A buffer, or an attribute of
    a module, would keep what the parameter is now.

    Raises:
        ValueError: there are such tensors.
    """
    noted = plan.notes.of(_MemoryBefore)
    for planned, parameter in zip(plan.parameters.values(), parameters.values(), strict=True):
        at = None if is_alone(parameter) else memory_of(parameter)
        if at is not None:
            noted.append((at, planned.slots[0]))
    places: _Places = {}
    of_inside = {id(state.notes): state.notes.of(_MemoryBefore) for state in plan.inside}
    for there in [*chain.from_iterable(of_inside.values()), *noted]:
        places.setdefault(there[0].storage.cdata, []).append(there)
    if not places:
        return
    for shared in places.values():
        if shared[1:]:
            _check_parameters(plan, shared)
    for module, prefix in plan.names.items():
        for name, buffer in module._buffers.items() if module._buffers else ():
            if buffer is not None:
                _check_other(plan, places, fqn(prefix, name), "a buffer", buffer)
        for name in module.__dict__:
            if name not in _USUAL and type(module.__dict__[name]) not in _ATOMS:
                _check_attribute(plan, places, parameters, module, name)


def _check_attribute(
    plan: Plan, places: _Places, parameters: Mapping[str, nn.Parameter], module: nn.Module, name: str
) -> None:
    if f"{name}_orig" in module._parameters:  # the old spectral_norm computes it in each forward
        return
    for path, tensor in _tensors_in(vars(module)[name], name):
        is_sharded = isinstance(tensor, extensions().tensor_class) or original_of(tensor) is not None
        if not is_sharded and not any(tensor is each for each in parameters.values()):
            _check_other(plan, places, fqn(plan.names[module], path), "an attribute", tensor)


def _check_parameters(plan: Plan, shared: Sequence[tuple[Memory, Slot]]) -> None:
    """Refuses those of the parameters in one storage that have an element in common."""
    before: list[tuple[Memory, Slot]] = []
    for there, slot in sorted(shared, key=lambda each: each[0].start):
        before = [each for each in before if each[0].end() > there.start]
        other = next((each for each in before if each[0].overlaps(there)), None)
        before.append((there, slot))
        if other is None:
            continue
        one, another = (_fqn_below(plan, each) for each in (slot, other[1]))
        if (there.start, there.end()) == (other[0].start, other[0].end()):
            advice = "Tie them as one nn.Parameter, in one group, or copy one of them."
        else:
            advice = "Make one nn.Parameter of all of it, and slice that in forward; or copy one of them."
        raise ValueError(f"{one} and {another} share memory. {advice}")


def _check_other(plan: Plan, places: _Places, name: str, kind: str, tensor: Tensor) -> None:
    there = memory_of(tensor)
    for place, slot in places.get(there.storage.cdata, ()) if there is not None else ():
        if there is not None and place.overlaps(there):
            raise ValueError(
                f"{name}, {kind}, and {_fqn_below(plan, slot)} share memory, and would not after sharding: {kind} "
                "keeps what the parameter is now. Copy it, or compute it in forward."
            )


def _tensors_in(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors in an attribute, in a list, tuple or dict too, with what a user writes for each."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, (list, tuple, dict)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(item, Tensor):
                yield f"{path}[{key!r}]", item


def _fqn_below(plan: Plan, slot: Slot) -> str:
    return fqn(plan.names.get(slot.module, ""), slot.name)
