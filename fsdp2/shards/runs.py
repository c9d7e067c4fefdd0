"""Cuts a sequence into runs of neighbours that have so many bytes together: what is brought, sent or read at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

Item = TypeVar("Item")


def in_runs(sized: Iterable[tuple[Item, int]], most_nbytes: int) -> list[list[Item]]:
    """Returns runs of neighbours, in order, that have `most_nbytes` together at most; or one item that has more itself.

    `sized`: pairs of an item and its bytes.
    """
    runs: list[list[Item]] = []
    used = 0
    for item, nbytes in sized:
        if not runs or used + nbytes > most_nbytes:
            runs.append([])
            used = 0
        runs[-1].append(item)
        used += nbytes
    return runs
