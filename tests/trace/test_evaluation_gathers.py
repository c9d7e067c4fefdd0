"""Tests how often each group is gathered in forwards without grad. The fault in question: a gather of data that is
unsharded already.

A model generates text in as many forwards as there are tokens: a gather of each group in each of them costs more than
all else. examples/guides/generation.md has these counts.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from recorder import record
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import fsdp2
from helpers import fake_world

WIDTH, BLOCKS, TOKENS = 8, 3, 5
GROUPS = BLOCKS + 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


@contextmanager
def counted(**options: Any) -> Iterator[tuple[Any, Callable[[], int]]]:
    """A sharded model, and how many gathers there were since the last call."""
    with fake_world(4):
        model: Any = Net()
        for block in model.blocks:
            fsdp2.fully_shard(block, **options)
        fsdp2.fully_shard(model, **options)
        lines = record(model)

        def gathers() -> int:
            count = sum(line.startswith("gather") for line in lines)
            lines.clear()
            return count

        yield model, gathers


def generate(model: nn.Module, tokens: int = TOKENS, mode: Any = torch.no_grad) -> None:
    with mode():
        x = torch.ones(2, WIDTH)
        for _ in range(tokens):
            x = model(x)


def sharded_modules(model: Any) -> list[Any]:
    return [*model.blocks, model]


def train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_without_a_setting_each_forward_gathers_each_group() -> None:
    with counted() as (model, gathers):
        generate(model)
        assert gathers() == TOKENS * GROUPS


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_groups_that_stay_unsharded_are_gathered_once(mode: Any) -> None:
    with counted(reshard_after_forward=False) as (model, gathers):
        generate(model, mode=mode)
        assert gathers() == GROUPS
        generate(model, mode=mode)
        assert gathers() == 0


@pytest.mark.parametrize("choice", [None, True])
def test_groups_unsharded_by_hand_are_not_gathered_again(choice: bool | None) -> None:
    """It stays through forwards of other lengths, until `reshard` frees it."""
    with counted(reshard_after_forward=choice) as (model, gathers):
        for module in sharded_modules(model):
            module.unshard()
        assert gathers() == GROUPS
        generate(model)
        generate(model, tokens=2)
        assert gathers() == 0
        assert not any(isinstance(p, DTensor) for p in model.parameters()), "registered, for whoever reads them"
        for module in sharded_modules(model):
            module.reshard()
        assert all(isinstance(p, DTensor) for p in model.parameters())
        generate(model, tokens=1)
        assert gathers() == GROUPS


def test_full_params_gathers_once_for_all_forwards_inside() -> None:
    with counted() as (model, gathers):
        with fsdp2.full_params(model):
            generate(model)
        assert gathers() == GROUPS


def by_a_step(model: Any) -> None:
    train(model)


def in_place(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def by_loading(model: Any) -> None:
    model.load_state_dict(model.state_dict())


def by_replacing(model: Any) -> None:
    for module in sharded_modules(model):
        for name, parameter in [*module.named_parameters(recurse=False)]:
            setattr(module, name, nn.Parameter(parameter.detach().clone()))
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


@pytest.mark.parametrize("change", [by_a_step, in_place, by_loading, by_replacing])
def test_after_a_weight_has_changed_each_group_is_gathered_once_more(change: Callable[[Any], None]) -> None:
    with counted(reshard_after_forward=False) as (model, gathers):
        generate(model)
        change(model)
        gathers()
        generate(model)
        # A parameter that was replaced is noticed when its group runs: what was gathered ahead then is gathered again.
        assert gathers() == (GROUPS + BLOCKS if change is by_replacing else GROUPS)
        generate(model)
        assert gathers() == 0


def test_only_the_group_whose_weight_has_changed_is_gathered_again() -> None:
    with counted(reshard_after_forward=False) as (model, gathers):
        generate(model)
        gathers()
        with torch.no_grad():
            model.blocks[1].weight.add_(1)
        generate(model)
        assert gathers() == 1


def test_pinned_groups_stay_pinned_when_a_weight_changes() -> None:
    with counted() as (model, gathers):
        weights = [*model.parameters()]
        for module in sharded_modules(model):
            module.unshard()
        gathers()
        with torch.no_grad():
            weights[0].add_(1)
        generate(model)
        assert gathers() == 1


def test_a_pass_with_grad_ends_the_effect_of_unshard() -> None:
    with counted(reshard_after_forward=True) as (model, gathers):
        for module in sharded_modules(model):
            module.unshard()
        model(torch.ones(2, WIDTH)).sum().backward()
        gathers()
        generate(model, tokens=2)
        assert gathers() == 2 * GROUPS


def test_a_group_gathered_ahead_does_not_stay_unsharded() -> None:
    """`unshard(async_op=True)` that a forward finishes: a user's own prefetching, in evaluation, too."""
    with counted(reshard_after_forward=True) as (model, gathers):
        for _ in range(2):
            for module in sharded_modules(model):
                module.unshard(async_op=True)
            generate(model, tokens=1)
            assert gathers() == GROUPS


def test_after_a_forward_that_raises_nothing_stays_unsharded() -> None:
    """It may have written to what it has gathered."""
    with counted(reshard_after_forward=False) as (model, gathers):
        generate(model)

        def fail(*_: Any) -> None:
            raise KeyError

        handle = model.head.register_forward_hook(fail)
        with pytest.raises(KeyError):
            generate(model)
        handle.remove()
        gathers()
        generate(model)
        assert gathers() == 1  # that of the root, whose head has failed


def test_evaluation_between_steps_costs_training_no_gather() -> None:
    with counted(reshard_after_forward=False) as (model, gathers):
        train(model)
        gathers()
        train(model)
        of_a_step = gathers()
        generate(model)
        gathers()
        train(model)
        assert gathers() <= of_a_step
        train(model)
        assert gathers() == of_a_step
