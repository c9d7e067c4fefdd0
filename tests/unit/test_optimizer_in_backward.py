"""Tests which optimizers `set_optimizer_in_backward` refuses, and that it leaves an optimizer unchanged."""

import time
from collections.abc import Iterator
from concurrent.futures import wait

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdp2 import clip_grad_norm_, fully_shard
from fsdp2.features.optimizer_in_backward import StepsInBackward
from helpers import fake_world, full


@pytest.fixture(autouse=True)
def _world() -> Iterator[None]:
    with fake_world(1):
        yield


def build() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard(model[0])
    return fully_shard(model)


def test_refuses_optimizers_that_it_cannot_step() -> None:
    model, other = build(), nn.Linear(2, 2)
    with pytest.raises(TypeError, match=r"optimizer: expected a torch\.optim\.Optimizer or None, got 0\.1"):
        model.set_optimizer_in_backward(0.1)
    with pytest.raises(ValueError, match="needs no closure, got LBFGS"):
        model.set_optimizer_in_backward(torch.optim.LBFGS(model.parameters()))
    mixed = torch.optim.SGD([*model.parameters(), other.bias], lr=0.1)
    with pytest.raises(ValueError, match=r"expected sharded parameters .* shape \(2,\) as number 4 of SGD"):
        model.set_optimizer_in_backward(mixed)


def test_functions_that_need_all_gradients_are_refused_after_steps() -> None:
    """A clip, or a second step, of gradients that are None would do nothing, and say nothing."""
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    params = list(model.parameters())
    model.set_optimizer_in_backward(optimizer)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        for use in (
            lambda: nn.utils.clip_grad_norm_(params, 1.0),
            lambda: clip_grad_norm_(params, 1.0),
            optimizer.step,
            lambda: params[0].grad + 1,
        ):
            with pytest.raises(RuntimeError, match="has stepped with this gradient in backward"):
                use()
    optimizer.zero_grad()
    assert all(param.grad is None for param in params)
    model.set_optimizer_in_backward(None)
    model(torch.ones(1, 2)).sum().backward()
    nn.utils.clip_grad_norm_(params, 1.0)
    optimizer.step()


def test_leaves_others_parameters_and_the_groups_alone() -> None:
    model = build()
    optimizer = torch.optim.SGD([{"params": [model[0].weight]}, {"params": [model[1].bias], "lr": 0.5}], lr=0.1)
    groups = [group["params"] for group in optimizer.param_groups]
    before = [full(param).clone() for param in model.parameters()]
    model.set_optimizer_in_backward(optimizer)
    model(torch.ones(1, 2)).sum().backward()
    assert all(group["params"] is params for group, params in zip(optimizer.param_groups, groups, strict=True))
    changed = [not torch.equal(full(p), old) for p, old in zip(model.parameters(), before, strict=True)]
    assert changed == [True, False, False, True]
    assert model[0].bias.grad is not None


def test_a_second_gradient_in_one_pass_is_refused() -> None:
    """Reentrant checkpointing brings one for each region: the first step would have been with a part of the sum."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(2):
                x = checkpoint(self.inner, x, use_reentrant=True)
            return x

    model = fully_shard(Twice())
    model.set_optimizer_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
    loss = model(torch.ones(1, 2, requires_grad=True)).sum()
    with pytest.raises(RuntimeError, match=r"inner\.(weight|bias).*second gradient in one backward"):
        loss.backward()


def test_users_hooks_on_steps_do_not_run_for_nothing() -> None:
    """The first half of a large gradient, and parameters that the optimizer does not have, are no reason to step."""
    model, events = build(), []
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: events.append("step"))
    steps = StepsInBackward(optimizer, list(model.parameters()), torch.device("cpu"))
    assert steps.step([]) == steps.step(list(model[1].parameters())) == events == []
    assert steps.step([model[0].weight]) == [model[0].weight]
    assert events == ["step"]


def test_two_threads_step_one_after_the_other() -> None:
    """While one does, the optimizer has some of its parameters only."""
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.SGD(params, lr=1.0)
    steps = StepsInBackward(optimizer, params, torch.device("cpu"))
    optimizer.register_step_pre_hook(lambda *_: time.sleep(0.05))
    for param in params:
        param.grad = torch.ones(2)
    beside = steps.run_beside(steps.step, params[:1])
    steps.step(params[1:])
    wait([beside])
    assert all(torch.equal(param, torch.zeros(2)) for param in params)
    assert len(optimizer.param_groups[0]["params"]) == 2
