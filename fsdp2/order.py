"""In which order groups run, and which to gather next. Pure: items are opaque, sizes are ints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Cursor(Generic[Item]):
    """Walks along a recorded order, and says what is expected next.

    Where the run departs from the record, the cursor goes on to the next place that agrees with it; something that
    isn't in the record at all leaves it where it was, since what was expected is likely to follow.
    """

    def __init__(self, recorded: Sequence[Item]) -> None:
        self._recorded = recorded
        self._position = 0

    def visit(self, item: Item) -> bool:
        """`item` runs now. Return whether that was in the record, here or further on."""
        for position in range(self._position, len(self._recorded)):
            if self._recorded[position] is item:
                self._position = position + 1
                return True
        return False

    @property
    def num_left(self) -> int:
        """How many items follow the one visited last."""
        return len(self._recorded) - self._position

    def ahead(self) -> Iterator[Item]:
        """What the record says will run after the item visited last, in order."""
        for position in range(self._position, len(self._recorded)):
            yield self._recorded[position]


def within_budget(
    items: Iterable[Item], size: Callable[[Item], int], budget: int, at_least_one: bool = True
) -> Iterator[Item]:
    """As many of `items`, in order, as sum to at most `budget`; `at_least_one`: the first whatever its size.

    What has no size is passed over.
    """
    spent = 0
    for item in items:
        cost = size(item)
        if cost == 0:
            continue
        if (spent or not at_least_one) and spent + cost > budget:
            return
        spent += cost
        yield item
