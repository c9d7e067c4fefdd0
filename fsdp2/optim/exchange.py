"""Brings the parts of matrices to the ranks that update them, and the updates back."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..shards.ranks import all_reduce_over, gather_objects, moves_data
from ..shards.tensors import copy_all
from .cuts import Cut, Matrix
from .plan import Bucket


class Exchange:
    """Sends this rank's parts of a bucket's matrices to their owners when it is made. Every rank of the bucket's
    process group must make it, and call `send_back`, in the same order as those of other buckets.

    `mine`: the matrices that this rank updates. `parts`: those of which it holds a part, in the order of their owners;
    `part_values`: what is sent of each at first, and its update afterwards. A bucket without a process group does not
    travel: there parts are matrices.
    """

    def __init__(self, bucket: Bucket, cut_of: Callable[[Matrix], Cut], part_of: Callable[[Matrix], Tensor]) -> None:
        self._bucket, self._group, self.mine = bucket, bucket.process_group, bucket.owned[bucket.rank]
        self._work: dist.Work | None = None
        self._axes = [matrix.axis(cut_of(matrix)) for matrix in self.mine]
        held = [(owner, m) for owner, owned in enumerate(bucket.owned) for m in owned if bucket.rank in m.holders]
        self.parts = [matrix for _, matrix in held]
        values = [part_of(matrix) for matrix in self.parts]
        owners, shapes = [owner for owner, _ in held], [value.shape for value in values]
        self._sent, self._to_owners, self.part_values = self._memory(owners, shapes)
        if values:
            copy_all(self.part_values, values)
        self._views: list[list[Tensor]] = [[] for _ in self.mine]
        if self._group is None:
            self._views = [[part.view(-1, *part.shape[-2:])] for part in self.part_values]
            return
        # From each rank its parts of all of this rank's matrices, one rank after the other.
        places = [(rank, i) for rank in range(len(bucket.owned)) for i, m in enumerate(self.mine) if rank in m.holders]
        held_shapes = [self.mine[i].part_shape(cut_of(self.mine[i]), rank) for rank, i in places]
        self._received, self._from_holders, views = self._memory([rank for rank, _ in places], held_shapes)
        for (_, i), view in zip(places, views, strict=True):
            self._views[i].append(view[None])
        self._exchange(self._received, self._sent, self._from_holders, self._to_owners)

    def _memory(self, ranks: Sequence[int], shapes: Sequence[Any]) -> tuple[Tensor, list[int], list[Tensor]]:
        """Returns memory for tensors of these shapes, of or for these ranks; the elements of each rank; the tensors."""
        sizes, of_ranks = [math.prod(shape) for shape in shapes], [0] * len(self._bucket.owned)
        for rank, size in zip(ranks, sizes, strict=True):
            of_ranks[rank] += size
        memory = torch.empty(sum(sizes), dtype=self._bucket.wire, device=self._bucket.device)
        return memory, of_ranks, [each.view(shape) for each, shape in zip(memory.split(sizes), shapes, strict=True)]

    def _exchange(self, output: Tensor, source: Tensor, received: list[int], sent: list[int]) -> None:
        self._work = dist.all_to_all_single(output, source, received, sent, group=self._group, async_op=True)

    def wait(self) -> None:
        """Waits until the matrices, or the updates, are there."""
        if self._work is not None:
            self._work.wait()

    def stack(self, chosen: Sequence[int]) -> Tensor:
        """Returns matrices of equal shape as one tensor [matrices, rows, columns]."""
        first, numbers = self.mine[chosen[0]], [len(self.mine[i].stack) for i in chosen]
        if len(self.mine) == 1 and self._axes[0] < 1:
            memory = self._sent if self._work is None else self._received
            return memory.view(-1, first.rows, first.cols)  # the ranks' rows lie one behind the other
        stacked = self._views[chosen[0]][0].new_empty(sum(numbers), first.rows, first.cols)
        for i, out in zip(chosen, stacked.split(numbers), strict=True):
            torch.cat(self._views[i], self._axes[i] + 1, out=out)
        return stacked

    def put(self, chosen: Sequence[int], updates: Tensor) -> None:
        """Takes the updates of these matrices."""
        if updates.untyped_storage().data_ptr() == self._views[chosen[0]][0].untyped_storage().data_ptr():
            updates = updates.clone()  # a function that returns what it got, or a view of it
        for i, update in zip(chosen, updates.split([len(self.mine[i].stack) for i in chosen]), strict=True):
            dim = self._axes[i] + 1
            copy_all(self._views[i], list(update.split([view.shape[dim] for view in self._views[i]], dim)))

    def send_back(self) -> None:
        """Sends the updates to the ranks that hold the matrices' parts."""
        if self._work is not None:
            self._exchange(self._sent, self._received, self._to_owners, self._from_holders)


def find_present(process_group: dist.ProcessGroup, device: torch.device, own: Sequence[bool]) -> Sequence[bool]:
    """Returns which parameters have a gradient on any rank. `own`: those on this rank.

    Every rank of `process_group` must call it. Ranks that have all gradients know the answer without reading it.
    """
    facts = torch.ones(len(own), dtype=torch.uint8, device=device)
    if not all(own):
        facts.copy_(torch.tensor(own, dtype=torch.uint8))
    dist.all_reduce(facts, dist.ReduceOp.MAX, group=process_group)
    return own if all(own) else [bool(each) for each in facts.tolist()]


def check_alike(process_group: dist.ProcessGroup, device: torch.device, facts: dict[str, str]) -> None:
    """Checks that all ranks of `process_group` have the same parameters. All of them must call it.

    `facts`: FQN -> what must be equal.

    Raises:
        ValueError: they have not; on all ranks.
    """
    if device.type == "meta" or not moves_data([process_group], device):
        return
    digest = zlib.crc32(repr(facts).encode())
    extremes = torch.tensor([digest, -digest], device=device)
    all_reduce_over(extremes, [process_group], largest=True)
    if extremes.sum() == 0:
        return
    (first, expected), *others = gather_objects((dist.get_rank(), facts), [process_group], device)
    rank, got = next((rank, facts) for rank, facts in others if repr(facts) != repr(expected))
    differing = [each for each in {**expected, **got} if expected.get(each) != got.get(each)]
    found = "; ".join(f"{each}: {expected.get(each)} and {got.get(each)}" for each in differing[:3]) or "the order"
    raise ValueError(
        f"whole-matrix optimizer: ranks {first} and {rank} have other parameters, or another order: {found}. Pass the "
        "same parameters, in the same order and groups, on all ranks."
    )
