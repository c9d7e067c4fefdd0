"""Tests a hook of a module that reads the module's weight in backward, after all gradients of its group.

The oracle trains a plain model on each rank's rows, and averages the gradients: such a hook may add values that do not
scale with the number of rows.
"""

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_full_backward_hook
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2.engine.state import groups_of
from helpers import assert_same, full, run_checks, run_ranks, world_sizes
from models import TanhBlock

WIDTH, ROWS = 6, 4


class Net(nn.Module):
    def __init__(self, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(TanhBlock(WIDTH, 9) for _ in range(2))
        self.is_checkpointed = is_checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return x


def add_of(module: nn.Module, name: str, gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    weight = module.get_parameter(name)
    return (gradients[0] + 0.01 * weight.detach().sum(), *gradients[1:])


def on_blocks(model: Any) -> None:
    for block in model.blocks:
        block.register_full_backward_hook(lambda module, gi, go: add_of(module, "down.weight", gi))


def on_what_is_inside(model: Any) -> None:
    """Its first module is the last of the group in backward."""
    for block in model.blocks:
        block.up.register_full_backward_hook(lambda module, gi, go: add_of(module, "weight", gi))


def on_outputs(model: Any) -> None:
    for block in model.blocks:
        block.register_full_backward_pre_hook(lambda module, go: add_of(module, "up.weight", go))


def on_all_modules(model: Any) -> None:
    """Of the process: registered once, for both sides."""
    del model

    def hook(module: nn.Module, gi: Any, go: Any) -> Any:
        return add_of(module, "down.weight", gi) if isinstance(module, TanhBlock) else None

    if not getattr(on_all_modules, "is_done", False):
        register_module_full_backward_hook(hook)
        on_all_modules.is_done = True  # type: ignore[attr-defined]


def late(model: Any) -> None:
    """When backward passes have found already that no hook is there."""
    model.register_after = on_blocks


def train(model: Any, rank: int, world_size: int, steps: int = 4) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    is_plain = not isinstance(model, fsdp2.FSDPModule)
    for step in range(steps):
        if step == 2 and hasattr(model, "register_after"):
            model.register_after(model)
        x = torch.randn(ROWS * world_size, WIDTH, generator=torch.Generator().manual_seed(step)).double()
        for part in x.chunk(world_size) if is_plain else [x.chunk(world_size)[rank]]:
            model(part).square().mean().backward()
        for parameter in model.parameters() if is_plain else ():
            parameter.grad /= world_size
        optimizer.step()
        optimizer.zero_grad()


HOOKS = (on_blocks, on_what_is_inside, on_outputs, late, on_all_modules)


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("world_size", world_sizes(2, nightly=(1, 3)))
def test_a_backward_hook_reads_the_unsharded_weight(world_size: int, is_checkpointed: bool) -> None:
    def body(rank: int, world_size: int) -> None:
        warnings.simplefilter("ignore")  # torch's own, of hooks in modules whose inputs need no gradient
        for register in HOOKS:
            for options in ({}, {"reshard_after_forward": False}):
                torch.manual_seed(0)
                model: Any = Net(is_checkpointed).double()
                plain = copy.deepcopy(model)
                register(model), register(plain)
                for block in model.blocks:
                    fsdp2.fully_shard(block, **options)
                fsdp2.fully_shard(model, **options)
                train(model, rank, world_size)
                train(plain, rank, world_size)
                for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
                    assert_same(full(mine), theirs.detach(), 1e-9, 1e-10, f"{register.__name__} {options}: {name}")

    run_ranks(world_size, body)


def test_groups_without_such_hooks_are_freed_with_their_last_gradient() -> None:
    """A hook of one block keeps that block only."""

    def check(register: Callable[[Any], object], expected: list[bool]) -> None:
        model: Any = Net().double()
        register(model)
        for block in model.blocks:
            fsdp2.fully_shard(block)
        fsdp2.fully_shard(model)
        found = []
        for _ in range(2):  # from the second on, counting gradients is known to be enough
            model(torch.ones(1, WIDTH).double()).sum().backward()
            found = [groups_of(block)[0].last_gradient_reshards for block in model.blocks]
        assert found == expected

    run_checks(
        2,
        [
            ("none", partial(check, lambda model: None, [True, True])),
            ("one", partial(check, lambda model: model.blocks[0].register_full_backward_hook(_nothing), [False, True])),
        ],
    )


def _nothing(*_: Any) -> None:
    pass
