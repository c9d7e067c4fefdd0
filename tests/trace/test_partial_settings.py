"""Tests that the first optimizer step refuses a setting that reaches only a part of a model, where it should reach all.

The fault in question: `set_gradient_divide_factor` on the root only, whose default is `recurse=False` like torch's,
scales gradients of the root's own group against those of its blocks, and training continues. Its variants are the
factor of one block; of a root without parameters; of one of several roots that one optimizer steps; of groups that two
optimizers share; a factor that is set, or a group that is unfrozen, after the first step; the optimizer in backward,
also on its own thread; a closure; and functions of the user on a module without parameters, which no group would
call.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import CPUOffloadPolicy, FSDPModule, fully_shard, replicate
from fsdp2.checks import partial_settings
from helpers import fake_world
from simulated_device import simulated_device

RANKS = 4


@pytest.fixture(autouse=True)
def _world() -> Iterator[None]:
    with fake_world(RANKS):
        yield


def make(root: Any = fully_shard, has_own: bool = True, **options: Any) -> Any:
    """Two blocks; the root has parameters of its own, or not, or is not sharded (None)."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4) if has_own else nn.Tanh())
    for block in model[:2]:
        fully_shard(block, **options)
    return model if root is None else root(model, **options)


def sgd(*models: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD([param for model in models for param in model.parameters()], lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    model(torch.ones(2, 4)).sum().backward()
    (optimizer or sgd(model)).step()


def refused(*words: str) -> Any:
    return pytest.raises(RuntimeError, match=".*".join((r"^SGD\.step: ", *words)))


HOW = r"model\.set_gradient_divide_factor\(factor, recurse=True\)"


def test_of_the_root_only() -> None:
    model = make()
    model.set_gradient_divide_factor(1)
    optimizer = sgd(model)
    before = [param.to_local().clone() for param in model.parameters()]
    for _ in range(2):  # whoever goes on meets it again
        with refused(r"root by 1, 0, 1 by 4", HOW):
            step(model, optimizer)
    assert all(map(torch.equal, before, (param.to_local() for param in model.parameters())))
    model.set_gradient_divide_factor(1.0, recurse=True)
    step(model, optimizer)


def test_of_one_block() -> None:
    model = make()
    model[1].set_gradient_divide_factor(2)
    with refused(r"root, 0 by 4, 1 by 2"):
        step(model)


def test_of_a_root_without_parameters() -> None:
    """It would divide nothing."""
    model = make(has_own=False)
    model.set_gradient_divide_factor(1)
    with refused(r"root by 1, 0, 1 by 4"):
        step(model)


def test_of_one_of_several_roots() -> None:
    model = make(None, has_own=False)
    model[0].set_gradient_divide_factor(1)
    with refused(r"root by 1, root by 4"):
        step(model)


def test_groups_that_two_optimizers_share() -> None:
    model = make()
    model.set_gradient_divide_factor(1)
    model(torch.ones(2, 4)).sum().backward()
    for part in (model[0], model[2]):
        with refused(r"root by 1, 0, 1 by 4"):
            sgd(part).step()


def test_that_is_set_after_a_step() -> None:
    model = make()
    optimizer = sgd(model)
    step(model, optimizer)
    model.set_gradient_divide_factor(1)
    with refused(HOW):
        step(model, optimizer)


def test_of_a_group_that_is_unfrozen_later() -> None:
    """While it is frozen it may be divided in any way."""
    model = make()
    model[0].requires_grad_(False)
    for module in (model, model[1]):
        module.set_gradient_divide_factor(1)
    optimizer = sgd(model)
    step(model, optimizer)
    model[0].requires_grad_(True)
    with refused(r"root, 1 by 1, 0 by 4"):
        step(model, optimizer)


@pytest.mark.parametrize("offloads", [False, True])
def test_in_backward(offloads: bool) -> None:
    """The optimizer in backward; offloaded, on a thread of its own."""
    with simulated_device() if offloads else nullcontext():
        model = make(**({"offload_policy": CPUOffloadPolicy()} if offloads else {}))
        model.set_gradient_divide_factor(1)
        model.set_optimizer_in_backward(sgd(model))
        with refused(HOW):
            model(torch.ones(2, 4)).sum().backward()
        assert all(param.grad is None for param in model.parameters()), "the next pass would add to it"
        model.set_gradient_divide_factor(1, recurse=True)
        model(torch.ones(2, 4)).sum().backward()


def test_of_a_closure() -> None:
    """No loss would fit the gradients, and a line search would go wrong."""
    model, calls = make(), []
    model.set_gradient_divide_factor(1)
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(RuntimeError, match=HOW):
        optimizer.step(lambda: calls.append(1))
    assert not calls


def on_different_meshes() -> Any:
    """Experts, say, in the middle."""
    model, mesh = make(None), init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    model[2] = fully_shard(nn.Linear(4, 4), mesh=mesh["b"])
    fully_shard(model)
    model[2].set_gradient_divide_factor(1)
    return model


def as_many_as_there_are() -> Any:
    model = make()
    model.set_gradient_divide_factor(RANKS)
    return model


def on_each() -> Any:
    """In a loop, as programs for torch do it, with a root that has no parameters."""
    model = make(has_own=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1)
            module.set_all_reduce_hook(lambda reduced: None)
    return model


@pytest.mark.parametrize("build", [on_different_meshes, as_many_as_there_are, on_each, make])
def test_harmless_settings(build: Callable[[], Any]) -> None:
    step(build())


def test_replicated_and_sharded_groups_together() -> None:
    """They lie on the same axes of one mesh, so their gradients come from the same batch."""
    model = make(replicate)
    step(model)
    model.set_gradient_divide_factor(1)
    with refused(r"root by 1, 0, 1 by 4"):
        step(model)


class Collective:
    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    def __call__(self, **arguments: Any) -> None:
        pass


@pytest.mark.parametrize("method", ["set_custom_all_gather", "set_custom_reduce_scatter", "set_all_reduce_hook"])
def test_a_function_that_no_group_calls(method: str) -> None:
    """A module with parameters may have another one: programs make one for each."""
    model = make(has_own=False)
    getattr(model, method)(Collective() if "custom" in method else print)
    with refused(rf"{method} on root.*has no parameters"):
        step(model)
    getattr(model[1], method)(Collective() if "custom" in method else lambda reduced: None)
    step(model)
    getattr(model[1], method)(None)
    with refused(method):
        step(model)


@pytest.mark.parametrize("in_backward", [False, True])
def test_it_is_checked_once(in_backward: bool) -> None:
    """Until a setting changes: a step in steady state compares two integers."""
    model = make()
    optimizer, looks = sgd(model), []
    find = partial_settings.find_partial
    model.set_optimizer_in_backward(optimizer if in_backward else None)

    def note(states: Any) -> Any:
        looks.append(1)
        return find(states)

    with mock.patch.object(partial_settings, "find_partial", note):
        for expected in (1, 1, 1, 2, 2):
            if expected > len(looks) > 0:
                model.set_gradient_divide_factor(3, recurse=True)
            model(torch.ones(2, 4)).sum().backward()
            if not in_backward:
                optimizer.step()
            optimizer.zero_grad()
            assert len(looks) == expected
