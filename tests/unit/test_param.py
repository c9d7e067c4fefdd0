"""Tests hooks that users register on sharded parameters."""

import torch
from torch import Tensor, nn

from fsdp2 import fully_shard
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
