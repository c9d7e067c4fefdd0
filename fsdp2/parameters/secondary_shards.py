"""Keeps 1/k of the unsharded parameters on each rank when they are freed, so that later gathers are among k ranks only.

These secondary shards last until backward (`reshard_after_forward=k`, the secondary partition of ZeRO++ hpZ), or until
a write, where replicas share one set of shards (`Use.OUTER_SHARD`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..engine.comm import Comm
from ..engine.gather import Copies, GatherPlan, PendingGather, group_copies, view_bytes
from ..engine.layout import GatherLayout, gather_layout
from ..torch_private import internals

if TYPE_CHECKING:
    from ..engine.unsharded import UnshardedParameters


class SecondaryLevel(NamedTuple):
    """The ranks that keep secondary shards, among which later gathers are, and for how long they keep them."""

    comm: Comm
    # True: until a parameter is written to (`Use.OUTER_SHARD`). False: until backward (`reshard_after_forward=k`).
    until_write: bool


class SecondaryShards:
    """This rank's part of the unsharded parameters, in compute dtypes, which stays when they are freed."""

    def __init__(self, layout: GatherLayout, level: SecondaryLevel, unsharded: UnshardedParameters) -> None:
        self.level, self._unsharded, self._nbytes = level, unsharded, layout.shard_nbytes
        self.is_filled = False
        memory = unsharded.memory
        self._shards = torch.empty(self._nbytes, dtype=torch.uint8, device=memory.device)
        self._storage = self._shards.untyped_storage()
        self._plan = GatherPlan(layout, level.comm.rank, self._shards, memory)
        self._copies = group_copies(self._plan_fill(layout, level.comm.rank, memory))
        self._storage.resize_(0)

    def _plan_fill(self, layout: GatherLayout, rank: int, unsharded: Tensor) -> Copies:
        copies = []
        rows = zip(layout.specs, layout.shard_offsets, layout.unsharded_offsets, strict=True)
        for spec, offset, start in rows:
            shape, (first, last) = spec.local_shape(rank), spec.rows(rank)
            whole = view_bytes(unsharded, start, spec.numel, spec.compute_dtype).view(spec.shape)
            own = whole.narrow(spec.dim, first, last - first)
            copies.append((view_bytes(self._shards, offset, own.numel(), spec.compute_dtype).view(shape), own))
        return copies

    def keep(self) -> None:
        """Keeps this rank's part of the unsharded parameters, which may be freed then. A part that is kept until a
        write stays as it is.
        """
        if not (self.is_filled and self.level.until_write):
            self._fill()

    def _fill(self) -> None:
        self.is_filled = True
        self._storage.resize_(self._nbytes)
        for copies in self._copies:
            internals.copy_all(*copies)

    def drop(self) -> None:
        """Frees the secondary shards: the next gather is from the shards again."""
        if self.is_filled:
            self.is_filled = False
            self._storage.resize_(0)

    def restore(self) -> PendingGather:
        """Begins to fill the unsharded parameters from the secondary shards. Every rank that keeps some must call it,
        in order.
        """
        if self._plan.arrives_in_place:
            self._unsharded.allocate()
        return PendingGather(self._unsharded, self._plan, self._plan.start(self.level.comm))


def layout_among(layout: GatherLayout, comm: Comm) -> GatherLayout:
    """Returns the layout of parameters cut among fewer ranks, in compute dtypes, into the same unsharded storage.

    Chunks of fewer ranks need no more padding, so that they fit into the same bytes. Packed segments follow them.
    """
    among = comm.size
    specs = tuple(replace(s, storage_dtype=s.compute_dtype, world_size=among, gather_codec=None) for s in layout.specs)
    own = gather_layout(specs, comm.size, comm.direct_min_bytes)
    return replace(own, unsharded_offsets=layout.unsharded_offsets, packed_start=layout.packed_start)
