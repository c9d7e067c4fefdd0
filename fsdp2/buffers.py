"""The memory of one group: its shards at rest, the full parameters, and the part that may stay after forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from . import gather, torch_compat
from .comm import Comm
from .full_places import FullPlaces
from .gather import GatherPlan, PendingGather
from .layout import GatherLayout, gather_layout
from .pack import Copies, alias, group_copies, leaf_over, view_bytes
from .param import FSDPParam
from .transfers import Transfer, Transfers


class GroupBuffers:
    """One flat buffer of shards, and one storage for the full parameters, allocated from `start_gather` to `free`.

    At first it is allocated, for `full_parameter`: call `free` when they are built.

    Args:
        layout: where everything lies.
        rank: this rank's place among those that share the parameters.
        device: where the full parameters live and compute.
        transfers: if the shards live on the CPU and `device` is another: what copies them there for each gather.
        few: some of these ranks, this one included, which can restore the full parameters after `shrink`.
    """

    def __init__(
        self,
        layout: GatherLayout,
        rank: int,
        device: torch.device,
        transfers: Transfers | None = None,
        few: Comm | None = None,
    ) -> None:
        self.layout = layout if transfers is None else replace(layout, aliased=False)
        self._rank, self._device, self._transfers = rank, device, transfers
        self._stage: _Stage | None = None
        self._full_nbytes, kept = layout.full_nbytes, None
        if few is not None:
            kept = _kept_layout(layout, few)
            self._full_nbytes = max(self._full_nbytes, kept.full_nbytes)
        if not self.layout.aliased:
            self._full = torch.empty(self._full_nbytes, dtype=torch.uint8, device=device)
        # Keep the full storage when it is given up, so that pointers into it stay valid.
        self.keeps_storage = False
        self._is_allocated = True
        self._renew_shards()
        self._kept = _KeptPart(kept, few, self._full) if kept is not None and few is not None else None

    def renew_shards(self) -> None:
        """Have the shards in other memory, without values: of the old one, users may hold parts. If the full parameters
        lie there, too, so do those that `full_parameter` yields from now on.
        """
        if not self._is_allocated:
            self._full_storage.resize_(self._full_nbytes)  # while a plan is made of it
        self._renew_shards()
        if not self._is_allocated:
            self._full_storage.resize_(0)

    def _renew_shards(self) -> None:
        nbytes = self.layout.shard_nbytes
        if self._transfers is None:
            self.shards = source = torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        else:
            self.shards = self._transfers.allocate(nbytes, torch.uint8).zero_()
            self._stage = _Stage(self.shards, self._device, self._transfers)
            source = self._stage.memory
        if self.layout.aliased:
            self._full = self.shards
        self._full_storage = self._full.untyped_storage()
        self.storage_id = torch_compat.storage_id(self._full)
        self._plan = GatherPlan(self.layout, self._rank, source, self._full)
        if self._stage is not None:
            self._stage.free()

    def full_parameter(self, i: int) -> Tensor:
        """The memory of full parameter i, as a tensor to build it upon."""
        spec = self.layout.specs[i]
        return leaf_over(self._full, self.layout.full_offsets[i], spec.shape, spec.compute_dtype)

    def places_of(self, params: Sequence[FSDPParam]) -> FullPlaces:
        """Where the full parameters of `params`, the first of which lie here, must lie."""
        return FullPlaces(params[: len(self.layout.specs)], self.layout.full_offsets, self._full_storage)

    def full_words(self, every: int) -> list[Tensor]:
        """Returns every so many of the words in which each full parameter lies, as int64."""
        whole = view_bytes(self._full, 0, self._full.numel() // 8, torch.int64)
        return [
            whole.as_strided((-(-spec.nbytes // (8 * every)),), (every,), offset // 8)
            for spec, offset in zip(self.layout.specs, self.layout.full_offsets, strict=True)
        ]

    def hold(self, locals_: Sequence[Tensor]) -> bool:
        """Whether each of these local tensors is at its place in the shard buffer: `.to` has made objects anew, say."""
        places = zip(locals_, self.layout.shard_offsets, strict=True)
        start = self.shards.data_ptr()
        return not any(local.is_inference() for local in locals_) and all(
            not local.numel() or (local.data_ptr() == start + offset and local.is_contiguous())
            for local, offset in places
        )

    def move_into_shards(self, locals_: Sequence[Tensor]) -> list[Tensor]:
        """Copy each local tensor to its place in the shard buffer, and return those in place."""
        placed = []
        for local, spec, offset in zip(locals_, self.layout.specs, self.layout.shard_offsets, strict=True):
            own = alias(self.shards, offset, tuple(local.shape), spec.storage_dtype)
            own.copy_(local)
            placed.append(own)
        return placed

    def start_gather(
        self, comm: Comm, more_outputs: Sequence[Tensor] = (), more_inputs: Sequence[Tensor] = ()
    ) -> PendingGather:
        """Begin to fill the full parameters, and `more_outputs`. Every rank of `comm` must call it, in one order."""
        if not self._is_allocated:
            self._full_storage.resize_(self._full_nbytes)
            self._is_allocated = True
        if self._kept is not None and self._kept.is_filled:
            return self._kept.start_gather()
        if self._stage is not None:
            self._stage.start(partial(gather.start, self._plan, comm, more_outputs, more_inputs))
            return PendingGather(self._plan, self._stage, more_inputs)
        return gather.start(self._plan, comm, more_outputs, more_inputs)

    def shrink(self) -> None:
        """Give up the full parameters but for this rank's part, which the next gather needs, among few ranks only."""
        if self._kept is not None:
            self._kept.fill()
        self._free_full()

    def free(self) -> None:
        """Give up the full parameters, and what `shrink` has kept of them."""
        if self._kept is not None:
            self._kept.drop()
        self._free_full()

    def hold_memory(self) -> bool:
        """Returns True if memory is to be given back: that of full parameters, or of a part of them."""
        is_freed_later = self._is_allocated and not self.layout.aliased and not self.keeps_storage
        return is_freed_later or (self._kept is not None and self._kept.is_filled)

    def _free_full(self) -> None:
        if self._is_allocated and not self.layout.aliased and not self.keeps_storage:
            self._is_allocated = False
            self._full_storage.resize_(0)


