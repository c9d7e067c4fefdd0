"""Tests which groups stay unsharded under a budget (`set_unsharded_budget`), for steps of several micro-batches.

benchmarks/tests/test_unsharded_budget.py compares groups of unequal sizes with an exhaustive search.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp2 import MixedPrecisionPolicy, fully_shard
from fsdp2.engine.state import groups_of
from helpers import fake_world
from unsharded_meter import Meter

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WIDTH = 4
BLOCKS = 6


def make(**options: Any) -> tuple[Any, int, Meter]:
    """Returns a sharded model, the bytes of a block, and a meter of it."""
    model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)) for _ in range(BLOCKS)))
    for block in model:
        fully_shard(block, mp_policy=BF16, **options)
    fully_shard(model, mp_policy=BF16)
    meter = Meter()
    groups_of(model)[0].root.add(meter)
    return model, groups_of(model[0])[0].nbytes, meter


def step(model: nn.Module, micro_batches: int, train: bool = True) -> None:
    for _ in range(micro_batches):
        with torch.set_grad_enabled(train):
            output: Tensor = model(torch.ones(2, WIDTH))
        if train:
            output.float().sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            if train and parameter.requires_grad:
                parameter.add_(0)


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_equal_blocks_are_gathered_as_rarely_as_can_be(micro_batches: int) -> None:
    """Where a pass turns, the block that ran last is there, and as many as the budget holds; behind a step none is."""
    with fake_world(4):
        for budget in range(1, BLOCKS + 2):
            model, nbytes, meter = make()
            model.set_unsharded_budget(budget * nbytes)
            step(model, micro_batches)
            meter.clear()
            step(model, micro_batches)
            turns = 2 * micro_batches - 1
            assert len(meter.gathers) == (turns + 1) * BLOCKS - turns * min(BLOCKS, budget + 1)
            assert meter.peak <= budget * nbytes


def test_the_first_forward_of_a_step_gathers_ahead() -> None:
    """Also if the groups that stay take the whole budget."""
    with fake_world(4):
        for budget in range(1, BLOCKS + 2):
            model, nbytes, meter = make()
            model.set_unsharded_budget(budget * nbytes)
            for _ in range(2):
                step(model, 3)
            meter.clear()
            model(torch.ones(2, WIDTH))
            assert meter.num_ahead == len(meter.gathers) == BLOCKS
            assert meter.peak <= budget * nbytes


def test_a_step_of_one_backward_keeps_nothing_for_the_next() -> None:
    """Its weights change: they would take memory while the optimizer steps."""
    with fake_world(4):
        model, nbytes, _ = make()
        model.set_unsharded_budget(2 * BLOCKS * nbytes)
        kept = []
        for micro_batches in (1, 1, 3, 3, 1, 1):
            step(model, micro_batches)
            there = [groups_of(block)[0].unsharded.is_allocated for block in model]
            assert all(there) or not any(there)
            kept.append(there[0])
    assert kept == [False, False, True, False, True, False], "a step is expected to have as many as the last one"


def test_the_pass_that_reduces_accumulated_gradients_is_the_last_one() -> None:
    """However many passes the last step had."""
    with fake_world(4):
        model, nbytes, _ = make()
        model.set_unsharded_budget(2 * BLOCKS * nbytes)
        for micro_batches in (3, 2, 4):
            for i in range(micro_batches):
                model.set_requires_gradient_sync(i == micro_batches - 1)
                model(torch.ones(2, WIDTH)).float().sum().backward()
                there = [groups_of(block)[0].unsharded.is_allocated for block in model]
                assert there == [0 < i < micro_batches - 1] * BLOCKS or (i == 0 and len(set(there)) == 1)
            step(model, 0)


def test_frozen_groups_stay_over_steps() -> None:
    with fake_world(4):
        model, nbytes, meter = make()
        model[1].requires_grad_(False)
        model[2].requires_grad_(False)
        model.set_unsharded_budget(3 * nbytes)
        for _ in range(3):
            meter.gathers.clear()
            step(model, 1)
        gathered = {group.modules[0] for group in meter.gathers}
        assert gathered == {model[0], model[3], model[4], model[5]}


def test_evaluation_gathers_once() -> None:
    with fake_world(4):
        model, nbytes, meter = make(reshard_after_forward=True)
        step(model, 1)
        model.set_unsharded_budget(2 * BLOCKS * nbytes)
        step(model, 2, train=False)
        meter.gathers.clear()
        step(model, 3, train=False)
        assert not meter.gathers


def test_a_smaller_budget_frees_what_was_kept() -> None:
    with fake_world(4):
        model, nbytes, meter = make()
        model.set_unsharded_budget(2 * BLOCKS * nbytes)
        step(model, 3)
        model.set_unsharded_budget(2 * nbytes)
        meter.peak = 0
        step(model, 3)
        assert meter.peak <= 2 * nbytes
        model.set_unsharded_budget(None)
        meter.gathers.clear()
        step(model, 3)
        assert len(meter.gathers) == 3 * (2 * BLOCKS - 2)
