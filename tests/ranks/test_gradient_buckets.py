"""Tests `set_gradient_buckets`: training is that of plain models with any size, and buckets have no more bytes."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, describe, fully_shard
from fsdp2.engine.state import groups_below
from helpers import run_checks, world_sizes
from models import OddMLP
from scenarios import train_beside

SIZES = (1, 100, 2000, 10**9, None)


def shard(model: Any, **options: Any) -> Any:
    first = next(iter(model.children()))
    fully_shard(first, **options)
    return fully_shard(model, **options)


def batch(model: OddMLP, seed: int) -> Tensor:
    return model.example(rows=12, seed=seed)


def any_size() -> None:
    for options in ({}, {"reshard_after_forward": False}, {"offload_policy": CPUOffloadPolicy()}):
        plain = OddMLP()
        model = shard(copy.deepcopy(plain), **options)
        for nbytes in SIZES:
            model.set_gradient_buckets(nbytes)
            train_beside(model, plain, partial(batch, plain))


def they_have_no_more_bytes() -> None:
    for reduced in (torch.float32, torch.float64):
        model = shard(OddMLP(), mp_policy=MixedPrecisionPolicy(reduce_dtype=reduced))
        for nbytes in SIZES:
            model.set_gradient_buckets(nbytes)
            for group in groups_below(model):
                for bucket in group.gradients.buckets:
                    specs = [group.parameters.specs[i] for i in bucket.indices]
                    filled = sum(spec.shard_numel * spec.world_size * reduced.itemsize for spec in specs)
                    assert nbytes is None or filled <= nbytes or len(specs) == 1
                trainable = sum(len(bucket.indices) for bucket in group.gradients.buckets)
                assert trainable == len(group.params)
                if nbytes == 1:
                    assert len(group.gradients.buckets) == trainable
        model.set_gradient_buckets(100, recurse=False)
        assert ["bucket_bytes=100" in (each.settings or ()) for each in describe(model).groups] == [True, False]


def on_meta_and_amid_a_step() -> None:
    with torch.device("meta"):
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model)
    model.set_gradient_buckets(1)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.1)
    model(torch.ones(2, 4)).sum().backward()
    (group,) = groups_below(model)
    assert len(group.gradients.buckets) == 4
    model[0].register_forward_hook(lambda *_: model.set_gradient_buckets(None))
    with pytest.raises(RuntimeError, match="call it between steps"):
        model(torch.ones(2, 4))
    for wrong, kind in ((0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(kind, match="nbytes"):
            model.set_gradient_buckets(wrong)


CHECKS = [(each.__name__, each) for each in (any_size, they_have_no_more_bytes, on_meta_and_amid_a_step)]


@pytest.mark.parametrize("world_size", world_sizes(1, 2, nightly=[3]))
def test_gradient_buckets(world_size: int) -> None:
    run_checks(world_size, CHECKS)


def test_on_replicas_of_shards() -> None:
    def train() -> None:
        plain = OddMLP()
        model = shard(copy.deepcopy(plain), mesh=init_device_mesh("cpu", (2, 2)))
        for nbytes in SIZES:
            model.set_gradient_buckets(nbytes)
            train_beside(model, plain, partial(batch, plain))

    run_checks(4, [("replicas", train)])
