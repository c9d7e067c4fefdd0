"""Keeps 1/k of the unsharded parameters on each rank after forward, and gathers among k neighbours in backward.

That is `reshard_after_forward=k`: the secondary partition of ZeRO++ hpZ.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import compat
from .buffers import GroupBuffers, PendingGather
from .comm import Comm
from .events import strategies
from .gather import Copies, GatherPlan, group_copies, view_bytes
from .layout import GatherLayout, gather_layout
from .streams import Transfers
from .torch_names import name_of_new_group


def restore_among(group: Any, num_ranks: int) -> None:
    """Has so many neighbouring ranks restore the parameters after forward: the strategy for the core. Every rank must
    call it.
    """
    assert group.mesh.shard_group is not None, "one rank restores nothing"
    neighbours = subgroup(group.mesh.shard_group, num_ranks)
    comm = strategies().make_comm(neighbours, group.mesh.device, group.purpose)
    group.use_comms(group.comms._replace(post_forward=comm))


def make_buffers(
    layout: GatherLayout,
    rank: int,
    device: torch.device,
    transfers: Transfers | None = None,
    post_forward: Comm | None = None,
) -> GroupBuffers:
    """Returns a group's buffers: the strategy for the core."""
    if post_forward is None:
        return GroupBuffers(layout, rank, device, transfers)
    return ShrinkingBuffers(layout, rank, device, transfers, post_forward)


class ShrinkingBuffers(GroupBuffers):
    """Has buffers that can free the unsharded parameters except this rank's secondary shards.

    `post_forward`: the ranks that restore them, this one included.
    """

    def __init__(
        self,
        layout: GatherLayout,
        rank: int,
        device: torch.device,
        transfers: Transfers | None,
        post_forward: Comm,
    ) -> None:
        self._secondary_layout = _secondary_layout(layout, post_forward)
        super().__init__(layout, rank, device, transfers)
        self._secondary = SecondaryShards(self._secondary_layout, post_forward, self.unsharded)

    def _storage_nbytes(self) -> int:
        return max(super()._storage_nbytes(), self._secondary_layout.unsharded_nbytes)

    def start_gather(
        self, comm: Comm, more_outputs: Sequence[Tensor] = (), more_inputs: Sequence[Tensor] = ()
    ) -> PendingGather:
        if self._secondary.is_filled:
            if self._secondary.plan.arrives_in_place:
                self.allocate()
            return self._secondary.start_gather(self)
        return super().start_gather(comm, more_outputs, more_inputs)

    def keep_secondary(self) -> None:
        """Keeps this rank's secondary shards, which the next gather reads. The unsharded parameters may be freed."""
        self._secondary.fill()

    def free(self, although_viewed: bool = False) -> bool:
        """Frees the unsharded parameters, and the secondary shards."""
        self._secondary.drop()
        return super().free(although_viewed)

    def hold_memory(self) -> bool:
        return super().hold_memory() or self._secondary.is_filled


class SecondaryShards:
    """Holds this rank's shards in compute dtypes, cut among the ranks of the post-forward mesh instead of all."""

    def __init__(self, layout: GatherLayout, comm: Comm, unsharded: Tensor) -> None:
        self._comm, self._nbytes = comm, layout.shard_nbytes
        self.is_filled = False
        self._shards = torch.empty(self._nbytes, dtype=torch.uint8, device=unsharded.device)
        self._storage = self._shards.untyped_storage()
        self.plan = GatherPlan(layout, comm.rank, self._shards, unsharded)
        self._copies = group_copies(self._plan_fill(layout, comm.rank, unsharded))
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

    def fill(self) -> None:
        self.is_filled = True
        self._storage.resize_(self._nbytes)
        for copies in self._copies:
            compat.copy_all(*copies)

    def drop(self) -> None:
        if self.is_filled:
            self.is_filled = False
            self._storage.resize_(0)

    def start_gather(self, buffers: GroupBuffers) -> PendingGather:
        return PendingGather(buffers, self.plan, self.plan.start(self._comm))


def _secondary_layout(layout: GatherLayout, comm: Comm) -> GatherLayout:
    """Returns the layout of parameters cut among fewer ranks, in compute dtypes, into the same unsharded storage.

    Chunks of fewer ranks need no more padding, so that they fit into the same bytes. Packed segments follow them.
    """
    specs = tuple(replace(spec, storage_dtype=spec.compute_dtype, world_size=comm.size) for spec in layout.specs)
    own = gather_layout(specs, comm.size, comm.direct_min_bytes)
    return replace(own, unsharded_offsets=layout.unsharded_offsets, packed_start=layout.packed_start)


# Process group -> size -> the group of so many neighbours of this rank.
_subgroups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]] = weakref.WeakKeyDictionary()
# Default process group -> how many groups of the same ranks `subgroup` has made. These ranks have made equally many.
_num_made: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()


def subgroup(group: dist.ProcessGroup, size: int) -> dist.ProcessGroup:
    """Returns a process group of this rank's `size` neighbours in `group`, which it makes once.

    If `size` is that of `group`, it is a second group over the same ranks. All ranks of the new group must call it. If
    the default group is bound to a device (`init_process_group(device_id=...)`), all ranks of that must, because NCCL
    splits it.
    """
    of_size = _subgroups.setdefault(group, {})
    if size not in of_size:
        first = group.rank() // size * size
        ranks = tuple(dist.get_process_group_ranks(group)[first : first + size])
        assert dist.group.WORLD is not None, "there are other groups"
        num_made = _num_made.setdefault(dist.group.WORLD, Counter())
        num_made[ranks] += 1
        with name_of_new_group(f"fsdp2, number {num_made[ranks]} of ranks {ranks}"):
            of_size[size] = dist.new_group([*ranks], use_local_synchronization=True)
    return of_size[size]
