"""Divides the gradients of a group into buckets that are reduced together, and large gradients into pieces."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import repeat
from typing import NamedTuple

import torch

from ..devices.streams import costs_launches
from .codec import Codec
from .layout import RANK_ALIGNMENT, ParamSpec, align
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

# A gradient that is all of its group, an embedding or a head for example, is cut into at most MAX_PIECES pieces.
# PIECES_IN_FLIGHT of them are sent at once.
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
    """Limits for buckets and pieces of gradients on one kind of device, so that gradients are sent and freed early."""

    max_buckets: int | None
    """About how many buckets the gradients of a group are. None: as many as they need."""
    max_buckets_of_copies: int | None
    """The same, where copies of gradients are sent."""
    min_bucket_bytes: int
    """A bucket has at least this size, in the reduce dtype, unless the group has less."""
    room: int
    """A bucket may always have this many bytes."""
    max_pieces: int
    """At most how many pieces a gradient is cut into that is all of its group."""
    min_piece_bytes: int
    """The size of the smallest piece, for all ranks together."""


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
    """Returns how gradients are sent.

    `as_computed`: a gradient that is computed in a narrower dtype than it is summed in is sent in the narrower one,
    unless the policy chooses how.
    """
    return tuple(
        policy.codec_for(spec.delivered_dtype, spec.arriving_dtype if as_computed else None, spec.shape)
        for spec in specs
    )


class BucketPlan(NamedTuple):
    """The codecs of the gradients of one group, and the buckets into which they are divided."""

    reduce_dtypes: tuple[torch.dtype, ...]
    """The dtype in which each gradient is summed."""
    codecs: tuple[Codec, ...]
    """How each gradient is sent as autograd has computed it."""
    codecs_of_sums: tuple[Codec, ...]
    """How each gradient is sent if sums of several micro-batches may be among them."""
    buckets: tuple[tuple[int, ...], ...]
    """The parameter indices of each bucket."""
    sent_nbytes: int
    """Bytes of one rank's segments of all gradients, as they are sent."""


@lru_cache(1024)
def plan_buckets(
    specs: tuple[ParamSpec, ...],
    policy: MixedPrecisionPolicy,
    receiver_sums: bool,
    trainable: tuple[int, ...],
    cuts: Cuts,
    summed: tuple[Hashable, ...] = (),
    bucket_bytes: int | None = None,
) -> BucketPlan:
    """Plans the gradients of the parameters `trainable`. `receiver_sums`: each rank sums what it receives; the others
    are those of `find_buckets`.

    Equal groups share the plan: the blocks of a transformer have one.
    """
    dtypes = tuple(policy.gradient_dtype(spec.delivered_dtype) for spec in specs)
    codecs, of_sums = codecs_of(specs, policy, receiver_sums), codecs_of(specs, policy, as_computed=False)
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

    A bucket holds one (reduce dtype, kind: how it is sent, dtype of `.grad`) and at least `min_bytes`, unless all of
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
