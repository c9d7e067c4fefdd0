"""`requires_grad` of sharded parameters that changes between the forward and the backward of a step."""

from __future__ import annotations

from typing import Any

from .events import Observer
from .group import FSDPParamGroup


class RequiresGrad(Observer):
    """Plans a group's buckets anew, before a backward, if other parameters are trainable than in the last forward."""

    ignored = frozenset({"backward_began"})

    def __init__(self) -> None:
        # Groups whose trainable parameters have changed since the last backward, which may be of an earlier forward.
        self._changed: set[FSDPParamGroup] = set()

    def settings_changed(self, group: FSDPParamGroup) -> None:
        if not self._changed:
            group.events.follow(self, "backward_began")
        self._changed.add(group)

    def backward_began(self, root: Any) -> None:
        root.events.ignore(self, "backward_began")
        changed, self._changed = self._changed, set()
        for group in changed:
            parameters = group.parameters
            if parameters.buffers is not None and group.registration.trainable() != parameters.trainable:
                parameters.follow_requires_grad()
