"""Lets checks compare what ranks are about to communicate, before they do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..engine.comm import Comm, CommLabel
from ..engine.events import extensions


class CommWatcher(Protocol):
    """Watches what ranks are about to communicate, and raises on all of them if they are out of step.

    `Extensions.comm_watcher` is the one of checks.
    """

    def named(self, group: dist.ProcessGroup, comm_label: CommLabel) -> Comm | None:
        """Returns a Comm over gloo whose collectives carry their names; None: an ordinary one will do."""

    def is_checked(self, group: dist.ProcessGroup | None) -> bool:
        """Returns True if ranks compare all that they do there."""

    def checked(self, comm: Comm, device: torch.device) -> Comm:
        """Returns a Comm that does what `comm` does, once ranks have compared what that is."""

    def unchecked(self, comm: Comm) -> Comm:
        """Returns the Comm inside of such a one, or `comm` itself."""

    def note_level(self, groups: Sequence[dist.ProcessGroup], comm_label: CommLabel, checked: bool) -> None:
        """Has collectives over these process groups compared, or not, from now on."""


class Unwatched:
    """Watches nothing."""

    def named(self, group: dist.ProcessGroup, comm_label: CommLabel) -> Comm | None:
        return None

    def is_checked(self, group: dist.ProcessGroup | None) -> bool:
        return False

    def checked(self, comm: Comm, device: torch.device) -> Comm:
        return comm

    def unchecked(self, comm: Comm) -> Comm:
        return comm

    def note_level(self, groups: Sequence[dist.ProcessGroup], comm_label: CommLabel, checked: bool) -> None:
        pass


_UNWATCHED = Unwatched()


def watcher() -> CommWatcher:
    """Returns what watches the Comms that this thread makes and chooses."""
    return extensions().comm_watcher or _UNWATCHED


def compare_first(comm: Comm, kind: str, tensor: Tensor, label: str = "") -> None:
    """Compares ranks, if `comm` does so, before a collective that is not its own, whose messages have no names.

    `kind`: what ranks are about to do with the group. `label`: names the gradients in `tensor`.

    Raises:
        RuntimeError: ranks are about to do different things, or with tensors of different sizes; on all ranks.
    """
    compare = getattr(comm, "compare", None)
    if compare is not None:
        compare(kind, tensor, label)
