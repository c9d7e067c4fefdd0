"""Tests hooks that users register on sharded parameters, and classes that say themselves how they are moved."""

from typing import Any

import torch
from torch import Tensor, nn

from fsdp2 import fully_shard
from fsdp2.engine.parameter import _on_device
from helpers import fake_world


def test_every_post_accumulate_hook_gets_the_parameter() -> None:
    """What one of them returns is no gradient: an optimizer in the next one must still be given the parameter."""
    given = []

    def first(parameter: Tensor) -> Tensor:
        return parameter.grad

    with fake_world(1):
        layer = fully_shard(nn.Linear(2, 2, bias=False))
        layer.weight.register_post_accumulate_grad_hook(first)
        layer.weight.register_post_accumulate_grad_hook(given.append)
        layer(torch.ones(1, 2)).sum().backward()
        assert given[0] is layer.weight


class Scaled(nn.Parameter):
    """Moves a tensor that it needs along with its values."""

    def to(self, device: Any) -> Any:  # type: ignore[override]
        moved: Any = Scaled(self.data.to(device), self.requires_grad)
        moved.scale = self.scale.to(device)  # type: ignore[attr-defined]
        return moved


def test_class_that_moves_itself_is_asked() -> None:
    original: Any = Scaled(torch.ones(4, 2))
    original.scale, original.tag = torch.ones(4), "weight"
    handle = original.register_hook(lambda gradient: gradient)
    moved: Any = _on_device(original, torch.device("meta"))
    assert type(moved) is Scaled
    assert (moved.device.type, moved.scale.device.type, moved.tag) == ("meta", "meta", "weight")
    assert moved._backward_hooks is original._backward_hooks
    handle.remove()
    assert _on_device(original, torch.device("cpu")) is original
    plain = nn.Parameter(torch.ones(2))
    assert _on_device(plain, torch.device("meta")) is plain, "it is moved when it has been cut"


def test_sharded_parameter_has_what_its_class_defines() -> None:
    with fake_world(2):
        layer: Any = nn.Linear(2, 4)
        layer.weight = Scaled(layer.weight.data)
        Scaled.unit = "kg"  # type: ignore[attr-defined]
        layer.weight.scale = 3.0
        fully_shard(layer)
        assert (layer.weight.scale, layer.weight.unit) == (3.0, "kg")
        assert layer.weight.to("cpu").shape == (4, 2), "tensors' own methods are those of DTensors"
        for name in ("unit", "scale", "missing"):
            assert not hasattr(layer.bias, name)
        assert not hasattr(layer.weight, "missing")
        del Scaled.unit  # type: ignore[attr-defined]