class _Stage:
    """Memory on the device for a copy of the shards, from which a gather reads. It is the Work of that gather.

    At first it is allocated, for a plan to be made of it.
    """

    def __init__(self, shards: Tensor, device: torch.device, transfers: Transfers) -> None:
        self._shards, self._transfers = shards, transfers
        self.memory = torch.empty_like(shards, device=device)
        self._storage = self.memory.untyped_storage()
        self._copy: Transfer[PendingGather] | None = None

    def start(self, start_gather: Callable[[], PendingGather]) -> None:
        """Begin to copy, and to gather behind that, beside what the device computes."""
        self._storage.resize_(self._shards.nbytes)
        self._copy = self._transfers.start_in(self.memory, self._shards, start_gather)

    def wait(self) -> None:
        copy, self._copy = self._copy, None
        assert copy is not None, "a gather is waited for once"
        copy.wait().abandon()
        self.free()

    def free(self) -> None:
        self._storage.resize_(0)


class _KeptPart:
    """This rank's part of the full parameters in compute dtypes, cut among `few` ranks instead of all."""

    def __init__(self, layout: GatherLayout, few: Comm, full: Tensor) -> None:
        self._comm, self._nbytes = few, layout.shard_nbytes
        self.is_filled = False
        self._part = torch.empty(self._nbytes, dtype=torch.uint8, device=full.device)
        self._storage = self._part.untyped_storage()
        self._plan = GatherPlan(layout, few.rank, self._part, full)
        self._copies = group_copies(self._plan_fill(layout, few.rank, full))
        self._storage.resize_(0)

    def _plan_fill(self, layout: GatherLayout, rank: int, full: Tensor) -> Copies:
        copies = []
        for spec, offset, full_offset in zip(layout.specs, layout.shard_offsets, layout.full_offsets, strict=True):
            shape, (first, last) = spec.local_shape(rank), spec.rows(rank)
            whole = view_bytes(full, full_offset, spec.numel, spec.compute_dtype).view(spec.shape)
            own = whole.narrow(spec.dim, first, last - first)
            copies.append((view_bytes(self._part, offset, own.numel(), spec.compute_dtype).view(shape), own))
        return copies

    def fill(self) -> None:
        self.is_filled = True
        self._storage.resize_(self._nbytes)
        for copies in self._copies:
            torch_compat.copy_all(*copies)

    def drop(self) -> None:
        if self.is_filled:
            self.is_filled = False
            self._storage.resize_(0)

    def start_gather(self) -> PendingGather:
        return gather.start(self._plan, self._comm)


def _kept_layout(layout: GatherLayout, few: Comm) -> GatherLayout:
    """How the parameters lie when they are cut among fewer ranks, in compute dtypes, into the same full storage.

    Chunks of fewer ranks need no more padding: they fit where those of all ranks do. What is packed lies behind them.
    """
    specs = tuple(replace(spec, storage_dtype=spec.compute_dtype, world_size=few.size) for spec in layout.specs)
    own = gather_layout(specs, few.size, few.direct_min_bytes)
    return replace(own, full_offsets=layout.full_offsets, packed_start=layout.packed_start)
