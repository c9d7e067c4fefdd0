"""Tests that a model trains as the plain one when it is sharded by `wrap_groups`, in groups of tied parameters, too."""

from functools import partial
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

import fsdp2
from fsdp2.shards.find import shards_of
from helpers import alone, assert_same, run_ranks, shard_batch
from models import TinyGPT, mean_loss

STEPS, ROWS = 3, 8


def make() -> TinyGPT:
    torch.manual_seed(0)
    return TinyGPT(dim=96, heads=4, depth=2, tied=True)


def train(model: Any, batch: torch.Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        mean_loss(model(batch)).backward()
        optimizer.step()
        optimizer.zero_grad()


def plain_weights() -> dict[str, torch.Tensor]:
    model = make()
    train(model, model.example(rows=ROWS, seed=0))
    return {name: weight.detach() for name, weight in model.named_parameters()}


# A policy of 2,000 elements makes groups of single Linears, and one of the embedding with the head that is tied to it.
BY_SIZE = partial(size_based_auto_wrap_policy, min_num_params=2000)


@pytest.mark.parametrize(("ranks", "policy", "replicas"), [(2, BY_SIZE, 1), (4, 2000, 2)])
def test_a_wrapped_model_trains_as_the_plain_one(ranks: int, policy: Any, replicas: int) -> None:
    expected = alone(plain_weights)

    def body(rank: int, world_size: int) -> None:
        model = make()
        batch = shard_batch(model.example(rows=ROWS, seed=0), rank, world_size)
        groups = fsdp2.wrap_groups(model, policy)
        assert [group.modules for group in groups if model.embed in group.modules] == [(model.embed, model.head)]
        planned = fsdp2.plan(model, ranks=world_size, policy=policy, settings=[{"replicas": replicas}])
        names = [group.name for group in planned.groups]
        shape = (world_size,) if replicas == 1 else (replicas, world_size // replicas)
        mesh = init_device_mesh("cpu", shape)
        for group in groups:
            fsdp2.fully_shard(group.module, mesh=mesh, **group.options)
        fsdp2.fully_shard(model, mesh=mesh)
        assert sorted(each.name or "root" for each in shards_of(model).groups) == sorted(names)
        train(model, batch)
        for name, weight in model.named_parameters():
            assert_same(weight, expected[name], 1e-4, 1e-5, name)

    run_ranks(ranks, body)
