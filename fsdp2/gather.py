"""Shards to full parameters. Takes byte buffers and a layout; knows no parameter.

Everything that does not change from one gather to the next (views, lists, what needs a cast) is prepared once, in
`GatherPlan`; a gather is then one cast per pair of dtypes, one collective and, for the packed parameters, one copy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import pack, torch_compat
from .comm import Comm
from .layout import GatherLayout
from .pack import Copies, group_copies, split_chunks, view_bytes
from .work import Work


class GatherPlan:
    """How one group's shards (`shards`, uint8, at rest) become its full parameters (`full`, uint8).

    The plan keeps views into both buffers. `full`'s storage may be freed between gathers and must be allocated again
    before `start`. Where operations cost launches, one copies all packed parameters out, if they allow that: on
    CUDA it is one kernel, and a foreach copy to other strides is one for each tensor. On CPU it takes half as long
    again, and copies the rows that are padding, too.
    """

    def __init__(self, layout: GatherLayout, rank: int, shards: Tensor, full: Tensor) -> None:
        self._layout, self._rank, self._shards, self._full = layout, rank, shards, full
        self._world_size = layout.world_size
        # Casts write this rank's own slot of an output, which then is the collective's input too.
        self._casts: Copies = []
        self._copies_out: Copies = []
        # The W packed segments as rows of bytes; the sizes of the parts of a row; where the parts of all rows go.
        self.split: tuple[Tensor, list[int], list[Tensor]] | None = None
        self.outputs: list[Tensor] = []
        self.inputs: list[Tensor] = []
        # The full parameters' bytes as elements of the dtypes that are copied out of them.
        self._typed: dict[torch.dtype, Tensor] = {}
        if not layout.aliased:
            for i in layout.direct:
                self._plan_direct(i)
            if layout.packed_nbytes:
                self._plan_packed(pack.costs_launches(full.device))
        self.casts, self.copies_out = group_copies(self._casts), group_copies(self._copies_out)

    def _plan_direct(self, i: int) -> None:
        spec, start = self._layout.specs[i], self._layout.full_offsets[i]
        if spec.shard_numel == 0:
            return
        must_copy = spec.storage_dtype != spec.compute_dtype or self._world_size == 1
        if must_copy:
            to, source = start + self._rank * spec.compute_nbytes, self._layout.shard_offsets[i]
            target = view_bytes(self._full, to, spec.shard_numel, spec.compute_dtype)
            self._casts.append((target, view_bytes(self._shards, source, spec.shard_numel, spec.storage_dtype)))
        if self._world_size > 1:
            output = self._full[start : start + spec.compute_nbytes * self._world_size]
            own = slice(self._layout.shard_offsets[i], self._layout.shard_offsets[i] + spec.storage_nbytes)
            self.outputs.append(output)
            self.inputs.append(self._slot(output, spec.compute_nbytes) if must_copy else self._shards[own])

    def _plan_packed(self, splits: bool) -> None:
        layout, nbytes = self._layout, self._layout.packed_nbytes
        output = self._full[layout.packed_start : layout.packed_start + nbytes * self._world_size]
        if layout.casts:
            own = self._slot(output, nbytes)
            for run in layout.casts:
                target = view_bytes(own, run.packed_offset, run.numel, run.compute_dtype)
                self._casts.append((target, view_bytes(self._shards, run.storage_offset, run.numel, run.storage_dtype)))
        else:
            first = layout.shard_offsets[layout.packed[0]]
            own = self._shards[first : first + nbytes]
        self.outputs.append(output)
        self.inputs.append(own)
        # Chunks along another dim interleave in the parameter.
        if splits and all(layout.specs[i].dim == 0 for i in layout.packed):
            self._plan_split(output)
            return
        for i in layout.packed:
            self._plan_copy_out(i)

    def _plan_split(self, segments: Tensor) -> None:
        """Along dim 0, a parameter's chunks lie there in rank order, with their padding: it is a part of each row."""
        layout = self._layout
        rows = max(layout.specs[i].num_holders for i in layout.packed)
        places = [(layout.full_offsets[i], layout.specs[i].compute_nbytes) for i in layout.packed]
        # Nobody reads what aligns the segments, but the parts must make up whole rows.
        places.append((layout.packed_start + layout.packed_nbytes * self._world_size, layout.tail_nbytes))
        places = [(offset, nbytes) for offset, nbytes in places if nbytes]
        targets = [self._full[offset : offset + rows * nbytes].view(rows, nbytes) for offset, nbytes in places]
        self.split = segments.view(self._world_size, -1)[:rows], [nbytes for _, nbytes in places], targets

    def _plan_copy_out(self, i: int) -> None:
        spec, layout = self._layout.specs[i], self._layout
        held = spec.num_holders  # the last ranks may hold nothing of a parameter of few rows
        segment = layout.packed_nbytes // spec.compute_dtype.itemsize
        first = layout.packed_start + layout.packed_offsets[i]
        chunks = self._rows_at(first, (held, spec.shard_numel), segment, spec.compute_dtype)
        if spec.dim == 0:
            full = self._rows_at(layout.full_offsets[i], chunks.shape, spec.shard_numel, spec.compute_dtype)
            targets, sources = [full], [chunks]
        else:
            full = view_bytes(self._full, layout.full_offsets[i], spec.numel, spec.compute_dtype)
            targets = split_chunks(full.view(spec.shape), spec)
            sources = [chunks[: spec.whole_chunks].unflatten(1, spec.local_shape(0))]
            if len(targets) > 1:
                sources.append(chunks[spec.whole_chunks, : targets[1].numel()].view(targets[1].shape))
        self._copies_out += zip(targets, sources, strict=True)

    def _rows_at(self, offset: int, shape: Sequence[int], stride: int, dtype: torch.dtype) -> Tensor:
        """Rows that begin at byte `offset` of the full parameters, `stride` elements apart, in one view, not six."""
        if dtype not in self._typed:
            self._typed[dtype] = self._full.view(dtype)
        return self._typed[dtype].as_strided(shape, (stride, 1), offset // dtype.itemsize)

    def _slot(self, output: Tensor, nbytes: int) -> Tensor:
        return output[self._rank * nbytes : (self._rank + 1) * nbytes]


class PendingGather:
    """A gather in flight. The buffers of its plan must stay allocated until `finish` or `abandon`."""

    def __init__(self, plan: GatherPlan, work: Work | None, inputs: Sequence[Tensor]) -> None:
        self._plan, self._work, self._inputs = plan, work, inputs

    def finish(self) -> None:
        """Wait (the caller's stream, or the caller on CPU); then the full parameters are there."""
        self.abandon()
        if self._plan.split is not None:
            rows, sizes, targets = self._plan.split
            torch.split_with_sizes_copy(rows, sizes, 1, out=targets)
        for copies in self._plan.copies_out:
            torch_compat.copy_all(*copies)

    def abandon(self) -> None:
        """Wait until the buffers are no longer written to, so that they can be freed."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()
        self._inputs = ()


def start(
    plan: GatherPlan, comm: Comm, more_outputs: Sequence[Tensor] = (), more_inputs: Sequence[Tensor] = ()
) -> PendingGather:
    """Begin to gather, `more` beside the plan's parameters. Every rank of `comm` must call it, in the same order."""
    for casts in plan.casts:
        torch_compat.copy_all(*casts)
    outputs, inputs = plan.outputs, plan.inputs
    if more_outputs:
        outputs, inputs = [*outputs, *more_outputs], [*inputs, *more_inputs]
    return PendingGather(plan, comm.all_gather(outputs, inputs) if outputs else None, more_inputs)
