"""Deals the sequences of one optimizer step to ranks, so that all have about as much to do (`balance`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any

from torch import Tensor


def balance(costs: Sequence[float], num_ranks: int, *, num_batches: int | None = None) -> list[list[list[int]]]:
    """Deals the sequences of one optimizer step to ranks, so that no rank waits long for another.

    It computes, and communicates nothing: call it with the same arguments on every rank, and take this rank's part.
    With `accumulate`, which weighs by tokens, gradients do not depend on who gets what, but for rounding.

    Args:
        costs: what each sequence costs: its number of tokens, or an estimate with the square of that for attention.
        num_ranks: how many ranks share them: those among which gradients are reduced.
        num_batches: each rank gets so many micro-batches, and micro-batch i of all ranks costs about the same: for
            ranks that meet in each micro-batch. None: each sequence is a micro-batch of its own, and ranks have
            different numbers of them, which cost about the same in all: for ranks that meet once a step
            (`accumulate(on_demand=True)`), which wait less.

    Returns:
        For each rank, for each of its micro-batches, the indices of its sequences. The costly ones come first, so that
        memory that is short is noticed at once.

    Raises:
        TypeError: `num_ranks` or `num_batches` is not an int.
        ValueError: one is less than 1, a cost is negative or not finite, or there are too few sequences for one in each
            micro-batch.

    Example:
        ```python
        parts = fsdp2.balance([len(tokens) for tokens in sequences], dist.get_world_size())
        for indices in parts[dist.get_rank()]:
            ...
        ```
    """
    given: Any = costs
    costs = given.tolist() if isinstance(given, Tensor) else given
    if not isinstance(costs, Sequence):
        raise TypeError(f"costs: expected a sequence of numbers, got {type(costs).__name__}")
    for name, value in (("num_ranks", num_ranks), ("num_batches", 1 if num_batches is None else num_batches)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name}: expected an int, got {value!r}")
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    each: list[Any] = [*costs]
    strange = [cost for cost in each if not isinstance(cost, Real | Tensor)]
    if strange:
        raise TypeError(f"costs: expected numbers, got {strange[0]!r}")
    bad = [cost for cost in costs if not 0 <= cost < math.inf]
    if bad:
        raise ValueError(f"costs: expected numbers that are finite and not negative, got {bad[0]!r}")
    needed = num_ranks * (num_batches or 1)
    if len(costs) < needed:
        raise ValueError(f"costs: expected at least {needed} sequences, one for each micro-batch, got {len(costs)}")
    if num_batches is None:
        return [[[i] for i in of_rank] for of_rank in _deal(costs, num_ranks)]
    batches = _deal(costs, needed)
    batches.sort(key=lambda batch: -sum(costs[i] for i in batch))
    return [batches[rank::num_ranks] for rank in range(num_ranks)]


def _deal(costs: Sequence[float], number: int) -> list[list[int]]:
    """Returns `number` lists of indices, none of them empty: the costliest first, each to the list that costs least."""
    lists: list[list[int]] = [[] for _ in range(number)]
    sums = [0.0] * number
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        least = min(range(number), key=lambda n: (bool(lists[n]), sums[n]))
        lists[least].append(i)
        sums[least] += costs[i]
    return lists
