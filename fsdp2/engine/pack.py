"""Packs the gradients of a bucket for the reduce-scatter: one segment for each rank.

Shape legend:  W ranks,  P elements of one rank's segment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from ..devices import streams
from ..devices.streams import costs_launches
from ..torch_private import internals
from .buckets import cuts_on, split_pieces
from .codec import AS_IS, Cast, Encoder, Member, Part, ReplicaSum
from .comm import TORCH_MEMORY, CommMemory
from .layout import BucketLayout, ParamSpec, contiguous_stride, split_chunks

# Below this, gradients are packed by one operation on CPU though that takes more copies: an operation costs more than
# its bytes.
LITTLE_BYTES = 64 * 1024


class Segments:
    """The send buffer of one bucket: packed gradients, one segment for each rank, side by side.

    The views that gradients are copied to are made once. The memory may be freed between two uses.
    """

    def __init__(
        self,
        layout: BucketLayout,
        specs: Sequence[ParamSpec],
        world_size: int,
        device: torch.device,
        source: CommMemory,
    ) -> None:
        self._layout, self._specs = layout, [specs[i] for i in layout.packed]
        with torch.inference_mode(False):  # they outlive it
            self.of_ranks = source.empty(world_size, layout.packed_numel, dtype=layout.wire_dtype, device=device)
        """(W, P) elements of the wire dtype."""
        self.flat = self.of_ranks.view(-1)
        """The same elements as one row."""
        self.storage = self.flat.untyped_storage()
        """The memory of both, which may be freed."""
        self.allocate = source.allocator(self.flat.nbytes)
        """Gives `storage` memory again."""
        self._has_single_rows = all(spec.has_single_rows for spec in self._specs)

    def fill(self, gradients: list[Tensor]) -> None:
        """Copies each gradient to its place, casting to the wire dtype. Padding keeps what it held."""
        sources = gradients
        if not self._has_single_rows:
            sources = [part for each, spec in zip(gradients, self._specs, strict=True) for part in _parts(each, spec)]
        if len(sources) == 1:  # on CUDA a foreach copy launches a kernel for each 84 MB of fp32
            self._places[0].copy_(sources[0])
        else:
            internals.copy_all(self._places, sources)

    @cached_property
    def _places(self) -> list[Tensor]:
        """The views of the segments to which the parts of all gradients are copied."""
        layout = self._layout
        offsets = [layout.offsets[i] - layout.packed_start for i in layout.packed]
        return [
            place for spec, first in zip(self._specs, offsets, strict=True) for place in self._places_of(spec, first)
        ]

    def _places_of(self, spec: ParamSpec, offset: int) -> list[Tensor]:
        """Returns the views to which the parts of one gradient are copied; it begins at `offset` of each segment."""
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


# ---- ways to pack

Packer = Callable[[Segments, list[Tensor]], None]
"""Fills the segments of a bucket with its gradients, casting to the wire dtype."""


def choose_packer(specs: Sequence[ParamSpec], layout: BucketLayout, world_size: int, device: torch.device) -> Packer:
    """Returns the fastest way to pack gradients of these layouts: one concatenation, or a copy of each."""
    is_even = all(spec.is_even for spec in specs)
    if not all(spec.shard_numel for spec in specs):
        return Segments.fill
    if costs_launches(device):
        # A concatenation also uploads where its inputs lie: one copy is less.
        is_one_copy = is_even and len(specs) == 1 and specs[0].num_slices == 1
        concatenates = not is_one_copy and all(spec.has_few_slices for spec in specs)
        return Concatenation(specs, layout, world_size, casts=True).fill if concatenates else Segments.fill
    # On CPU a concatenation pads by a second copy, and casts by one: that pays where there is little. Gradients of a
    # row for each rank need no views, and are copied as they are.
    is_little = world_size * layout.packed_numel * layout.wire_dtype.itemsize <= LITTLE_BYTES
    has_single_rows = all(spec.has_single_rows for spec in specs)
    if any(spec.dim for spec in specs) or has_single_rows or not (is_even or is_little):
        return Segments.fill
    return Concatenation(specs, layout, world_size, casts=False, copies_to_cast=is_little).fill


@final
class Concatenation:
    """Packs all gradients of a bucket by one operation, if they have one dtype.

    Args:
        specs: the layouts of the packed gradients.
        casts: the operation may cast.
        copies_to_cast: gradients of another dtype than the wire dtype are concatenated first, and cast by a copy.
    """

    def __init__(
        self,
        specs: Sequence[ParamSpec],
        layout: BucketLayout,
        world_size: int,
        casts: bool,
        copies_to_cast: bool = False,
    ) -> None:
        self._specs, self._world_size, self._casts, self._copies_to_cast = specs, world_size, casts, copies_to_cast
        self._has_slices = any(spec.dim for spec in specs)
        self._tail_numel = (layout.packed_numel - sum(spec.shard_numel for spec in specs)) * world_size
        # Zeros for the padding at the end of all segments, by dtype.
        self._tails: dict[torch.dtype, Tensor] = {}

    def fill(self, segments: Segments, gradients: list[Tensor]) -> None:
        """Concatenates the gradients. Those that have waited for a later pass come in the reduce dtype: gradients of
        several dtypes, or of one that it does not cast, are copied one by one.
        """
        out_WP, dtypes = segments.of_ranks, {each.dtype for each in gradients}
        may_cast = self._casts or self._copies_to_cast
        if len(dtypes) > 1 or not (may_cast or out_WP.dtype in dtypes):
            segments.fill(gradients)
            return
        (dtype,) = dtypes
        sources = gradients
        if self._has_slices:
            sources = [part for each, spec in zip(gradients, self._specs, strict=True) for part in _slices(each, spec)]
        if self._tail_numel:
            if dtype not in self._tails:
                self._tails[dtype] = out_WP.new_zeros(self._tail_numel, dtype=dtype)
            sources = [*sources, self._tails[dtype]]
        if self._casts or dtype == out_WP.dtype:
            internals.chunk_cat(sources, 0, self._world_size, out=out_WP)
        else:
            uncast = torch.empty_like(out_WP, dtype=dtype)
            internals.chunk_cat(sources, 0, self._world_size, out=uncast)
            out_WP.copy_(uncast)


def _slices(gradient: Tensor, spec: ParamSpec) -> Sequence[Tensor]:
    """Returns the slices of a gradient, each of which is cut along its first dim."""
    return [gradient] if spec.dim == 0 else gradient.reshape(spec.num_slices, *spec.shape[spec.dim :]).unbind()


def _parts(gradient: Tensor, spec: ParamSpec) -> list[Tensor]:
    """Returns a gradient's whole chunks, and the rest as one row; the gradient as it is, if no rank has more than a
    row.
    """
    if spec.has_single_rows:
        return [gradient]
    if spec.dim == 0:
        rows = spec.whole_chunks * spec.chunk_rows
        chunks, *rest = [gradient] if rows == spec.num_rows else [gradient[:rows], gradient[rows:]]
        chunks = chunks.reshape(spec.whole_chunks, spec.shard_numel)
    else:
        chunks, *rest = split_chunks(gradient, spec)
    return [chunks, *(each.reshape(-1) for each in rest)]


@final
class Pieces:
    """Packs a gradient that is all of its group piece by piece: a copy of all of it, in the reduce dtype, would be the
    peak of a whole step.

    Args:
        i: the index of its parameter.
        bounds: first and one-past-last element of each piece, in each rank's shard.
        zeroes_padding: padding is zeros. Else it keeps what it held.
        unbinds: copies one row after another, where that is one launch, too, and moves several elements at a time.
    """

    def __init__(
        self, i: int, spec: ParamSpec, bounds: Sequence[tuple[int, int]], zeroes_padding: bool, unbinds: bool
    ) -> None:
        self._i, self._spec, self.bounds = i, spec, bounds
        self._zeroes_padding, self._unbinds = zeroes_padding, unbinds

    def pack(self, gradient: Tensor, first: int, last: int, out_WP: Tensor) -> None:
        """Copies elements `first` to `last` of each rank's shard of the gradient, along dim 0, casting."""
        spec = self._spec
        if self._zeroes_padding:
            out_WP.zero_()
        flat, shard, last = gradient.reshape(-1), spec.shard_numel, min(last, spec.shard_numel)
        whole = spec.whole_chunks * shard
        places = [out_WP[: spec.whole_chunks, : last - first]]
        sources = [flat[:whole].view(spec.whole_chunks, shard)[:, first:last]]
        if self._unbinds:
            places, sources = [*places[0].unbind()], [*sources[0].unbind()]
        rest = flat[whole:][first:last]
        if rest.numel():
            places.append(out_WP[spec.whole_chunks, : rest.numel()])
            sources.append(rest)
        internals.copy_all(places, sources)

    def member(self, first: int, last: int) -> Member:
        """Returns where a piece of the gradient lies in the segments of that piece."""
        size = self._spec.shard_numel
        return Member(self._i, 0, min(first, size), min(last, size), size)


