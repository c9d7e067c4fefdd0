"""Which faces of a group's parameters are registered in its modules: the sharded ones, or, while they compute, the full
ones; and what a user has put there instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

from torch import nn

from . import dtensor_compat, torch_compat
from .param import FSDPParam

_KEY = "fsdp2"
_SHARDED, _FULL = 0, 1


class RegisteredFaces:
    """Of one group. `installed`: the full ones are registered."""

    def __init__(self) -> None:
        self.installed = False
        # What to write where, to register the sharded parameters and the full ones.
        self._dict_slots: tuple[list[Any], list[Any]] = ([], [])
        self._setattr_slots: tuple[list[Any], list[Any]] = ([], [])
        # In which dicts of modules, under which names, the sharded ones were registered, and over which local tensors.
        self._watched: tuple[tuple[Any, ...], ...] = ((),) * 4
        # Forward pre-hooks of the modules that others gather for, and the one that is among them while these don't.
        self._call_hooks: list[dict[Any, Any]] = []
        self._on_sharded_call: Callable[..., None] | None = None

    def install(self) -> None:
        """Register the full parameters in the modules."""
        if not self.installed:
            self.installed = True
            self._register(_FULL)

    def uninstall(self) -> None:
        """Register the sharded parameters in the modules."""
        if self.installed:
            self.installed = False
            self._register(_SHARDED)

    def _register(self, face: int) -> None:
        for hooks in self._call_hooks:
            if face:
                hooks.pop(_KEY, None)
            else:
                hooks[_KEY] = self._on_sharded_call
        for slots, name, parameter, other in self._dict_slots[face]:
            if slots.get(name) is other:  # else a user has put something there, which the next forward will look at
                slots[name] = parameter
        for module, name, parameter in self._setattr_slots[face]:
            setattr(module, name, parameter)

    def watch_calls(self, inside: Sequence[nn.Module], on_sharded_call: Callable[..., None] | None) -> None:
        """Have `on_sharded_call(module, args, kwargs)` run before a call of one of `inside` while the full parameters
        are not registered. It costs calls while they are nothing. No module: no more.
        """
        for hooks in self._call_hooks:
            hooks.pop(_KEY, None)
        self._on_sharded_call = on_sharded_call
        self._call_hooks = [torch_compat.watch_calls(each, _KEY) for each in inside]
        for hooks in self._call_hooks:
            hooks[_KEY] = on_sharded_call

    # ---- whenever the faces are others

    def forget(self) -> None:
        """There are no full parameters."""
        self._dict_slots, self._setattr_slots = ([], []), ([], [])

    def prepare(self, params: Sequence[FSDPParam]) -> None:
        """The faces are those that `params` have now."""
        self.forget()
        for param in params:
            sharded, full = param.sharded, param.full
            for slot in param.slots:
                module, name = slot.module, slot.name
                if slot.is_plain:
                    self._dict_slots[_SHARDED].append((module._parameters, name, sharded, full))
                    self._dict_slots[_FULL].append((module._parameters, name, full, sharded))
                else:
                    self._setattr_slots[_SHARDED].append((module, name, sharded))
                    self._setattr_slots[_FULL].append((module, name, full))

    def watch(self, params: Sequence[FSDPParam]) -> None:
        """Remember what is registered where, to notice what is put there instead."""
        rows = [
            (slot.module._parameters, slot.name, param.sharded, param.local) for param in params for slot in param.slots
        ]
        self._watched = tuple(zip(*rows, strict=True)) or ((),) * 4

    def is_replaced(self) -> bool:
        """Whether a sharded parameter that should be registered is not, or has another local tensor."""
        # No loop: it takes twice as long, in every gather.
        slots, names, sharded, locals_ = self._watched
        are_registered = all(map(is_, map(dict.get, slots, names), sharded))
        return not (are_registered and all(map(is_, map(dtensor_compat.local_of, sharded), locals_)))

    def replaced(self, params: Sequence[FSDPParam]) -> list[FSDPParam]:
        """Those of `params`, which are watched, that `is_replaced` speaks of."""
        local_of = dtensor_compat.local_of
        gone = {
            id(sharded)
            for slots, name, sharded, local in zip(*self._watched, strict=True)
            if slots.get(name) is not sharded or local_of(sharded) is not local
        }
        return [param for param in params if id(param.sharded) in gone]
