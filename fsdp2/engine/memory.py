"""Owns the memory of one group: its shards, its unsharded parameters while they are needed, secondary shards.

Secondary shards are 1/k of the unsharded parameters, which each rank keeps after forward, so that later gathers are
among k neighbours only. They last until backward (`reshard_after_forward=k`, the secondary partition of ZeRO++ hpZ), or
until a write, where replicas share one set of shards (`Use.OUTER_SHARD`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..devices.streams import Transfer, Transfers, Work
from ..torch_private import compat
from ..torch_private.compat import storage_uses
from .comm import TORCH_MEMORY, Comm, CommMemory
from .gather import Copies, GatherPlan, group_copies, leaves_over, own_storage_view, view_bytes
from .layout import GatherLayout, gather_layout


class PendingGather:
    """An all-gather in flight. The memory must stay until `finish` or `abandon`; `Memory.free` gives it back."""

    def __init__(self, memory: Memory, plan: GatherPlan, work: Work | None, inputs: Sequence[Tensor] = ()) -> None:
        self._memory, self._plan, self._work, self._inputs_kept_alive = memory, plan, work, inputs

    def finish(self) -> None:
        """Makes the current stream (on CPU: the caller) wait until the unsharded parameters are there."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()
        del work  # and memory of its own
        if not self._plan.arrives_in_place:
            self._memory.allocate()
        self._plan.finish()
        self._inputs_kept_alive = ()
        if self._plan.has_memory and not self._memory.keeps_storage:
            self._plan.free()

    def abandon(self) -> None:
        """Waits until the all-gather no longer writes to the memory, so that it can be freed. Frees what has arrived
        apart from the unsharded parameters.
        """
        work, self._work = self._work, None
        if work is not None:
            work.wait()
        self._inputs_kept_alive = ()
        if self._plan.has_memory and not self._memory.keeps_storage:
            self._plan.free()


