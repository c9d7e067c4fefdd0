"""Tests what groups of the sizes of eight models gather under a budget, beside an exhaustive search."""

import pytest

from benchmarks.unsharded_budget import MODELS, WIDTH, count, least
from helpers import fake_world

MICRO_BATCHES = 2


@pytest.mark.parametrize("name", MODELS)
def test_the_budget_is_used_and_never_exceeded(name: str) -> None:
    """The least bytes are exceeded by two fifths of a model at most, of four that two micro-batches take."""
    widths = [max(1, number // 65536 // (2 * WIDTH)) for number in MODELS[name]]
    with fake_world(8):
        usual, sizes = count(widths, None, MICRO_BATCHES)
        for share in (0.25, 0.5, 0.75, 1.0):
            budget = int(sum(sizes) * share)
            meter, _ = count(widths, budget, MICRO_BATCHES)
            best = least(sizes, budget, MICRO_BATCHES, lambda nbytes: nbytes)
            if best is not None:
                assert best <= meter.nbytes <= best + 0.4 * sum(sizes)
            assert meter.peak <= budget
            assert meter.nbytes < usual.nbytes
        assert len(meter.gathers) == len(sizes)
