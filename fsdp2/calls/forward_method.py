"""Runs methods of modules so that they gather like a call does: `forward` by itself, and those that users register."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from functools import partial, update_wrapper
from types import GeneratorType, MethodType
from typing import Any

from torch import nn

from ..engine.state import STATE, require_module, require_state, state_of
from ..torch_private.internals import untraced
from . import transforms

_DEFERRED = (inspect.iscoroutinefunction, inspect.isasyncgenfunction)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Has `module.method_name(...)` gather the parameters like `module(...)` does: `generate`, `encode`, ...

    Each step of a method that is a generator gathers by itself. Nothing happens if fully_shard was not applied to
    `module`.

    Raises:
        TypeError: `module` is no module, or `method_name` no text.
        ValueError: there is no such method.
        NotImplementedError: it is asynchronous: it would run when the parameters are sharded again.
    """
    require_module("module", module, "register_fsdp_forward_method")
    if not isinstance(method_name, str):
        raise TypeError(f"method_name: expected a str, got {method_name!r}")
    method = getattr(module, method_name, None)
    if not callable(method):
        raise ValueError(f"method_name: expected a method of {type(module).__name__}, got {method_name!r}")
    if state_of(module) is None:
        return
    if any(is_deferred(inspect.unwrap(method)) for is_deferred in _DEFERRED):
        raise NotImplementedError(
            f"{method_name} is asynchronous: it would run when the parameters are sharded again. Run it inside `with "
            "fsdp2.full_params(module):`."
        )
    function = getattr(type(module), method_name, None) if getattr(method, "__self__", None) is module else None
    call = partial(_run_function, module, method) if function is None else partial(_run_method, module, method_name)
    setattr(module, method_name, update_wrapper(call, method))


# At module level, and with the module as an argument: a copy of the module, pickled or not, then runs its own.


@untraced
def _run_method(module: nn.Module, name: str, *args: Any, **kwargs: Any) -> Any:
    return run_method(module, MethodType(getattr(type(module), name), module), args, kwargs)


@untraced
def _run_function(module: nn.Module, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return run_method(module, function, args, kwargs)


# ---- how they run


def run_unless_running(module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls `forward` by itself, if a call of `module` has gathered its parameters already."""
    state = module.__dict__.get(STATE)  # none, while a copy of the module is being made
    if state is None or state.running:
        return forward(*args, **kwargs)
    return run_method(module, forward, args, kwargs)


@untraced
def run_method(module: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Returns `function(*args, **kwargs)`, run with the unsharded parameters of `module`."""
    output = transforms.run_forward(require_state(module), module, function, args, kwargs)
    return output if type(output) is not GeneratorType else gather_in_each_step(module, output)


# ---- generators


def gather_in_each_step(module: nn.Module, steps: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """Yields what the generator `steps` yields, and returns what it returns. Its body runs after the forward of
    `module` has returned it, so each of its steps runs as a forward of its own.
    """
    resume: Callable[..., Any] = steps.send
    value: Any = None
    while True:
        is_over, value = run_method(module, _step, (resume, value), {})
        if is_over:
            return value
        try:
            resume, value = steps.send, (yield value)
        except GeneratorExit:
            steps.close()
            raise
        except BaseException as error:
            resume, value = steps.throw, error


def _step(resume: Callable[..., Any], value: Any) -> tuple[bool, Any]:
    """Returns whether a generator is over, and what it yields or returns. `resume`: its `send` or `throw`."""
    try:
        return False, resume(value)
    except StopIteration as end:
        return True, end.value
