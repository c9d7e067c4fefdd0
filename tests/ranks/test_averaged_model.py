"""`AveragedModel`: the bits of torch's class on sharded models, whichever function averages."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, swa_utils

import fsdp2
from fsdp2 import fully_shard
from helpers import run_checks
from scenarios import Net

FUNCTIONS: dict[str, dict[str, Any]] = {
    "SWA": {},
    "EMA": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.9)},
    "EMA one by one": {"avg_fn": swa_utils.get_ema_avg_fn(0.9)},
    "SWA in lists": {"multi_avg_fn": swa_utils.get_swa_multi_avg_fn()},
    "with buffers": {"use_buffers": True},
}


def build(dtype: torch.dtype) -> Any:
    torch.manual_seed(1)
    model = Net(depth=2)
    model.register_buffer("mean", torch.ones(3))
    model = model.to(dtype)
    for block in model.blocks:
        fully_shard(block, ignored_params={block.up.bias})
    return fully_shard(model)


def steps(model: nn.Module, update: Callable[[], None], count: int) -> None:
    optimizer = SGD(model.parameters(), lr=0.1)
    for step in range(count):
        for param in model.parameters():
            param.grad = torch.full_like(param, 0.1 * (step + 1)) * param.detach()
        optimizer.step()
        model.mean.add_(1)  # type: ignore[union-attr, operator]
        update()


def check_function(name: str, dtype: torch.dtype) -> None:
    model = build(dtype)
    averages = [cls(model, **FUNCTIONS[name]) for cls in (swa_utils.AveragedModel, fsdp2.AveragedModel)]
    assert isinstance(averages[1], swa_utils.AveragedModel)

    def update() -> None:
        for average in averages:
            average.update_parameters(model)

    steps(model, update, 3)
    averages[1].load_state_dict(copy.deepcopy(averages[1].state_dict()))
    averages = [copy.deepcopy(average) for average in averages]
    steps(model, update, 2)
    first, second = (average.state_dict() for average in averages)
    assert first.keys() == second.keys()
    for key, value in first.items():
        assert torch.equal(as_local(value), as_local(second[key])), key
    assert torch.equal(averages[0](torch.ones(2, 5, dtype=dtype)), averages[1](torch.ones(2, 5, dtype=dtype)))


def as_local(value: Any) -> Any:
    return value.to_local() if hasattr(value, "to_local") else value


def check_evaluation_between_updates() -> None:
    """An update counts as a write: what an evaluation has gathered before is not used again."""
    model = build(torch.float32)
    average = fsdp2.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5))
    average.update_parameters(model)
    seen = []
    for _ in range(2):
        with torch.no_grad():
            seen.append(average(torch.ones(2, 5)))
        steps(model, lambda: average.update_parameters(model), 1)
    assert not torch.equal(*seen)


def test_averages() -> None:
    checks = [(name, partial(check_function, name, torch.float32)) for name in FUNCTIONS]
    run_checks(2, [*checks, ("evaluation", check_evaluation_between_updates)])


def test_empty_and_uneven_shards() -> None:
    run_checks(4, [("EMA", partial(check_function, "EMA", torch.float64))])