@final
class ReducePlan:
    """How the gradients of one bucket are packed, encoded and summed. All reductions of the bucket share it.

    Args:
        specs: the layouts of all parameters of the group.
        world_size: of how many ranks the bucket has segments.
        encoder: encodes what is sent. None: it is sent as it is packed.
        summing: how replicas sum these gradients. None: by one collective.
        parts: the shards of the bucket, for `summing`.
    """

    def __init__(
        self,
        layout: BucketLayout,
        specs: tuple[ParamSpec, ...],
        world_size: int,
        device: torch.device,
        encoder: Encoder | None = None,
        summing: ReplicaSum | None = None,
        parts: Sequence[Part] = (),
    ) -> None:
        self.layout, self.specs, self.world_size = layout, specs, world_size
        self.encoder = encoder or Encoder(AS_IS)
        self.summing, self.parts = summing, parts
        codec = self.encoder.codec
        self.exchanges = codec.exchanges
        """True if ranks exchange what is encoded, and sum it. False: a reduce-scatter sums it."""
        self.nbytes = codec.sent_nbytes(layout.shard_numel, layout.reduce_dtype) * world_size
        """Bytes that are sent."""
        self.direct = [((specs[i].shard_numel,), layout.offsets[i]) for i in layout.direct]
        """Size and offset of the shards of gradients that are sent from where autograd has put them."""
        packed = [specs[i] for i in layout.packed]
        self._fill = choose_packer(packed, layout, world_size, device)
        is_even = all(spec.is_even for spec in packed)
        self._has_padding = not is_even or layout.packed_numel != sum(spec.shard_numel for spec in packed)
        # A cast leaves its neighbours alone. Another codec, or a sum between replicas, may read padding.
        self._reads_padding = (self.exchanges and type(codec) is not Cast) or summing is not None
        # Segments that no reduction uses: on CPU it takes as long to make their views as to fill them. Where there are
        # streams, other streams may still read their memory behind the host: there it goes with the object.
        self._spare: Segments | None = None
        self._keeps_segments = not streams.exist_on(device)
        self.pieces = self._cut(device)
        """How a gradient that is all of its group is cut. None: it is not."""

    def _cut(self, device: torch.device) -> Pieces | None:
        """Cuts the one gradient, if its reduction takes memory, to copy to, or to receive in."""
        layout, world_size, spec = self.layout, self.world_size, self.specs[0]
        takes_memory = layout.packed or self.exchanges or layout.wire_dtype != layout.reduce_dtype
        if len(self.specs) > 1 or spec.dim or not takes_memory:
            return None
        cuts = cuts_on(device, world_size)
        limits = cuts.max_pieces, cuts.min_piece_bytes
        bounds = split_pieces(layout.shard_numel, world_size, layout.wire_dtype.itemsize, *limits)
        if len(bounds) < 2:
            return None
        return Pieces(
            layout.indices[0], spec, bounds, self._reads_padding and self._has_padding, costs_launches(device)
        )

    @cached_property
    def members(self) -> list[list[Member]]:
        """The parameters in each input of the collective: one that is not packed in each, and all others."""
        layout, sizes = self.layout, [spec.shard_numel for spec in self.specs]
        direct = [[Member(i, 0, 0, sizes[i], sizes[i])] for i in layout.direct]
        first = layout.packed_start
        packed = [Member(i, layout.offsets[i] - first, 0, sizes[i], sizes[i]) for i in layout.packed]
        return [*direct, packed]

    def pack(self, gradients: Mapping[int, Tensor], segments: Segments, reads_padding: bool = False) -> None:
        """Copies the bucket's packed gradients to their places, casting to the wire dtype.

        `reads_padding`: padding is to be zeros. Else it keeps what it held, unless a codec reads it.
        """
        if self._has_padding and (reads_padding or self._reads_padding):
            segments.flat.zero_()
        self._fill(segments, [gradients[i] for i in self.layout.packed])

    def take_segments(self, device: torch.device, source: CommMemory = TORCH_MEMORY) -> Segments:
        """Returns memory of `source` to pack into. `return_segments` follows when it has been read."""
        segments, self._spare = self._spare, None
        if segments is None:
            return Segments(self.layout, self.specs, self.world_size, device, source)
        segments.allocate(segments.storage)
        return segments

    def return_segments(self, segments: Segments) -> None:
        """Keeps the views for the next reduction, and frees the memory."""
        if self._keeps_segments:
            segments.storage.resize_(0)
            self._spare = segments
