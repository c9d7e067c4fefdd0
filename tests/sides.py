"""Holds a model and the other objects of a program, once plain and once sharded, and compares the two."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2 import FSDPModule
from fsdp2.engine.placeholders import UnsynchronizedGrad
from helpers import assert_same, assert_same_names, own_part, shard_batch


@dataclasses.dataclass(eq=False)
class Loss:
    """Holds the loss of a forward whose backward may come later."""

    value: Tensor
    x: Tensor | None = None


class Side:
    """Holds one model: the plain one gets whole batches, the sharded one this rank's rows of them."""

    def __init__(
        self, model: nn.Module, make_optimizer: Callable[[Any], torch.optim.Optimizer], rank: int, world_size: int
    ) -> None:
        self.is_sharded, self.rank, self.world_size = isinstance(model, FSDPModule), rank, world_size
        self.make_optimizer = make_optimizer
        self.losses: list[Loss] = []
        # Of the sharded side, on both: whether gradients wait to be synchronised.
        self.waits = False
        self.saved: dict[str, Tensor] | None = None
        # What the call that runs shows, and whether only in this rank's rows.
        self.shown: dict[str, tuple[Tensor | bool, bool]] = {}
        self.adopt(model)

    def adopt(self, model: nn.Module) -> None:
        """Continues with another model and its optimizer."""
        self.model = model
        self._params: dict[str, nn.Parameter] = {}
        self.losses.clear()
        if not all(isinstance(p, DTensor) for p in model.parameters()):
            self.reshard()
        self.optimizer = self.make_optimizer(self.params.values())

    @property
    def params(self) -> dict[str, nn.Parameter]:
        """Returns the sharded parameters by name, also while unsharded ones are registered."""
        for name, param in self.model.named_parameters():
            if isinstance(param, DTensor) or not self.is_sharded:
                self._params[name] = param
        return self._params

    def sharded_modules(self) -> list[FSDPModule]:
        """Returns the sharded modules, the root first; none for a plain model."""
        return [m for m in self.model.modules() if isinstance(m, FSDPModule)]

    def reshard(self) -> None:
        for module in self.sharded_modules():
            module.reshard()

    def rows(self, whole: Tensor) -> Tensor:
        return shard_batch(whole, self.rank, self.world_size) if self.is_sharded else whole

    def show(self, name: str, value: Tensor | bool, is_rows: bool = False) -> None:
        """Shows the full value. Every rank must call it."""
        if isinstance(value, DTensor):
            value = value.full_tensor()
        self.shown[name] = (value.detach().clone() if isinstance(value, Tensor) else value, is_rows)

    def give_up(self) -> None:
        """Cleans up after an error."""
        self.losses.clear()
        self.shown.clear()
        for param in self.params.values():
            param.grad = None


def assert_part(actual: Tensor | None, expected: Tensor | None, name: str, tolerance: dict[str, float]) -> None:
    if actual is None or expected is None:
        return assert_same(actual, expected, **tolerance, name=name)
    assert isinstance(actual, DTensor), f"{name}: expected a DTensor, got {type(actual)}"
    assert actual.shape == expected.shape, f"{name}: expected {expected.shape}, got {actual.shape}"
    assert_same(actual.to_local(), own_part(expected, actual), **tolerance, name=f"{name}, {actual.placements}")


def assert_alike(sharded: Side, plain: Side, tolerance: dict[str, float]) -> None:
    """Compares the values that the last call showed, then parameters and gradients. It does not communicate."""
    assert list(sharded.shown) == list(plain.shown)
    for name, (expected, is_rows) in plain.shown.items():
        actual = sharded.shown[name][0]
        if isinstance(expected, Tensor):
            assert_same(actual, sharded.rows(expected) if is_rows else expected, **tolerance, name=name)
        else:
            assert actual == expected, f"{name}: expected {expected}, got {actual}"
    assert_same_names((name for name, _ in sharded.model.named_parameters()), plain.params)
    for name, expected in plain.params.items():
        assert_alike_param(sharded.params[name], expected, name, tolerance)


def assert_alike_param(actual: nn.Parameter, expected: nn.Parameter, name: str, tolerance: dict[str, float]) -> None:
    """Compares one parameter and its gradient. An unsynchronized gradient is compared after its reduction."""
    assert_part(actual.detach(), expected.detach(), name, tolerance)
    assert actual.requires_grad == expected.requires_grad, f"{name}.requires_grad: {actual.requires_grad}"
    if isinstance(actual.grad, UnsynchronizedGrad):
        assert expected.grad is not None, f"{name}.grad waits, expected None"
    else:
        assert_part(actual.grad, expected.grad, f"{name}.grad", tolerance)