class Memory:
    """Owns one flat buffer of shards, and one storage for the unsharded parameters, allocated from gather to free; from
    the end of the gather, if all of it travels packed.

    The storage is allocated at first, for `unsharded_parameters`: call `free` when the parameters are built.

    `shards`, `unsharded`: their bytes; `storage`: that of the unsharded parameters; `is_allocated`: it has its size.
    `free` leaves it allocated while something else than the engine uses it: a view of a parameter that a hook, a cache
    or a graph keeps. What autograd saves through the engine's hooks is no such use, see SavedTensors. `secondary`: what
    this rank keeps of the unsharded parameters when they are freed; None if no ranks restore them together.

    Args:
        layout: where everything lies.
        rank: this rank's index in the shard group.
        device: where the unsharded parameters live and compute.
        transfers: copies the shards to `device` for each gather, if they rest on the CPU and `device` is another.
        neighbours: the ranks that restore the unsharded parameters from secondary shards, this one included.
        source: where the memory comes from that gathers fill.
    """

    def __init__(
        self,
        layout: GatherLayout,
        rank: int,
        device: torch.device,
        transfers: Transfers | None = None,
        neighbours: Comm | None = None,
        source: CommMemory = TORCH_MEMORY,
    ) -> None:
        self.layout = layout if transfers is None else replace(layout, aliased=False)
        self._rank, self._device, self._transfers, self._source = rank, device, transfers, source
        self._stage: _Stage | None = None
        self._nbytes, restored = self.layout.unsharded_nbytes, None
        if neighbours is not None:
            restored = _layout_among(self.layout, neighbours)
            self._nbytes = max(self._nbytes, restored.unsharded_nbytes)
        self._allocate = source.allocator(self._nbytes)
        if not self.layout.aliased:
            self.unsharded = torch.empty(self._nbytes, dtype=torch.uint8, device=device)
        # Keep the storage when it is given up, so that pointers into it stay valid.
        self.keeps_storage = False
        self.is_allocated = True
        # How many tensors and Python objects of the engine use the storage, see `note_uses`.
        self.num_uses = 0
        self._place_shards()
        self.secondary: SecondaryShards | None = None
        if neighbours is not None and restored is not None:
            self.secondary = SecondaryShards(restored, neighbours, self.unsharded)

    def renew_shards(self) -> None:
        """Puts the shards into other memory, without values: users may hold parts of the old one. If the unsharded
        parameters lie there, too, so do those that `unsharded_parameters` returns from now on.
        """
        if not self.is_allocated:
            self.storage.resize_(self._nbytes)  # while a plan is made of it
        self._place_shards()
        if not self.is_allocated:
            self.storage.resize_(0)

    def _place_shards(self) -> None:
        nbytes = self.layout.shard_nbytes
        if self._transfers is None:
            self.shards = source = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        else:
            self.shards = self._transfers.allocate(nbytes, torch.uint8).zero_()
            self._stage = _Stage(self.shards, self._device, self._transfers)
            source = self._stage.memory
        if self.layout.aliased:
            self.unsharded = self.shards
        self.storage = self.unsharded.untyped_storage()
        self.storage_id = compat.storage_id(self.unsharded)
        with compat.below_autograd():
            self._plan = GatherPlan(self.layout, self._rank, source, self.unsharded, self._source)
        if self._stage is not None:
            self._stage.free()

    def unsharded_parameters(self) -> list[Tensor]:
        """Returns the memory of the unsharded parameters, as tensors to build the parameters upon."""
        offsets = self.layout.unsharded_offsets
        places = [(offsets[i], spec.shape, spec.compute_dtype) for i, spec in enumerate(self.layout.specs)]
        return leaves_over(self.unsharded, places)

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
        """Begins to fill the unsharded parameters. Every rank of `comm` must call it, in order.

        `more_outputs`, `more_inputs`: what parameters that say themselves how they are gathered receive and send in the
        same collective (subclasses.py). They lie in memory of their own.
        """
        plan = self._plan
        if self.secondary is not None:
            self.secondary.drop()
        if not self.is_allocated and plan.arrives_in_place:
            self._allocate(self.storage)
            self.is_allocated = True
        if self._stage is not None:
            if plan.has_memory:
                plan.allocate()  # on the stream that computes, which will free it
            self._stage.start(partial(plan.start, comm, more_outputs, more_inputs), comm.follows_stream)
            return PendingGather(self, plan, self._stage, more_inputs)
        return PendingGather(self, plan, plan.start(comm, more_outputs, more_inputs), more_inputs)

    def keep_secondary(self, refill: bool = True) -> None:
        """Keeps this rank's part of the unsharded parameters, from which `restore` gathers; they may be freed then.

        `refill=False`: the part that is kept already, if one is, stays as it is.
        """
        assert self.secondary is not None, "neighbours restore them"
        if refill or not self.secondary.is_filled:
            self.secondary.fill()

    def restore(self) -> PendingGather:
        """Begins to fill the unsharded parameters from secondary shards. Every neighbour must call it, in order."""
        assert self.secondary is not None, "neighbours restore them"
        if self.secondary.plan.arrives_in_place:
            self.allocate()
        return PendingGather(self, self.secondary.plan, self.secondary.start_gather())

    def allocate(self) -> None:
        """Allocates the storage of the unsharded parameters, unless it is there."""
        if not self.is_allocated:
            self._allocate(self.storage)
            self.is_allocated = True

    def note_uses(self) -> None:
        """Takes what uses the storage now for the engine's own: unsharded parameters, and prepared views."""
        self.num_uses = storage_uses(self.storage._cdata)

    def free(self, although_viewed: bool = False) -> bool:
        """Frees the unsharded parameters, and no secondary shards. Returns False if they stay because something uses
        their memory.

        `although_viewed`: free them also then. Whoever reads such a view reads memory that is not there. Where the
        memory is that of the shards, or the user keeps it, nothing is freed, and it returns True.
        """
        if self.is_allocated and not self.layout.aliased and not self.keeps_storage:
            if storage_uses(self.storage._cdata) > self.num_uses and not although_viewed:
                return False
            self.is_allocated = False
            self.storage.resize_(0)
        return True

    def hold_memory(self) -> bool:
        """Returns True if `free`, or dropping the secondary shards, would give memory back."""
        is_unsharded = self.is_allocated and not self.layout.aliased and not self.keeps_storage
        return is_unsharded or (self.secondary is not None and self.secondary.is_filled)


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


class SecondaryShards:
    """This rank's shards in compute dtypes, cut among the ranks that restore the parameters instead of all."""

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
        """Keeps this rank's part of the unsharded parameters, which may be freed then."""
        self.is_filled = True
        self._storage.resize_(self._nbytes)
        for copies in self._copies:
            compat.copy_all(*copies)

    @property
    def nbytes(self) -> int:
        """Bytes that it takes now."""
        return self._nbytes if self.is_filled else 0

    def drop(self) -> None:
        """Frees the secondary shards: the next gather is from the shards again."""
        if self.is_filled:
            self.is_filled = False
            self._storage.resize_(0)

    def start_gather(self) -> Work | None:
        """Begins to gather the unsharded parameters among the ranks that restore them."""
        return self.plan.start(self._comm)


def _layout_among(layout: GatherLayout, comm: Comm) -> GatherLayout:
    """Returns the layout of parameters cut among fewer ranks, in compute dtypes, into the same unsharded storage.

    Chunks of fewer ranks need no more padding, so that they fit into the same bytes. Packed segments follow them.
    """
    among = comm.size
    specs = tuple(replace(s, storage_dtype=s.compute_dtype, world_size=among, gather_codec=None) for s in layout.specs)
    own = gather_layout(specs, comm.size, comm.direct_min_bytes)
    return replace(own, unsharded_offsets=layout.unsharded_offsets, packed_start=layout.packed_start)
