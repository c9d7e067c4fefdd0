"""Owns the shards of one group, and secondary shards, and gathers its unsharded parameters from them.

Secondary shards are 1/k of the unsharded parameters, which each rank keeps after forward, so that later gathers are
among k neighbours only. They last until backward (`reshard_after_forward=k`, the secondary partition of ZeRO++ hpZ), or
until a write, where replicas share one set of shards (`Use.OUTER_SHARD`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..collectives.comm_memory import TORCH_MEMORY, CommMemory
from ..devices.streams import Transfer, Transfers, Work
from ..torch_private import compat
from .comm import Comm
from .gather import Copies, GatherPlan, group_copies, leaves_over, own_storage_view, view_bytes
from .layout import GatherLayout, gather_layout
from .unsharded import UnshardedParameters


@dataclass(eq=False)
class PendingGather:
    """An all-gather in flight. The memory must stay until `finish` or `abandon`."""

    unsharded: UnshardedParameters
    plan: GatherPlan
    # None: nothing is to be waited for any more.
    work: Work | None
    # They must stay alive while the all-gather reads them.
    inputs: Sequence[Tensor] = ()

    def finish(self) -> None:
        """Makes the current stream (on CPU: the caller) wait until the unsharded parameters are there."""
        work, self.work = self.work, None
        if work is not None:
            work.wait()
        del work  # and memory of its own
        if not self.plan.arrives_in_place:
            self.unsharded.allocate()
        self.plan.finish()
        self.inputs = ()
        if self.plan.has_memory and not self.unsharded.keeps_storage:
            self.plan.free()

    def abandon(self) -> None:
        """Waits until the all-gather no longer writes to the memory, so that it can be freed. Frees what has arrived
        apart from the unsharded parameters.
        """
        work, self.work = self.work, None
        if work is not None:
            work.wait()
        self.inputs = ()
        if self.plan.has_memory and not self.unsharded.keeps_storage:
            self.plan.free()


class Memory:
    """One flat buffer of a group's shards, and the gathers that fill the memory of its unsharded parameters from it.

    That memory is allocated at first, for `unsharded_parameters`: free it when the parameters are built.

    Args:
        layout: where everything lies.
        rank: this rank's index in the shard group.
        device: where the unsharded parameters live and compute.
        unsharded: gets their memory.
        transfers: copies the shards to `device` for each gather, if they rest on the CPU and `device` is another.
        secondary: the ranks that keep secondary shards, and for how long. None: no rank keeps any.
        source: where the memory comes from that gathers fill.
    """

    def __init__(
        self,
        layout: GatherLayout,
        rank: int,
        device: torch.device,
        unsharded: UnshardedParameters,
        transfers: Transfers | None = None,
        secondary: SecondaryLevel | None = None,
        source: CommMemory = TORCH_MEMORY,
    ) -> None:
        self.layout = layout if transfers is None else replace(layout, aliased=False)
        self._rank, self._device, self._transfers, self._source = rank, device, transfers, source
        self._stage: _Stage | None = None
        self._nbytes, restored = self.layout.unsharded_nbytes, None
        if secondary is not None:
            restored = _layout_among(self.layout, secondary.comm)
            self._nbytes = max(self._nbytes, restored.unsharded_nbytes)
        self._unsharded = unsharded
        if not self.layout.aliased:
            memory = torch.empty(self._nbytes, dtype=torch.uint8, device=device)
            unsharded.use_memory(memory, source.allocator(self._nbytes))
        # The bytes of the shards.
        self.shards: Tensor
        self._place_shards()
        # What this rank keeps of the unsharded parameters when they are freed. None: nothing.
        self.secondary: SecondaryShards | None = None
        if secondary is not None and restored is not None:
            self.secondary = SecondaryShards(restored, secondary, unsharded)

    def renew_shards(self) -> None:
        """Puts the shards into other memory, without values: users may hold parts of the old one. If the unsharded
        parameters lie there, too, so do those that `unsharded_parameters` returns from now on.
        """
        storage, is_allocated = self._unsharded.storage, self._unsharded.is_allocated
        if not is_allocated:
            storage.resize_(self._nbytes)  # while a plan is made of it
        self._place_shards()
        if not is_allocated:
            storage.resize_(0)

    def _place_shards(self) -> None:
        nbytes = self.layout.shard_nbytes
        if self._transfers is None:
            self.shards = source = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        else:
            self.shards = self._transfers.allocate(nbytes, torch.uint8).zero_()
            self._stage = _Stage(self.shards, self._device, self._transfers)
            source = self._stage.memory
        if self.layout.aliased:
            self._unsharded.use_memory(self.shards, None)
        with compat.below_autograd():
            self._plan = GatherPlan(self.layout, self._rank, source, self._unsharded.memory, self._source)
        if self._stage is not None:
            self._stage.free()

    def unsharded_parameters(self) -> list[Tensor]:
        """Returns the memory of the unsharded parameters, as tensors to build the parameters upon."""
        offsets = self.layout.unsharded_offsets
        places = [(offsets[i], spec.shape, spec.compute_dtype) for i, spec in enumerate(self.layout.specs)]
        return leaves_over(self._unsharded.memory, places)

    def has_in_place(self, locals_: Sequence[Tensor]) -> bool:
        """Returns True if each of these local tensors is at its place in the shard buffer (`.to` makes new objects)."""
        places = zip(locals_, self.layout.shard_offsets, strict=True)
        start = self.shards.data_ptr()
        return not any(local.is_inference() for local in locals_) and all(
            not local.numel() or (local.data_ptr() == start + offset and local.is_contiguous())
            for local, offset in places
        )

    def move_into_shards(self, locals_: Sequence[Tensor]) -> list[Tensor]:
        """Copies each local tensor to its place in the shard buffer, and returns those in place."""
        placed = []
        with compat.below_autograd():
            for local, spec, offset in zip(locals_, self.layout.specs, self.layout.shard_offsets, strict=True):
                own = own_storage_view(self.shards, offset, local.shape, spec.storage_dtype)
                own.copy_(local)
                placed.append(own)
        return placed

    @property
    def sent(self) -> Sequence[Tensor]:
        """The tensors that this rank sends in each gather from the shards, always in the same list."""
        return self._plan.inputs

    def start_gather(
        self, comm: Comm, more_outputs: Sequence[Tensor] = (), more_inputs: Sequence[Tensor] = ()
    ) -> PendingGather:
        """Begins to fill the unsharded parameters from the shards. Every rank of `comm` must call it, in order.

        `more_outputs`, `more_inputs`: what parameters that say themselves how they are gathered receive and send in the
        same collective (subclasses.py). They lie in memory of their own.
        """
        plan = self._plan
        if self.secondary is not None:
            self.secondary.drop()
        if plan.arrives_in_place:
            self._unsharded.allocate()
        if self._stage is not None:
            if plan.has_memory:
                plan.allocate()  # on the stream that computes, which will free it
            self._stage.start(partial(plan.start, comm, more_outputs, more_inputs), comm.follows_stream)
            return PendingGather(self._unsharded, plan, self._stage, more_inputs)
        return PendingGather(self._unsharded, plan, plan.start(comm, more_outputs, more_inputs), more_inputs)


class _Stage:
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
        """Begins to copy the shards, and to gather behind that, beside what the device computes. `follows`: whoever
        waits for the gather has waited for the copy.
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
            compat.copy_all(*copies)

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


def _layout_among(layout: GatherLayout, comm: Comm) -> GatherLayout:
    """Returns the layout of parameters cut among fewer ranks, in compute dtypes, into the same unsharded storage.

    Chunks of fewer ranks need no more padding, so that they fit into the same bytes. Packed segments follow them.
    """
    among = comm.size
    specs = tuple(replace(s, storage_dtype=s.compute_dtype, world_size=among, gather_codec=None) for s in layout.specs)
    own = gather_layout(specs, comm.size, comm.direct_min_bytes)
    return replace(own, unsharded_offsets=layout.unsharded_offsets, packed_start=layout.packed_start)
