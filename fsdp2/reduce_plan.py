"""What is the same in all reductions of one bucket of gradients: how they are packed, and into what they are cut."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from . import streams, torch_compat
from .layout import BucketLayout, ParamSpec, split_pieces
from .segments import Segments

# The gradient of a group of one parameter, an embedding or a head say, can't be cut into buckets. It is copied and sent
# piece by piece, so many at a time, lest a copy of all of it, in the reduce dtype, be the peak of the whole step.
MAX_PIECES = 16
MIN_PIECE_BYTES = 1024 * 1024
# Below this, what is packed at one go on CPU though that takes more copies: an operation costs more than its bytes.
LITTLE_BYTES = 64 * 1024


class ReducePlan:
    """Of one bucket.

    `pieces`: of the one gradient of a group. `halves`: of one that is copied, and shares its group with others.
    """

    def __init__(self, layout: BucketLayout, specs: tuple[ParamSpec, ...], world_size: int) -> None:
        self.layout, self.spec = layout, specs[layout.indices[0]]
        self.direct = [((specs[i].shard_numel,), layout.offsets[i]) for i in layout.direct]
        self._specs, self.world_size = specs, world_size
        self.nbytes = layout.payload_nbytes * world_size  # of what is sent
        # Those that no reduction uses: CPUs take as long to make views of others as to fill them.
        self._spare: Segments | None = None
        packed = [specs[i] for i in layout.packed]
        # One operation for all of them. On CPU it pads by a copy, and casts slowly.
        self.is_one_cat = all(spec.dim == 0 and spec.shard_numel for spec in packed)
        self.is_even = all(spec.is_even for spec in packed)
        self.is_little = world_size * layout.packed_numel * layout.wire_dtype.itemsize <= LITTLE_BYTES
        # Elements behind the last of them, of all segments; and zeros for them, which a hook of a user's sees.
        self.tail_numel = (layout.packed_numel - sum(spec.shard_numel for spec in packed)) * world_size
        self._tails: dict[torch.dtype, list[Tensor]] = {}
        self.pieces = self._split(MAX_PIECES) if len(specs) == 1 else []
        self.halves = self._split(2) if layout.packed and len(layout.indices) == 1 < len(specs) else []

    def _split(self, count: int) -> list[tuple[int, int]]:
        """Into at most so many pieces, if it takes memory to reduce this gradient: to copy it to, or to receive in."""
        layout, world_size = self.layout, self.world_size
        if self.spec.dim or not (layout.packed or layout.wire_dtype != layout.reduce_dtype):
            return []
        pieces = split_pieces(layout.shard_numel, world_size, layout.wire_dtype.itemsize, count, MIN_PIECE_BYTES)
        return pieces if len(pieces) > 1 else []

    def take_segments(self, device: torch.device) -> Segments:
        """To pack into. `give_back`, when they have been read."""
        segments, self._spare = self._spare, None
        if segments is None:
            return Segments(self.layout, self._specs, self.world_size, device)
        segments.allocate()
        return segments

    def give_back(self, segments: Segments) -> None:
        """Where there are streams, others may still read them, behind the caller: their memory goes with the object."""
        if not streams.exist_on(segments.flat.device):
            segments.free()
            self._spare = segments

    def pack(self, gradients: Mapping[int, Tensor], segments: Segments) -> None:
        packed, out_WP = [gradients[i] for i in self.layout.packed], segments.of_ranks
        dtype = packed[0].dtype
        if not self._is_one_operation(packed, segments):
            segments.fill(packed)
            return
        if self.tail_numel and dtype not in self._tails:
            self._tails[dtype] = [out_WP.new_zeros(self.tail_numel, dtype=dtype)]
        tail = self._tails.get(dtype, [])
        if dtype == out_WP.dtype or segments.costs_launches:
            torch_compat.chunk_cat([*packed, *tail], out_WP)
        else:
            uncast = torch.empty_like(out_WP, dtype=dtype)
            torch_compat.chunk_cat([*packed, *tail], uncast)
            out_WP.copy_(uncast)

    def _is_one_operation(self, packed: list[Tensor], segments: Segments) -> bool:
        if not self.is_one_cat:
            return False
        if segments.costs_launches:
            takes_one_copy = self.is_even and len(packed) == 1  # a concatenation also uploads where its inputs lie
            return not takes_one_copy and len({each.dtype for each in packed}) == 1
        if segments.has_single_rows or not (self.is_even or self.is_little):
            return False
        dtypes = {each.dtype for each in packed}  # those that have waited come in the reduce dtype
        return dtypes == {segments.flat.dtype} or (len(dtypes) == 1 and self.is_little)
