"""Tests what one stage of a pipeline gathers, launches and keeps, in the order in which 1F1B runs micro-batches.

tests/ranks/test_pipelining.py compares numbers of torch's own schedules with a plain model.
"""

import copy
from collections import deque
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import pipelining

from fsdp2 import fully_shard
from fsdp2.engine import placeholders
from fsdp2.engine.state import groups_below
from helpers import fake_world
from unsharded_meter import Meter

WIDTH, BLOCKS = 4, 6
# The first of four stages: three forwards warm up, and three backwards end the step.
ORDER = "FFFFBFBFBFBBBB"


def make(**options: Any) -> tuple[Any, Meter]:
    model: Any = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)) for _ in range(BLOCKS)))
    for block in model:
        fully_shard(block, **options)
    fully_shard(model, **options)
    meter = Meter()
    groups_below(model)[0].root.add(meter)
    return model, meter


def run_stage(model: Any, order: str = ORDER, is_split: bool = False) -> None:
    """Calls `model` as torch's schedules do: they keep gradients unsynchronized, and reduce them behind all passes.
    `is_split`: a backward for the input comes before that for the weights, as in zero-bubble schedules.
    """
    waiting = deque[tuple[Tensor, Tensor]]()
    for action in order:
        if action == "F":
            batch = torch.ones(2, WIDTH, requires_grad=is_split)
            waiting.append((batch, model(batch)))
        else:
            set_last(model, False)
            batch, output = waiting.popleft()
            if is_split:
                torch.autograd.grad(output.sum(), batch, retain_graph=True)
            output.sum().backward()
    set_last(model, True)
    model._get_fsdp_state()._root_post_backward_final_callback()


def set_last(model: Any, is_last: bool) -> None:
    model.set_is_last_backward(is_last)
    model.set_reshard_after_backward(is_last)
    model.set_requires_gradient_sync(is_last)


def optimize(model: nn.Module) -> None:
    """Stands for an optimizer's step: weights change."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0)
            parameter.grad = None


def test_parameters_that_stay_after_forward_are_gathered_once_a_step() -> None:
    """Several forwards run before the first backward."""
    with fake_world(4):
        model, meter = make(reshard_after_forward=False)
        for _ in range(3):
            meter.clear()
            run_stage(model)
            optimize(model)
            assert len(meter.gathers) == BLOCKS


def write_unseen(model: nn.Module, plain: nn.Module) -> None:
    """Doubles the weights of both, in a way that no version counter of a parameter shows."""
    for parameter in model.parameters():
        parameter.to_local().data.mul_(2)
    for parameter in plain.parameters():
        parameter.data.mul_(2)


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}])
def test_a_forward_whose_graph_is_gone_leaves_nothing_for_the_next_one(options: dict[str, Any]) -> None:
    """As without these settings, an unseen write counts then, in the root and in its blocks."""
    with fake_world(1):
        plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        model = copy.deepcopy(plain)
        fully_shard(model[0], **options)
        fully_shard(model, **options)
        for _ in range(2):
            assert torch.equal(model(torch.ones(2, WIDTH)), plain(torch.ones(2, WIDTH)))
            write_unseen(model, plain)


def test_the_root_is_gathered_for_each_forward() -> None:
    """Also while the graph of one before may need its weights: the program has not asked that they stay."""
    with fake_world(1):
        plain = nn.Linear(WIDTH, WIDTH)
        model = fully_shard(copy.deepcopy(plain))
        before = model(torch.ones(2, WIDTH))
        write_unseen(model, plain)
        assert torch.equal(model(torch.ones(2, WIDTH)), plain(torch.ones(2, WIDTH)))
        assert before.requires_grad


def test_a_budget_keeps_groups_until_gradients_are_reduced() -> None:
    """They are stale after the optimizer's step, during which they would take memory."""
    with fake_world(4):
        model, meter = make()
        _, *groups = groups_below(model)
        model.set_unsharded_budget(BLOCKS * groups[0].nbytes)
        for is_first in (True, False):
            meter.clear()
            run_stage(model)
            assert not any(group.unsharded.is_allocated for group in groups)
            optimize(model)
            # The first forward of the first step does not know that others follow.
            assert len(meter.gathers) == (2 * BLOCKS if is_first else BLOCKS)


