"""Refuses parameters, buffers and attributes of modules over the memory of a parameter, which sharding would part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ..engine.build import Plan
from ..engine.events import extensions
from ..engine.parameter import Slot, fqn
from ..engine.ties import original_of
from ..engine.torch_names import Memory, memory_of
from .before_sharding import begin, facts_of

# What each module has besides its own attributes.
_USUAL = frozenset(vars(nn.Module()))
# How deep in lists and dicts an attribute is searched for tensors.
_DEPTH = 3


class _Place(NamedTuple):
    """Where a parameter is, or was before an inner call sharded it."""

    memory: Memory
    slot: Slot


def check_memory(plan: Plan, parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuses tensors that share memory with a parameter, and notes where each parameter is.

    Two parameters over the same memory, not being one object, would be two after sharding. A buffer, or an attribute of
    a module, would keep what the parameter is now.

    Raises:
        ValueError: there are such tensors.
    """
    places: defaultdict[StorageWeakRef, list[_Place]] = defaultdict(list)
    memory = begin(plan).memory
    for group in [group for state in plan.inside for group in state.groups]:
        before = facts_of(group).memory
        for slot in [param.slots[0] for param in group.params]:
            there = before.get((id(slot.module), slot.name))
            if there is not None:
                places[there.storage].append(_Place(there, slot))
    for planned, parameter in zip(plan.parameters.values(), parameters.values(), strict=True):
        slot = planned.slots[0]
        there = memory[id(slot.module), slot.name] = memory_of(parameter)
        if there is not None:
            places[there.storage].append(_Place(there, slot))
    for shared in places.values():
        if len(shared) > 1:
            _check_parameters(plan, shared)
    known, sharded = {*map(id, parameters.values())}, extensions().tensor_class
    for module, prefix in plan.names.items():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                _check_other(plan, places, fqn(prefix, name), "a buffer", buffer)
        for name in vars(module).keys() - _USUAL:
            for path, tensor in _tensors_in(vars(module)[name], name):
                is_known = id(tensor) in known or isinstance(tensor, sharded) or original_of(tensor) is not None
                if not is_known and f"{name}_orig" not in module._parameters:  # which old spectral_norm recomputes
                    _check_other(plan, places, fqn(prefix, path), "an attribute", tensor)


def _check_parameters(plan: Plan, shared: list[_Place]) -> None:
    """Refuses those of the parameters in one storage that have memory in common."""
    before: list[_Place] = []
    for place in sorted(shared, key=lambda each: each.memory.start):
        before = [each for each in before if each.memory.end > place.memory.start]
        other = next((each for each in before if each.memory.overlaps(place.memory)), None)
        before.append(place)
        if other is None:
            continue
        one, another = (_fqn_below(plan, each.slot) for each in (place, other))
        if place.memory[:3] == other.memory[:3]:
            advice = "Tie them as one nn.Parameter, in one group, or copy one of them."
        else:
            advice = "Make one nn.Parameter of all of it, and slice that in forward; or copy one of them."
        raise ValueError(f"{one} and {another} share memory. {advice}")


def _check_other(
    plan: Plan, places: Mapping[StorageWeakRef, list[_Place]], name: str, kind: str, tensor: Tensor
) -> None:
    there = memory_of(tensor)
    if there is None:
        return
    for place in places.get(there.storage, ()):
        if place.memory.overlaps(there):
            raise ValueError(
                f"{name}, {kind}, and {_fqn_below(plan, place.slot)} share memory, and would not after sharding: "
                f"{kind} keeps what the parameter is now. Copy it, or compute it in forward."
            )


def _tensors_in(value: Any, path: str, depth: int = _DEPTH) -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors in an attribute, in lists and dicts in it too, with what a user writes for each. An array of
    numpy stands for the tensor that it is a view of.
    """
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, (list, tuple, dict)):
        for key, item in (value.items() if isinstance(value, dict) else enumerate(value)) if depth else ():
            yield from _tensors_in(item, f"{path}[{key!r}]", depth - 1)
    elif type(value).__module__ == "numpy":
        while type(value).__module__ == "numpy":
            value = getattr(value, "base", None)
        if isinstance(value, Tensor):
            yield path, value


def _fqn_below(plan: Plan, slot: Slot) -> str:
    return fqn(plan.names.get(slot.module, ""), slot.name)
