"""Tensors inside whatever a module takes and returns."""

from __future__ import annotations

import copy
import dataclasses
import operator
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .modes import run_hidden
from .torch_compat import runs_transform

_ATOMS = (str, bytes, int, float, bool, complex, type(None), type, torch.dtype, torch.device, nn.Module)


def tensors_in(*values: Any) -> list[Tensor]:
    """Every tensor in nested containers, dataclasses and plain objects (in `__dict__` or `__slots__`), each once."""
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
            waiting.extend(reversed(_parts(value)))
    return list(found.values())


def _parts(value: Any) -> list[Any]:
    if isinstance(value, (tuple, list, set, frozenset)):
        return list(value)
    if isinstance(value, (dict, Mapping)):  # a dict is recognised several times as fast
        return list(value.values())
    if _is_dataclass(value):
        return list(_fields(value).values())
    return [getattr(value, name) for name in _attribute_names(value)]


def _attribute_names(value: Any) -> list[str]:
    if callable(value):
        return []
    declared = [getattr(kind, "__slots__", ()) for kind in type(value).__mro__]
    slots = [name for names in declared for name in ([names] if isinstance(names, str) else names)]
    return [*getattr(value, "__dict__", {}), *(name for name in slots if hasattr(value, name))]


def left_out(value: Any, name: str) -> Iterator[tuple[str, Any, Tensor]]:
    """The tensors that `map_tensors` does not look for, being in objects of other kinds: an expression for each, if
    `value` is called `name`, and the outermost such object around it.
    """
    seen: set[int] = set()
    waiting: list[tuple[str, Any, Any]] = [(name, value, None)]
    while waiting:
        name, value, inside = waiting.pop()
        if isinstance(value, Tensor):
            if inside is not None:
                yield name, inside, value
        elif not isinstance(value, _ATOMS) and id(value) not in seen:
            seen.add(id(value))
            is_mapped = isinstance(value, (tuple, list, dict, UserDict)) or _is_dataclass(value)
            inside = value if inside is None and not is_mapped else inside
            waiting.extend((name + place, item, inside) for place, item in reversed(_places(value)))


def _places(value: Any) -> list[tuple[str, Any]]:
    """Each part of `value`, with what is written behind an expression for that to get it."""
    if isinstance(value, Mapping):
        return [(f"[{key!r}]", item) for key, item in value.items()]
    if isinstance(value, (tuple, list, set, frozenset)):
        return [(f"[{i}]", item) for i, item in enumerate(value)]
    names = _fields(value) if _is_dataclass(value) else _attribute_names(value)
    return [(f".{name}", getattr(value, name)) for name in names]


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """`value` with its floating-point tensors cast to `dtype`; see `map_tensors`. Those that have it stay the same."""
    return map_tensors(
        value, lambda tensor: cast(tensor, dtype) if tensor.dtype != dtype and tensor.is_floating_point() else tensor
    )


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `tensor.to(dtype)`, whose gradient is cast back where the user's modes don't see it."""
    if not (tensor.requires_grad and torch.is_grad_enabled()) or runs_transform():
        return tensor.to(dtype)
    return _Cast.apply(tensor, dtype)


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.before, ctx.after = tensor.dtype, dtype
        return tensor.to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return run_hidden(gradient.to, ctx.before), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        return run_hidden(tangent.to, ctx.after)


def to_device(value: Any, device: torch.device) -> Any:
    """`value` with its tensors on `device`; from page-locked memory they come while others compute. Those that are
    there stay the same.
    """
    return map_tensors(
        value, lambda tensor: tensor.to(device, non_blocking=True) if tensor.device != device else tensor
    )


def map_tensors(value: Any, change: Callable[[Tensor], Tensor], everywhere: bool = False) -> Any:
    """`value` with `change` applied to its tensors.

    Looks into tuples, lists, dicts, UserDicts and dataclasses. Those that hold a tensor that changes are copied,
    keeping their type and attributes and without running their constructor; all else is returned as it is.
    `everywhere`: also in plain objects, whose attributes are set in place.
    """
    if everywhere:
        _map_attributes(value, change)
    return _map(value, change, {})


def _map_attributes(value: Any, change: Callable[[Tensor], Tensor]) -> None:
    """Apply `change` to the tensors that plain objects inside `value` have as attributes."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, (Tensor, *_ATOMS)) or id(value) in seen:
            continue
        seen.add(id(value))
        waiting.extend(_parts(value))
        if not isinstance(value, (Mapping, tuple, list, set, frozenset)) and not _is_dataclass(value):
            for name in _attribute_names(value):
                item = getattr(value, name)
                if isinstance(item, Tensor) and (changed := change(item)) is not item:
                    setattr(value, name, changed)


def _map(value: Any, change: Callable[[Tensor], Tensor], done: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, _ATOMS) or id(value) in done:
        return done.get(id(value), value)
    done[id(value)] = value  # while it is worked on: a structure may contain itself
    if isinstance(value, (tuple, list)):
        items = [_map(item, change, done) for item in value]
        unchanged = all(new is old for new, old in zip(items, value, strict=True))
        done[id(value)] = value if unchanged else _like(value, items)
    elif isinstance(value, (dict, UserDict)):
        done[id(value)] = _replace(value, dict(value), operator.setitem, change, done)
    elif _is_dataclass(value):
        done[id(value)] = _replace(value, _fields(value), object.__setattr__, change, done)
    return done[id(value)]


def _replace(value: Any, items: dict[Any, Any], assign: Any, change: Any, done: dict[int, Any]) -> Any:
    new = {key: _map(item, change, done) for key, item in items.items()}
    changed = {key: item for key, item in new.items() if item is not items[key]}
    if changed:
        value = copy.copy(value)
    for key, item in changed.items():
        assign(value, key, item)
    return value


def _like(sequence: Any, items: list[Any]) -> Any:
    """A sequence of the same type and attributes, holding `items`."""
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


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _fields(value: Any) -> dict[str, Any]:
    """The dataclass fields that are set."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if hasattr(value, field.name)}
