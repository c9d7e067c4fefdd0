"""Where the engine meets a user's code: modes that are in force around it, and tensors inside inputs and outputs.

A user's modes (TorchDispatchMode, TorchFunctionMode; selective activation checkpointing is made of them) see the user's
operations and no others: the engine computes while they are withdrawn, and puts them back in force around the user's
code that it calls. Modes with which torch itself traces or simulates (FakeTensorMode, for example) stay in force.
`CommDebugMode`, which counts collectives, sees what the engine computes, too. So does a mode whose class has a true
attribute `sees_fsdp2`. Torch's own `_disable_current_modes` would withdraw FakeTensorMode, too, and takes 20 us.
"""

from __future__ import annotations

import copy
import dataclasses
import operator
import sys
import threading
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from . import compat
from .compat import num_dispatch_modes, num_function_modes, runs_transform, untraced

Function = TypeVar("Function", bound=Callable[..., Any])

# ---- modes


class _Modes(NamedTuple):
    """The modes of one thread, outermost first."""

    dispatch: Sequence[Any]
    function: Sequence[Any]


class _ThreadState(threading.local):
    # The user's modes while they are withdrawn. None: they are in force.
    withdrawn: _Modes | None = None


_thread = _ThreadState()


def are_in_force() -> bool:
    """Returns True if modes are in force on this thread that nobody has withdrawn yet."""
    return _thread.withdrawn is None and bool(num_dispatch_modes() or num_function_modes())


class hidden:
    """Context: the user's modes are withdrawn on this thread, except those that may see the engine's operations."""

    def __enter__(self) -> None:
        self._is_needed = are_in_force()
        if self._is_needed:
            _thread.withdrawn = _withdraw()

    def __exit__(self, *_: object) -> None:
        if self._is_needed:
            modes, _thread.withdrawn = _thread.withdrawn, None
            assert modes is not None, "it was set when the context was entered"
            _replace(modes)


class shown:
    """Context: the user's modes are in force, also inside `hidden`."""

    def __enter__(self) -> None:
        modes, _thread.withdrawn = _thread.withdrawn, None
        self._is_needed = modes is not None
        if modes is not None:
            _replace(modes)

    def __exit__(self, *_: object) -> None:
        if self._is_needed:
            _thread.withdrawn = _withdraw()  # the user may have put other modes in force for good


def run_hidden(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns `function(*args, **kwargs)`, called while the user's modes are withdrawn."""
    with hidden():
        return function(*args, **kwargs)


@untraced
def run_shown(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns `function(*args, **kwargs)`, called with the user's modes in force."""
    with shown():
        return function(*args, **kwargs)


def hides_modes(function: Function) -> Function:
    """Decorator: `function` runs while the user's modes are withdrawn."""

    @untraced
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with hidden():
            return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def outside_transforms() -> AbstractContextManager[list[Any]]:
    """Context: no transform of torch.func runs. It yields the list of those that run again afterwards."""
    if not runs_transform():
        return nullcontext([])
    from torch._functorch import pyfunctorch  # takes some 100 ms, where nobody has used torch.func

    context: AbstractContextManager[list[Any]] = pyfunctorch.temporarily_clear_interpreter_stack()
    return context


@contextmanager
def outside() -> Iterator[None]:
    """Context: no transform of torch.func runs, and the user's modes are withdrawn."""
    with hidden(), outside_transforms():
        yield


def is_inside() -> bool:
    """Returns True if a transform of torch.func runs, or modes of the user's are in force."""
    return runs_transform() or are_in_force()


def _withdraw() -> _Modes:
    """Withdraws the user's modes, except those that may see the engine's operations, and returns all of them."""
    modes = _replace(_Modes((), ()))
    if any(_sees_engine(mode) for mode in modes.dispatch):
        _replace(_Modes([mode for mode in modes.dispatch if _sees_engine(mode)], ()))
    return modes


def _replace(modes: _Modes) -> _Modes:
    """Puts `modes` in force on this thread in place of those that are, which are returned.

    Torch's own stay in force: torch keeps them below all others.
    """
    dispatch, function = [], []
    while num_dispatch_modes():
        mode = compat.pop_dispatch_mode(None)
        if getattr(mode, "_mode_key", None) is not None:
            compat.push_dispatch_mode(mode)
            break
        dispatch.append(mode)
    while num_function_modes():
        function.append(compat.pop_function_mode())
    for mode in modes.dispatch:
        compat.push_dispatch_mode(mode)
    for mode in modes.function:
        compat.push_function_mode(mode)
    return _Modes(dispatch[::-1], function[::-1])


def _sees_engine(mode: Any) -> bool:
    debug: Any = sys.modules.get("torch.distributed.tensor.debug")
    is_comm_debug = debug is not None and isinstance(mode, debug.CommDebugMode)
    return is_comm_debug or getattr(type(mode), "sees_fsdp2", False)


# ---- tensors in nested values

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


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """Returns `value` with its floating-point tensors cast to `dtype`; see `map_tensors`."""
    return map_tensors(
        value, lambda tensor: cast(tensor, dtype) if tensor.dtype != dtype and tensor.is_floating_point() else tensor
    )


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns `tensor.to(dtype)`. The user's modes don't see its gradient being cast back."""
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
    """Returns `value` with its tensors on `device`; copies from page-locked memory are asynchronous."""
    return map_tensors(
        value, lambda tensor: tensor.to(device, non_blocking=True) if tensor.device != device else tensor
    )


def map_tensors(value: Any, change: Callable[[Tensor], Tensor], everywhere: bool = False) -> Any:
    """Returns `value` with `change` applied to its tensors.

    Looks into tuples, lists, dicts, UserDicts and dataclasses. Those that hold a tensor that changes are copied,
    keeping their type and attributes and without running their constructor; all else is returned as it is.
    `everywhere`: also in plain objects, whose attributes are set in place.
    """
    if everywhere:
        _map_attributes(value, change)
    return _map(value, change, {})


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


def _map(value: Any, change: Callable[[Tensor], Tensor], done: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, _ATOMS) or id(value) in done:
        return done.get(id(value), value)
    done[id(value)] = value  # while its parts are changed: a structure may contain itself
    if isinstance(value, (tuple, list)):
        items = [_map(item, change, done) for item in value]
        unchanged = all(new is old for new, old in zip(items, value, strict=True))
        done[id(value)] = value if unchanged else _like(value, items)
    elif isinstance(value, (dict, UserDict)):
        done[id(value)] = _with_items(value, dict(value), operator.setitem, change, done)
    elif is_dataclass(value):
        done[id(value)] = _with_items(value, fields_of(value), object.__setattr__, change, done)
    return done[id(value)]


def _with_items(value: Any, items: dict[Any, Any], assign: Any, change: Any, done: dict[int, Any]) -> Any:
    new = {key: _map(item, change, done) for key, item in items.items()}
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
