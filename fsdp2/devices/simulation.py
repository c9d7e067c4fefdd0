"""Lets the engine run on tensors of the meta device that stand for those of another one: sizes without memory.

A plan runs it so, where no process group exists, to see what a step allocates and sends. `simulated` says what tensors
on meta stand for on this thread; None, the usual case: for nothing but themselves. Real devices never ask.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist

from ..torch_private.internals import type_of

if TYPE_CHECKING:
    from ..engine.comm import Comm, CommLabel
    from .streams import Transfers


class Simulation(Protocol):
    """The device that tensors on the meta device stand for."""

    device: torch.device
    transfers: Transfers
    """Copies between that device and the CPU."""


class SimulatedGroup(dist.ProcessGroup):
    """Stands for the process group of ranks that this process does not have. It makes Comms for itself."""

    @abstractmethod
    def make_comm(self, comm_label: CommLabel) -> Comm:
        """Returns a Comm over these ranks."""

    @abstractmethod
    def among(self, ranks: Sequence[int]) -> SimulatedGroup:
        """Returns another group, of some of these ranks, by their indices; this rank is one of them."""


simulated: ContextVar[Simulation | None] = ContextVar("simulated", default=None)


def kind_of(device: torch.device) -> str:
    """Returns the type of a device; of the meta device, the type of the one that it stands for."""
    kind = type_of(device)
    now = simulated.get() if kind == "meta" else None
    return kind if now is None else type_of(now.device)
