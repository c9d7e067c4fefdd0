"""Brings the parts of matrices to the ranks that update them, and the updates back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..core.compat import copy_all
from ..ext.rank_facts import all_reduce_over, gather_objects, moves_data
from .cuts import Cut, Matrix
from .plan import Bucket, Member


class LocalBucket:
    """Has the matrices that this rank has as a whole, [rows, columns] or [matrices, rows, columns] each, and their
    updates. It communicates nothing.
    """

    def __init__(self, matrices: Sequence[Matrix], wholes: Sequence[Tensor], member: Member) -> None:
        self.mine = self.parts = list(matrices)
        self._wholes, self._device, self._wire = list(wholes), member.cut.device, member.wire
        self._updates: list[Tensor | None] = [None] * len(self.mine)

    def wait(self) -> None:
        """Does nothing: the matrices are there."""

    def stack(self, chosen: Sequence[int]) -> Tensor:
        """Returns matrices of equal shape as one tensor [matrices, rows, columns]."""
        each = [self._wholes[i].view(-1, *self._wholes[i].shape[-2:]) for i in chosen]
        return (each[0] if len(each) == 1 else torch.cat(each)).to(self._device, self._wire)

    def put(self, chosen: Sequence[int], updates: Tensor) -> None:
        """Takes the updates of these matrices."""
        for i, update in zip(chosen, updates.split([self.mine[i].number for i in chosen]), strict=True):
            self._updates[i] = update.view_as(self._wholes[i])

    def send_back(self) -> None:
        """Frees the matrices."""
        self._wholes.clear()

    def updates(self) -> list[Tensor]:
        """Returns the update of each of `parts`."""
        return [each for each in self._updates if each is not None]


class TravellingBucket:
    """Sends this rank's parts of a bucket's matrices to their owners when it is made. Every rank of the bucket's
    process group must make it, and call `send_back` and `updates`, in the same order as other buckets.

    `mine`: the matrices that this rank updates. `parts`: those of which it holds a part, in the order of their owners.
    The memory of a part holds what is sent first, and its update afterwards; likewise that of a matrix.
    """

    def __init__(self, bucket: Bucket, cut_of: Callable[[Matrix], Cut], part_of: Callable[[Matrix], Tensor]) -> None:
        self.mine, self._bucket, self._cut_of = bucket.owned[bucket.rank], bucket, cut_of
        held = [[each for each in owned if bucket.rank in each.holders] for owned in bucket.owned]
        self.parts = [matrix for matrices in held for matrix in matrices]
        values = [part_of(matrix) for matrix in self.parts]
        rank, sizes = bucket.rank, [value.numel() for value in values]
        self._to_owners = [sum(_part_numel(each, cut_of(each), rank) for each in matrices) for matrices in held]
        self._sent = self._memory(sum(sizes))
        self._part_views = [view.view(value.shape) for view, value in zip(self._sent.split(sizes), values, strict=True)]
        if values:
            copy_all(self._part_views, values)
        # From each rank its parts of all of this rank's matrices, one rank after the other.
        places = [(source, i) for source in range(len(held)) for i, m in enumerate(self.mine) if source in m.holders]
        shapes = [self.mine[i].part_shape(cut_of(self.mine[i]), source) for source, i in places]
        numels = [rows * cols for rows, cols in shapes]
        self._from_holders = [0] * len(held)
        for (source, _), numel in zip(places, numels, strict=True):
            self._from_holders[source] += numel
        self._received = self._memory(sum(numels))
        self._views: list[list[Tensor]] = [[] for _ in self.mine]
        for (_, i), shape, view in zip(places, shapes, self._received.split(numels), strict=True):
            self._views[i].append(view.view(shape))
        self._work = self._exchange(self._received, self._sent, self._from_holders, self._to_owners)

    def _memory(self, numel: int) -> Tensor:
        return torch.empty(numel, dtype=self._bucket.wire, device=self._bucket.device)

    def _exchange(self, output: Tensor, source: Tensor, received: list[int], sent: list[int]) -> Any:
        return dist.all_to_all_single(output, source, received, sent, group=self._bucket.process_group, async_op=True)

    def wait(self) -> None:
        """Waits for the matrices."""
        self._work.wait()

    def stack(self, chosen: Sequence[int]) -> Tensor:
        """Returns matrices of equal shape as one tensor [matrices, rows, columns]."""
        first = self.mine[chosen[0]]
        if len(self.mine) == 1 and first.axis(self._cut_of(first)) == 0:
            return self._received.view(1, first.rows, first.cols)  # the ranks' rows, one behind the other
        stacked = self._memory(len(chosen) * first.numel).view(-1, first.rows, first.cols)
        for i, out in zip(chosen, stacked, strict=True):
            torch.cat(self._views[i], self.mine[i].axis(self._cut_of(self.mine[i])), out=out)
        return stacked

    def put(self, chosen: Sequence[int], updates: Tensor) -> None:
        """Takes the updates of these matrices."""
        for i, update in zip(chosen, updates, strict=True):
            axis = self.mine[i].axis(self._cut_of(self.mine[i]))
            views = self._views[i]
            copy_all(views, list(update.split([view.shape[axis] for view in views], axis)))

    def send_back(self) -> None:
        """Sends the updates to the ranks that hold the matrices' parts."""
        self._work = self._exchange(self._sent, self._received, self._to_owners, self._from_holders)

    def updates(self) -> list[Tensor]:
        """Waits for the updates, and returns that of each of `parts`."""
        self._work.wait()
        return self._part_views


