"""Tests which group is expected next, in a run that follows the recorded order and in one that departs from it."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from fsdp2.engine.policy import KeepUntil, Phase
from fsdp2.engine.schedule import MAX_KEPT_BYTES, Cursor, Prefetcher, within_budget

A, B, C, D, NEW = (object() for _ in range(5))


@pytest.mark.parametrize(
    ("recorded", "visited", "found", "ahead"),
    [
        ([], [], [], []),
        ([], [A], [False], []),
        ([A, B, C], [], [], [A, B, C]),
        ([A, B, C], [A], [True], [B, C]),
        ([A, B, C], [A, B, C], [True] * 3, []),
        # A module that runs several times.
        ([A, B, A, C], [A, B], [True] * 2, [A, C]),
        ([A, B, A, C], [A, B, A], [True] * 3, [C]),
        ([A, A, B], [A], [True], [A, B]),
        # One is skipped, or several.
        ([A, B, C, D], [A, C], [True] * 2, [D]),
        ([A, B, C, D], [D], [True], []),
        # The record agrees again after a stranger.
        ([A, B, C], [A, NEW, B], [True, False, True], [C]),
        # After a stranger, what was expected still is.
        ([A, B, C], [A, NEW], [True, False], [B, C]),
        ([A, B], [A, B, A], [True, True, False], []),
        ([A, B, C], [B, A], [True, False], [C]),
    ],
)
def test_cursor(recorded: list[object], visited: list[object], found: list[bool], ahead: list[object]) -> None:
    """A wrong guess gathers a group in vain, and holds its memory until the pass ends."""
    cursor = Cursor(recorded)
    left = [cursor.visit(item) for item in visited]
    assert [each is not None for each in left] == found
    assert not found or not found[-1] or left[-1] == len(ahead)
    assert list(cursor.ahead()) == ahead
    assert list(cursor.ahead()) == ahead, "looking ahead must not advance"


def test_cursor_compares_by_identity() -> None:
    """Items are opaque: equal ones (two empty lists, say) are still two."""
    first, second = [], []
    cursor = Cursor([first, second])
    cursor.visit(second)
    assert list(cursor.ahead()) == []


@pytest.mark.parametrize(
    ("sizes", "budget", "expected"),
    [
        ([3, 3, 3], 6, [3, 3]),
        ([3, 3, 3], 5, [3]),
        ([], 5, []),
        # The first comes whatever it costs, else nothing large would ever be gathered ahead.
        ([3, 1], 2, [3]),
        ([3, 3], 0, [3]),
        # What is there already costs nothing, and is not the first.
        ([0, 2, 0, 1], 2, [2]),
        ([0, 9, 1], 2, [9]),
        ([0, 0], 5, []),
        # The order is kept: no small item overtakes a large one.
        ([2, 9, 1], 5, [2]),
    ],
)
def test_within_budget(sizes: list[int], budget: int, expected: list[int]) -> None:
    assert list(within_budget(iter(sizes), lambda size: size, budget)) == expected


@pytest.mark.parametrize(
    ("sizes", "budget", "expected"),
    [([3, 3], 5, [3]), ([3, 1], 2, []), ([0, 2, 1], 3, [2, 1]), ([2, 9, 1], 5, [2]), ([1], 0, [])],
)
def test_within_a_strict_budget(sizes: list[int], budget: int, expected: list[int]) -> None:
    assert list(within_budget(iter(sizes), lambda size: size, budget, at_least_one=False)) == expected


def test_within_budget_asks_for_sizes_one_by_one() -> None:
    """What is gathered for one item changes what the next would cost."""
    asked: list[int] = []

    def items() -> Iterator[int]:
        yield from (1, 2, 3)

    def size(item: int) -> int:
        asked.append(item)
        return item

    generator = within_budget(items(), size, 10)
    assert next(generator) == 1
    assert asked == [1]


class Group:
    """A group that is unsharded already."""

    keep_until, phase = KeepUntil.END_OF_USE, Phase.UNSHARDED
    root: Any = None

    def __init__(self, settings: Any, nbytes: int) -> None:
        self.settings, self.unsharded = settings, SimpleNamespace(nbytes=nbytes)


@pytest.mark.parametrize(
    ("shares", "num_kept"),
    [
        ([0.1, 0.1, 0.1], 2),
        ([0.1, 0.1, 0.1, None], 2),  # the last one runs twice, as the modules of one call do
        ([0.1, 0.5, 0.5], 2),
        ([0.1, 0.6, 0.6], 1),
        ([2.0, 2.0, 2.0], 1),  # the last one alone may have more
        ([0.1, 0.1, 0.95], 1),
    ],
)
def test_the_last_groups_stay_if_they_are_not_too_large(shares: list[float | None], num_kept: int) -> None:
    """Of the default budget; sizes are shares of what they may have together. None: the group before runs again."""
    settings = SimpleNamespace(forward_prefetch=None, backward_prefetch=None, unshard_in_backward=True)
    groups = [Group(settings, int(share * MAX_KEPT_BYTES)) for share in shares if share]
    prefetcher = Prefetcher(groups)
    for group in groups:
        group.root = SimpleNamespace(prefetcher=prefetcher)
    for _ in range(2):
        prefetcher.begin_pass(0)
        for group in groups + groups[-1:] * shares.count(None):
            assert not [*prefetcher.in_forward(group)]
    assert prefetcher.first_in_backward == {*groups[-num_kept:]}
