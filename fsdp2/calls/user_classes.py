"""Makes subclasses of users' classes, for sharded modules, and runs none of the users' code for it."""

from __future__ import annotations

import sys
from abc import ABCMeta
from collections.abc import Callable
from functools import update_wrapper
from threading import RLock, get_ident
from typing import Any

from torch import nn

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


def recompile_of(cls: Any) -> Callable[..., Any]:
    def recompile(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Recompiles a torch.fx.GraphModule, which replaces `__call__` and `forward` of its class."""
        sharded = type(self)
        object.__setattr__(self, "__class__", cls)
        try:
            return self.recompile(*args, **kwargs)  # type: ignore[operator]
        finally:
            object.__setattr__(self, "__class__", sharded)

    return update_wrapper(recompile, cls.recompile)


def name_of(cls: Any) -> Callable[[nn.Module], str]:
    def _get_name(self: nn.Module) -> str:
        """Returns the name of the class to torch, which prints it; and to others that of the plain class, by which they
        look up what kind of model it is (Trainer of Transformers, for one: if a loss shifts the labels).
        """
        name: str = cls._get_name(self)
        is_torch = sys._getframe(1).f_globals.get("__name__", "").partition(".")[0] == "torch"
        return name if is_torch or name != type(self).__name__ else str(cls.__name__)

    return _get_name
