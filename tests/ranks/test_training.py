"""Tests that sharded training computes, bit by bit, what plain training computes: see training.py.

Each test is one draw, and its name lists what was drawn, so that it can be run alone:

    python -m pytest "tests/ranks/test_training.py::test_training[2, OddMLP, leaves, bf16, rows, ...]"

Draws that are to run on as many ranks share launches.
"""

from typing import Any

import pytest

from training import CHOSEN, Draw, differing, launches, sampled


class Found:
    """Trains draws when the first of their launch is asked for, and holds what differs."""

    def __init__(self, draws: list[Draw]) -> None:
        self._launches = {draw: launch for launch in launches(draws) for draw in launch}
        self._found: dict[Draw, list[str]] = {}

    def __getitem__(self, draw: Draw) -> list[str]:
        if draw not in self._found:
            self._found |= differing(self._launches[draw])
        return self._found[draw]


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> Found:
    """Returns the differences of each draw that this run of pytest has selected."""
    items: Any = [item for item in request.session.items if item.path == request.path]
    return Found([item.callspec.params["draw"] for item in items if hasattr(item, "callspec")])


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:torch")
@pytest.mark.parametrize("draw", sorted({*sampled(), *CHOSEN}, key=lambda draw: (draw.ranks, str(draw))), ids=str)
def test_training(draw: Draw, found: Found) -> None:
    """A lost, doubled, unscaled or stale number, a cast too many, too early or too late, a row at another rank."""
    assert not found[draw], "\n".join(found[draw])


# ---- single draws ----------------------------------------------------------------------------------------------------


def test_shards_that_are_stepped_on_are_not_gathered_ahead() -> None:
    """Lists for `set_modules_to_backward_prefetch` may name modules whose gradients have been reduced."""
    names = ("OddMLP", "children", "fp64", "rows", "by default", "staged", "packed", "sgd")
    for ranks in ("1", "2"):
        draw = Draw(ranks, *names, "prefetch everything", "optimizer in backward")
        assert not differing([draw])[draw]


def test_shards_are_not_stepped_on_while_a_copy_reads_them() -> None:
    """The gradient of a bias comes before backward needs a weight of its group, which is being gathered ahead."""
    names = ("Odd", "pairs", "bf16 wire, fp32 vectors", "rows", "kept", "staged", "direct", "adamw")
    draw = Draw("2x2 across", *names, "prefetch everything", "optimizer in backward")
    assert not differing([draw])[draw]


def test_conditional_modules_that_ranks_reach_in_other_orders() -> None:
    """A step comes when all ranks have reduced; a list inside such a module may name what only others wait for."""
    common = ("whole", "fp64", "rows", "by default", "on the device", "packed", "sgd")
    for draw in (
        Draw("2x1", "Mixture", *common, "nothing", "optimizer in backward"),
        Draw("2", "Nested", *common, "prefetch everything", "gradients add up"),
    ):
        assert not differing([draw])[draw]
