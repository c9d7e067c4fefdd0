"""Full gradients to this rank's shards of their mean. Takes tensors and a layout; knows no parameter."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from . import torch_compat
from .comm import Comm, Work
from .layout import BucketLayout, ParamSpec
from .pack import gradient_slots, pack_gradients

# Parameter index -> (a tensor, where in its storage this rank's padded shard of the gradient begins).
Shards = dict[int, tuple[Tensor, int]]


class ReducePlan:
    """What is the same in all reductions of one bucket."""

    def __init__(self, layout: BucketLayout, specs: tuple[ParamSpec, ...], world_size: int) -> None:
        self.layout = layout
        self.direct = [((specs[i].shard_numel,), layout.offsets[i]) for i in layout.direct]
        self.slots = gradient_slots(layout, specs)
        self.segments_shape = (world_size, layout.packed_numel)
        # One operation for all of them; on CPU it is slow where it casts, and copies twice where it pads.
        self.is_one_cat = layout.packed_numel == sum(specs[i].shard_numel for i in layout.packed) and all(
            specs[i].is_even and specs[i].shard_numel and specs[i].compute_dtype == layout.reduce_dtype
            for i in layout.packed
        )

    def pack(self, gradients: Mapping[int, Tensor], out_WP: Tensor) -> None:
        packed = [gradients[i] for i in self.layout.packed]
        if self.is_one_cat:
            torch_compat.chunk_cat(packed, out_WP)
        else:
            pack_gradients(packed, self.slots, out_WP)


class PendingReduce:
    """A reduction in flight; holds its buffers, and the gradients it reads, until `finish`."""

    def __init__(self, layout: BucketLayout, work: Work | None, output: Tensor, inputs: list[Tensor]) -> None:
        self._layout, self._work, self._output = layout, work, output
        self._inputs_kept_alive = inputs

    def finish(self) -> Shards:
        """Wait; return this rank's shards of the mean gradients, in the storage dtype."""
        self.abandon()
        shards = self._output.to(self._layout.storage_dtype)
        return {i: (shards, self._layout.offsets[i]) for i in self._layout.indices}

    def abandon(self) -> None:
        """Wait until the buffers are no longer in use, and give them up."""
        if self._work is not None:
            self._work.wait()
        self._inputs_kept_alive.clear()


class _Local:
    """What a reduction over one rank is: the gradients themselves."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    def finish(self) -> Shards:
        return self._shards

    def abandon(self) -> None:
        pass


def start(gradients: Mapping[int, Tensor], plan: ReducePlan, comm: Comm) -> PendingReduce | _Local:
    """Begin to reduce `gradients` (index -> full gradient), which must not be written to until `finish`.

    Every rank of `comm` must call it, in the same order, with the same plan.
    """
    layout = plan.layout
    if comm.size == 1:
        return _Local({i: _own(gradients[i], layout) for i in layout.indices})
    device = gradients[layout.indices[0]].device
    output = torch.empty(layout.shard_numel, dtype=layout.reduce_dtype, device=device)
    inputs = [gradients[i].contiguous().view(-1) for i in layout.direct]
    outputs = [output.as_strided(size, (1,), offset) for size, offset in plan.direct]
    if layout.packed_numel:
        segments = torch.empty(plan.segments_shape, dtype=layout.reduce_dtype, device=device)
        plan.pack(gradients, segments)
        inputs.append(segments.view(-1))
        outputs.append(output[layout.packed_start :] if outputs else output)
    work = comm.reduce_scatter(outputs, inputs) if outputs else None
    return PendingReduce(layout, work, output, inputs)


def _own(gradient: Tensor, layout: BucketLayout) -> tuple[Tensor, int]:
    shard = gradient.contiguous().to(layout.reduce_dtype).to(layout.storage_dtype)
    return shard, int(shard.storage_offset())
