"""Keeps one order of messages for each process group, which several Comms may share."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import cached_property
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist

from ..engine.comm import CommLabel
from .conversation import Conversation
from .gloo_threads import let_callers_finish


class WatchedGroup:
    """What Comms that share a process group must have in common, to be watched.

    `compares_all`: ranks compare all that they do there (the debug level). `comm_labels`: those of its collectives;
    their roots are told when ranks are out of step.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.compares_all = False
        self.comm_labels: WeakSet[CommLabel] = WeakSet()
        self._group = weakref.ref(group)

    @cached_property
    def conversation(self) -> Conversation:
        """The order of its messages over gloo, which begins with the first Comm whose collectives carry their names."""
        let_callers_finish()
        made = Conversation(self._group, self.comm_labels)
        _conversations[:] = [*(each for each in _conversations if each() is not None), weakref.ref(made)]
        return made


# A list is copied in one operation, which no other thread interrupts.
_conversations: list[weakref.ref[Conversation]] = []
# Process group -> what checks know of it. A process group is torch's, and has no place for it.
_groups: WeakKeyDictionary[dist.ProcessGroup, WatchedGroup] = WeakKeyDictionary()


def watched(group: dist.ProcessGroup) -> WatchedGroup:
    """Returns what checks know of a process group."""
    if group not in _groups:
        _groups[group] = WatchedGroup(group)
    return _groups[group]


def conversations() -> list[Conversation]:
    """Returns what ranks say to each other on all process groups that have named collectives, for another thread."""
    return [found for each in [*_conversations] if (found := each()) is not None]


def note_level(groups: Sequence[dist.ProcessGroup], comm_label: CommLabel, checked: bool) -> None:
    """Has collectives over these process groups compared, or not, from now on: small facts between ranks, too."""
    for group in map(watched, groups):
        group.compares_all = checked
        group.comm_labels.add(comm_label)


def are_checked(group: dist.ProcessGroup) -> bool:
    """Returns True if ranks compare all that they do there."""
    found = _groups.get(group)
    return found is not None and found.compares_all
