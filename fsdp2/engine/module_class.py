"""Makes the attributes of a sharded module's class: each call of the module, or of its `forward`, gathers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, update_wrapper
from types import GeneratorType, MethodType
from typing import Any

from torch import nn

from ..calls.forward_method import gather_in_each_step, run_unless_running
from ..calls.transforms import run_transformed
from ..calls.user_classes import name_of, recompile_of
from ..parameters.parameter_methods import parameter_methods
from ..torch_private.internals import runs_transform, untraced
from .state import STATE
from .step import run_forward


def class_attributes(cls: Any) -> dict[str, Any]:
    """Returns what the class of a sharded module of class `cls` has besides its own."""
    calls = {"__call__": _call_of(cls), "forward": Forward(cls)}
    return {
        **({} if getattr(cls, "runs_without_gather", False) else calls),
        "_get_name": name_of(cls),
        **parameter_methods(cls),
        **({"recompile": recompile_of(cls)} if hasattr(cls, "recompile") else {}),
    }


def _call_of(cls: Any) -> Callable[..., Any]:
    @untraced
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = run_transformed if runs_transform() else run_forward
        output = run(self.__dict__[STATE], self, partial(cls.__call__, self), args, kwargs)
        return output if type(output) is not GeneratorType else gather_in_each_step(self, output)

    return call


class Forward:
    """The attribute `forward` of a sharded class: `module.forward(x)` gathers like `module(x)` does.

    While a call of the module runs, the attribute is what its own class, or the user on the instance, has written, so
    that a call costs one look-up more than a plain one's. It is a data descriptor, because what stands in the
    instance's dict would hide a plain function. (This file is one of those that dynamo traces, see `_TRACED` in
    torch_private/: a graph goes through `__get__`, and breaks where something must be gathered.)
    """

    def __init__(self, cls: Any) -> None:
        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            # The method of the plain class, whatever it is by now.
            return run_unless_running(module, super(self._owner, module).forward, *args, **kwargs)  # type: ignore[misc]

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
        return update_wrapper(partial(run_unless_running, module, own), own)

    def __set__(self, module: nn.Module, value: Any) -> None:
        module.__dict__["forward"] = value

    def __delete__(self, module: nn.Module) -> None:
        if module.__dict__.pop("forward", None) is None:
            raise AttributeError("forward")
