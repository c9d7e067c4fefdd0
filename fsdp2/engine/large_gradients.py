"""Large gradients: a gradient that is a bucket of its own is copied and sent piece by piece.

Otherwise a copy of all of it, in the reduce dtype, would be the peak of a whole step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from . import compat, reduce, streams
from .buckets import ReducePlan
from .comm import AllWork, Work
from .gradients import GroupGradients
from .layout import RANK_ALIGNMENT, BucketLayout, ParamSpec, align
from .reduce import Pending, PendingReduce, Reduction, Shards

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


def split_pieces(numel: int, world_size: int, itemsize: int, max_pieces: int, min_bytes: int) -> list[tuple[int, int]]:
    """Cuts segments of `numel` elements per rank, a multiple of 16 bytes, into pieces that are such multiples, too.

    Returns first and one-past-last element of each. A piece of all ranks has at least `min_bytes`.
    """
    count = max(1, min(max_pieces, numel * world_size * itemsize // min_bytes))
    size = align(-(-numel // count) * itemsize, RANK_ALIGNMENT) // itemsize
    return [(first, min(first + size, numel)) for first in range(0, numel, size or 1)]


class PiecePlan(ReducePlan):
    """A plan that knows the pieces of a bucket of one gradient.

    `pieces`, `halves`: (first, last) elements of each rank's shard: many pieces if the gradient is all of its group,
    two halves if it is copied and shares its group with others. There are no halves where an operation is a launch: the
    second half is packed when the first is reduced, for which the stream that computes would wait.
    """

    def __init__(self, layout: BucketLayout, specs: tuple[ParamSpec, ...], *others: Any) -> None:
        super().__init__(layout, specs, *others)
        self.spec = specs[layout.indices[0]]
        if self.launches:
            minimum = MIN_PIECE_BYTES_OF_RANK * self.world_size
            self.pieces, self.halves = self._split(MAX_PIECES_LAUNCHED, minimum) if len(specs) == 1 else [], []
        else:
            is_half_of_group = layout.packed and len(layout.indices) == 1 < len(specs)
            self.pieces = self._split(MAX_PIECES, MIN_PIECE_BYTES) if len(specs) == 1 else []
            self.halves = self._split(2, MIN_PIECE_BYTES) if is_half_of_group else []
        self.has_parts = bool(self.pieces or self.halves)

    def _split(self, count: int, min_bytes: int) -> list[tuple[int, int]]:
        """Cuts into at most so many pieces, if the reduction takes memory, to copy to, or to receive in."""
        layout, world_size = self.layout, self.world_size
        if self.spec.dim or not (layout.packed or layout.wire_dtype != layout.reduce_dtype):
            return []
        pieces = split_pieces(layout.shard_numel, world_size, layout.wire_dtype.itemsize, count, min_bytes)
        return pieces if len(pieces) > 1 else []

    def pack_piece(self, gradient: Tensor, first: int, last: int, out_WP: Tensor) -> None:
        """Copies elements `first` to `last` of each rank's shard, along dim 0, of one gradient, casting.

        Padding keeps whatever it held.
        """
        spec = self.spec
        flat, shard, last = gradient.reshape(-1), spec.shard_numel, min(last, spec.shard_numel)
        whole = spec.whole_chunks * shard
        places = [out_WP[: spec.whole_chunks, : last - first]]
        sources = [flat[:whole].view(spec.whole_chunks, shard)[:, first:last]]
        if self.launches:  # row by row it is one launch, too, and reads and writes several elements at a time
            places, sources = [*places[0].unbind()], [*sources[0].unbind()]
        rest = flat[whole:][first:last]
        if rest.numel():
            places.append(out_WP[spec.whole_chunks, : rest.numel()])
            sources.append(rest)
        compat.copy_all(places, sources)


class FirstHalf(Pending):
    """The first half of one gradient. It is finished, and its memory freed, before the other half is packed; `output`
    is complete when that one is finished, too.
    """

    num_halves = 1

    def __init__(self, output: Tensor, work: Work, nbytes: int) -> None:
        self.output, self._work, self.nbytes = output, work, nbytes

    def finish(self) -> Shards:
        self._work.wait()
        return {}

    def abandon(self) -> None:
        self._work.wait()


class LargeGradients(GroupGradients):
    """The gradients of a group, of which large ones are reduced piece by piece."""

    plan_class = PiecePlan

    def start_in_parts(self, gradients: Any, plan: Any, reduction: Reduction, carried: Any) -> Pending:
        gradient = gradients[plan.layout.indices[0]]
        if reduction.shards.size > 1 and reduction.hook is None:
            if plan.halves and reduction.replicas is None:
                return self._start_in_halves(gradient, plan, carried)
            if plan.pieces:
                return _start_in_pieces(gradient, plan, reduction, carried)
        return reduce.start(gradients, plan, reduction, carried)

    def _start_in_halves(self, gradient: Tensor, plan: PiecePlan, carried: Mapping[int, Tensor]) -> Pending:
        """Begins to reduce one half, and the other when there is room for it."""
        queue, reduction, nbytes = self.group.queue, self.reduction, plan.nbytes // 2
        output = gradient.new_empty(plan.layout.shard_numel, dtype=plan.layout.reduce_dtype)
        queue.add(self, FirstHalf(output, _start_piece(gradient, plan, reduction, output, *plan.halves[0]), nbytes))
        queue.make_room()
        rest = _start_piece(gradient, plan, reduction, output, *plan.halves[1])
        return PendingReduce(plan.layout, reduction, rest, output, [], carried, nbytes, num_halves=1)


def _start_in_pieces(
    gradient: Tensor, plan: PiecePlan, reduction: Reduction, carried: Mapping[int, Tensor]
) -> PendingReduce:
    """Begins to reduce one gradient piece by piece. All but the last pieces are finished on return; where there are
    streams, they are on a stream beside the caller's, which goes on.
    """
    layout, device = plan.layout, gradient.device
    output = torch.empty(layout.shard_numel, dtype=layout.reduce_dtype, device=device)
    running: deque[Work] = deque()
    with streams.beside(device):
        for first, last in plan.pieces:
            if len(running) == PIECES_IN_FLIGHT:
                running.popleft().wait()
            running.append(_start_piece(gradient, plan, reduction, output, first, last))
    # On streams the host has not waited for the pieces to be packed.
    inputs = [gradient] if streams.exist_on(device) else []
    nbytes = plan.nbytes if inputs else plan.nbytes * PIECES_IN_FLIGHT // len(plan.pieces)
    return PendingReduce(layout, reduction, AllWork(running), output, inputs, carried, nbytes)


def _start_piece(
    gradient: Tensor, plan: PiecePlan, reduction: Reduction, output: Tensor, first: int, last: int
) -> Work:
    """Begins to reduce elements `first` to `last` of each rank's shard of one gradient into their place in `output`."""
    segments = output.new_empty(plan.world_size, last - first, dtype=plan.layout.wire_dtype)
    plan.pack_piece(gradient, first, last, segments)
    comm = reduction.shards
    work = comm.reduce_scatter([output[first:last]], [segments.view(-1)], reduction.divisors()[0])
    return AllWork([work], [segments])
