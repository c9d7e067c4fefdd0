"""Tests that pruning and parametrizing sharded parameters is refused by name, and that the advice works."""

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
    "random": lambda model: prune.random_unstructured(model.head, name="weight", amount=0.3),
    "rows": lambda model: prune.ln_structured(model.head, "weight", 0.4, 2, 0),
    "mask": lambda model: prune.custom_from_mask(model.head, "weight", torch.ones(5, 5)),
    "of several": lambda model: prune.global_unstructured(
        [(model.head, "weight"), (model.stem, "weight")], prune.L1Unstructured, amount=0.3
    ),
    "registered": lambda model: parametrizations.orthogonal(model.head),
}


def each_names_the_parameter() -> None:
    model = Net()
    for module in (*model.blocks, model):
        fully_shard(module)
    for change in CHANGES.values():
        with pytest.raises(RuntimeError, match=r"^head\.weight: .*before fully_shard"):
            change(model)
    assert [name for name, _ in model.head.named_parameters()] == ["weight", "bias"]


def parametrizations_stay() -> None:
    """Whether the module itself is sharded, or one around it; and inside full_params."""
    for own in (False, True):
        model = parametrized()
        for module in (model.head, model) if own else (model,):
            fully_shard(module)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"weight\.original0: remove_parametrizations .*full state dict"):
                parametrize.remove_parametrizations(model.head, "weight")
        with full_params(model), pytest.raises(RuntimeError, match="remove_parametrizations"):
            parametrize.remove_parametrizations(model.head, "weight")


def plain_modules_are_left_alone() -> None:
    model = parametrized()
    fully_shard(model.blocks[0])
    prune.l1_unstructured(model.stem, "weight", 0.3)
    parametrize.remove_parametrizations(model.head, "weight")
    assert not parametrize.is_parametrized(model.head)


CHECKS = (each_names_the_parameter, parametrizations_stay, plain_modules_are_left_alone)


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
