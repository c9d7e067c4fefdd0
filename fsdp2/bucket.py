"""Which gradients of a group are reduced together, and how many of them are still to come."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from . import pack
from .layout import ParamSpec
from .policy import MixedPrecisionPolicy
from .streams import GroupStreams

# A group's gradients are reduced in about four parts, so that what has arrived can be sent and freed while the rest is
# computed: twice as many where copies are sent, cast ones, which take memory, too. Parts below this size cost more in
# latency than they save.
MAX_BUCKETS = 4
MAX_BUCKETS_OF_COPIES = 8
MIN_BUCKET_BYTES = 1024 * 1024
# So many times that where an operation is a launch: a block of some 30 MB, as GPT-2's, is soon computed, and then the
# host is late that launches four buckets in place of one; they would save little memory. Among 1,024 ranks, each one's
# part is 16 KiB then, which takes no longer than its latency. Not measured on a GPU.
LAUNCHES_TIMES = 16


def wire_dtypes(
    specs: Iterable[ParamSpec], policy: MixedPrecisionPolicy, as_they_come: bool
) -> tuple[torch.dtype, ...]:
    """In which dtypes gradients travel. `as_they_come`: those that come in a narrower dtype than they are summed in do
    so in that one, unless the policy chooses another.
    """
    return tuple(
        policy.sent_dtype(spec.storage_dtype, spec.compute_dtype if as_they_come and not spec.extended else None)
        for spec in specs
    )


def find_buckets(
    specs: Sequence[ParamSpec],
    reduce_dtypes: Sequence[torch.dtype],
    wire_dtypes: Sequence[torch.dtype],
    trainable: Iterable[int],
    device: torch.device,
) -> list[tuple[int, ...]]:
    """The parameters of a group whose gradients are reduced together; they are expected in reverse order."""
    expected = sorted(trainable, reverse=True)
    are_sent = all(specs[i].arrives_in(wire_dtypes[i]) for i in expected)
    count = MAX_BUCKETS if are_sent else MAX_BUCKETS_OF_COPIES
    min_bytes = MIN_BUCKET_BYTES * (LAUNCHES_TIMES if pack.costs_launches(device) else 1)
    return split_buckets(specs, reduce_dtypes, wire_dtypes, expected, count, min_bytes)


def split_buckets(
    specs: Sequence[ParamSpec],
    reduce_dtypes: Sequence[torch.dtype],
    wire_dtypes: Sequence[torch.dtype],
    indices: Iterable[int],
    max_buckets: int,
    min_bytes: int,
) -> list[tuple[int, ...]]:
    """Cut the parameters `indices` of a group, in the order their gradients are expected, into buckets.

    A bucket holds one (reduce dtype, wire dtype, storage dtype) and at least `min_bytes`, unless all of that kind are
    less. If its parameters allow that, it holds no more than 1 / max_buckets of the group, and what is left over: there
    may be up to twice as many buckets.
    """
    by_dtype: dict[tuple[torch.dtype, ...], list[int]] = {}
    for i in indices:
        by_dtype.setdefault((reduce_dtypes[i], wire_dtypes[i], specs[i].storage_dtype), []).append(i)
    buckets = []
    for (reduce_dtype, *_), members in by_dtype.items():
        sizes = {i: specs[i].shard_numel * specs[i].world_size * reduce_dtype.itemsize for i in members}
        target = max(sum(sizes.values()) / max_buckets, min_bytes)
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


class Bucket:
    """Parameters whose gradients are reduced together, and how many of these are still to come in this backward.

    The full parameters hold it by their hooks, so it must not hold the group that owns them.
    """

    def __init__(self, indices: tuple[int, ...], progress: Callable[[Bucket], None]) -> None:
        self.indices, self.size = indices, len(indices)
        self._progress = weakref.WeakMethod(progress)
        self.restart()

    def restart(self) -> None:
        self.missing, self.complete = self.size, False

    def arrive(self, _: Tensor) -> None:
        """Post-accumulate hook: one of the gradients is complete."""
        self.missing -= 1
        if self.missing == 0 or self.missing == self.size - 1:
            progress = self._progress()
            if progress is not None:
                progress(self)


def noting(streams: GroupStreams, bucket: Bucket) -> Callable[[Tensor], None]:
    """`bucket.arrive`, which notes on which stream the gradient was computed."""

    def arrive(gradient: Tensor) -> None:
        streams.note()
        bucket.arrive(gradient)

    return arrive
