"""`flatten_optimizer`: parameters and states get the bits that they get one by one, whatever a program does meanwhile.

The oracle is the same optimizer, as torch has it, on a second sharded model, on the same ranks.
"""

import copy
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn, optim
from torch.amp import GradScaler
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import lr_scheduler

from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, clip_grad_norm_, flatten_optimizer, fully_shard
from helpers import Differences, run_checks, run_ranks
from scenarios import Net

Make = Callable[..., optim.Optimizer]

# Classes that compute element by element, in all their ways to do so.
ELEMENTWISE: dict[str, Make] = {
    "SGD": partial(optim.SGD, lr=0.1, momentum=0.5, nesterov=True, weight_decay=0.1),
    "SGD foreach, no momentum": partial(optim.SGD, lr=0.1, foreach=True, maximize=True),
    "SGD fused": partial(optim.SGD, lr=0.1, momentum=0.5, weight_decay=0.1, fused=True),
    "SGD fused, no momentum": partial(optim.SGD, lr=0.1, fused=True),
    "Adam": partial(optim.Adam, amsgrad=True, weight_decay=0.1),
    "Adam fused": partial(optim.Adam, fused=True, amsgrad=True),
    "AdamW": partial(optim.AdamW),
    "AdamW foreach": partial(optim.AdamW, foreach=True, maximize=True),
    "AdamW fused": partial(optim.AdamW, fused=True),
    "AdamW fused, rate in a tensor": lambda p: optim.AdamW(p, fused=True, lr=torch.tensor(0.01)),
    "Adagrad": partial(optim.Adagrad, lr_decay=0.1, initial_accumulator_value=0.1),
    "Adagrad fused": partial(optim.Adagrad, fused=True, weight_decay=0.1),
    "Adadelta": partial(optim.Adadelta, weight_decay=0.1),
    "Adamax foreach": partial(optim.Adamax, foreach=True),
    "ASGD": partial(optim.ASGD, lr=0.1, t0=3),
    "NAdam": partial(optim.NAdam, decoupled_weight_decay=True, weight_decay=0.1),
    "NAdam foreach": partial(optim.NAdam, foreach=True),
    "RAdam": partial(optim.RAdam, weight_decay=0.1),
    "RMSprop": partial(optim.RMSprop, momentum=0.5, centered=True),
    "Rprop": partial(optim.Rprop, lr=0.01),
    "AdamW without eps": partial(optim.AdamW, eps=0.0),  # 0 / 0 in padding
}
REFUSED: dict[str, Make] = {
    "Adafactor": optim.Adafactor,
    "LBFGS": optim.LBFGS,
    "Muon": lambda params: optim.Muon([p for p in params if p.dim() == 2]),
    "SparseAdam": lambda params: optim.SparseAdam([*params]),
}


def test_every_optimizer_of_torch_is_known() -> None:
    classes = {name for name, value in vars(optim).items() if isinstance(value, type)} - {"Optimizer"}
    assert classes == {*REFUSED, *(name.split()[0] for name in ELEMENTWISE)}


