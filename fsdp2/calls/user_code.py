"""Hides the user's modes from the engine's operations.

A user's modes (TorchDispatchMode, TorchFunctionMode; selective activation checkpointing is made of them) see the user's
operations and no others: the engine computes while they are withdrawn, and puts them back in force around the user's
code that it calls. Modes with which torch itself traces or simulates (FakeTensorMode, for example) stay in force.
`CommDebugMode`, which counts collectives, sees what the engine computes, too. So does a mode whose class has a true
attribute `sees_fsdp2`. Torch's own `_disable_current_modes` would withdraw FakeTensorMode, too, and takes 20 us.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, NamedTuple, TypeVar

from ..torch_private import internals
from ..torch_private.internals import num_dispatch_modes, num_function_modes, runs_transform, untraced
from ..torch_private.rare_internals import transform_stacks

Function = TypeVar("Function", bound=Callable[..., Any])
Result = TypeVar("Result")

# ---- modes


class _Modes(NamedTuple):
    """Holds the modes of one thread, outermost first."""

    dispatch: Sequence[Any]
    function: Sequence[Any]


class _ThreadState(threading.local):
    # The user's modes while they are withdrawn. None: they are in force.
    withdrawn: _Modes | None = None


_thread = _ThreadState()


def are_in_force() -> bool:
    """Returns True if modes are in force on this thread that have not been withdrawn."""
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


def run_hidden(function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Returns `function(*args, **kwargs)`, called while the user's modes are withdrawn."""
    with hidden():
        return function(*args, **kwargs)


@untraced
def run_shown(function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Returns `function(*args, **kwargs)`, called with the user's modes in force, also inside `hidden`."""
    modes, _thread.withdrawn = _thread.withdrawn, None
    if modes is None:
        return function(*args, **kwargs)
    _replace(modes)
    try:
        return function(*args, **kwargs)
    finally:
        _thread.withdrawn = _withdraw()  # the user may have put other modes in force for good


def hides_modes(function: Function) -> Function:
    """Decorator: `function` runs while the user's modes are withdrawn."""

    @untraced
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return run_hidden(function, *args, **kwargs)

    return call  # type: ignore[return-value]


def outside_transforms() -> AbstractContextManager[list[Any]]:
    """Context: no transform of torch.func runs. It yields the list of those that run again afterwards."""
    if not runs_transform():
        return nullcontext([])
    suspend, _ = transform_stacks()
    context: AbstractContextManager[list[Any]] = suspend()
    return context


@contextmanager
def outside() -> Iterator[None]:
    """Context: no transform of torch.func runs, and the user's modes are withdrawn."""
    with hidden(), outside_transforms():
        yield


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
        mode = internals.pop_dispatch_mode(None)
        if internals.is_of_torch(mode):
            internals.push_dispatch_mode(mode)
            break
        dispatch.append(mode)
    while num_function_modes():
        function.append(internals.pop_function_mode())
    for mode in modes.dispatch:
        internals.push_dispatch_mode(mode)
    for mode in modes.function:
        internals.push_function_mode(mode)
    return _Modes(dispatch[::-1], function[::-1])


def _sees_engine(mode: Any) -> bool:
    debug: Any = sys.modules.get("torch.distributed.tensor.debug")
    is_comm_debug = debug is not None and isinstance(mode, debug.CommDebugMode)
    return is_comm_debug or getattr(type(mode), "sees_fsdp2", False)