@pytest.mark.parametrize("order", [ORDER, "FBFFFBBB"])
@pytest.mark.parametrize("num_blocks", [1, 3])
@pytest.mark.parametrize("is_split", [False, True])
def test_a_budget_bounds_what_stays_between_micro_batches(is_split: bool, num_blocks: int, order: str) -> None:
    """Torch's schedules turn reshard_after_backward off for all groups."""
    with fake_world(4):
        model, meter = make()
        _, *groups = groups_below(model)
        model.set_unsharded_budget(num_blocks * groups[0].nbytes)
        for _ in range(3):
            run_stage(model, order, is_split)
            assert meter.peak <= num_blocks * groups[0].nbytes
            optimize(model)


def test_a_smaller_budget_bounds_what_a_larger_one_has_left() -> None:
    with fake_world(4):
        model, meter = make()
        _, *groups = groups_below(model)
        model.set_unsharded_budget(BLOCKS * groups[0].nbytes)
        run_stage(model)
        optimize(model)
        set_last(model, False)
        model(torch.ones(2, WIDTH)).sum().backward()
        assert sum(group.unsharded.is_allocated for group in groups) > 1
        model.set_unsharded_budget(groups[0].nbytes)
        meter.clear()
        model(torch.ones(2, WIDTH)).sum().backward()
        assert meter.peak <= groups[0].nbytes


def test_steps_that_accumulate_are_forgotten_by_those_that_do_not() -> None:
    """Each of the micro-batches that follow is reduced: all but the last leave the groups for the next one."""
    with fake_world(4):
        model, meter = make()
        _, *groups = groups_below(model)
        model.set_unsharded_budget(BLOCKS * groups[0].nbytes)
        run_stage(model)
        optimize(model)
        for _ in range(2):
            meter.clear()
            for _ in range(3):
                model(torch.ones(2, WIDTH)).sum().backward()
            optimize(model)
        assert len(meter.gathers) == BLOCKS


def test_unsynchronized_gradients_launch_no_fills() -> None:
    """There is a placeholder for each of them after each backward pass."""
    with fake_world(4):
        model, _ = make()
        run_stage(model)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            run_stage(model)
    counts = {each.key: each.count for each in profile.key_averages()}
    assert counts.get("aten::zero_", 0) == 0


def test_passes_for_single_weights_put_placeholders_once() -> None:
    """Zero-bubble schedules run a backward pass for each intermediate. Placeholders of all parameters in each of them
    took longer than all else.
    """
    with fake_world(4):
        model, _ = make(reshard_after_forward=False)
        root, num_params = groups_below(model)[0].root, len([*model.parameters()])
        set_last(model, False)
        backward: Any = pipelining.PipelineStage.backward_maybe_with_nosync
        for _ in range(2):  # of the first micro-batch, and of one that finds placeholders
            given = torch.ones(2, WIDTH, requires_grad=True)
            output = model(given)
            passed = {"stage_output": [output], "output_grads": [torch.ones_like(output)], "input_values": [given]}
            _, of_weights = backward(SimpleNamespace(submod=model), "input", passed)
            before = root.num_backwards
            with mock.patch.object(placeholders, "put_placeholder", wraps=placeholders.put_placeholder) as put:
                backward(SimpleNamespace(submod=model), "weight", {"param_groups": of_weights})
            assert root.num_backwards - before == 2 * BLOCKS, "a pass for each nn.Linear"
            assert put.call_count == num_params
            assert all(isinstance(each.grad, placeholders.UnsynchronizedGrad) for each in model.parameters())


def test_settings_that_a_schedule_sets_again_change_nothing() -> None:
    """It sets three for each micro-batch: groups whose settings have changed plan their buckets anew in backward."""
    with fake_world(4):
        model, _ = make()
        root = groups_below(model)[0].root
        run_stage(model, "FB")
        set_last(model, False)
        root.changed.clear()
        set_last(model, False)
        assert not root.changed
        set_last(model, True)
        assert root.changed == {*root.groups}
