"""Tests that pruning and parametrizing sharded parameters ends with an error that says what to do, and that it works.

Some of it fails at once, the rest in the next forward, which lacks the parameter.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from fsdp2 import full_params, fully_shard
from helpers import run_checks
from scenarios import Net, Run, check, loss_of, sgd


def parametrized() -> Any:
    model = Net()
    parametrizations.weight_norm(model.head)
    return model


CHANGES: dict[str, Callable[[Any], Any]] = {
    "least": lambda model: prune.l1_unstructured(model.head, "weight", 0.3),
    "rows": lambda model: prune.ln_structured(model.head, "weight", 0.4, 2, 0),
    "mask": lambda model: prune.custom_from_mask(model.head, "weight", torch.ones(5, 5)),
    "of several": lambda model: prune.global_unstructured(
        [(model.head, "weight"), (model.stem, "weight")], prune.L1Unstructured, amount=0.3
    ),
    "random": lambda model: prune.random_unstructured(model.head, name="weight", amount=0.3),
}
# Each leaves a model that can't run.
LATER: dict[str, Callable[[Any], Any]] = {
    "nothing pruned": lambda model: prune.identity(model.head, "weight"),
    "norm": lambda model: parametrizations.weight_norm(model.head),
    "registered": lambda model: parametrize.register_parametrization(model.head, "weight", nn.Tanh()),
}


def sharded() -> Any:
    model = Net()
    for module in (*model.blocks, model):
        fully_shard(module)
    return model


def each_says_what_to_do() -> None:
    for change in CHANGES.values():
        with pytest.raises(RuntimeError, match=r"Prune before fully_shard, or inside"):
            change(sharded())
    for change in LATER.values():
        model = sharded()
        change(model)
        with pytest.raises(ValueError, match=r"head\.weight.* before fully_shard"):
            model(torch.ones(2, 5))


def parametrizations_stay() -> None:
    """Whether the module itself is sharded, or one around it."""
    for own in (False, True):
        for stays in (True, False):
            model = Net()
            parametrize.register_parametrization(model.head, "weight", nn.Tanh())
            for module in (model.head, model) if own else (model,):
                fully_shard(module)

            def remove(model: Any = model, stays: bool = stays) -> None:
                parametrize.remove_parametrizations(model.head, "weight", leave_parametrized=stays)
                model(torch.ones(2, 5))

            says = r"before fully_shard|full_params|no attribute 'weight'"
            with pytest.raises((RuntimeError, ValueError, AttributeError), match=says):
                remove()  # the latter is torch's own error, about the class of a sharded module


def plain_modules_are_left_alone() -> None:
    model = parametrized()
    fully_shard(model.blocks[0])
    prune.l1_unstructured(model.stem, "weight", 0.3)
    parametrize.remove_parametrizations(model.head, "weight")
    assert not parametrize.is_parametrized(model.head)


CHECKS = (each_says_what_to_do, parametrizations_stay, plain_modules_are_left_alone)


def test_changes_of_sharded_parameters() -> None:
    run_checks(2, [(each.__name__, each) for each in CHECKS])


def test_pruning_inside_full_params() -> None:
    """Made permanent there, it is that of whole weights."""

    def scenario(run: Run) -> None:
        model = run.build(Net)
        run.shard(model)
        optimizer = sgd(model)
        for step in range(2):
            if run.sharded:
                with full_params(model, writeback=True):
                    prune_least(model.head)
            else:
                prune_least(model.head)
            run.step(f"{step}", model, optimizer, loss_of(model(run.batch(seed=step))))

    check(scenario)


def prune_least(module: nn.Module) -> None:
    prune.l1_unstructured(module, "weight", 0.3)
    prune.remove(module, "weight")
