"""Where the gradients of one bucket lie side by side, one segment for each rank, to be sent.

Shape legend:  W ranks,  P elements of one rank's segment.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from . import pack, torch_compat
from .layout import BucketLayout, ParamSpec
from .pack import contiguous_stride, split_chunks


class Segments:
    """Of the packed gradients of one bucket. `of_ranks`: (W, P) elements of the wire dtype; `flat`: the same as a row.

    The views that gradients are copied to are made once; the memory may be given up between two uses.
    """

    def __init__(self, layout: BucketLayout, specs: Sequence[ParamSpec], world_size: int, device: torch.device) -> None:
        self._layout, self._specs = layout, [specs[i] for i in layout.packed]
        with torch.inference_mode(False):  # they outlive it
            self.of_ranks = torch.empty(world_size, layout.packed_numel, dtype=layout.wire_dtype, device=device)
        self.flat = self.of_ranks.view(-1)
        # Whether gradients are copied as they are.
        self.has_single_rows = all(spec.has_single_rows for spec in self._specs)
        self.costs_launches = pack.costs_launches(device)
        self._storage, self._nbytes = self.flat.untyped_storage(), self.flat.nbytes

    def allocate(self) -> None:
        self._storage.resize_(self._nbytes)

    def free(self) -> None:
        self._storage.resize_(0)

    def fill(self, gradients: list[Tensor]) -> None:
        """Copy each gradient to its place, casting to the wire dtype.

        Elements that are padding keep whatever they held: the sums made of them are never read.
        """
        sources = gradients
        if not self.has_single_rows:
            sources = [part for each, spec in zip(gradients, self._specs, strict=True) for part in _parts(each, spec)]
        torch_compat.copy_all(self._places, sources)

    @cached_property
    def _places(self) -> list[Tensor]:
        """Of the parts of all gradients."""
        layout = self._layout
        offsets = [layout.offsets[i] - layout.packed_start for i in layout.packed]
        return [
            place for spec, first in zip(self._specs, offsets, strict=True) for place in self._places_of(spec, first)
        ]

    def _places_of(self, spec: ParamSpec, offset: int) -> list[Tensor]:
        """Of the parts of one gradient, which begins at `offset` of each segment."""
        segment = self.of_ranks.stride(0)
        if spec.has_single_rows:
            return [self.of_ranks.as_strided(spec.shape, (segment, *contiguous_stride(spec.shape[1:])), offset)]
        chunk = (spec.shard_numel,) if spec.dim == 0 else spec.local_shape(0)
        strides = segment, *contiguous_stride(chunk)
        places = [self.of_ranks.as_strided((spec.whole_chunks, *chunk), strides, offset)]
        rows = spec.num_rows - spec.whole_chunks * spec.chunk_rows
        if rows:
            first = offset + spec.whole_chunks * segment
            places.append(self.of_ranks.as_strided((rows * spec.row_numel,), (1,), first))
        return places


def _parts(gradient: Tensor, spec: ParamSpec) -> list[Tensor]:
    """Its whole chunks, and in one row what is left over; or, if no rank has more than a row, all of it as it is."""
    if spec.has_single_rows:
        return [gradient]
    if spec.dim == 0:
        rows = spec.whole_chunks * spec.chunk_rows
        chunks, *rest = [gradient] if rows == spec.num_rows else [gradient[:rows], gradient[rows:]]
        chunks = chunks.reshape(spec.whole_chunks, spec.shard_numel)
    else:
        chunks, *rest = split_chunks(gradient, spec)
    return [chunks, *(each.reshape(-1) for each in rest)]
