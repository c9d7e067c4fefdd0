"""Gives the engine Comms that are watched: with names over gloo, and with a rollcall at the debug level."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
import torch.distributed as dist

from ..collectives.choose import make_unchecked
from ..engine.comm import Comm, CommLabel
from . import watch
from .level import is_on
from .named_comm import NamedPairwiseComm
from .rollcall import CheckedComm
from .watched_groups import are_checked, note_level


@final
class Watched:
    """The CommWatcher of the checks: chooses Comms whose ranks compare what they do."""

    def named(self, group: dist.ProcessGroup, comm_label: CommLabel) -> Comm | None:
        if not is_on():
            return None
        watch.start()
        return NamedPairwiseComm(group, comm_label)

    def is_checked(self, group: dist.ProcessGroup | None) -> bool:
        return group is not None and are_checked(group)

    def checked(self, comm: Comm, device: torch.device) -> Comm:
        return CheckedComm(comm, make_unchecked, device)

    def unchecked(self, comm: Comm) -> Comm:
        return comm.inner_comm if isinstance(comm, CheckedComm) else comm

    def note_level(self, groups: Sequence[dist.ProcessGroup], comm_label: CommLabel, checked: bool) -> None:
        note_level(groups, comm_label, checked)
