"""Keeps the operations of fsdp2 out of the modes that a user has put in force.

A user's modes (TorchDispatchMode, TorchFunctionMode; selective activation checkpointing is made of them) see the user's
operations and no others: fsdp2 computes with the modes out of force, and puts them back in force around whatever of the
user's it calls. Modes with which torch itself traces or simulates (FakeTensorMode and its like) stay in force.

`CommDebugMode`, which counts collectives, sees what fsdp2 computes, too. So does a mode whose class has an attribute
`sees_fsdp2` that is true.

The stacks of modes are private names of torch: its public contexts can only add a mode to them. Torch's own
`_disable_current_modes` takes FakeTensorMode out of force, too, and takes 20 us.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple, TypeVar

import torch

from .torch_compat import untraced

Function = TypeVar("Function", bound=Callable[..., Any])

# How many modes are in force on this thread. Callers ask this first, in place of a function of ours: 0.03 us each.
num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
num_function_modes: Callable[[], int] = torch._C._len_torch_function_stack


class _Modes(NamedTuple):
    """Modes of one thread, outermost first."""

    dispatch: Sequence[Any]
    function: Sequence[Any]


class _ThreadState(threading.local):
    # The user's modes while they are out of force. None: they are in force.
    withdrawn: _Modes | None = None


_thread = _ThreadState()


def are_in_force() -> bool:
    """Returns True if modes are in force on this thread that fsdp2 has not dealt with."""
    return _thread.withdrawn is None and bool(num_dispatch_modes() or num_function_modes())


class hidden:
    """Context: the user's modes are out of force on this thread, except those that may see fsdp2's operations."""

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
            _thread.withdrawn = _withdraw()  # the user may have put others in force for good


def run_hidden(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns `function(*args, **kwargs)`, called with the user's modes out of force."""
    with hidden():
        return function(*args, **kwargs)


@untraced
def run_shown(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns `function(*args, **kwargs)`, called with the user's modes in force."""
    with shown():
        return function(*args, **kwargs)


def hides_modes(function: Function) -> Function:
    """Decorator: calls run with the user's modes out of force."""

    @untraced
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with hidden():
            return function(*args, **kwargs)

    return call  # type: ignore[return-value]


def _withdraw() -> _Modes:
    """Takes the user's modes out of force, except those that may see fsdp2's operations, and returns all of them."""
    modes = _replace(_Modes((), ()))
    if any(_sees_fsdp2(mode) for mode in modes.dispatch):
        _replace(_Modes([mode for mode in modes.dispatch if _sees_fsdp2(mode)], ()))
    return modes


def _replace(modes: _Modes) -> _Modes:
    """Puts `modes` in force on this thread in place of those that are, which are returned.

    Torch's own stay in force: it keeps them below all others.
    """
    dispatch, function = [], []
    while num_dispatch_modes():
        mode = torch._C._pop_torch_dispatch_stack(None)
        if getattr(mode, "_mode_key", None) is not None:
            torch._C._push_on_torch_dispatch_stack(mode)
            break
        dispatch.append(mode)
    while num_function_modes():
        function.append(torch._C._pop_torch_function_stack())
    for mode in modes.dispatch:
        torch._C._push_on_torch_dispatch_stack(mode)
    for mode in modes.function:
        torch._C._push_on_torch_function_stack(mode)
    return _Modes(dispatch[::-1], function[::-1])


def _sees_fsdp2(mode: Any) -> bool:
    debug: Any = sys.modules.get("torch.distributed.tensor.debug")
    is_comm_debug = debug is not None and isinstance(mode, debug.CommDebugMode)
    return is_comm_debug or getattr(type(mode), "sees_fsdp2", False)