class Pair:
    """Two models with equal weights, and an optimizer of each; the second is flat."""

    def __init__(
        self, make: Make, dtype: torch.dtype = torch.float32, shard: Callable[[nn.Module], Any] = fully_shard
    ) -> None:
        self.models = [self._model(dtype, shard) for _ in range(2)]
        self._make = make
        self.optimizers = [self.optimizer(model) for model in self.models]
        flatten_optimizer(self.optimizers[1])
        self.names = [name for name, _ in self.models[0].named_parameters()]

    @staticmethod
    def _model(dtype: torch.dtype, shard: Callable[[nn.Module], Any]) -> Any:
        torch.manual_seed(1)
        model = Net(depth=1).to(dtype)
        for block in model.blocks:
            shard(block)
        return shard(model)

    def optimizer(self, model: nn.Module) -> optim.Optimizer:
        """No decay for vectors, as trainers do it, where the class has any."""
        if "weight_decay" not in getattr(self._make, "keywords", {}):
            return self._make(model.parameters())
        vectors = [p for p in model.parameters() if p.dim() == 1]
        others = [p for p in model.parameters() if p.dim() != 1]
        return self._make([{"params": others}, {"params": vectors, "weight_decay": 0.0}])

    def each(self, do: Callable[[Any, Any], None]) -> None:
        """Calls `do(model, optimizer)` for both."""
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            do(model, optimizer)

    def backward(self, seed: int) -> None:
        batch = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed * 10 + dist.get_rank()))
        for model in self.models:
            model(batch.to(next(model.parameters()).dtype)).square().mean().backward()

    def step(self, *args: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.step(*args)
            optimizer.zero_grad()

    def compare(self, when: str) -> None:
        first, second = (dict(model.named_parameters()) for model in self.models)
        for name in self.names:
            assert same(first[name], second[name]), f"{when}: {name}"

    def compare_states(self, when: str) -> None:
        """Names, kinds and bits of the state dicts."""
        first, second = (optimizer.state_dict() for optimizer in self.optimizers)
        assert first["param_groups"] == second["param_groups"]
        assert first["state"].keys() == second["state"].keys()
        for i, state in first["state"].items():
            assert state.keys() == second["state"][i].keys(), (when, i)
            for name, value in state.items():
                assert same(value, second["state"][i][name]), f"{when}: {name} of {self.names[i]}"


def same(one: Any, other: Any) -> bool:
    """True of equal bits, and equal distribution."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return bool(one == other)
    if type(one) is not type(other) or one.shape != other.shape or one.dtype != other.dtype:
        return False
    if isinstance(one, DTensor) and isinstance(other, DTensor):
        return one.placements == other.placements and same(one.to_local(), other.to_local())
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def train_at_random(pair: Pair, steps: int, seed: int, begin: int = 0) -> None:
    """Freezes and thaws, leaves gradients out, accumulates, changes rates, and exchanges states; from step `begin` on.

    Ranks draw alike. What differs on one is raised at the end: others would wait for it.
    """
    draw, differences = random.Random(seed), Differences()

    def set_frozen(names: set[str]) -> None:
        for model in pair.models:
            for name, param in model.named_parameters():
                param.requires_grad_(name not in names)

    for step in range(steps):
        if draw.random() < 0.2 and step >= begin:
            set_frozen({name for name in pair.names[1:] if draw.random() < 0.3})
        elif draw.random() < 0.2:
            set_frozen(set())
        if draw.random() < 0.2:
            pair.each(lambda model, _: model.set_requires_gradient_sync(False))
            pair.backward(100 + step)
            pair.each(lambda model, _: model.set_requires_gradient_sync(True))
        pair.backward(step)
        if draw.random() < 0.1:
            pair.backward(200 + step)
        leaves_out = step >= begin and draw.random() < 0.4
        left_out = {name for name in pair.names if draw.random() < 0.3} if leaves_out else set()
        for model in pair.models:
            for name, param in model.named_parameters():
                if name in left_out:
                    param.grad = None
        if draw.random() < 0.2:
            factor = draw.choice([0.5, 2.0])
            for optimizer in pair.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = group["lr"] * factor
        if draw.random() < 0.15:  # each goes on from what the other has saved
            saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in pair.optimizers]
            for optimizer, state in zip(pair.optimizers, reversed(saved), strict=True):
                optimizer.load_state_dict(state)
        pair.step()
        with differences.noted():
            pair.compare(f"step {step}")
    with differences.noted():
        pair.compare_states("at the end")
    differences.raise_first()


def variants(ranks: int) -> list[str]:
    """Of each class one way to compute, another on each number of ranks."""
    of_class: dict[str, list[str]] = {}
    for name in ELEMENTWISE:
        of_class.setdefault(name.split()[0], []).append(name)
    return [names[ranks % len(names)] for names in of_class.values()]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_training_at_random(ranks: int) -> None:
    """On three and four ranks there are shards of other lengths, and empty ones."""

    def train(name: str) -> None:
        # torch's own can't step with momentum on some parameters that have one and others that have none yet.
        begin = 1 if name == "SGD fused" else 0
        train_at_random(Pair(ELEMENTWISE[name]), 20, seed=ranks, begin=begin)

    run_checks(ranks, [(name, partial(train, name)) for name in variants(ranks)], timeout=120)
