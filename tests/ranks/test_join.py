"""Tests `fsdp2.join` and torch's `Join([model])`: ranks with different numbers of batches train as on all of them.

The oracle is the plain model on the batches of all ranks that have one, step by step, in fp64.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, replicate
from helpers import RankError, assert_same, full, run_checks, run_ranks
from models import OddMLP, TinyModel, mean_loss

EXACT = {"rtol": 1e-12, "atol": 1e-13}
Counts = Sequence[int]
"""How many batches each rank has."""


def batch_of(model: TinyModel, rank: int, i: int) -> Tensor:
    batch = model.example(rows=1 + (rank + i) % 3, seed=1000 * rank + i)
    return batch.double() if batch.is_floating_point() else batch


def build(make: Callable[[], TinyModel] = OddMLP) -> Any:
    torch.manual_seed(1)
    return make().double()


def shard(model: Any, apply: Any = fully_shard, **options: Any) -> Any:
    for block in getattr(model, "blocks", [*model.children()][:2]):
        apply(block, **options)
    return apply(model, **options)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def plain_epoch(
    model: Any, optimizer: Any, counts: Counts, by_present: bool = False, max_norm: float | None = None
) -> None:
    """Trains on all batches. Step i has those of the ranks that have so many."""
    for i in range(max(counts)):
        present = [rank for rank, count in enumerate(counts) if i < count]
        divisor = len(present) if by_present else len(counts)
        sum(mean_loss(model(batch_of(model, rank, i))) for rank in present).div(divisor).backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()


def compare(model: nn.Module, plain: nn.Module, **tolerance: float) -> None:
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_same(param, expected, **(tolerance or EXACT), name=name)
        assert_same(param.grad, expected.grad, **(tolerance or EXACT), name=f"gradient of {name}")


def compare_states(optimizer: Any, plain: Any) -> None:
    ours, theirs = ([*each.state.values()] for each in (optimizer, plain))
    assert len(ours) == len(theirs)
    for own, expected in zip(ours, theirs, strict=True):
        for name, value in expected.items():
            assert_same(full(own[name]), value, **EXACT, name=name)


def counts_for(num_ranks: int) -> list[Counts]:
    """Returns numbers of batches: one rank runs out first, or has none; all end at once; each at another time."""
    ranks = range(num_ranks)
    drawn = [[3 - (rank == 0) for rank in ranks], [2 * (rank != num_ranks - 1) for rank in ranks]]
    return [*drawn, [2] * num_ranks, [(rank * 2) % 5 for rank in ranks], [0] * num_ranks]


def train_joined(
    counts: Counts, joins: Callable[..., Any], by_present: bool = False, make: Any = OddMLP, **options: Any
) -> None:
    """Two epochs of `for ...: backward(); step(); zero_grad()`, the second one with other numbers; then a step of all."""
    plain, rank = build(make), dist.get_rank()
    model = shard(copy.deepcopy(plain), **options)
    optimizer, expected = adamw(model), adamw(plain)
    for of_ranks in (counts, counts[::-1]):
        plain_epoch(plain, expected, of_ranks, by_present)
        with joins(model, optimizer, divide_by_initial_world_size=not by_present):
            for i in range(of_ranks[rank]):
                mean_loss(model(batch_of(plain, rank, i))).backward()
                optimizer.step()
                optimizer.zero_grad()
        compare(model, plain)
    if max(counts):
        compare_states(optimizer, expected)
    plain_epoch(plain, expected, [1] * len(counts))
    mean_loss(model(batch_of(plain, rank, 0))).backward()
    optimizer.step()
    optimizer.zero_grad()
    compare(model, plain)


def ours(model: Any, optimizer: Any, **options: Any) -> Any:
    return fsdp2.join(model, optimizer=optimizer, **options)


def torchs(model: Any, optimizer: Any, **options: Any) -> Any:
    return Join([model], optimizer=optimizer, **options)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_each_batch_counts_once(num_ranks: int) -> None:
    """With both contexts, both divisors, and all numbers of batches, 0 included."""
    checks = [
        (f"{joins.__name__} {counts} {by_present}", partial(train_joined, counts, joins, by_present))
        for joins in (ours, torchs)
        for counts in counts_for(num_ranks)
        for by_present in (False, True)
    ]
    run_checks(num_ranks, checks)
