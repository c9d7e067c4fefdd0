"""Tests that forwards without grad, after which parameters may stay unsharded, use the present weights."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fsdp2 import fully_shard
from helpers import assert_same, run_ranks


@pytest.mark.parametrize("way", ["kept", "unshard"])
def test_forwards_without_grad_compute_with_the_present_weights(way: str) -> None:
    """What stays between forwards is gathered anew when a weight has changed, and a rank that has ended may stop."""

    def body(rank: int, world_size: int) -> None:
        torch.manual_seed(0)
        model: Any = nn.Sequential(*(nn.Linear(5, 5) for _ in range(3))).double()
        plain = copy.deepcopy(model)
        for block in model:
            fully_shard(block, reshard_after_forward=False if way == "kept" else None)
        fully_shard(model, reshard_after_forward=False if way == "kept" else None)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
        for step in range(3):
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step)).double()
            if way == "unshard":
                for module in (*model, model):
                    module.unshard()
            with torch.no_grad():
                for _ in range(2 + rank if step == 2 else 2):
                    assert_same(model(x), plain(x), 1e-12, 1e-12, f"step {step}")
            if way == "unshard" and step:
                for module in (*model, model):
                    module.reshard()
            for each, optimizer in zip((model, plain), optimizers, strict=True):
                each(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

    run_ranks(2, body)
