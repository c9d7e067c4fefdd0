"""Tests changes of the parameters of sharded modules inside a forward, or between a forward and its backward.

The modules may run later, and be gathered already, or have run before.
"""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp2 import FSDPModule
from helpers import world_sizes
from matrix import TOPOLOGIES, Matrix, MatrixRun
from scenarios import WIDTH, Block, Run, check, loss_of, whole

matrix = Matrix()

Change = Callable[[nn.Linear], object]


class Tower(nn.Module):
    """Changes one of its linears before the block that holds it runs, twice before the last one does."""

    def __init__(self, change: Change, depth: int = 4) -> None:
        super().__init__()
        self.change = change
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        last = len(self.blocks) - 1
        for i, block in enumerate(self.blocks):
            if i == 0:
                self.change(self.blocks[last].up)
            if i in (1, last):
                self.change(self.blocks[i].up)
            x = block(x)
        return x


def in_place(change: Callable[[Tensor], object]) -> Change:
    def changing(linear: nn.Linear) -> None:
        with torch.no_grad():
            change(linear.weight)

    return changing


def copied(linear: nn.Linear) -> None:
    with torch.no_grad():
        linear.bias.copy_(linear.bias * 0.5 + 0.1)


def replaced(linear: nn.Linear) -> None:
    linear.weight = nn.Parameter(linear.weight.detach() * 0.9)


def local_replaced(linear: nn.Linear) -> None:
    weight = linear.weight
    if hasattr(weight, "_local_tensor"):
        weight._local_tensor = weight._local_tensor * 0.9
    else:
        with torch.no_grad():
            weight.mul_(0.9)


class KeptData:
    """Goes on writing to what it got once."""

    def __init__(self) -> None:
        self.data: dict[nn.Linear, Tensor] = {}

    def __call__(self, linear: nn.Linear) -> None:
        if linear not in self.data:
            self.data[linear] = linear.weight.data
        self.data[linear].mul_(0.9)


def data_assigned(linear: nn.Linear) -> None:
    linear.weight.data = linear.weight.data * 0.9


def frozen_and_thawed(linear: nn.Linear) -> None:
    linear.weight.requires_grad_(not linear.weight.requires_grad)


CHANGES: dict[str, Change] = {
    "mul_": in_place(lambda weight: weight.mul_(0.9)),
    "mul_ of the local tensor": in_place(lambda weight: getattr(weight, "_local_tensor", weight).mul_(0.9)),
    "mul_ of .data": lambda linear: linear.weight.data.mul_(0.9),
    "mul_ of what .data was": KeptData(),
    ".data assigned": data_assigned,
    "norm": in_place(lambda weight: weight.div_(weight.norm())),
    "copy_": copied,
    "replaced": replaced,
    "local tensor replaced": local_replaced,
    "frozen and thawed": frozen_and_thawed,
}


def blocks(run: Run, model: nn.Module, **options: Any) -> None:
    for block in model.blocks:  # type: ignore[union-attr]
        run.shard(block, **options)
    run.shard(model, **options)


def settle(model: nn.Module, stays: bool) -> None:
    """Whether full parameters stay for the passes that follow."""
    if isinstance(model, FSDPModule):
        model.set_reshard_after_backward(not stays)


@pytest.mark.skipif(
    bool(os.environ.get("FSDP2_HOSTILE")),
    reason="the program itself writes to what is being gathered, which a hostile scheduler objects to; nobody reads it",
)
@pytest.mark.parametrize("world_size", world_sizes(2, nightly=[1]))
def test_a_later_module_computes_with_the_parameters_it_has_when_it_runs(world_size: int) -> None:
    """From the second pass on its parameters may have been gathered before the change."""

    def scenario(run: Run, change: str, stays: bool) -> None:
        model = run.build(Tower, CHANGES[change])
        blocks(run, model)
        settle(model, stays)
        for step in range(3):
            loss_of(model(run.batch(seed=step))).backward()
            run.grads(f"trained {step}", model)
            model.zero_grad()
            with torch.no_grad():
                run.rows(f"evaluated {step}", model(run.batch(seed=step + 10)))
        run.params("last", model)

    check(scenario, world_size, change=tuple(CHANGES), stays=(False, True))


