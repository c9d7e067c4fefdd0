"""`requires_grad` that a forward gives to unsharded parameters: the sharded ones take it, and gradients follow."""

from __future__ import annotations

from typing import Any

from ..core.compat import requires_grad_of
from ..core.events import Observer
from ..core.group import FSDPParamGroup


class RequiresGrad(Observer):
    """Has sharded parameters take the `requires_grad` that users have given the unsharded ones."""

    def __init__(self) -> None:
        # Groups whose trainable parameters have changed since the last backward, which may be of an earlier forward.
        self._changed: set[FSDPParamGroup] = set()

    def forward_ended(self, group: FSDPParamGroup) -> None:
        parameters = group.parameters
        if parameters.buffers is None or list(map(requires_grad_of, parameters.unsharded)) == parameters.trainable:
            return
        for param, before in zip(group.params, parameters.trainable, strict=True):
            if param.unsharded.requires_grad != before:
                param.sharded.requires_grad_(param.unsharded.requires_grad)
        parameters.follow_requires_grad()

    forward_failed = before_reshard = forward_ended

    def settings_changed(self, group: FSDPParamGroup) -> None:
        self._changed.add(group)

    def backward_began(self, root: Any) -> None:
        changed, self._changed = self._changed, set()
        for group in changed:
            parameters = group.parameters
            if parameters.buffers is not None and group.registration.trainable() != parameters.trainable:
                parameters.follow_requires_grad()
