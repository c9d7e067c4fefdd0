"""Swaps sharded and unsharded parameters in the modules that own them, and notices what users do to the sharded ones."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from operator import add, is_
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from . import compat
from .compat import local_of, requires_grad_of, version_of
from .parameter import FSDPParam

_SHARDED, _UNSHARDED = 0, 1
_uncounted = count()


class Registration:
    """Which parameters of one group are registered in its modules, and the version counters of the sharded ones.

    A tensor counts the in-place operations on it, together with those on its views. A gathered copy is stale when the
    counters have moved on since. `watched`: in which dicts of modules, under which names, the sharded parameters were
    registered, with which local tensors.
    """

    def __init__(self) -> None:
        # What to write where, to register the sharded parameters and the unsharded ones.
        self._dict_slots: tuple[list[Any], list[Any]] = ([], [])
        self._setattr_slots: tuple[list[Any], list[Any]] = ([], [])
        # In which dicts of modules, under which names, the sharded ones were registered, with which local tensors.
        self.watched: tuple[tuple[Any, ...], ...] = ((),) * 4
        # Entries (dict, key, value) that are there only while the sharded parameters are registered; for extensions.
        self.while_sharded: list[tuple[dict[Any, Any], Any, Any]] = []
        # Version counters are read from both: an operation on a DTensor need not count for its local tensor. The last
        # ones count replacements.
        self._sharded: list[Tensor] = []
        self._locals: list[Tensor] = []
        self._replacements = torch.empty(0, device="cpu")

    # ---- swapping

    def register_unsharded(self) -> None:
        """Registers the unsharded parameters."""
        for entries, key, _ in self.while_sharded:
            entries.pop(key, None)
        self._register(_UNSHARDED)

    def register_sharded(self) -> None:
        """Registers the sharded parameters."""
        for entries, key, value in self.while_sharded:
            entries[key] = value
        self._register(_SHARDED)

    def _register(self, kind: int) -> None:
        for slots, name, parameter, other in self._dict_slots[kind]:
            if slots.get(name) is other:  # else a user has put something there, which the next forward will notice
                slots[name] = parameter
        for module, name, parameter in self._setattr_slots[kind]:
            setattr(module, name, parameter)

    def prepare(self, params: Sequence[FSDPParam]) -> None:
        """Prepares to swap the parameters that `params` have now. None of them: there is nothing to swap."""
        self._dict_slots, self._setattr_slots = ([], []), ([], [])
        for param in params:
            sharded, unsharded = param.sharded, param.unsharded
            for slot in param.slots:
                module, name = slot.module, slot.name
                if slot.is_plain:
                    self._dict_slots[_SHARDED].append((module._parameters, name, sharded, unsharded))
                    self._dict_slots[_UNSHARDED].append((module._parameters, name, unsharded, sharded))
                else:
                    self._setattr_slots[_SHARDED].append((module, name, sharded))
                    self._setattr_slots[_UNSHARDED].append((module, name, unsharded))

    # ---- noticing

    def watch(self, params: Sequence[FSDPParam]) -> None:
        """Remembers what is registered where, and from where version counters are read."""
        rows = [
            (slot.module._parameters, slot.name, param.sharded, param.local) for param in params for slot in param.slots
        ]
        self.watched = tuple(zip(*rows, strict=True)) or ((),) * 4
        self._sharded = [*(param.sharded for param in params), self._replacements]
        self._locals = [*(param.local for param in params), self._replacements]

    def is_replaced(self) -> bool:
        """Returns True if a sharded parameter that should be registered is not, or has another local tensor."""
        # No loop: it takes twice as long, in every gather.
        slots, names, sharded, locals_ = self.watched
        are_registered = all(map(is_, map(dict.get, slots, names), sharded))
        return not (are_registered and all(map(is_, map(local_of, sharded), locals_)))

    def note_replacement(self) -> None:
        """Counts that parameters, or their local tensors, were replaced."""
        increment_version(self._replacements)

    def versions(self) -> tuple[int, ...]:
        """Returns a number per sharded parameter, which grows with each in-place operation on it, or step of an
        optimizer; and then one that grows with replacements.
        """
        try:
            return tuple(map(add, map(version_of, self._sharded), map(version_of, self._locals)))
        except RuntimeError:  # some were made in inference mode
            return tuple(map(add, map(version_if_counted, self._sharded), map(version_if_counted, self._locals)))

    def trainable(self) -> list[bool]:
        """Returns which of the sharded parameters require a gradient."""
        with compat.no_torch_function():
            return list(map(requires_grad_of, self._sharded[:-1]))


def version_if_counted(tensor: Tensor) -> int:
    """Returns a tensor's version. One made in inference mode has none, and counts as changed whenever it is asked."""
    return next(_uncounted) if tensor.is_inference() else tensor._version
