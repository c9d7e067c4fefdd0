"""Keeps the gradients of a group that a backward pass has left to a later one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from ..torch_private import internals


@final
class PartialSums:
    """The sums of one parameter's gradients over the micro-batches that have run: one sum, or the nodes of a tree.

    If micro-batches have numbers, they are the leaves of one binary tree: neighbours are added, then the sums of
    neighbouring pairs, and so on. So the order of additions does not depend on how many of the leaves are on this rank.
    The nodes are those of the subtrees that are complete, one of each size at most. A leaf without a gradient adds
    nothing.
    """

    def __init__(self) -> None:
        # (the number of the first leaf, the sum), in order.
        self._nodes: list[tuple[int, Tensor]] = []

    @property
    def numel(self) -> int:
        """How many elements all the sums have."""
        return sum(each.numel() for _, each in self._nodes)

    def add(self, gradient: Tensor, leaf: int | None, dtype: torch.dtype | None = None) -> None:
        """Adds the gradient of micro-batch number `leaf`; later ones have larger numbers. None: to one running sum.

        `dtype`: of the sums, which are to lie in memory of their own. None: as the gradient is, which is written to.
        """
        self._join(leaf)
        self._nodes.append((leaf or 0, gradient))
        self._join(None if leaf is None else leaf + 1)
        first, last = self._nodes[-1]
        self._nodes[-1] = first, last if dtype is None else internals.owned(last.to(dtype))

    def take(self, leaf: int | None) -> list[Tensor]:
        """Returns the sums, in the order in which the tree adds them to the gradient of `leaf`, the last one."""
        self._join(leaf)
        return [each for _, each in reversed(self._nodes)]

    def _join(self, end: int | None) -> None:
        """Adds up the nodes of each subtree whose leaves are all before `end`. None: all nodes are one."""
        nodes, before = self._nodes, math.inf if end is None else end
        while len(nodes) > 1:
            (first, earlier), (second, later) = nodes[-2:]
            level = (first ^ second).bit_length()
            if (second >> level) + 1 << level > before:
                return
            nodes[-2:] = [(first, earlier.add_(later))]


@final
class UnsynchronizedGradients:
    """The gradients of one group that a later backward pass is to reduce, and which of them the running pass includes.

    GroupGradients keeps gradients here and includes them in its reductions. Placeholders, and features that count or
    drop such gradients, read the attributes and call `forget` and `clear`. It is true if there are any.
    """

    def __init__(self) -> None:
        self.unreduced: dict[int, PartialSums] = {}
        """Parameter index -> sums of unsharded gradients, in the reduce dtype, which no rank has sent yet."""
        self.reduced_in_shard: dict[int, PartialSums] = {}
        """Parameter index -> sums of flat padded shards, in the reduce dtype, which replicas have not summed yet. If R
        replicas share one set of shards, [R, shard_numel]: one for each of them."""
        self.leaf: int | None = None
        """The number of the micro-batch that runs, among this rank's, if all ranks add up gradients in the order of one
        tree. None: they are added as they come."""
        self.in_tree = False
        """True if the gradients that were delivered last were added up in the order of one tree."""
        self.included: set[int] = set()
        """Indices of the parameters whose gradients of earlier passes the running pass has included. If it fails, they
        are lost."""
        self.were_left = False
        """True if the last backward pass has left gradients, by its settings. It is the same on all ranks."""
        self.may_be_sums = False
        """True if gradients of the running pass may be sums of several micro-batches, here or on another rank. Sums are
        sent in the reduce dtype. It is the same on all ranks."""

    def __bool__(self) -> bool:
        return bool(self.unreduced or self.reduced_in_shard)

    @property
    def indices(self) -> set[int]:
        """Indices of the parameters that have such a gradient."""
        return {*self.unreduced, *self.reduced_in_shard}

    def begin_pass(self) -> None:
        """Begins a backward pass, which has included nothing so far."""
        self.may_be_sums = self.were_left
        self.included.clear()

    def end_pass(self, leaves: bool) -> None:
        """Notes if a backward pass has left gradients, by its settings. This rank may still take part in reductions of
        that pass which other ranks need: `may_be_sums` stays.
        """
        self.were_left = leaves

    def fail_pass(self) -> None:
        """Drops what a backward pass that has failed had included, and keeps what it had not."""
        for i in self.included:
            self.forget(i)

    def expect(self) -> None:
        """Notes that there are gradients which no backward pass has computed: a user has assigned them."""
        self.were_left = True

    def add_in_tree(self, in_tree: bool) -> None:
        """Adds up gradients in the order of one tree from now on, which `begin_leaf` follows; or as they come."""
        self.in_tree, self.leaf = in_tree, 0 if in_tree else None

    def begin_leaf(self, leaf: int | None) -> None:
        """Notes which micro-batch, a leaf of the tree, runs next. None: no other does."""
        self.leaf = leaf

    def keep(self, i: int, gradient: Tensor, dtype: torch.dtype) -> None:
        """Keeps an unsharded gradient of parameter i, in `dtype`; adds it to earlier ones, in their memory."""
        self.may_be_sums = True
        if i in self.unreduced:
            self.included.add(i)
        self.unreduced.setdefault(i, PartialSums()).add(gradient, self.leaf, dtype)

    def keep_shard(self, i: int, shard: Tensor) -> None:
        """Keeps the shard of parameter i that this rank has got, until replicas sum it; adds it to earlier ones."""
        if i in self.reduced_in_shard:
            self.included.add(i)
        self.reduced_in_shard.setdefault(i, PartialSums()).add(shard, self.leaf)

    def include(self, i: int, gradient: Tensor | None) -> Tensor:
        """Takes the unreduced gradients of parameter i, and returns their sum with `gradient`."""
        self.included.add(i)
        total, *others = [*([] if gradient is None else [gradient]), *self.unreduced.pop(i).take(self.leaf)]
        for each in others:
            total = each.add_(total)
        return total

    def include_shards(self, indices: Iterable[int]) -> Mapping[int, Sequence[Tensor]]:
        """Takes the shards of the parameters `indices` that replicas have not summed: parameter index -> those that
        there are, in the order in which they are to be added.
        """
        taken = {i: self.reduced_in_shard.pop(i).take(self.leaf) for i in indices if i in self.reduced_in_shard}
        self.included.update(taken)
        return taken

    def forget(self, i: int) -> None:
        """Drops what parameter i has."""
        self.unreduced.pop(i, None)
        self.reduced_in_shard.pop(i, None)

    def clear(self) -> None:
        """Drops all gradients."""
        self.unreduced.clear()
        self.reduced_in_shard.clear()
