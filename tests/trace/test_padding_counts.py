"""Tests that the gathered bytes and the padding that `describe` shows are what all-gathers send."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.meters import WireMeter
from fsdp2 import MixedPrecisionPolicy, cheapest_placement, describe, fully_shard, replicate
from fsdp2.compression import Compression
from helpers import fake_world

POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    "bf16 wire": MixedPrecisionPolicy(
        torch.bfloat16, torch.float32, compression=Compression(reduce_scatter=torch.bfloat16)
    ),
}
NUMEL = 128 * 48 * 40 + 128 * 48 + 5 + 21


class Experts(nn.Module):
    """128 of them, a router, a bias of few elements, and a frozen parameter."""

    def __init__(self, experts: int = 128) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.ones(experts, 48, 40))
        self.router = nn.Parameter(torch.ones(experts, 48))
        self.bias = nn.Parameter(torch.ones(5))
        self.frozen = nn.Parameter(torch.ones(3, 7), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * sum(param.sum() for param in self.parameters())


class Net(nn.Module):
    def __init__(self, experts: int = 128) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Experts(experts) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(7))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.scale


def shard(model: Any, **options: Any) -> Any:
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("world_size", [2, 3, 7, 96, 256, 512])
def test_padding_is_what_gathers_send_besides_the_parameters(world_size: int, policy: str) -> None:
    """All that ranks put into all-gathers, less the parameters' own bytes."""
    with fake_world(world_size):
        for place in (None, cheapest_placement()):
            model = shard(Net(), mp_policy=POLICIES[policy], shard_placement_fn=place, reshard_after_forward=False)
            with WireMeter() as wire:
                model(torch.ones(1)).sum().backward()
            sent = sum(world_size * each.payload_bytes for each in wire.collectives if each.kind == "all_gather")
            itemsize = 4 if policy == "fp32" else 2
            found = sum(group.padding_nbytes for group in describe(model).groups)
            assert found == sent - (7 + 2 * NUMEL) * itemsize


def test_few_experts_are_twice_their_size_unless_planned() -> None:
    """48 divides by 16 ranks where 9 experts do not."""
    with fake_world(16):
        plain, planned = (
            describe(shard(Net(9), shard_placement_fn=place)).groups[1].padding_nbytes
            for place in (None, cheapest_placement())
        )
    assert plain > 0.7 * 9 * 48 * 40 * 4
    assert planned < 0.1 * 9 * 48 * 40 * 4


def test_one_rank_and_replicas_have_no_padding() -> None:
    with fake_world(1):
        assert describe(fully_shard(Experts(3))).groups[0].padding_nbytes == 0
    with fake_world(4):
        assert describe(replicate(Experts(3))).groups[0].padding_nbytes == 0
