"""The ranks that save and load together, and how they agree: over a gloo process group of their own.

The group is theirs alone, so that a thread may use it while training communicates over others. A save needs two rounds
of it: each rank sends eight numbers to the first one, which answers with one. Whatever raises on one rank is raised on
all of them.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
_MOST_NUMBERS = 7
# The classes of errors that are raised on other ranks, too; any other becomes a RuntimeError there.
_ERRORS = (FileNotFoundError, FileExistsError, OSError, NotImplementedError, ValueError, TypeError, ImportError)


class Team:
    """Ranks that save and load together. Every one of them must make it, and call each of its methods.

    Args:
        group: their process group. None: all ranks; or this process alone, without torch.distributed.

    Attributes:
        index: the number of this rank among the `size` ranks.
        rank: its global rank.
        run_id: a text that no other team has, equal on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group: Any = None
        self.rank, self.members = 0, [0]
        if dist.is_initialized():
            self.rank, self.members = dist.get_rank(), dist.get_process_group_ranks(group)
        self.size, self.index = len(self.members), self.members.index(self.rank)
        if self.size > 1:
            # Without local synchronization, ranks outside would have to call it, too.
            self._group = dist.new_group(self.members, backend="gloo", use_local_synchronization=group is not None)
        self.run_id = self.broadcast(secrets.token_hex(8).encode(), 0).decode()

    @property
    def is_first(self) -> bool:
        """True on the rank that commits."""
        return self.index == 0

    def decide(
        self,
        failed: Exception | None,
        numbers: Sequence[int],
        choose: Callable[[list[list[int]]], int],
        undo: Callable[[], object] = lambda: None,
    ) -> int:
        """Returns what `choose` returns on the first rank. What any rank has met is raised on all of them.

        Args:
            failed: what this rank has met before.
            numbers: up to seven integers of 64 bits.
            choose: is called on the first rank with the numbers of all ranks in their order, unless one has failed.
                It returns no negative number.
            undo: is called on each rank before it raises what ranks have agreed on; not if a rank is gone, because
                then the first one may have chosen.
        """
        own = torch.tensor([failed is not None, *numbers, *[0] * (_MOST_NUMBERS - len(numbers))], dtype=torch.int64)
        rows = [torch.empty_like(own) for _ in self.members] if self.is_first else []
        if self._group is None:
            rows = [own]
        else:
            dist.gather(own, rows or None, group=self._group, group_dst=0)
        found: int | None = None
        if self.is_first and not any(row[0] for row in rows):
            found, failed = attempt(lambda: choose([row[1:].tolist() for row in rows]))
        answer = torch.tensor(-1 if found is None else found)
        if self._group is not None:
            dist.broadcast(answer, group=self._group, group_src=0)
        if answer < 0:
            undo()
            every = self.gather(None if failed is None else portable(failed))
            if failed is not None:
                raise failed
            rank, (kind, text) = next((rank, each) for rank, each in zip(self.members, every, strict=True) if each)
            raise kind(f"rank {rank}: {text}")
        return int(answer)

    def broadcast(self, data: bytes, source: int) -> bytes:
        """Returns `data` of the rank with that index."""
        sent = [data]
        if self._group is not None:
            dist.broadcast_object_list(sent, group=self._group, group_src=source)
        return sent[0]

    def gather(self, value: Any) -> list[Any]:
        """Returns a small value of each rank, in their order."""
        found = [value] * self.size
        if self._group is not None:
            dist.all_gather_object(found, value, group=self._group)
        return found

    def run(self, function: Callable[[], T], failed: Exception | None = None) -> T:
        """Returns `function()`, which must not communicate. What it raises on any rank is raised on all of them.

        Args:
            function: is not called on a rank that has failed before.
            failed: what this rank has met before.
        """
        value, failed = (None, failed) if failed is not None else attempt(function)
        self.decide(failed, (), lambda rows: 0)
        return value  # type: ignore[return-value]


def attempt(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Returns what a function returns, and None; or None, and what it raises."""
    try:
        return function(), None
    except Exception as error:
        return None, error


def require_same(function: str, of_ranks: Sequence[Mapping[str, Any]]) -> None:
    """Compares arguments of a function. `of_ranks`: the arguments on each rank, in the order of ranks.

    Raises:
        ValueError: one of them differs.
    """
    first, *others = of_ranks
    for index, other in enumerate(others, 1):
        for name in (name for name in first if first[name] != other[name]):
            got = f"{first[name]!r} on rank 0 and {other[name]!r} on rank {index}"
            raise ValueError(f"{function}: {name}: expected the same on all ranks, got {got}")


def portable(error: BaseException) -> tuple[type[Exception], str]:
    """Returns a class and a text for an error, from which it can be made on another rank."""
    return next((kind for kind in _ERRORS if isinstance(error, kind)), RuntimeError), str(error)


def digest_of(data: bytes) -> int:
    """Returns 63 bits of a hash, and never 0."""
    return int.from_bytes(hashlib.sha256(data).digest()[:8], "little") >> 1 | 1
