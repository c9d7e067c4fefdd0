"""Divides the gradients of a group into buckets that are reduced together, and packs a bucket for the reduce-scatter.

Shape legend:  W ranks,  P elements of one rank's segment.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import repeat
from typing import NamedTuple, final

import torch
from torch import Tensor

from ..codecs.replicas import Part, ReplicaSum
from ..devices import streams
from ..devices.streams import costs_launches
from ..torch_private import compat
from .codec import AS_IS, Cast, Codec, Encoder, Member
from .comm import TORCH_MEMORY, CommMemory
from .layout import RANK_ALIGNMENT, BucketLayout, ParamSpec, align, contiguous_stride, split_chunks
from .policy import MixedPrecisionPolicy

# On CPU a group's gradients are reduced in about four buckets, so that what has arrived can be sent and freed while the
# rest is computed: eight where copies are sent, cast ones, which take memory, too. Buckets below this size cost more in
# latency than they save.
MAX_BUCKETS = 4
MAX_BUCKETS_OF_COPIES = 8
MIN_BUCKET_BYTES = 1024 * 1024
# Where an operation is a launch, a group's gradients are one bucket up to so many bytes in the reduce dtype. In a model
# with a head the peak of a step is at the head, and more buckets save no memory; each costs a launch, and the latency
# of a collective. Blocks of experts are larger, and there one bucket would be the peak. (Counted and replayed on the
# calls of a step; not measured on a GPU.)
MAX_BUCKET_BYTES = 1024 * 1024 * 1024
# Below this, gradients are packed by one operation on CPU though that takes more copies: an operation costs more than
# its bytes.
LITTLE_BYTES = 64 * 1024

# A gradient that is all of its group, an embedding or a head for example, is cut into so many pieces at most, of which
# so many are in flight at a time.
MAX_PIECES = 16
MIN_PIECE_BYTES = 1024 * 1024
# Where an operation is a launch, a piece has at least so many bytes for each rank: then it takes some twenty times the
# latency of a ring of all ranks, which grows with their number, too. That is 192 MiB among 8 ranks; among 64 the head
# of most models is one piece. (By NCCL's own table of latencies, src/graph/tuning.cc: 30 us and 370 GB/s for 8 ranks of
# a machine, 210 us and 340 GB/s for 64; not measured.)
MAX_PIECES_LAUNCHED = 8
MIN_PIECE_BYTES_OF_RANK = 24 * 1024 * 1024
PIECES_IN_FLIGHT = 2


@dataclass(frozen=True)
class Cuts:
    """Limits for buckets and pieces of gradients on one kind of device, so that gradients are sent and freed early.

    Args:
        max_buckets: a group's gradients are about so many buckets. None: as many as they need.
        max_buckets_of_copies: the same, where copies of gradients are sent.
        min_bucket_bytes: a bucket has at least so many bytes, in the reduce dtype, unless the group has less.
        room: a bucket may always have so many bytes.
        max_pieces: a gradient that is all of its group is sent in so many pieces at most.
        min_piece_bytes: a piece has at least so many bytes, those of all ranks together.
    """

    max_buckets: int | None
    max_buckets_of_copies: int | None
    min_bucket_bytes: int
    room: int
    max_pieces: int
    min_piece_bytes: int


def cuts_on(device: torch.device, world_size: int) -> Cuts:
    """Returns how the gradients of groups of so many ranks are cut on `device`."""
    if costs_launches(device):
        of_buckets = None, None, MAX_BUCKET_BYTES // 4, MAX_BUCKET_BYTES
        return Cuts(*of_buckets, MAX_PIECES_LAUNCHED, MIN_PIECE_BYTES_OF_RANK * world_size)
    return Cuts(MAX_BUCKETS, MAX_BUCKETS_OF_COPIES, MIN_BUCKET_BYTES, 0, MAX_PIECES, MIN_PIECE_BYTES)


def cuts_for(specs: Sequence[ParamSpec], device: torch.device) -> Cuts:
    """Returns how the gradients of a group of these parameters are cut on `device`."""
    return cuts_on(device, specs[0].world_size if specs else 1)


def codecs_of(specs: Iterable[ParamSpec], policy: MixedPrecisionPolicy, as_computed: bool) -> tuple[Codec, ...]:
    """Returns how gradients travel.

    `as_computed`: a gradient that is computed in a narrower dtype than it is summed in travels in the narrower one,
    unless the policy chooses how.
    """
    return tuple(
        policy.codec_for(spec.delivered_dtype, spec.arriving_dtype if as_computed else None, spec.shape)
        for spec in specs
    )


class BucketPlan(NamedTuple):
    """The codecs of the gradients of one group, and the buckets into which they are divided.

    `reduce_dtypes`: in which each is summed; `codecs`: how each travels as it is computed; `codecs_of_sums`: if sums of
    several may be among them; `buckets`: the parameter indices of each bucket; `sent_nbytes`: bytes of all gradients as
    they travel, those of one rank's segments.
    """

    reduce_dtypes: tuple[torch.dtype, ...]
    codecs: tuple[Codec, ...]
    codecs_of_sums: tuple[Codec, ...]
    buckets: tuple[tuple[int, ...], ...]
    sent_nbytes: int


@lru_cache(1024)
def plan_buckets(
    specs: tuple[ParamSpec, ...],
    policy: MixedPrecisionPolicy,
    sums_on_arrival: bool,
    trainable: tuple[int, ...],
    cuts: Cuts,
    summed: tuple[Hashable, ...] = (),
    bucket_bytes: int | None = None,
) -> BucketPlan:
    """Plans the gradients of the parameters `trainable`. `sums_on_arrival`: each rank sums what it receives; the others
    are those of `find_buckets`.

    Equal groups share the plan: the blocks of a transformer have one.
    """
    dtypes = tuple(policy.gradient_dtype(spec.delivered_dtype) for spec in specs)
    codecs, of_sums = codecs_of(specs, policy, sums_on_arrival), codecs_of(specs, policy, as_computed=False)
    buckets = tuple(find_buckets(specs, dtypes, codecs, trainable, cuts, summed, bucket_bytes))
    sent = sum(codecs[i].sent_nbytes(specs[i].shard_numel, dtypes[i]) for indices in buckets for i in indices)
    return BucketPlan(dtypes, codecs, of_sums, buckets, sent)


def find_buckets(
    specs: Sequence[ParamSpec],
    reduce_dtypes: Sequence[torch.dtype],
    codecs: Sequence[Codec],
    trainable: Iterable[int],
    cuts: Cuts,
    summed: Sequence[Hashable] = (),
    bucket_bytes: int | None = None,
) -> list[tuple[int, ...]]:
    """Returns the parameter indices of each bucket. Gradients are expected in reverse order of the parameters.

    `summed`: a bucket holds parameters of which this is equal. Empty: it is for all. `bucket_bytes`: what a user has
    chosen; a bucket then has at most so many, in the reduce dtype, or one gradient.
    """
    wire_dtypes = [codec.packed_dtype(dtype) for codec, dtype in zip(codecs, reduce_dtypes, strict=True)]
    kinds = [*zip(codecs, summed or repeat(None), strict=False)]
    expected = sorted(trainable, reverse=True)
    if bucket_bytes is not None:
        return split_buckets(specs, reduce_dtypes, kinds, expected, None, 0, bucket_bytes)
    are_sent = all(specs[i].arrives_in(wire_dtypes[i]) for i in expected)
    count = cuts.max_buckets if are_sent else cuts.max_buckets_of_copies
    most = count or len(expected) or 1
    return split_buckets(specs, reduce_dtypes, kinds, expected, most, cuts.min_bucket_bytes, cuts.room)


def split_buckets(
    specs: Sequence[ParamSpec],
    reduce_dtypes: Sequence[torch.dtype],
    kinds: Sequence[Hashable],
    indices: Iterable[int],
    max_buckets: int | None,
    min_bytes: int,
    room: int = 0,
) -> list[tuple[int, ...]]:
    """Cuts the parameters `indices` of a group, in the order their gradients are expected, into buckets.

    A bucket holds one (reduce dtype, kind: how it travels, dtype of `.grad`) and at least `min_bytes`, unless all of
    that kind are less. If its parameters allow that, it holds no more than 1 / max_buckets of the group, or than `room`
    bytes if that is more, and what is left over: there may be up to twice as many buckets. `max_buckets` None: `room`
    alone counts.
    """
    by_kind: dict[tuple[torch.dtype, Hashable, torch.dtype], list[int]] = {}
    for i in indices:
        by_kind.setdefault((reduce_dtypes[i], kinds[i], specs[i].delivered_dtype), []).append(i)
    buckets = []
    for (reduce_dtype, *_), members in by_kind.items():
        sizes = {i: specs[i].shard_numel * specs[i].world_size * reduce_dtype.itemsize for i in members}
        target = max(0 if max_buckets is None else sum(sizes.values()) / max_buckets, min_bytes, room)
        bucket: list[int] = []
        filled = 0
        for i in members:
            # The largest bucket is what the peak of a step depends on.
            if filled >= max(min_bytes, 1) and filled + sizes[i] > target:
                buckets.append(tuple(bucket))
                bucket, filled = [], 0
            bucket.append(i)
            filled += sizes[i]
        if filled < min_bytes and filled < sum(sizes.values()):
            bucket = [*buckets.pop(), *bucket]
        buckets.append(tuple(bucket))
    return buckets


def split_pieces(numel: int, world_size: int, itemsize: int, max_pieces: int, min_bytes: int) -> list[tuple[int, int]]:
    """Cuts segments of `numel` elements per rank, a multiple of 16 bytes, into pieces that are such multiples, too.

    Returns first and one-past-last element of each. A piece of all ranks has at least `min_bytes`.
    """
    count = max(1, min(max_pieces, numel * world_size * itemsize // min_bytes))
    size = align(-(-numel // count) * itemsize, RANK_ALIGNMENT) // itemsize
    return [(first, min(first + size, numel)) for first in range(0, numel, size or 1)]


class Bucket:
    """Counts the gradients of one bucket that are still to come in this backward pass.

    The unsharded parameters hold it by their hooks, so it must not hold the group that owns them.
    """

    def __init__(self, indices: tuple[int, ...], begin: Callable[[], None], complete: Callable[[Bucket], None]) -> None:
        self.indices, self.size = indices, len(indices)
        self._begin, self._complete = weakref.WeakMethod(begin), weakref.WeakMethod(complete)
        # How many are missing; and how often all were there in this pass: reentrant checkpointing may bring them again.
        self.missing, self.completed = self.size, 0

    def arrive(self, _: Tensor) -> None:
        """Counts a gradient. It is a post-accumulate hook, and calls back at the first gradient and at the last."""
        self.missing -= 1
        if self.missing == self.size - 1 and (begin := self._begin()) is not None:
            begin()
        if self.missing == 0 and (complete := self._complete()) is not None:
            complete(self)


class Segments:
    """The send buffer of one bucket: packed gradients, one segment for each rank, side by side.

    `of_ranks`: (W, P) elements of the wire dtype; `flat`: the same as one row. The views that gradients are copied to
    are made once; the memory, `storage`, may be freed between two uses: then `allocate(storage)` follows.
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
        self.flat = self.of_ranks.view(-1)
        self._has_single_rows = all(spec.has_single_rows for spec in self._specs)
        self.storage, self.allocate = self.flat.untyped_storage(), source.allocator(self.flat.nbytes)

    def fill(self, gradients: list[Tensor]) -> None:
        """Copies each gradient to its place, casting to the wire dtype.

        Padding keeps whatever it held: nobody reads the sums made of it.
        """
        sources = gradients
        if not self._has_single_rows:
            sources = [part for each, spec in zip(gradients, self._specs, strict=True) for part in _parts(each, spec)]
        if len(sources) == 1:  # on CUDA a foreach copy launches a kernel for each 84 MB of fp32
            self._places[0].copy_(sources[0])
        else:
            compat.copy_all(self._places, sources)

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
class ReducePlan:
    """Packs the gradients of one bucket. All reductions of the bucket share it.

    `summing`: how replicas sum these gradients, of which `parts` are the shards. None: by one collective.
    `pieces`: (first, last) elements of each rank's shard of a gradient that is all of its group. It is reduced piece by
    piece, so that a copy of all of it, in the reduce dtype, is not the peak of a whole step. Empty: as one.
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
        self.layout, self.encoder = layout, encoder or Encoder(AS_IS)
        self.summing, self.parts = summing, parts
        codec = self.encoder.codec
        self.exchanges = codec.exchanges
        # A cast leaves its neighbours alone; another codec, or sum, may see padding, which else holds anything.
        self._fills_padding = (self.exchanges and type(codec) is not Cast) or summing is not None
        self.direct = [((specs[i].shard_numel,), layout.offsets[i]) for i in layout.direct]
        self.specs, self.world_size = specs, world_size
        self.nbytes = codec.sent_nbytes(layout.shard_numel, layout.reduce_dtype) * world_size  # of what is sent
        # Segments that no reduction uses: on CPU it takes as long to make their views as to fill them.
        self._spare: Segments | None = None
        self._has_streams, self._launches = streams.exist_on(device), costs_launches(device)
        self._packed = packed = [specs[i] for i in layout.packed]
        # One operation packs all of them. On CPU it pads by a copy, and casts slowly.
        is_able = [spec.has_few_slices if self._launches else spec.dim == 0 for spec in packed]
        self._is_one_cat = all(is_able) and all(spec.shard_numel for spec in packed)
        self._has_slices = any(spec.num_slices > 1 for spec in packed)
        self._is_by_rows = all(spec.dim == 0 for spec in packed)
        self._is_even = all(spec.is_even for spec in packed)
        self._is_little = world_size * layout.packed_numel * layout.wire_dtype.itemsize <= LITTLE_BYTES
        self._has_single_rows = all(spec.has_single_rows for spec in packed)
        # Elements behind the last of them, of all segments; and zeros for them, which a user's hook sees.
        self._tail_numel = (layout.packed_numel - sum(spec.shard_numel for spec in packed)) * world_size
        self._tails: dict[torch.dtype, list[Tensor]] = {}
        self._spec, cuts = specs[layout.indices[0]], cuts_on(device, world_size)
        self.pieces = self._split(cuts) if len(specs) == 1 else []

    def _split(self, cuts: Cuts) -> list[tuple[int, int]]:
        """Cuts the one gradient, if its reduction takes memory, to copy to, or to receive in."""
        layout, world_size = self.layout, self.world_size
        if self._spec.dim or not (layout.packed or self.exchanges or layout.wire_dtype != layout.reduce_dtype):
            return []
        limits = cuts.max_pieces, cuts.min_piece_bytes
        pieces = split_pieces(layout.shard_numel, world_size, layout.wire_dtype.itemsize, *limits)
        return pieces if len(pieces) > 1 else []

    def take_segments(self, device: torch.device, source: CommMemory = TORCH_MEMORY) -> Segments:
        """Returns memory of `source` to pack into. `return_segments` follows when it has been read."""
        segments, self._spare = self._spare, None
        if segments is None:
            return Segments(self.layout, self.specs, self.world_size, device, source)
        segments.allocate(segments.storage)
        return segments

    def return_segments(self, segments: Segments) -> None:
        """Keeps the views, and frees the memory. Where there are streams, other streams may still read it behind the
        host: there the memory goes with the object.
        """
        if not self._has_streams:
            segments.storage.resize_(0)
            self._spare = segments

    def pack(self, gradients: Mapping[int, Tensor], segments: Segments) -> None:
        """Copies the bucket's packed gradients to their places, casting to the wire dtype."""
        packed, out_WP = [gradients[i] for i in self.layout.packed], segments.of_ranks
        if self._fills_padding and not (self._is_even and self._tail_numel == 0):
            out_WP.zero_()
        dtype = packed[0].dtype
        if not self._is_one_operation(packed, out_WP.dtype):
            segments.fill(packed)
            return
        if self._tail_numel and dtype not in self._tails:
            self._tails[dtype] = [out_WP.new_zeros(self._tail_numel, dtype=dtype)]
        if not self._is_by_rows:
            packed = [part for each, spec in zip(packed, self._packed, strict=True) for part in _slices(each, spec)]
        packed += self._tails.get(dtype, [])
        if dtype == out_WP.dtype or self._launches:
            compat.chunk_cat(packed, 0, self.world_size, out=out_WP)
        else:
            uncast = torch.empty_like(out_WP, dtype=dtype)
            compat.chunk_cat(packed, 0, self.world_size, out=uncast)
            out_WP.copy_(uncast)

    @cached_property
    def members(self) -> list[list[Member]]:
        """The parameters in each input of the collective: one that is not packed in each, and all others."""
        layout, sizes = self.layout, [spec.shard_numel for spec in self.specs]
        direct = [[Member(i, 0, 0, sizes[i], sizes[i])] for i in layout.direct]
        first = layout.packed_start
        packed = [Member(i, layout.offsets[i] - first, 0, sizes[i], sizes[i]) for i in layout.packed]
        return [*direct, packed]

    def member_of_piece(self, first: int, last: int) -> Member:
        """Returns where a piece of the one gradient lies in the segments of that piece."""
        size = self._spec.shard_numel
        return Member(self.layout.indices[0], 0, min(first, size), min(last, size), size)

    def _is_one_operation(self, packed: list[Tensor], wire_dtype: torch.dtype) -> bool:
        if not self._is_one_cat:
            return False
        if self._launches:
            # A concatenation also uploads where its inputs lie.
            takes_one_copy = self._is_even and len(packed) == 1 and not self._has_slices
            return not takes_one_copy and len({each.dtype for each in packed}) == 1
        if self._has_single_rows or not (self._is_even or self._is_little):
            return False
        dtypes = {each.dtype for each in packed}  # those that have waited come in the reduce dtype
        return dtypes == {wire_dtype} or (len(dtypes) == 1 and self._is_little)

    def pack_piece(self, gradient: Tensor, first: int, last: int, out_WP: Tensor) -> None:
        """Copies elements `first` to `last` of each rank's shard, along dim 0, of one gradient, casting.

        Padding keeps whatever it held, or is zeros for a codec that may see it.
        """
        spec = self._spec
        if self._fills_padding and not (self._is_even and self._tail_numel == 0):
            out_WP.zero_()
        flat, shard, last = gradient.reshape(-1), spec.shard_numel, min(last, spec.shard_numel)
        whole = spec.whole_chunks * shard
        places = [out_WP[: spec.whole_chunks, : last - first]]
        sources = [flat[:whole].view(spec.whole_chunks, shard)[:, first:last]]
        if self._launches:  # row by row it is one launch, too, and reads and writes several elements at a time
            places, sources = [*places[0].unbind()], [*sources[0].unbind()]
        rest = flat[whole:][first:last]
        if rest.numel():
            places.append(out_WP[spec.whole_chunks, : rest.numel()])
            sources.append(rest)
        compat.copy_all(places, sources)
