"""Finds and changes tensors in containers, dataclasses and plain objects."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections import UserDict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

_ATOMS = (str, bytes, int, float, bool, complex, type(None), type, torch.dtype, torch.device, nn.Module)


def tensors_in(*values: Any) -> list[Tensor]:
    """Returns every tensor in nested containers, dataclasses and plain objects (`__dict__`, `__slots__`), each once."""
    if len(values) == 1 and isinstance(values[0], Tensor):
        return [*values]
    found: dict[int, Tensor] = {}
    seen: set[int] = set()
    waiting = [*reversed(values)]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            found[id(value)] = value
        elif not isinstance(value, _ATOMS) and id(value) not in seen:
            seen.add(id(value))
            waiting.extend(reversed(parts_of(value)))
    return list(found.values())


def parts_of(value: Any) -> list[Any]:
    """Returns the items of a container, the fields of a dataclass, or the attributes of another object."""
    if isinstance(value, (tuple, list, set, frozenset)):
        return list(value)
    if isinstance(value, (dict, Mapping)):  # a dict is recognised several times as fast
        return list(value.values())
    if is_dataclass(value):
        return list(fields_of(value).values())
    return [getattr(value, name) for name in attribute_names(value)]


def attribute_names(value: Any) -> list[str]:
    """Returns the names of the attributes that an object holds; of what can be called, none."""
    if callable(value):
        return []
    declared = [getattr(kind, "__slots__", ()) for kind in type(value).__mro__]
    slots = [name for names in declared for name in ([names] if isinstance(names, str) else names)]
    return [*getattr(value, "__dict__", {}), *(name for name in slots if hasattr(value, name))]


def map_tensors(
    value: Any,
    change: Callable[[Tensor], Tensor],
    everywhere: bool = False,
    copied: list[tuple[Any, Any]] | None = None,
    known: Mapping[int, Any] | None = None,
) -> Any:
    """Returns `value` with `change` applied to its tensors.

    Looks into tuples, lists, dicts, UserDicts and dataclasses. Those that hold a tensor that changes are copied,
    keeping their type and attributes and without running their constructor; all else is returned as it is.
    `everywhere`: also in plain objects, whose attributes are set in place. `copied`: receives (container, copy).
    `known`: what to put in place of some containers, by their identities.
    """
    if everywhere:
        _map_attributes(value, change)
    return _map(value, change, dict(known or ()), copied)


def _map_attributes(value: Any, change: Callable[[Tensor], Tensor]) -> None:
    """Applies `change` to the tensors that plain objects inside `value` have as attributes."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, (Tensor, *_ATOMS)) or id(value) in seen:
            continue
        seen.add(id(value))
        waiting.extend(parts_of(value))
        if not isinstance(value, (Mapping, tuple, list, set, frozenset)) and not is_dataclass(value):
            for name in attribute_names(value):
                item = getattr(value, name)
                if isinstance(item, Tensor) and (changed := change(item)) is not item:
                    setattr(value, name, changed)


def _map(
    value: Any, change: Callable[[Tensor], Tensor], done: dict[int, Any], copied: list[tuple[Any, Any]] | None
) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, _ATOMS) or id(value) in done:
        return done.get(id(value), value)
    done[id(value)] = value  # while its parts are changed: a structure may contain itself
    if isinstance(value, (tuple, list)):
        items = [_map(item, change, done, copied) for item in value]
        unchanged = all(new is old for new, old in zip(items, value, strict=True))
        done[id(value)] = value if unchanged else _like(value, items)
    elif isinstance(value, (dict, UserDict)):
        done[id(value)] = _with_items(value, dict(value), operator.setitem, change, done, copied)
    elif is_dataclass(value):
        done[id(value)] = _with_items(value, fields_of(value), object.__setattr__, change, done, copied)
    if copied is not None and done[id(value)] is not value:
        copied.append((value, done[id(value)]))
    return done[id(value)]


def _with_items(value: Any, items: dict[Any, Any], assign: Any, change: Any, done: dict[int, Any], copied: Any) -> Any:
    new = {key: _map(item, change, done, copied) for key, item in items.items()}
    changed = {key: item for key, item in new.items() if item is not items[key]}
    if changed:
        value = copy.copy(value)
    for key, item in changed.items():
        assign(value, key, item)
    return value


def _like(sequence: Any, items: list[Any]) -> Any:
    """Returns a sequence of the same type and attributes, holding `items`."""
    kind = type(sequence)
    if isinstance(sequence, list):
        new = copy.copy(sequence)
        new[:] = items
        return new
    if hasattr(kind, "n_sequence_fields"):  # torch.return_types and the like
        return kind(items)
    new = tuple.__new__(kind, items)
    if hasattr(sequence, "__dict__"):
        vars(new).update(vars(sequence))
    return new


def is_dataclass(value: Any) -> bool:
    """Returns True for an instance of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def fields_of(value: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass instance that are set."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if hasattr(value, field.name)}
