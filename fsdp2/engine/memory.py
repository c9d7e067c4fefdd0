"""Owns the shards of one group, and gathers its unsharded parameters from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..devices.staged_shards import StagedShards
from ..devices.streams import Transfers
from ..parameters.secondary_shards import SecondaryLevel, SecondaryShards, layout_among
from ..torch_private import internals
from .comm import TORCH_MEMORY, Comm, CommMemory
from .gather import GatherPlan, PendingGather, leaves_over, own_storage_view
from .layout import GatherLayout
from .unsharded import UnshardedParameters


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
        self._stage: StagedShards | None = None
        self._nbytes, restored = self.layout.unsharded_nbytes, None
        if secondary is not None:
            restored = layout_among(self.layout, secondary.comm)
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
        """Puts the shards into other memory, without values: users may hold parts of the old one. Unsharded parameters
        that share the memory of the shards must be put there by the caller.
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
            self._stage = StagedShards(self.shards, self._device, self._transfers)
            source = self._stage.memory
        if self.layout.aliased:
            self._unsharded.use_memory(self.shards, None)
        with internals.below_autograd():
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
        with internals.below_autograd():
            for local, spec, offset in zip(locals_, self.layout.specs, self.layout.shard_offsets, strict=True):
                own = own_storage_view(self.shards, offset, local.shape, spec.storage_dtype)
                if local.untyped_storage().nbytes():  # else it has no values yet
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
            self._stage.start(partial(plan.start, comm, more_outputs, more_inputs), comm.is_stream_ordered)
            return PendingGather(self._unsharded, plan, self._stage, more_inputs)
        return PendingGather(self._unsharded, plan, plan.start(comm, more_outputs, more_inputs), more_inputs)