class Twice(nn.Module):
    """Its block runs with a weight that is changed before it runs again, and no gradient needs the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        first = self.block(x).detach()
        with torch.no_grad():
            self.block.weight.mul_(0.5)
        return self.head(first + self.block(x))


@pytest.mark.parametrize("reshard_after_forward", [None, False, 2], ids=str)
def test_a_module_that_runs_twice_computes_with_the_parameters_it_has_each_time(reshard_after_forward: Any) -> None:
    """Also where full parameters, or a part of them, are left behind by the first run. Of four ranks 2 restore."""

    def scenario(run: Run) -> None:
        model = run.build(Twice)
        run.shard(model.block, reshard_after_forward=reshard_after_forward)
        run.shard(model)
        for step in range(2):
            loss_of(model(run.batch(seed=step, rows=8))).backward()
            run.grads(f"trained {step}", model)
            model.zero_grad()

    check(scenario, world_size=4)


@matrix.over()
def a_parameter_replaced_before_backward_stays(run: MatrixRun) -> None:
    """Backward computes with what forward has used, as in plain training, and registers that meanwhile."""
    model = run.build(Tower, lambda linear: None)
    blocks(run, model)
    for step in range(2):
        loss = loss_of(model(run.batch(seed=step)))
        before = model.blocks[1].up.weight
        after = nn.Parameter(before.detach() * 0.9)
        model.blocks[1].up.weight = after
        loss.backward()
        run.value(f"registered {step}", model.blocks[1].up.weight is after)
        run.value(f"gradients {step}", (before.grad is None, after.grad is None))
        run.grads(f"trained {step}", model)
        model.zero_grad()
    run.params("last", model)


@matrix.over(wrap=(blocks, whole))
def backward_refuses_parameters_replaced_in_another_forward(run: MatrixRun, wrap: Any) -> None:
    """Plain training computes with the old ones; here nobody has them any more. The next step is exact."""
    model = run.build(Tower, lambda linear: None)
    wrap(run, model)
    for step in range(2):
        loss = loss_of(model(run.batch(seed=step)))
        up = model.blocks[1].up
        before, up.weight = up.weight, nn.Parameter(up.weight.detach() * 0.9)
        with torch.no_grad():
            run.rows(f"evaluated {step}", model(run.batch(seed=step + 10)))
        if step == 0:
            up.weight = before
        if run.sharded:
            with pytest.raises(RuntimeError, match=r"needed for the gradient was modified .* or replaced"):
                loss.backward()
        model.zero_grad()
        loss_of(model(run.batch(seed=step))).backward()
        run.grads(f"trained {step}", model)
        model.zero_grad()
        run.params(f"in the end {step}", model)


@matrix.over(wrap=(blocks, whole))
def writes_through_data_before_backward(run: MatrixRun, wrap: Any) -> None:
    """Backward refuses it, by name, for a weight that it needs; a bias it does not."""
    model = run.build(Tower, lambda linear: None)
    wrap(run, model)
    up = model.blocks[1].up
    loss = loss_of(model(run.batch(seed=1)))
    up.bias.data.mul_(0.9)
    loss.backward()
    run.grads("bias", model)
    model.zero_grad()
    older = up.weight.data
    loss = loss_of(model(run.batch(seed=2)))
    up.weight.data.norm()
    older.mul_(0.9)
    if run.sharded:
        with pytest.raises(RuntimeError, match=r"^blocks\.1\.up\.weight of shape .* was modified .* Change"):
            loss.backward()
    model.zero_grad()
    loss_of(model(run.batch(seed=3))).backward()
    run.grads("the next step", model)


class WritesBetween(nn.Module):
    """Runs its first linear twice, and may write to its weight in between: others run meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = False
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        first, second, last = self.layers
        x = second(first(x))
        if self.writes:
            in_place(lambda weight: weight.mul_(2))(first)
        return first(last(x))


def written_between_two_uses_in_a_pass(run: Run, k: int | None) -> None:
    """What is kept of a group until backward, or is gathered ahead of the second use, is as old as the first use."""
    model: Any = run.build(WritesBetween)
    for layer in model.layers:
        run.shard(layer, reshard_after_forward=k)
    run.shard(model, reshard_after_forward=k)
    for step in range(4):
        model.writes = step >= 2  # the order of gathers is known by then
        run.rows(f"output {step}", model(run.batch(seed=step, rows=8)))


def test_secondary_shards_are_not_those_of_another_weight() -> None:
    check(written_between_two_uses_in_a_pass, world_size=4, k=(2, None))


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_scenarios_match_the_plain_model(topology: str) -> None:
    matrix.check_on(topology)
