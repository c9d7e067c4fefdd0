"""Tests DDP around a sharded model, or beside it."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._composable import replicate
from torch.nn.parallel import DistributedDataParallel

from fsdp2 import fully_shard
from helpers import run_ranks


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def test_around_a_sharded_model() -> None:
    def body(rank: int, _: int) -> None:
        whole, part = layers(), layers()
        fully_shard(whole)
        fully_shard(part[1])
        for model, first in ((whole, "0.weight"), (part, "1.weight")):
            with pytest.raises(RuntimeError, match=rf"fully_shard manages {first}.*Remove DistributedDataParallel"):
                DistributedDataParallel(model)
        assert DistributedDataParallel(layers())(torch.ones(1, 4)).shape == (1, 2)

    run_ranks(2, body)


def test_replicate_inside_a_sharded_model() -> None:
    """It would have DDP around its parameters from the first forward on. Beside it, both train."""

    def body(rank: int, _: int) -> None:
        model = layers()
        replicate(model[1])
        for refused in (model, model[1]):
            with pytest.raises(
                NotImplementedError, match=r"weight: torch's replicate was applied .* Leave replicate out"
            ):
                fully_shard(refused)
        fully_shard(model[0])
        torch.manual_seed(rank)
        model(torch.randn(2, 4)).sum().backward()
        total = model[1].weight.grad.clone()
        torch.distributed.all_reduce(total)
        assert torch.equal(total, 2 * model[1].weight.grad)

    run_ranks(2, body)


def test_around_a_model_without_its_sharded_parameters() -> None:
    """As whoever trains the rest by DDP says."""

    def body(rank: int, _: int) -> None:
        model: Any = layers()
        fully_shard(model[1])
        ignored = [name for name, _ in model[1].named_parameters(prefix="1")]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
        torch.manual_seed(rank)
        wrapped = DistributedDataParallel(model)
        wrapped(torch.randn(2, 4)).sum().backward()
        gradient = model[0].weight.grad
        total = gradient.clone()
        torch.distributed.all_reduce(total)
        assert torch.equal(total, 2 * gradient)

    run_ranks(2, body)
