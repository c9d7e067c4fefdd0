"""Makes the attributes of a sharded module's class: each call of the module, or of its `forward`, gathers."""

from __future__ import annotations

import sys
from abc import ABCMeta
from collections.abc import Callable, Generator
from functools import partial, update_wrapper
from threading import RLock, get_ident
from types import GeneratorType, MethodType
from typing import Any

from torch import nn

from ..calls import transforms
from ..parameters.parameter_methods import parameter_methods
from ..torch_private.compat import runs_transform, untraced
from .state import STATE, require_state
from .step import run_forward

# Held while a class is made: ranks may be threads of one process.
class_lock = RLock()
_HOOK = "__init_subclass__"


def make_subclass(cls: Any, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> Any:
    """Returns a new class of these `bases`, among them `cls`, and runs no code of `cls` for it.

    A user's `__init_subclass__` or metaclass may wrap the forward of each subclass, demand keywords, or register the
    subclass. It is written for subclasses that users define.
    """
    make = ABCMeta.__new__ if issubclass(type(cls), ABCMeta) else type.__new__  # not that of the user's metaclass
    definer = next(base for base in cls.__mro__ if _HOOK in vars(base))
    with class_lock:
        if definer is object:
            return make(type(cls), name, bases, body)
        # Python calls the hook of the first base, `cls`. It has another one meanwhile, for this thread.
        own, original, thread = vars(cls).get(_HOOK), vars(definer)[_HOOK], get_ident()

        def hook(made: Any, /, **keywords: Any) -> None:
            if get_ident() != thread:  # another thread defines a subclass of the user's
                original.__get__(None, made)(**keywords)

        type.__setattr__(cls, _HOOK, classmethod(hook))
        try:
            return make(type(cls), name, bases, body)
        finally:
            if own is None:
                type.__delattr__(cls, _HOOK)
            else:
                type.__setattr__(cls, _HOOK, own)


def class_attributes(cls: Any) -> dict[str, Any]:
    """Returns what the class of a sharded module of class `cls` has besides its own."""
    calls = {"__call__": _call_of(cls), "forward": Forward(cls)}
    return {
        **({} if getattr(cls, "runs_without_gather", False) else calls),
        "_get_name": _name_of(cls),
        **parameter_methods(cls),
        **({"recompile": _recompile_of(cls)} if hasattr(cls, "recompile") else {}),
    }


def _recompile_of(cls: Any) -> Callable[..., Any]:
    def recompile(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Recompiles a torch.fx.GraphModule, which replaces `__call__` and `forward` of its class."""
        sharded = type(self)
        object.__setattr__(self, "__class__", cls)
        try:
            return self.recompile(*args, **kwargs)  # type: ignore[operator]
        finally:
            object.__setattr__(self, "__class__", sharded)

    return update_wrapper(recompile, cls.recompile)


def _call_of(cls: Any) -> Callable[..., Any]:
    @untraced
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        run = transforms.run_transformed if runs_transform() else run_forward
        output = run(self.__dict__[STATE], self, partial(cls.__call__, self), args, kwargs)
        return output if type(output) is not GeneratorType else _gather_in_each_step(self, output)

    return call


def _name_of(cls: Any) -> Callable[[nn.Module], str]:
    def _get_name(self: nn.Module) -> str:
        """Returns the name of the class to torch, which prints it; and to others that of the plain class, by which they
        look up what kind of model it is (Trainer of Transformers, for one: if a loss shifts the labels).
        """
        name: str = cls._get_name(self)
        is_torch = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] == "torch"
        return name if is_torch or name != type(self).__name__ else str(cls.__name__)

    return _get_name


class Forward:
    """The attribute `forward` of a sharded class: `module.forward(x)` gathers like `module(x)` does.

    While a call of the module runs, the attribute is what its own class, or the user on the instance, has written, so
    that a call costs one look-up more than a plain one's. It is a data descriptor, because what stands in the
    instance's dict would hide a plain function. (This file is one of those that dynamo traces, see torch_names.py: a
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
    return run_method(module, forward, args, kwargs)


@untraced
def run_method(module: nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Returns `function(*args, **kwargs)`, run with the unsharded parameters of `module`."""
    output = transforms.run_forward(require_state(module), module, function, args, kwargs)
    return output if type(output) is not GeneratorType else _gather_in_each_step(module, output)


# ---- generators


def _gather_in_each_step(module: nn.Module, steps: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
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
