"""Methods that gather like a call of their module does: `forward` itself, and those that users register."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, update_wrapper
from types import MethodType
from typing import Any

from torch import nn

from ..checks import entry_points
from ..core.compat import untraced
from ..core.state import STATE, require_state, state_of
from .transforms import run_forward

_DEFERRED = (inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Has `module.method_name(...)` gather the parameters like `module(...)` does: `generate`, `encode`, ...

    Nothing happens if fully_shard was not applied to `module`.

    Raises:
        ValueError: there is no such method.
        NotImplementedError: it is a generator, or asynchronous: it would run when the parameters are sharded again.
    """
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(f"method_name: expected a method of {type(module).__name__}, got {method_name!r}")
    if state_of(module) is None:
        return
    if any(is_deferred(method) for is_deferred in _DEFERRED):
        raise NotImplementedError(
            f"{method_name} is a generator or asynchronous: it would run when the parameters are sharded again. Run it "
            "inside `with fsdp2.full_params(module):`."
        )
    function = getattr(type(module), method_name, None) if getattr(method, "__self__", None) is module else None
    call = partial(_run_function, module, method) if function is None else partial(_run_method, module, method_name)
    setattr(module, method_name, update_wrapper(call, method))


# At module level, and with the module as an argument: a copy of the module, pickled or not, then runs its own.


@untraced
def _run_method(module: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
    return _run(module, MethodType(getattr(type(module), name), module), args, kwargs)


@untraced
def _run_function(module: nn.Module, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return _run(module, function, args, kwargs)


@untraced
def _run(module: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    try:
        return run_forward(require_state(module), module, function, args, kwargs)
    except RuntimeError as error:
        entry_points.explain_dtypes(error, module, args, kwargs)
        raise


class Forward:
    """Is the attribute `forward` of a sharded class: `module.forward(x)` gathers like `module(x)` does.

    While a call of the module runs, the attribute is what its own class, or the user on the instance, has written, so
    that a call costs one look-up more than a plain one's. It is a data descriptor, because what stands in the
    instance's dict would hide a plain function. (This file is one of those that dynamo traces, see ext/compat.py: a
    graph goes through `__get__`, and breaks where something must be gathered.)
    """

    def __init__(self, cls: Any) -> None:
        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            # The method of the plain class, whatever it is by now.
            return _run_unless_running(module, super(self._owner, module).forward, *args, **kwargs)  # type: ignore[misc]

        self._function = update_wrapper(forward, cls.forward)

    def __set_name__(self, owner: Any, name: str) -> None:
        self._owner = owner

    def __get__(self, module: Any, owner: type | None = None) -> Any:
        if module is None:
            return self._function
        attributes = module.__dict__
        own, state = attributes.get("forward"), attributes.get(STATE)
        if state is not None and state.running:  # here, not in a function: each call of each module comes here
            return super(self._owner, module).forward if own is None else own  # type: ignore[misc]
        if own is None:
            return MethodType(self._function, module)
        return update_wrapper(partial(_run_unless_running, module, own), own)

    def __set__(self, module: nn.Module, value: Any) -> None:
        module.__dict__["forward"] = value

    def __delete__(self, module: nn.Module) -> None:
        if module.__dict__.pop("forward", None) is None:
            raise AttributeError("forward")


def _run_unless_running(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls `forward` by itself, if a call of `module` has gathered its parameters already."""
    state = module.__dict__.get(STATE)  # none, while a copy of the module is being made
    if state is None or state.running:
        return forward(*args, **kwargs)
    return _run_forward(module, forward, args, kwargs)


@untraced
def _run_forward(module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    try:
        return _run(module, forward, args, kwargs)
    except RuntimeError as error:
        entry_points.explain(error, module, "forward")
        raise
