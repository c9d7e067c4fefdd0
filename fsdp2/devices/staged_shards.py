"""Copies offloaded shards to the device for each all-gather, while the device computes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .streams import Transfer, Transfers, Work


class StagedShards:
    """A copy of offloaded shards on the device, from which an all-gather reads. It is that all-gather's Work.

    It is allocated at first, for a plan to be made of it.
    """

    def __init__(self, shards: Tensor, device: torch.device, transfers: Transfers) -> None:
        self._shards, self._transfers = shards, transfers
        self.memory = torch.empty_like(shards, device=device)
        self._storage = self.memory.untyped_storage()
        self._copy: Transfer[Work | None] | None = None
        self._follows = False

    def start(self, start_gather: Callable[[], Work | None], follows: bool) -> None:
        """Begins to copy the shards, and then to gather, while the device computes. `follows`: to wait for the gather
        is to wait for the copy, too.
        """
        self._storage.resize_(self._shards.nbytes)
        self._copy = self._transfers.start_in(self.memory, self._shards, start_gather)
        self._follows = follows

    def wait(self) -> None:
        copy, self._copy = self._copy, None
        assert copy is not None, "a gather is waited for once"
        work = copy.pass_on() if self._follows else copy.wait()
        if work is not None:
            work.wait()
        elif self._follows:
            copy.wait()
        self.free()

    def free(self) -> None:
        self._storage.resize_(0)
