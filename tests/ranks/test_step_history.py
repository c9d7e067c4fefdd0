"""Tests that ranks detect different optimizer steps, and that equal steps are no error."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from fsdp2 import flatten_optimizer, fully_shard
from fsdp2.engine.state import require_state
from fsdp2.ranks.compare_ranks import bounds_over
from helpers import run_ranks

DIFFERENT = "each rank's part is of another model now"


def build() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    fully_shard(model[0])
    return fully_shard(model)


def train(model: nn.Module, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(2, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def forwards_until_raised(model: nn.Module, optimizer: Any, most: int) -> int:
    for i in range(most):
        try:
            train(model, optimizer, 1)
        except RuntimeError as error:
            if DIFFERENT not in str(error):
                raise
            return i + 1
    return 0


def test_an_additional_step_is_found_at_the_next_check() -> None:
    """In the 1st, 2nd, 4th, ... forward."""

    def body(rank: int, size: int) -> tuple[int, int]:
        model = build()
        optimizer = SGD(model.parameters(), 0.1)
        train(model, optimizer, 10)
        model(torch.ones(2, 3)).square().mean().backward()
        for _ in range(1 + (rank == 1)):
            optimizer.step()
        return forwards_until_raised(model, optimizer, 40), forwards_until_raised(model, optimizer, 40)

    assert run_ranks(2, body) == [(5, 0)] * 2, "in the 16th, once"


def error_of_training(model: nn.Module, step: Callable[[int], None]) -> str:
    for number in range(1, 40):
        try:
            model(torch.ones(2, 3)).square().mean().backward()
        except RuntimeError as error:
            return str(error)
        step(number)
        model.zero_grad()
    return "nothing"


def test_the_error_says_which_optimizer_has_stepped_how_often_on_which_ranks_and_since_when() -> None:
    """Ranks compare in the 2nd, 4th, 8th, 16th forward."""

    def body(rank: int, size: int) -> list[str]:
        model = build()
        whole, frozen = Adam(model.parameters()), SGD(model[0].parameters(), 0.1)

        def skip(number: int) -> None:
            if number < 6 or rank == 0:
                whole.step()

        def step_alone(number: int) -> None:
            whole.step()
            if rank == 1 and number in (5, 7):
                frozen.step()

        def other_rate(number: int) -> None:
            whole.param_groups[0]["lr"] = 0.1 if number == 6 and rank == 2 else 0.001
            whole.step()

        found = [error_of_training(model, step) for step in (skip,)]
        model = build()
        whole, frozen = Adam(model.parameters()), SGD(model[0].parameters(), 0.1)
        found.append(error_of_training(model, step_alone))
        model = build()
        whole = Adam(model.parameters())
        found.append(error_of_training(model, other_rate))
        return found

    for skipped, alone, rate in run_ranks(3, body):
        assert skipped.startswith(
            "Adam of 0.weight, 0.bias, 1.weight and 1 more: this optimizer has stepped 4 times on rank 0 and 2 times "
            "on ranks 1, 2, since ranks compared steps after backward pass 3 of the model; the first difference is "
            "behind backward pass 6 (1 time on rank 0 and 0 times on ranks 1, 2), so each rank's part"
        ), skipped
        assert alone.startswith(
            "SGD of 0.weight, 0.bias: this optimizer has stepped 0 times on ranks 0, 2 and 2 times on rank 1, since "
            "ranks compared steps after backward pass 3 of the model; the first difference is behind backward pass 5 ("
        ), alone
        assert rate.startswith("Adam of 0.weight, 0.bias, 1.weight and 1 more: some settings were others in a step"), (
            rate
        )
        assert DIFFERENT in rate


def test_training_goes_on_from_a_checkpoint_of_before() -> None:
    """What the error says: ranks decide alike, and load a checkpoint of before."""

    def body(rank: int, size: int) -> None:
        plain, model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)), build()
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        optimizer = SGD(model.parameters(), 0.1)
        train(model, optimizer, 2)
        state, of_optimizer = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        model(torch.ones(2, 3)).square().mean().backward()
        if rank == 0:
            optimizer.step()
        optimizer.zero_grad()
        assert forwards_until_raised(model, optimizer, 20)
        model.load_state_dict(state)
        optimizer.load_state_dict(of_optimizer)
        train(model, optimizer, 20)
        train(plain, SGD(plain.parameters(), 0.1), 22)
        for got, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(got.full_tensor(), expected)

    run_ranks(2, body)


def test_a_rank_may_read_the_states_of_a_flat_optimizer_alone() -> None:
    def body(rank: int, size: int) -> None:
        model = build()
        optimizer: Any = flatten_optimizer(SGD(model.parameters(), 0.1, momentum=0.9))
        for _ in range(9):
            train(model, optimizer, 1)
            if rank == 1:
                assert len(optimizer.state) == 4

    run_ranks(2, body)


def test_a_scheduler_that_follows_the_loss_of_all_ranks() -> None:
    """What the error says: all-reduce what the choice of settings depends on."""

    def body(rank: int, size: int) -> list[int]:
        found = []
        for averages in (False, True):
            model = build()
            optimizer = SGD(model.parameters(), 0.1)
            scheduler = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)

            def step(
                number: int, averages: bool = averages, optimizer: Any = optimizer, scheduler: Any = scheduler
            ) -> None:
                loss = torch.tensor(100.0 - number * rank)
                if averages:
                    torch.distributed.all_reduce(loss)
                scheduler.step(loss)
                optimizer.step()

            text = error_of_training(model, step)
            assert text == "nothing" or "lr of parameter group 0 is" in text, text
            found.append(text == "nothing")
        return found

    assert run_ranks(2, body) == [[False, True]] * 2


def test_two_optimizers_of_equal_settings_are_told_apart() -> None:
    def body(rank: int, size: int) -> str:
        model = build()
        first, second = (SGD(layer.parameters(), 0.1) for layer in model)
        return error_of_training(model, lambda number: (first if number < 3 or rank == 0 else second).step())

    for text in run_ranks(2, body):
        assert re.match(
            "SGD of 0.weight, 0.bias: this optimizer has stepped 2 times on rank 0 and 1 time on rank 1", text
        )


def other_betas(optimizer: Optimizer) -> None:
    optimizer.param_groups[1]["betas"] = (0.8, 0.999)


def other_rate(optimizer: Optimizer) -> None:
    optimizer.param_groups[1]["lr"] = torch.tensor(0.2)


def rate_in_place(optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["lr"].fill_(0.2)


def beta_in_place(optimizer: Optimizer) -> None:
    optimizer.param_groups[1]["betas"][0] = 0.8


@pytest.mark.parametrize("change", [other_betas, other_rate, rate_in_place, beta_in_place])
def test_settings_of_one_rank_alone(change: Callable[[Optimizer], None]) -> None:
    def body(rank: int, size: int) -> int:
        model = build()
        groups = [{"params": [*layer.parameters()], "name": f"layer {i}"} for i, layer in enumerate(model)]
        groups[0]["lr"], groups[1]["betas"] = torch.tensor(0.1), [0.9, 0.999]
        optimizer = Adam(groups, lr=0.1, foreach=False)
        train(model, optimizer, 3)
        if rank == 1:
            change(optimizer)
        return forwards_until_raised(model, optimizer, 9)

    assert run_ranks(2, body) == [5, 5], "in the 8th; the 4th comes before the step"


class PerParameter:
    """An optimizer for each parameter of which this rank has rows, stepped as its gradient comes."""

    def __init__(self, model: nn.Module) -> None:
        self.steps = 0
        for parameter in model.parameters():
            if parameter.to_local().numel():
                parameter.register_post_accumulate_grad_hook(self.stepping(SGD([parameter], 0.1)))

    def stepping(self, optimizer: SGD) -> Callable[[Any], None]:
        def step(_: Any) -> None:
            self.steps += 1
            optimizer.step()
            optimizer.zero_grad()

        return step

    def step(self) -> None:
        pass

    zero_grad = step


def test_no_error_where_ranks_step_on_different_parameters() -> None:
    def body(rank: int, size: int) -> int:
        model = build()
        optimizer = PerParameter(model)
        train(model, optimizer, 9)
        return optimizer.steps

    assert len(set(run_ranks(3, body))) > 1, "the second layer has two rows"


def test_no_error_where_each_has_tensors_and_names_of_its_own() -> None:
    """What is no number is not compared."""

    def body(rank: int, size: int) -> None:
        model = build()
        optimizer = SGD(model.parameters(), 0.1)
        optimizer.param_groups[0].update(owner=f"rank {rank}", seen=torch.full((2,), float(rank)), nothing=None)
        train(model, optimizer, 9)

    run_ranks(3, body)


@pytest.mark.parametrize("own", ["sizes", "numbers", "none on one rank", "first"])
def test_no_error_where_ranks_step_on_other_plain_tensors_besides(own: str) -> None:
    """Experts that each rank has for itself, say."""

    def body(rank: int, size: int) -> int:
        model = build()
        sizes = {"sizes": [2 + rank], "numbers": [2] * (1 + rank), "none on one rank": [3] * rank, "first": [rank]}[own]
        tensors = [torch.zeros(each, requires_grad=True) for each in sizes]
        for tensor in tensors:
            tensor.grad = torch.ones_like(tensor)
        params = [*tensors, *model.parameters()] if own == "first" else [*model.parameters(), *tensors]
        optimizer = SGD(params, 0.1)
        train(model, optimizer, 9)
        step = optimizer.step if rank else lambda: None
        text = error_of_training(model, lambda _: step())
        assert text.startswith("SGD of 0.weight, 0.bias, 1.weight and 1 more: this optimizer has stepped "), text
        return 0

    run_ranks(3, body)


def test_divisors_are_compared_where_collectives_say_nothing() -> None:
    """On NCCL, say: there ranks look in the 2nd forward."""

    def body(rank: int, size: int) -> str:
        model = build()
        optimizer = SGD(model.parameters(), 0.1)
        model(torch.ones(2, 3))
        model.set_gradient_divide_factor(2.0 + rank)
        with pytest.raises(RuntimeError) as caught:
            train(model, optimizer, 1)
        return str(caught.value)

    for text in run_ranks(2, body):
        assert "Call set_gradient_divide_factor on all ranks, with the same factor" in text


def test_each_compared_number_has_a_fixed_index() -> None:
    """The kind: numbers that are on the host of one rank, and on the device of another, where a parameter was loaded on
    one rank only, or is there on one only. And any order and number of them.
    """

    def body(rank: int, _: int) -> None:
        mesh = require_state(build()).groups[0].mesh
        given = [
            [1, torch.tensor(5), 7, torch.tensor(-4)],
            [torch.tensor(3), 2, torch.tensor(7), -9],
            [2, 2, 7, 1 << 40],
        ]
        assert bounds_over(mesh, given[rank], "numbers") == [(1, 3), (2, 5), (7, 7), (-9, 1 << 40)]

    run_ranks(3, body)
