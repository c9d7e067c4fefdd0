"""Tests how what is brought, sent or read at once is cut: weights that are streamed, states that rest, files."""

import pytest

from fsdp2.shards.runs import in_runs


@pytest.mark.parametrize(
    ("sizes", "runs"),
    [
        ([], []),
        ([3], [[0]]),
        ([4, 6, 1], [[0, 1], [2]]),  # exactly as many as there is room for
        ([4, 7], [[0], [1]]),
        ([2, 30, 2, 8, 1], [[0], [1], [2, 3], [4]]),  # what is larger is alone
        ([0, 0, 10, 0], [[0, 1, 2, 3]]),
    ],
    ids=str,
)
def test_neighbours_are_together_while_there_is_room(sizes: list[int], runs: list[list[int]]) -> None:
    assert in_runs(enumerate(sizes), 10) == runs
