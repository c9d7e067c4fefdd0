"""Gathers shards into unsharded parameters: views into byte buffers, and the casts and copies around an all-gather.

It takes byte buffers and a layout, and knows no parameter. Everything that does not change from one gather to the next
(views, lists, which casts are needed) is prepared once, in `GatherPlan`. A gather then casts shards, by one foreach
copy for each pair of dtypes and kind of layout (`group_copies`), calls one collective, and copies packed parameters to
their places: on a device by one copy if possible, on CPU by foreach copies. Parameters with a codec are encoded before
the collective, and decoded behind it. layout.py says which parameters are sent direct, packed or encoded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..devices.streams import Work, costs_launches
from ..torch_private.internals import below_autograd, copy_all, part_of_storage
from .codec import Codec, encode
from .comm import TORCH_MEMORY, Comm, CommMemory
from .layout import GatherLayout, ParamSpec, Run, contiguous_stride, split_chunks

if TYPE_CHECKING:
    from .unsharded import UnshardedParameters

# ---- views and copies


def view_bytes(buffer: Tensor, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
    """Returns `numel` elements of `dtype` that start at byte `offset` of a uint8 buffer: 1-D, of the same memory."""
    return buffer[offset : offset + numel * dtype.itemsize].view(dtype)


def own_storage_view(buffer: Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Returns a tensor over `buffer`'s memory that has a storage of its own.

    A DTensor whose local tensor begins inside a storage can't be deep-copied, staged or saved on its own.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype, device=buffer.device)
    if buffer.is_meta:  # which has no address
        return view_bytes(buffer, offset, math.prod(shape), dtype).view(shape)
    storage = part_of_storage(buffer.untyped_storage(), slice(offset, offset + nbytes))
    return torch.empty(0, dtype=dtype, device=buffer.device).set_(storage, 0, shape, contiguous_stride(shape))


def leaves_over(buffer: Tensor, places: Iterable[tuple[int, tuple[int, ...], torch.dtype]]) -> list[Tensor]:
    """Returns tensors over `buffer`'s storage, each with a version counter of its own: refilling them is no change to
    autograd. `places`: the offset in bytes, the shape and the dtype of each.
    """
    leaves, of_dtype = [], {}
    with below_autograd():
        for offset, shape, dtype in places:
            if dtype not in of_dtype:
                of_dtype[dtype] = buffer.view(dtype)
            leaves.append(of_dtype[dtype].as_strided(shape, contiguous_stride(shape), offset // dtype.itemsize))
    return leaves


# Pairs of a target and a source.
Copies = list[tuple[Tensor, Tensor]]


def group_copies(copies: Iterable[tuple[Tensor, Tensor]]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Returns the targets and sources of the foreach copies that together do `copies`.

    A foreach copy is one kernel on CUDA if its targets have one dtype, its sources have one, and each is laid out like
    the other; otherwise it is one for each pair. (Before torch 2.12, https://github.com/pytorch/pytorch/pull/173531, it
    also wrote wrong bytes where targets differed in dtype.)
    """
    groups: dict[object, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in copies:
        is_alike = target.is_contiguous() and source.is_contiguous()
        targets, sources = groups.setdefault((target.dtype, source.dtype, is_alike), ([], []))
        targets.append(target)
        sources.append(source)
    return [*groups.values()]


def _places_of_chunks(whole: Tensor, chunks: Tensor, spec: ParamSpec) -> tuple[list[Tensor], list[Tensor]]:
    """Returns where the chunks of a parameter lie that is not cut along dim 0, and the chunks, [W, shard_numel]."""
    targets = split_chunks(whole.view(spec.shape), spec)
    sources = [chunks[: spec.whole_chunks].unflatten(1, spec.local_shape(0))]
    if len(targets) > 1:
        sources.append(chunks[spec.whole_chunks, : targets[1].numel()].view(targets[1].shape))
    return targets, sources


def as_sent(spec: ParamSpec, shard: Tensor, seed: int) -> Tensor:
    """Returns what a padded shard, [P], is where it was encoded and decoded, [P], in the dtype that computes.

    `seed`: as in `_Encoded`.
    """
    codec = spec.gather_codec
    assert codec is not None, "it is encoded"
    wire = encode(codec, shard.view(1, -1).to(codec.packed_dtype(spec.storage_dtype)), seed)
    decoded = shard.new_empty(1, spec.shard_numel, dtype=spec.compute_dtype)
    codec.decode(wire.view(1, -1), decoded)
    return decoded.view(-1)


class _Encoded:
    """Encodes and decodes one parameter in the gathers of its group.

    Args:
        shard: this rank's padded shard, [1, P], in the dtype in which it rests.
        rows: bytes of all ranks' shards as they are sent, [W, n].
        rank: which of them are those of `shard`.
        place: where the unsharded parameter is, flat.
        seed: given to the codec.
    """

    def __init__(
        self, spec: ParamSpec, codec: Codec, shard: Tensor, rows: Tensor, rank: int, place: Tensor, seed: int
    ) -> None:
        self._spec, self._codec, self._shard, self._seed = spec, codec, shard, seed
        self._rows, self._own, self._place = rows, rows[rank], place
        self._packed_dtype = codec.packed_dtype(spec.storage_dtype)
        # That of what the codec makes.
        self._wire_dtype = torch.uint8

    def encode(self) -> None:
        """Writes this rank's bytes.

        Raises:
            ValueError: the codec makes other bytes than it has said.
        """
        wire = encode(self._codec, self._shard.to(self._packed_dtype), self._seed)
        if wire.nbytes != self._own.numel():
            raise ValueError(
                f"{self._codec!r}.encode: expected {self._own.numel()} bytes, as its sent_nbytes says of "
                f"{self._shard.numel()} elements of {self._spec.storage_dtype}, got {wire.nbytes}"
            )
        self._wire_dtype = wire.dtype
        self._own.copy_(wire.view(-1).view(torch.uint8))

    def decode(self) -> None:
        """Fills the unsharded parameter with what all ranks' bytes stand for."""
        rows, spec = self._rows.view(self._wire_dtype), self._spec
        if spec.dim == 0:
            self._codec.decode(rows, self._place.view(spec.world_size, spec.shard_numel))
            return
        chunks = self._place.new_empty(spec.world_size, spec.shard_numel)
        self._codec.decode(rows, chunks)
        for target, source in zip(*_places_of_chunks(self._place, chunks, spec), strict=True):
            target.copy_(source)


class GatherPlan:
    """Prepares how one group's shards (`shards`, uint8, at rest) become its unsharded parameters (`unsharded`, uint8).

    The plan keeps views into both buffers. The storage of `unsharded` may be freed between gathers and must be
    allocated again before `start`, or before `finish` if nothing `arrives_in_place`. Packed segments that lie apart
    (`packs_apart`: not behind the unsharded parameters), and encoded ones, are the plan's own memory (`has_memory`):
    `start` allocates it, unless `allocate` has, and `free` frees it.

    Where operations cost launches, one split copy moves all packed parameters to their places, if these allow it: on
    CUDA that is one kernel, while a foreach copy between other strides launches one for each tensor. The split copy
    also copies rows of padding, and takes 1.5 times as long on CPU, so CPU uses foreach copies.
    """

    def __init__(
        self, layout: GatherLayout, rank: int, shards: Tensor, unsharded: Tensor, source: CommMemory = TORCH_MEMORY
    ) -> None:
        self._layout, self._rank, self._shards, self._unsharded, self._source = layout, rank, shards, unsharded, source
        self._world_size = layout.world_size
        # Where the packed segments land, and at which byte.
        self._segments, self._segments_start = unsharded, layout.packed_start
        # The plan's own storages, and what allocates each.
        self._own: list[tuple[torch.UntypedStorage, Callable[[torch.UntypedStorage], object]]] = []
        if layout.packs_apart:
            self._segments, self._segments_start = self._make_own(layout.segments_nbytes), 0
        # Casts write this rank's own part of an output, which then is the collective's input too.
        self._casts: Copies = []
        self._copies_out: Copies = []
        # The W packed segments as rows of bytes; the sizes of the parts of a row; where the parts of all rows go.
        self.split: tuple[Tensor, list[int], list[Tensor]] | None = None
        self.outputs: list[Tensor] = []
        self.inputs: list[Tensor] = []
        # dtype -> the buffer of segments in that dtype, and that of unsharded parameters.
        self._typed: dict[torch.dtype, tuple[Tensor, Tensor]] = {}
        if not layout.aliased:
            for i in layout.direct:
                self._plan_direct(i)
            if layout.packed_nbytes:
                self._plan_packed(costs_launches(unsharded.device))
        self._encoded = self._plan_encoded() if layout.encoded_nbytes else ()
        self.casts, self.copies_out = group_copies(self._casts), group_copies(self._copies_out)
        self.has_memory = bool(self._own)
        # False: all that is gathered is copied, so that the unsharded parameters are first written to by `finish`.
        self.arrives_in_place = bool(layout.direct) or not (layout.packs_apart if layout.packed else self.has_memory)
        self.free()

    def _make_own(self, nbytes: int) -> Tensor:
        memory = torch.empty(nbytes, dtype=torch.uint8, device=self._unsharded.device)
        self._own.append((memory.untyped_storage(), self._source.allocator(nbytes)))
        return memory

    def allocate(self) -> None:
        """Allocates the plan's own memory, unless it is there."""
        for storage, allocate in self._own:
            if not storage.nbytes():
                allocate(storage)

    def free(self) -> None:
        """Frees the plan's own memory. Its content must be copied out, and no collective may use it any more."""
        for storage, _ in self._own:
            storage.resize_(0)

    def start(self, comm: Comm, more_outputs: Sequence[Tensor] = (), more_inputs: Sequence[Tensor] = ()) -> Work | None:
        """Begins to gather. Every rank of `comm` must call it, in the same order.

        `more_outputs`, `more_inputs`: tensors of other parameters, which the same collective gathers. Returns None if
        there is nothing to wait for. `finish` follows when the work has been waited for.
        """
        if self.has_memory:
            self.allocate()
        for casts in self.casts:
            copy_all(*casts)
        for each in self._encoded:
            each.encode()
        outputs, inputs = self.outputs, self.inputs
        if self._source.is_symmetric and comm.group is not None:
            self._source.meet(comm.group, outputs)
        if more_outputs:
            outputs, inputs = [*outputs, *more_outputs], [*inputs, *more_inputs]
        return comm.all_gather(outputs, inputs) if outputs else None

    def finish(self) -> None:
        """Copies what arrived packed to its place, and decodes what arrived encoded."""
        if self.split is not None:
            rows, sizes, targets = self.split
            torch.split_with_sizes_copy(rows, sizes, 1, out=targets)
        for copies in self.copies_out:
            copy_all(*copies)
        for each in self._encoded:
            each.decode()

    def _plan_encoded(self) -> Sequence[_Encoded]:
        layout, nbytes = self._layout, self._layout.encoded_nbytes
        wire, found = self._make_own(nbytes * self._world_size), []
        for i, offset in layout.encoded_offsets.items():
            spec = layout.specs[i]
            assert spec.gather_codec is not None, "it is encoded"
            shard = view_bytes(self._shards, layout.shard_offsets[i], spec.shard_numel, spec.storage_dtype)
            start, numel = layout.unsharded_offsets[i], spec.unsharded_nbytes // spec.compute_dtype.itemsize
            place = view_bytes(self._unsharded, start, numel, spec.compute_dtype)
            rows = wire.view(self._world_size, nbytes)[:, offset : offset + spec.gathered_nbytes]
            found.append(_Encoded(spec, spec.gather_codec, shard.view(1, -1), rows, self._rank, place, seed=i))
        if self._world_size > 1:
            self.outputs.append(wire)
            self.inputs.append(self._own_part(wire, nbytes))
        return found

    def _plan_direct(self, i: int) -> None:
        spec, start = self._layout.specs[i], self._layout.unsharded_offsets[i]
        if spec.shard_numel == 0:
            return
        is_alone = self._world_size == 1
        must_copy = spec.storage_dtype != spec.compute_dtype or is_alone or self._source.is_registered
        if must_copy:
            to, source = start + self._rank * spec.compute_nbytes, self._layout.shard_offsets[i]
            target = view_bytes(self._unsharded, to, spec.shard_numel, spec.compute_dtype)
            self._casts.append((target, view_bytes(self._shards, source, spec.shard_numel, spec.storage_dtype)))
        if self._world_size > 1:
            output = self._unsharded[start : start + spec.compute_nbytes * self._world_size]
            own = slice(self._layout.shard_offsets[i], self._layout.shard_offsets[i] + spec.storage_nbytes)
            self.outputs.append(output)
            self.inputs.append(self._own_part(output, spec.compute_nbytes) if must_copy else self._shards[own])

    def _plan_packed(self, splits: bool) -> None:
        layout, nbytes = self._layout, self._layout.packed_nbytes
        output = self._segments[self._segments_start : self._segments_start + nbytes * self._world_size]
        if layout.casts:
            own = self._own_part(output, nbytes)
            for run in layout.casts:
                target = view_bytes(own, run.packed_offset, run.numel, run.compute_dtype)
                self._casts.append((target, view_bytes(self._shards, run.storage_offset, run.numel, run.storage_dtype)))
        else:
            first = layout.shard_offsets[layout.packed[0]]
            own = self._shards[first : first + nbytes]
            if self._source.is_registered:
                self._casts.append((self._own_part(output, nbytes), own))
                own = self._own_part(output, nbytes)
        self.outputs.append(output)
        self.inputs.append(own)
        if splits and all(layout.specs[i].has_few_slices for i in layout.packed):
            self._plan_split(output)
            return
        for alike in layout.packed_runs:
            self._plan_copies_out(alike)

    def _plan_split(self, segments: Tensor) -> None:
        """Plans one copy of all: the chunks of each parameter, or of each of its slices, with padding, are a part of
        each row.
        """
        layout = self._layout
        rows = max(layout.specs[i].num_holders for i in layout.packed)
        places = []
        for i in layout.packed:
            spec, offset = layout.specs[i], layout.unsharded_offsets[i]
            nbytes = spec.compute_nbytes // (spec.num_slices or 1)
            places += [
                (self._unsharded, offset + j * self._world_size * nbytes, nbytes) for j in range(spec.num_slices)
            ]
        # Nobody reads the bytes that align the segments, but the parts must make up whole rows.
        behind = self._segments_start + layout.packed_nbytes * self._world_size
        places.append((self._segments, behind, layout.tail_nbytes))
        places = [place for place in places if place[2]]
        targets = [memory[offset : offset + rows * nbytes].view(rows, nbytes) for memory, offset, nbytes in places]
        self.split = segments.view(self._world_size, -1)[:rows], [nbytes for *_, nbytes in places], targets

    def _plan_copies_out(self, run: Run) -> None:
        layout, first, size = self._layout, run.indices[0], len(run.indices)
        spec, offsets = layout.specs[first], layout.unsharded_offsets
        dtype, itemsize, numel = spec.compute_dtype, spec.compute_dtype.itemsize, spec.shard_numel
        if dtype not in self._typed:
            self._typed[dtype] = self._segments.view(dtype), self._unsharded.view(dtype)
        segments, unsharded = self._typed[dtype]
        shape = size, spec.num_holders, numel  # the last ranks may hold nothing of a parameter of few rows
        distance, packed_distance = (each // itemsize for each in run.distances)
        start = (self._segments_start + layout.packed_offsets[first]) // itemsize
        # One `as_strided` takes the host less time than the six views that would lead there.
        chunks = segments.as_strided(shape, (packed_distance, layout.packed_nbytes // itemsize, 1), start)
        if spec.dim == 0:
            place = unsharded.as_strided(shape, (distance, numel, 1), offsets[first] // itemsize)
            self._copies_out.append((place, chunks))
            return
        for i, own in zip(run.indices, chunks, strict=True):
            whole = view_bytes(self._unsharded, offsets[i], spec.numel, dtype)
            self._copies_out += zip(*_places_of_chunks(whole, own, spec), strict=True)

    def _own_part(self, output: Tensor, nbytes: int) -> Tensor:
        return output[self._rank * nbytes : (self._rank + 1) * nbytes]


@dataclass(eq=False)
class PendingGather:
    """An all-gather in flight. The memory must stay until `finish` or `abandon`."""

    unsharded: UnshardedParameters
    plan: GatherPlan
    # None: nothing is to be waited for any more.
    work: Work | None
    # They must stay alive while the all-gather reads them.
    inputs: Sequence[Tensor] = ()

    def finish(self) -> None:
        """Makes the current stream (on CPU: the caller) wait until the unsharded parameters are there."""
        work, self.work = self.work, None
        if work is not None:
            work.wait()
        del work  # and memory of its own
        if not self.plan.arrives_in_place:
            self.unsharded.allocate()
        self.plan.finish()
        self.inputs = ()
        if self.plan.has_memory and not self.unsharded.keeps_storage:
            self.plan.free()

    def abandon(self) -> None:
        """Waits until the all-gather no longer writes to the memory, so that it can be freed. Frees what has arrived
        apart from the unsharded parameters.
        """
        work, self.work = self.work, None
        if work is not None:
            work.wait()
        self.inputs = ()
        if self.plan.has_memory and not self.unsharded.keeps_storage:
            self.plan.free()
