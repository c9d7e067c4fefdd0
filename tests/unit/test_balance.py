"""Tests `fsdp2.balance`: each sequence is dealt once, ranks have about as much to do, and errors."""

import itertools
import random
from typing import Any

import pytest

import fsdp2


def sums(costs: list[float], dealt: list[list[list[int]]]) -> list[list[float]]:
    """The cost of each micro-batch of each rank."""
    return [[sum(costs[i] for i in batch) for batch in own] for own in dealt]


def lognormal(seed: int, number: int) -> list[float]:
    source = random.Random(seed)
    return [min(8192, max(8, int(300 * source.lognormvariate(0, 1)))) for _ in range(number)]


@pytest.mark.parametrize("seed", range(20))
def test_each_sequence_is_dealt_once(seed: int) -> None:
    source = random.Random(seed)
    ranks, batches = source.randint(1, 5), source.choice((None, 1, 2, 4))
    costs = [float(source.choice((0, 1, 5, 5, 100))) for _ in range(ranks * (batches or 1) + source.randint(0, 9))]
    dealt = fsdp2.balance(costs, ranks, num_batches=batches)
    assert sorted(i for own in dealt for batch in own for i in batch) == [*range(len(costs))]
    assert len(dealt) == ranks
    for own in dealt:
        assert own
        assert all(own)
        assert len(own) == (batches or len(own))
        if batches is None:
            assert all(len(batch) == 1 for batch in own)
    assert dealt == fsdp2.balance(costs, ranks, num_batches=batches)


@pytest.mark.parametrize("seed", range(10))
def test_sums_are_as_good_as_the_greedy_bound(seed: int) -> None:
    """Graham's bound for the costliest first: 4/3 - 1/(3 m) of the best of all dealings, which are tried here."""
    costs, ranks = lognormal(seed, 7), 2 + seed % 2
    dealt = fsdp2.balance(costs, ranks)
    best = min(
        max(sum(cost for cost, rank in zip(costs, choice, strict=True) if rank == each) for each in range(ranks))
        for choice in itertools.product(range(ranks), repeat=len(costs))
    )
    assert max(map(sum, sums(costs, dealt))) <= best * (4 / 3 - 1 / (3 * ranks)) + 1e-9


@pytest.mark.parametrize("seed", range(10))
def test_micro_batches_that_meet_are_alike(seed: int) -> None:
    """What ranks wait for each other in all is less than the largest difference of two micro-batches."""
    costs = lognormal(seed, 40)
    batches = [*zip(*sums(costs, fsdp2.balance(costs, 4, num_batches=5)), strict=True)]
    waits = sum(max(batch) - min(batch) for batch in batches)
    assert waits <= max(map(max, batches)) - min(map(min, batches))
    assert [max(batch) for batch in batches] == sorted((max(batch) for batch in batches), reverse=True)


def test_what_a_step_of_two_ranks_gains() -> None:
    """By the lengths alone, over 200 steps of 8 micro-batches: the benchmark measures it with ranks that sleep."""
    as_drawn = together = once = 0.0
    for seed in range(200):
        costs = lognormal(seed, 16)
        as_drawn += sum(map(max, zip(costs[:8], costs[8:], strict=True)))
        meeting = sums(costs, fsdp2.balance(costs, 2, num_batches=8))
        together += sum(map(max, zip(*meeting, strict=True)))
        once += max(map(sum, sums(costs, fsdp2.balance(costs, 2))))
    assert as_drawn / together > 1.25
    assert as_drawn / once > 1.45


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "match"),
    [
        (([1.0], 2), {}, ValueError, "at least 2 sequences"),
        (([1.0] * 5, 2), {"num_batches": 3}, ValueError, "at least 6 sequences"),
        (([1.0, -1.0], 1), {}, ValueError, "not negative, got -1.0"),
        (([1.0, float("nan")], 1), {}, ValueError, "finite"),
        (([1.0], 0), {}, ValueError, "num_ranks: expected at least 1"),
        (([1.0], 1), {"num_batches": 0}, ValueError, "num_batches: expected at least 1"),
        (([1.0], 1.0), {}, TypeError, "num_ranks: expected an int"),
        (([1.0], 1), {"num_batches": True}, TypeError, "num_batches: expected an int"),
    ],
)
def test_errors(arguments: Any, options: Any, kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=match):
        fsdp2.balance(*arguments, **options)
