"""Tensors inside whatever a module takes and returns."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

_ATOMS = (str, bytes, int, float, bool, complex, type(None), type, torch.dtype, torch.device, nn.Module)


def tensors_in(*values: Any) -> list[Tensor]:
    """Every tensor in nested containers, dataclasses and plain objects (those with a `__dict__`), each once."""
    found: dict[int, Tensor] = {}
    seen: set[int] = set()
    waiting = [*reversed(values)]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Tensor):
            found[id(value)] = value
        elif not isinstance(value, _ATOMS) and id(value) not in seen:
            seen.add(id(value))
            waiting.extend(reversed(_parts(value)))
    return list(found.values())


def _parts(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (tuple, list, set, frozenset)):
        return list(value)
    return list(vars(value).values()) if hasattr(value, "__dict__") and not callable(value) else []


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """`value` with its floating-point tensors cast to `dtype`.

    Containers and dataclasses that hold such a tensor are copied, keeping their type (dict subclasses, UserDict and
    namedtuples too) and without running their constructor; everything else is returned as it is.
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, (tuple, list)):
        return _cast_sequence(value, dtype)
    if isinstance(value, MutableMapping):
        return _replace(value, {key: cast_floating(item, dtype) for key, item in value.items()}, _set_item)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return _replace(value, {name: cast_floating(item, dtype) for name, item in fields.items()}, object.__setattr__)
    return value


def _cast_sequence(value: Any, dtype: torch.dtype) -> Any:
    items = [cast_floating(item, dtype) for item in value]
    if all(new is old for new, old in zip(items, value, strict=True)):
        return value
    if hasattr(value, "_make"):
        return value._make(items)
    return type(value)(items)


def _replace(value: Any, items: dict[Any, Any], assign: Any) -> Any:
    old = value if isinstance(value, Mapping) else vars(value)
    changed = {key: item for key, item in items.items() if item is not old[key]}
    if not changed:
        return value
    value = copy.copy(value)
    for key, item in changed.items():
        assign(value, key, item)
    return value


def _set_item(mapping: MutableMapping[Any, Any], key: Any, item: Any) -> None:
    mapping[key] = item