def _part_numel(matrix: Matrix, cut: Cut, rank: int) -> int:
    rows, cols = matrix.part_shape(cut, rank)
    return rows * cols


class Presence:
    """Finds out which parameters have a gradient on any rank. Every rank of `process_group` must make it.

    Ranks that have all gradients do not wait for the answer: with theirs, each parameter has one.
    """

    def __init__(self, process_group: dist.ProcessGroup, device: torch.device, has_gradient: Sequence[bool]) -> None:
        self._facts = torch.ones(len(has_gradient), dtype=torch.uint8, device=device)
        self._is_complete, self._own = all(has_gradient), has_gradient
        if not self._is_complete:
            self._facts.copy_(torch.tensor(has_gradient, dtype=torch.uint8))
        self._work = dist.all_reduce(self._facts, dist.ReduceOp.MAX, group=process_group, async_op=True)

    def anywhere(self) -> list[bool]:
        """Returns which have one on some rank: the same on all ranks."""
        if self._is_complete or self._facts.is_meta:
            return list(self._own)
        self._work.wait()
        return [bool(each) for each in self._facts.tolist()]

    def end(self) -> None:
        """Waits for the communication."""
        self._work.wait()


def check_alike(process_group: dist.ProcessGroup, device: torch.device, facts: dict[str, str], digest: int) -> None:
    """Checks that all ranks of `process_group` have the same parameters. All of them must call it.

    `facts`: FQN -> what must be equal. `digest`: a number that is equal where facts are, below 2**32.

    Raises:
        ValueError: they have not; on all ranks.
    """
    if device.type == "meta" or not moves_data([process_group], device):
        return
    extremes = torch.tensor([digest, -digest], device=device)
    all_reduce_over(extremes, [process_group], largest=True)
    if extremes[0] + extremes[1] == 0:
        return
    of_all = gather_objects((dist.get_rank(), facts), [process_group], device)
    (first, expected), *others = of_all
    for rank, got in others:
        names = [each for each in {**expected, **got} if expected.get(each) != got.get(each)]
        if names or [*expected] != [*got]:
            found = "; ".join(f"{each}: {expected.get(each)} and {got.get(each)}" for each in names[:3])
            raise ValueError(
                f"whole-matrix optimizer: ranks {first} and {rank} have other parameters, or another order: "
                f"{found or 'the order'}. Pass the same parameters, in the same order and groups, on all ranks."
            )
