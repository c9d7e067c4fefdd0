"""What backward passes without synchronisation have left for a later one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from .param import FSDPParam
from .unsynced_grad import UnsyncedGrad, put_stand_in, take_stand_in


class WaitingGradients:
    """Of one group, by the places of its parameters. While they wait, stand-ins in `.grad` show them to the user.

    `full`: full gradients; `partial`: flat padded shards that were not summed between replicas. Both are in the reduce
    dtype.
    """

    def __init__(self, params: Sequence[FSDPParam]) -> None:
        self._params = params
        self.full: dict[int, Tensor] = {}
        self.partial: dict[int, Tensor] = {}
        # Which have a stand-in; and which the backward pass that runs has taken along.
        self._marked: set[int] = set()
        self._taken: set[int] = set()

    def are_wanted(self) -> bool:
        """Between backward passes: whether the user has left some of them."""
        return any(isinstance(self._params[i].sharded.grad, UnsyncedGrad) for i in self._marked)

    def keep_partial(self, i: int, shard: Tensor) -> None:
        self.partial[i] = self.partial[i] + shard if i in self.partial else shard

    def take_full(self, i: int) -> Tensor:
        """To be reduced, or accumulated, with what the backward pass that runs has computed."""
        self._taken.add(i)
        return self.full.pop(i)

    def take_partial(self, indices: Iterable[int]) -> dict[int, Tensor]:
        """The same, of those that are there."""
        if not self.partial:
            return {}
        taken = {i: self.partial.pop(i) for i in indices if i in self.partial}
        self._taken.update(taken)
        return taken

    def mark(self) -> None:
        """A backward pass is over: put a stand-in into `.grad` of each parameter whose gradient waits."""
        self._taken.clear()
        for i in {*self.full, *self.partial}:
            if i in self._marked and not isinstance(self._params[i].sharded.grad, UnsyncedGrad):
                self._forget(i)  # the user has cleared it since
            else:
                self._mark(i)

    def _mark(self, i: int, is_lost: bool = False) -> None:
        self._marked.add(i)
        put_stand_in(self._params[i], UnsyncedGrad, is_lost)

    def unmark(self) -> None:
        """A backward pass begins: drop what the user has cleared or replaced since the last.

        Raises:
            RuntimeError: some was lost in a backward pass that failed, and not cleared since.
        """
        for param in (self._params[i] for i in self._marked):
            if isinstance(param.sharded.grad, UnsyncedGrad) and param.sharded.grad.is_lost:
                raise RuntimeError(
                    f"{param.name}: gradients that waited to be synchronised were lost in a backward pass that failed. "
                    "Call zero_grad, and repeat the accumulation."
                )
        for i in {*self.full, *self.partial}:
            if not take_stand_in(self._params[i]) and i in self._marked:
                self._forget(i)
        self._marked.clear()

    def lose_taken(self) -> None:
        """The backward pass that runs has failed: what it has taken along is lost, which stand-ins say."""
        for i in self._taken:
            self._forget(i)
            self._mark(i, is_lost=True)

    def drop(self) -> None:
        """Drop everything that waits, and what stands for it."""
        for i in {*self.full, *self.partial, *self._marked}:
            take_stand_in(self._params[i])
        self._marked.clear()
        self.full.clear()
        self.partial.clear()

    def _forget(self, i: int) -> None:
        self.full.pop(i, None)
        self.partial.pop(i, None)
