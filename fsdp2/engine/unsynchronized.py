"""Keeps the gradients of a group that a backward pass has left to a later one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

import torch
from torch import Tensor

from ..torch_private import internals


@final
class UnsynchronizedGradients:
    """The gradients of one group that a later backward pass is to reduce, and which of them the running pass includes.

    GroupGradients keeps gradients here and includes them in its reductions. Placeholders, and features that count or
    drop such gradients, read the attributes and call `forget` and `clear`. It is true if there are any.
    """

    def __init__(self) -> None:
        self.unreduced: dict[int, Tensor] = {}
        """Parameter index -> unsharded gradient, in the reduce dtype, which no rank has sent yet."""
        self.reduced_in_shard: dict[int, Tensor] = {}
        """Parameter index -> flat padded shard, in the reduce dtype, which replicas have not summed yet. If R replicas
        share one set of shards, [R, shard_numel]: one for each of them."""
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

    def keep(self, i: int, gradient: Tensor, dtype: torch.dtype) -> None:
        """Keeps an unsharded gradient of parameter i, in `dtype`. Later ones are added to its memory."""
        self.may_be_sums = True
        self.unreduced[i] = internals.owned(gradient.to(dtype))

    def keep_shard(self, i: int, shard: Tensor) -> None:
        """Keeps the shard of parameter i that this rank has got, until replicas sum it; adds it to an earlier one."""
        earlier = self.reduced_in_shard.get(i)
        self.reduced_in_shard[i] = shard if earlier is None else earlier + shard

    def include(self, i: int, gradient: Tensor | None) -> Tensor:
        """Takes the unreduced gradient of parameter i, and returns it with `gradient` added."""
        self.included.add(i)
        earlier = self.unreduced.pop(i)
        return earlier if gradient is None else earlier.add_(gradient)

    def include_shards(self, indices: Iterable[int]) -> dict[int, Tensor]:
        """Takes the shards of the parameters `indices` that replicas have not summed: those that there are."""
        taken = {i: self.reduced_in_shard.pop(i) for i in indices if i in self.reduced_in_shard}
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
