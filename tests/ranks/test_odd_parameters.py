"""Parameters whose memory lies otherwise than in rows, in models that are compared with their plain copies."""

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from fsdp2 import MixedPrecisionPolicy, fully_shard
from helpers import assert_same, full, run_checks
from scenarios import train_beside


class Strided(nn.Module):
    """A transposed matrix, images with channels last, and a part of a larger tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.matrix = nn.Parameter(torch.randn(4, 5).T)
        self.part = nn.Parameter(torch.randn(8, 4)[::2])

    def forward(self, x: Tensor) -> Tensor:
        images = x.view(-1, 3, 4, 4).contiguous(memory_format=torch.channels_last)
        return torch.tanh(self.conv(images)).mean((2, 3)) @ self.matrix @ self.part

    def batch(self, seed: int) -> Tensor:
        return torch.randn(12, 48, generator=torch.Generator().manual_seed(seed))


def trains(dim: int, policy: MixedPrecisionPolicy, **options: Any) -> None:
    plain = Strided()
    assert not any(param.is_contiguous() for name, param in plain.named_parameters() if name != "conv.bias")
    model = copy.deepcopy(plain)
    fully_shard(model, shard_placement_fn=lambda p: Shard(dim % p.dim()), mp_policy=policy, **options)
    for (name, param), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert param.to_local().is_contiguous()  # type: ignore[attr-defined]
        assert_same(full(param), whole, 0, 0, name)
    train_beside(model, plain, plain.batch)


FP64 = MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float64)
CHECKS = [
    ("rows", partial(trains, 0, MixedPrecisionPolicy())),
    ("columns", partial(trains, 1, MixedPrecisionPolicy(), reshard_after_forward=False)),
    ("cast", partial(trains, 0, FP64)),
]


def test_parameters_of_any_strides_on_one_rank() -> None:
    run_checks(1, CHECKS)


def test_parameters_of_any_strides_on_three_ranks() -> None:
    run_checks(3, CHECKS)
