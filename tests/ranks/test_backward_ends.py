"""Tests ranks of which one is done with a backward pass while others still reduce, and which communicates then."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp2
from helpers import alone, assert_same, full, one_mesh, run_ranks

TIMEOUT_S = 30
# What errors say. With HSDP, ranks of another shard group hear of it by a goodbye.
ENDING = {
    "shards": r"rank 0: reducing first.*; rank 1: ending a backward",
    "hsdp": r"rank 0: reducing first.*; rank 1: ending a backward|out of step with others, see its error",
    "replicas": "rank 0: (summing replicas|all-reducing what checks compare of root).*; rank 1: ending a backward",
}


class Net(nn.Module):
    """`leaves`: the loss does not depend on the first layer, whose gradients are reduced last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.leaves = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x.detach() if self.leaves else x)


def build(shard: Callable[..., Any], **options: Any) -> Any:
    torch.manual_seed(0)
    model = Net()
    for layer in (model.first, model.second):
        shard(layer, **options)
    return shard(model, **options)


def step(model: Any) -> None:
    model(torch.ones(2, 4)).sum().backward()
    dist.all_reduce(torch.ones(3))


@pytest.mark.parametrize("kind", ENDING)
@pytest.mark.parametrize("number", [1, 3])
def test_a_rank_that_leaves_out_what_is_reduced_last(kind: str, number: int) -> None:
    """All ranks raise, though one was about to communicate by itself: in the first step, after which the next one is
    exact, and at the debug level later.
    """

    def body(rank: int, world_size: int) -> None:
        options = {"mesh": one_mesh((2, 2), ("replicate", "shard"))} if kind == "hsdp" else {}
        model = build(fsdp2.replicate if kind == "replicas" else fsdp2.fully_shard, **options)
        if number > 1:
            fsdp2.set_checks("debug")
        for _ in range(number - 1):
            step(model)
        model.zero_grad()
        model.leaves = rank == 1
        with pytest.raises(RuntimeError, match=ENDING[kind]):
            step(model)
        if number > 1:
            return
        model.leaves = False
        model.zero_grad()
        step(model)
        assert_same(full(model.first.weight.grad), expected, 1e-6, 1e-7, "gradient of the next step")

    def train_plainly() -> Tensor:
        plain = build(lambda module: module)
        plain(torch.ones(2, 4)).sum().backward()
        return plain.first.weight.grad

    expected = alone(train_plainly)
    run_ranks(4 if kind == "hsdp" else 2, body, timeout=TIMEOUT_S)


def test_ranks_that_accumulate_different_numbers_of_batches() -> None:
    """Where unsharded parameters stay, nothing is compared at the end of a pass that reduces nothing."""

    def body(rank: int, world_size: int) -> None:
        model = build(fsdp2.fully_shard, reshard_after_forward=False)
        model.set_reshard_after_backward(False)
        for number in range(1, 5):
            with model.no_sync():
                for _ in range(number * rank):
                    model(torch.ones(2, 4)).sum().backward()
            step(model)

    run_ranks(2, body, timeout=TIMEOUT_S)
