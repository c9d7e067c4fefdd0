"""Compares ranks at the end of a backward pass: all that have reduced gradients must have come to it.

A rank whose loss does not depend on the groups that are reduced last is done, while others still wait for it there. If
it calls a collective of its own next, all hang. Where collectives carry names (gloo, or the debug level), the end of a
backward pass can be one more name among them. It costs a message, so it is told when rank checks are due only: this
observer follows from such a time to the end of the next backward pass that reduces.
"""

from __future__ import annotations

import torch

from ..engine.collectives import make_comm
from ..engine.comm import Purpose, compare_first
from ..engine.events import Observer
from ..engine.group import FSDPParamGroup
from ..engine.root import Root


class BackwardEnd(Observer):
    """Compares ranks once. `group`: the group over whose ranks they do, which no rank leaves out."""

    def __init__(self, group: FSDPParamGroup) -> None:
        self._group = group
        self._reduces = False

    def backward_began(self, root: Root) -> None:
        self._reduces = False

    def before_reduce(self, group: FSDPParamGroup) -> None:
        self._reduces = True

    def backward_ended(self, root: Root) -> None:
        if not self._reduces:
            return  # ranks that keep unsharded parameters may accumulate different numbers of batches
        root.remove(self)
        if root.consensus is not None:
            return  # it has its own
        group, purpose = self._group, Purpose("a backward")
        purpose.root = group.purpose.root
        nothing = torch.empty(0, device=group.mesh.device)
        for comm in (group.comms.reduces, group.comms.replicas if group.settings.all_reduce else None):
            if comm is not None and comm.size > 1 and hasattr(comm, "compare"):
                compare_first(make_comm(comm.group, group.mesh.device, purpose), "ending", nothing)
