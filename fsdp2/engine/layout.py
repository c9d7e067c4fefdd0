"""Computes where every byte of a group lies: sizes, offsets, padding, buckets. It needs no process group.

One parameter of shape (R, ...) over W ranks is cut along dim 0 into chunks of ceil(R / W) rows, as torch.chunk does
(or along another dim, of which a "row" is one index); the last ranks may hold fewer rows, or none. Padded to whole
chunks, the W shards in rank order *are* the parameter, plus trailing padding, so an all-gather of one parameter can
write straight into it:

    rank     0        1        2        3
    rows   | 0 1 2 | 3 4 5 | 6 . . | . . . |        R = 7, W = 4: three rows a chunk, '.' is padding
           '------ the parameter ------'

Large parameters are gathered that way ("direct"). The small ones, and those whose shard is not a multiple of 16 bytes,
share one collective ("packed"): their shards lie side by side in one segment per rank and are copied out after it.

A parameter is stored in one dtype and computed with in another. It is sent in the second, or as the bytes that a codec
makes of it ("encoded"): these lie in memory of their own until they are decoded to where the parameter is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .codec import Codec

# NCCL falls back to element-wise copies when a rank's payload is not a multiple of 16 bytes.
RANK_ALIGNMENT = 16
# Start of every full parameter, for vectorised kernels.
PARAM_ALIGNMENT = 128
# A coalesced call is one kernel of NCCL's, in which 16 to 32 channels work side by side, each on one operation after
# the other. An operation takes its bytes' time and the latency of a round over all ranks; as many of them as there are
# channels take one latency together, hundreds take it again and again (980 reduce-scatters of 2 KB: 70 times as long as
# one of them all, https://github.com/NVIDIA/nccl/issues/725). So a call has at most this many operations.
MAX_OPERATIONS = 16
# What does not fit into one call is packed, which costs memory and a copy, unless each rank's part of it is this large:
# then a further call of MAX_OPERATIONS takes about as much latency as a copy of what it brings takes time. By the
# prices of the simulated timeline: on 64 ranks a call has a latency of 0.28 ms, and its copy takes 0.04 ms for 64 KiB
# of each operation. Neither number is measured on several GPUs.
LARGE_SHARD_BYTES = 512 * 1024
# Where operations cost launches, one copies the chunks of all slices of a parameter that is not cut along dim 0, of
# whole lines of memory. More slices would cost the host more than the copy takes, element by element.
MAX_SLICES = 256
# Packed segments exist beside the parameters that are copied out of them. From this size on, if they are a quarter of
# their group, they lie in memory of their own, which is freed when they are copied: else they would double what a group
# takes while it is unsharded, where a process group sends many parameters packed.
APART_BYTES = 256 * 1024


def align(value: int, alignment: int) -> int:
    """Returns the least multiple of `alignment` that is not below `value`."""
    return -(-value // alignment) * alignment


@dataclass(frozen=True)
class ParamSpec:
    """Holds what the layout must know of one parameter: its global shape, and its dtypes at rest and in compute.

    `gather_codec`: how it is sent in a gather. None: in the dtype in which it computes.

    `param_spec` makes it: equal parameters, of which models have many, share one, and what is computed of it.
    """

    shape: tuple[int, ...]
    storage_dtype: torch.dtype
    compute_dtype: torch.dtype
    world_size: int
    # Along which it is cut. A "row" is what lies at one index of it.
    dim: int = 0
    # Gathered by methods of its own, hence in no GatherLayout; its gradient may come in any dtype.
    self_gathering: bool = False
    gather_codec: Codec | None = None
    # The dtype of `.grad`, in which autograd then accumulates the unsharded gradient, too. None: nobody has chosen one.
    grad_dtype: torch.dtype | None = None
    # Autograd accumulates the unsharded gradient in whatever dtype it comes (`p.grad_dtype = None`).
    takes_any_dtype: bool = False

    def __post_init__(self) -> None:
        if not self.shape:
            raise ValueError("expected a parameter of at least one dim, got a scalar")

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.shape, self.storage_dtype, self.compute_dtype, self.dim, self.gather_codec, self.grad_dtype))

    @cached_property
    def num_rows(self) -> int:
        return self.shape[self.dim]

    @cached_property
    def chunk_rows(self) -> int:
        return -(-self.num_rows // self.world_size)

    @cached_property
    def row_numel(self) -> int:
        return math.prod(self.shape[: self.dim] + self.shape[self.dim + 1 :])

    @cached_property
    def shard_numel(self) -> int:
        """Elements of one padded shard; the same on every rank."""
        return self.chunk_rows * self.row_numel

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def storage_nbytes(self) -> int:
        return self.shard_numel * self.storage_dtype.itemsize

    @property
    def compute_nbytes(self) -> int:
        return self.shard_numel * self.compute_dtype.itemsize

    @property
    def gathered_nbytes(self) -> int:
        """Bytes of one padded shard as it is sent in a gather."""
        codec = self.gather_codec
        return self.compute_nbytes if codec is None else codec.sent_nbytes(self.shard_numel, self.storage_dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the unsharded parameter, without padding."""
        return self.numel * self.compute_dtype.itemsize

    @property
    def unsharded_nbytes(self) -> int:
        """Bytes that the unsharded parameter takes: cut along dim 0, its chunks lie there with their padding."""
        return self.compute_nbytes * self.world_size if self.dim == 0 else self.nbytes

    @property
    def is_even(self) -> bool:
        return self.num_rows % self.world_size == 0

    @cached_property
    def num_slices(self) -> int:
        """Number of slices, one behind the other, that are each cut along their own first dim: 1 along dim 0."""
        return math.prod(self.shape[: self.dim])

    @cached_property
    def has_few_slices(self) -> bool:
        """True if its chunks can be cut and joined slice by slice: dim 0, or the second dim of a stack of experts."""
        return self.dim == 0 or (self.is_even and self.num_slices <= MAX_SLICES)

    @cached_property
    def whole_chunks(self) -> int:
        """Number of ranks that hold a whole chunk of rows; the next one may hold fewer, the others hold none."""
        return self.num_rows // self.chunk_rows if self.chunk_rows else 0

    @cached_property
    def num_holders(self) -> int:
        """Number of ranks that hold any rows: the first ones."""
        return -(-self.num_rows // self.chunk_rows) if self.chunk_rows else 0

    @cached_property
    def has_single_rows(self) -> bool:
        """True if each rank holds one row along dim 0, or none."""
        return self.dim == 0 and self.chunk_rows <= 1

    @cached_property
    def delivered_dtype(self) -> torch.dtype:
        """The dtype of `.grad` of the sharded parameter."""
        return self.grad_dtype or self.storage_dtype

    @cached_property
    def arriving_dtype(self) -> torch.dtype | None:
        """The dtype in which autograd leaves the unsharded gradient. None: any."""
        if self.self_gathering or self.takes_any_dtype:
            return None
        return self.grad_dtype or self.compute_dtype

    def arrives_in(self, dtype: torch.dtype) -> bool:
        """Returns True if the unsharded gradient is known to come in `dtype`."""
        return self.arriving_dtype == dtype

    def rows(self, rank: int) -> tuple[int, int]:
        """Returns the first row that `rank` holds, and the one after its last."""
        return bounds_of(self.num_rows, self.world_size, rank)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        first, last = self.rows(rank)
        return (*self.shape[: self.dim], last - first, *self.shape[self.dim + 1 :])


param_spec = lru_cache(4096)(ParamSpec)


@cache
def bounds_of(num_rows: int, world_size: int, rank: int) -> tuple[int, int]:
    """Returns the first of `num_rows` rows that `rank` holds, and the one after its last."""
    chunk_rows = -(-num_rows // world_size)
    return min(rank * chunk_rows, num_rows), min((rank + 1) * chunk_rows, num_rows)


@cache
def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the strides, in elements, of `torch.empty(shape)`."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def split_chunks(whole: Tensor, spec: ParamSpec) -> list[Tensor]:
    """Returns views of `whole`: its whole chunks along `spec.dim`, stacked in a new first dim; then the rest."""
    rows, dim = spec.whole_chunks * spec.chunk_rows, spec.dim
    chunks = whole.narrow(dim, 0, rows).unflatten(dim, (spec.whole_chunks, spec.chunk_rows)).movedim(dim, 0)
    return [chunks] if rows == spec.num_rows else [chunks, whole.narrow(dim, rows, spec.num_rows - rows)]


# ---- gathers


class CastRun(NamedTuple):
    """Describes packed parameters of the same two dtypes, side by side at rest and in a rank's segment: one cast."""

    storage_offset: int
    packed_offset: int
    numel: int
    storage_dtype: torch.dtype
    compute_dtype: torch.dtype


class Run(NamedTuple):
    """Equal parameters at equal distances: one operation reads or writes all of them."""

    indices: tuple[int, ...]
    # In bytes, in each of the buffers in which they lie so; 0 for a single parameter.
    distances: tuple[int, ...]


def find_runs(
    specs: Sequence[ParamSpec], indices: Iterable[int], *offsets: Sequence[int] | Mapping[int, int]
) -> tuple[Run, ...]:
    """Returns the parameters `indices` as runs. `offsets`: where each parameter begins, for one buffer or several."""
    runs: list[Run] = []
    last_of: dict[ParamSpec, int] = {}
    for i in indices:
        number = last_of.get(specs[i])
        if number is not None:
            members, distances = runs[number]
            own = tuple([places[i] - places[members[-1]] for places in offsets])
            if len(members) == 1 or own == distances:
                runs[number] = Run((*members, i), own)
                continue
        last_of[specs[i]] = len(runs)
        runs.append(Run((i,), (0,) * len(offsets)))
    return tuple(runs)


@dataclass(frozen=True)
class GatherLayout:
    """Holds byte offsets of one group: shard buffer (one rank's part, at rest), full storage (all, in compute dtypes).

    `packed_offsets[i]` is where packed parameter i lies in one rank's packed segment of `packed_nbytes`, of which the
    last `tail_nbytes` are padding; the W segments land at `packed_start` of the full storage, behind the parameters,
    or in memory of their own (`packs_apart`), and are copied out from there. Behind them is room for the W tails, where
    one copy splits all of a segment. `encoded_offsets[i]` is where the bytes of encoded parameter i lie in one rank's
    segment of `encoded_nbytes`.
    """

    world_size: int
    specs: tuple[ParamSpec, ...]
    direct: tuple[int, ...]
    packed: tuple[int, ...]
    shard_offsets: tuple[int, ...]
    shard_nbytes: int
    unsharded_offsets: tuple[int, ...]
    packed_offsets: dict[int, int]
    packed_nbytes: int
    tail_nbytes: int
    packed_start: int
    # How the packed part of the shard buffer becomes the segment to send; none if it already is that.
    casts: tuple[CastRun, ...]
    # One rank and no cast: the shard buffer already is the full storage, nothing is copied.
    aliased: bool
    encoded_offsets: dict[int, int]
    encoded_nbytes: int

    @cached_property
    def segments_nbytes(self) -> int:
        """Bytes of the W packed segments, and of the room behind them."""
        tails = align(self.tail_nbytes * self.world_size, RANK_ALIGNMENT)  # of which there are views in all dtypes
        return self.packed_nbytes * self.world_size + tails

    @cached_property
    def packs_apart(self) -> bool:
        """True if the packed segments land in memory of their own, from the beginning of a gather to its end."""
        nbytes = self.packed_nbytes * self.world_size
        return not self.aliased and nbytes >= APART_BYTES and 4 * nbytes >= self.packed_start

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The parameters, in runs in the full storage."""
        return find_runs(self.specs, range(len(self.specs)), self.unsharded_offsets)

    @cached_property
    def packed_runs(self) -> tuple[Run, ...]:
        """Those that are gathered packed, in runs in the full storage, and in a rank's packed segment."""
        return find_runs(self.specs, self.packed, self.unsharded_offsets, self.packed_offsets)

    @cached_property
    def unsharded_nbytes(self) -> int:
        """Bytes of the storage of all unsharded parameters."""
        return self.packed_start + (0 if self.packs_apart else self.segments_nbytes)


@lru_cache(1024)
def gather_layout(specs: tuple[ParamSpec, ...], world_size: int, direct_min_bytes: int) -> GatherLayout:
    """Lays out one group. `direct_min_bytes`: parameters of which a rank holds so many are gathered into place.

    Equal groups share the layout: the blocks of a transformer are one.
    """
    encoded = [i for i, spec in enumerate(specs) if spec.gather_codec is not None]
    aliased = world_size == 1 and not encoded and all(spec.storage_dtype == spec.compute_dtype for spec in specs)
    everything = [i for i in range(len(specs)) if i not in encoded] if encoded else range(len(specs))
    direct = [*everything] if world_size == 1 else _find_direct(specs, everything, direct_min_bytes)
    encoded_offsets, encoded_nbytes = _offsets({i: specs[i].gathered_nbytes for i in encoded}, RANK_ALIGNMENT)
    # Wide dtypes first: then every offset is a multiple of its own item size without gaps. Vectors last: optimizers
    # often treat them otherwise (no weight decay), and step on what lies side by side as one tensor.
    packed = sorted(set(everything) - set(direct), key=lambda i: (*_dtype_order(specs[i]), len(specs[i].shape) < 2, i))
    packed_offsets, end = _offsets({i: specs[i].compute_nbytes for i in packed}, 1)
    packed_nbytes = align(end, RANK_ALIGNMENT)

    alignment = PARAM_ALIGNMENT if aliased else RANK_ALIGNMENT
    shard_offsets, shard_nbytes = _offsets({i: specs[i].storage_nbytes for i in (*direct, *encoded)}, alignment)
    casts: list[CastRun] = []
    if all(specs[i].storage_dtype == specs[i].compute_dtype for i in packed):
        shard_offsets |= {i: shard_nbytes + packed_offsets[i] for i in packed}
        shard_nbytes += packed_nbytes
    else:
        for _, run in groupby(packed, key=lambda i: _dtype_order(specs[i])):
            members = list(run)
            offsets, nbytes = _offsets({i: specs[i].storage_nbytes for i in members}, 1)
            shard_offsets |= {i: shard_nbytes + offset for i, offset in offsets.items()}
            spec, numel = specs[members[0]], sum(specs[i].shard_numel for i in members)
            casts.append(
                CastRun(shard_nbytes, packed_offsets[members[0]], numel, spec.storage_dtype, spec.compute_dtype)
            )
            shard_nbytes += align(nbytes, RANK_ALIGNMENT)

    sizes = {i: spec.unsharded_nbytes for i, spec in enumerate(specs)}
    unsharded_offsets, packed_start = _offsets(sizes, PARAM_ALIGNMENT)
    return GatherLayout(
        world_size=world_size,
        specs=tuple(specs),
        direct=tuple(direct),
        packed=tuple(packed),
        shard_offsets=tuple(shard_offsets[i] for i in range(len(specs))),
        shard_nbytes=shard_nbytes,
        unsharded_offsets=tuple(unsharded_offsets.values()),
        packed_offsets=packed_offsets,
        packed_nbytes=packed_nbytes,
        tail_nbytes=packed_nbytes - end,
        packed_start=packed_start,
        casts=tuple(casts),
        aliased=aliased,
        encoded_offsets=encoded_offsets,
        encoded_nbytes=encoded_nbytes,
    )


def _find_direct(specs: Sequence[ParamSpec], indices: Iterable[int], min_bytes: int) -> list[int]:
    """Returns those of `indices` that are an operation of their own: with one for the others, no more than a call may
    have, unless they are large. None, if they are the smaller part of the bytes (one MLP for each of many experts).
    """
    sizes = {i: specs[i].compute_nbytes for i in indices}
    # Chunks along another dim interleave in the parameter: they must be copied to their places.
    able = [i for i in sizes if specs[i].dim == 0 and sizes[i] >= min_bytes and sizes[i] % RANK_ALIGNMENT == 0]
    largest = sorted(able, key=sizes.__getitem__, reverse=True)
    direct = [i for place, i in enumerate(largest) if place < MAX_OPERATIONS - 1 or sizes[i] >= LARGE_SHARD_BYTES]
    if len(direct) < len(able) and 2 * sum(sizes[i] for i in direct) < sum(sizes.values()):
        return []  # else all of the unsharded memory would be there while the packed part, which fills it, arrives
    return sorted(direct)


def _dtype_order(spec: ParamSpec) -> tuple[Any, ...]:
    dtypes = spec.compute_dtype, spec.storage_dtype
    return (*(-dtype.itemsize for dtype in dtypes), *map(str, dtypes))


def _offsets(sizes: dict[int, int], alignment: int) -> tuple[dict[int, int], int]:
    """Lays `sizes` one behind the other; returns the offset of each and the total."""
    offsets, position = {}, 0
    for index, size in sizes.items():
        offsets[index] = position
        position += align(size, alignment)
    return offsets, position


@dataclass(frozen=True)
class BucketLayout:
    """Describes gradients that are reduced together: one reduce dtype, one dtype of `.grad`. Offsets count elements.

    They are sent in the wire dtype; what arrives is summed in the reduce dtype.

    The reduced shards lie in one flat tensor of `shard_numel`: first the direct ones, whose gradient is its own
    collective's input, then from `packed_start` one segment of `packed_numel`, in which the packed ones lie side by
    side.
    """

    indices: tuple[int, ...]
    direct: tuple[int, ...]
    packed: tuple[int, ...]
    offsets: dict[int, int]
    packed_start: int
    packed_numel: int
    shard_numel: int
    wire_dtype: torch.dtype
    reduce_dtype: torch.dtype
    delivered_dtype: torch.dtype

    @property
    def payload_nbytes(self) -> int:
        """Bytes that each rank gives to each other in a reduction; bounded as those of a gather are."""
        return self.shard_numel * self.wire_dtype.itemsize


def bucket_layout(
    specs: Sequence[ParamSpec],
    indices: Iterable[int],
    reduce_dtype: torch.dtype,
    direct_min_bytes: int,
    wire_dtype: torch.dtype | None = None,
) -> BucketLayout:
    """Lays out the reduction of the parameters `indices`, which share one dtype of `.grad`.

    `wire_dtype`: no wider than the reduce dtype; None: that.
    """
    indices, wire_dtype = tuple(indices), wire_dtype or reduce_dtype
    itemsize = wire_dtype.itemsize  # what is aligned in it is so in a wider dtype
    # A gradient goes direct if it needs neither a cast nor padding: then it already lies rank-major.
    as_they_are = [i for i in indices if specs[i].arrives_in(wire_dtype) and specs[i].is_even]
    largest = _find_direct(specs, as_they_are, direct_min_bytes)
    direct = tuple(i for i in as_they_are if i in largest)
    packed = tuple(i for i in indices if i not in direct)
    offsets, packed_start = _offsets({i: specs[i].shard_numel for i in direct}, RANK_ALIGNMENT // itemsize)
    packed_offsets, packed_numel = _offsets({i: specs[i].shard_numel for i in packed}, 1)
    packed_numel = align(packed_numel * itemsize, RANK_ALIGNMENT) // itemsize
    return BucketLayout(
        indices=indices,
        direct=direct,
        packed=packed,
        offsets=offsets | {i: packed_start + offset for i, offset in packed_offsets.items()},
        packed_start=packed_start,
        packed_numel=packed_numel,
        shard_numel=packed_start + packed_numel,
        wire_dtype=wire_dtype,
        reduce_dtype=reduce_dtype,
        delivered_dtype=specs[indices[0]].delivered_dtype,
    )
