"""Who gathers a parameter: it doesn't say so itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

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
