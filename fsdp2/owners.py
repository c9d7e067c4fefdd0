"""Who gathers a parameter: it doesn't say so itself."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

from . import torch_compat
from .param import FSDPParam
from .state import FSDPState


class Owned(NamedTuple):
    """A parameter, and who gathers it."""

    state: FSDPState
    param: FSDPParam


def all_states() -> Iterator[FSDPState]:
    """Of all modules that are alive."""
    for outer in torch_compat.composable_states():
        state = outer if isinstance(outer, FSDPState) else None
        while state is not None:
            yield state
            state = state.inner


def owners_by_id() -> dict[int, Owned]:
    """Identity of a tensor -> whose sharded or full parameter it is."""
    found = {}
    for state in all_states():
        for param in state.group.params:
            registered = (slot.module._parameters.get(slot.name) for slot in param.slots)
            for face in (param.sharded, param.full, *registered):
                found[id(face)] = Owned(state, param)
    return found


# Identity of a sharded parameter -> its state, as far as anybody has asked. It may be out of date. Never changed, but
# replaced: other threads may be ranks of their own.
_known: dict[int, weakref.ref[FSDPState]] = {}


def sharded_owner(leaf: Tensor) -> Owned | None:
    """Whose sharded parameter it is, if it is one. Walks over all parameters only for what it doesn't know yet."""
    global _known
    found = _look_up(leaf, _known)
    if found is None:
        known = {id(param.sharded): weakref.ref(state) for state in all_states() for param in state.group.params}
        found, _known = _look_up(leaf, known), known
    return found


def _look_up(leaf: Tensor, known: dict[int, weakref.ref[FSDPState]]) -> Owned | None:
    reference = known.get(id(leaf))
    state = None if reference is None else reference()
    if state is not None:
        for param in state.group.params:
            if param.sharded is leaf:
                return Owned(state, param)
    return None
