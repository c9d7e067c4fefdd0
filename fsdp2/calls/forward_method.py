"""Methods that users register, so that they gather like a call of their module does."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, update_wrapper
from types import MethodType
from typing import Any

from torch import nn

from ..engine.module_class import run_method
from ..engine.state import require_module, state_of
from ..torch_private.compat import untraced

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
