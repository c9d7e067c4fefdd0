"""Tests that sharded training computes, bit by bit, what plain training computes: see training.py.

Each test is one draw, and its name lists what was drawn, so that it can be run alone:

    python -m pytest "tests/ranks/test_training.py::test_training[2, OddMLP, leaves, bf16, rows, ...]"

All draws that are to run on as many ranks are trained in one launch.
"""

from typing import Any

import pytest

from training import Draw, differing, of_each_number_of_ranks, sampled


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[Draw, list[str]]:
    """Returns the differences of each draw that this run of pytest has selected."""
    items: Any = [item for item in request.session.items if item.path == request.path]
    draws = [item.callspec.params["draw"] for item in items if hasattr(item, "callspec")]
    return {draw: texts for some in of_each_number_of_ranks(draws) for draw, texts in differing(some).items()}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:torch")
@pytest.mark.parametrize("draw", sampled(), ids=str)
def test_training(draw: Draw, found: dict[Draw, list[str]]) -> None:
    """A lost, doubled, unscaled or stale number, a cast too many, too early or too late, a row at another rank."""
    assert not found[draw], "\n".join(found[draw])


# ---- what is not exact yet -------------------------------------------------------------------------------------------


@pytest.mark.xfail(reason="what backward has left behind is gathered ahead again while its optimizer steps")
def test_shards_that_are_stepped_on_are_not_gathered_ahead() -> None:
    """Lists for `set_modules_to_backward_prefetch` may name modules whose gradients have been reduced."""
    names = ("1", "OddMLP", "children", "fp64", "rows", "by default", "staged", "packed", "sgd")
    draw = Draw(*names, "prefetch everything", "optimizer in backward")
    assert not differing([draw])[draw]
