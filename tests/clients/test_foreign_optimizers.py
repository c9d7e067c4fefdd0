"""Tests optimizers of bitsandbytes, whose kernels take no DTensors: refused with what to do, which is exact."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp2
from helpers import assert_same, run_checks, shard_batch

bitsandbytes = pytest.importorskip("bitsandbytes")
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
ADVICE = r"This operation of {} takes no DTensors\. Call fsdp2\.flatten_optimizer\(optimizer\) before the first step"


def models() -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 130), nn.Tanh(), nn.Linear(130, 64))
    return fsdp2.fully_shard(copy.deepcopy(plain)), plain


def train(model: Any, optimizer: Any, is_plain: bool = False) -> None:
    for step in range(3):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        model(x if is_plain else shard_batch(x, dist.get_rank(), 2)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def flat(name: str, **options: Any) -> None:
    make = getattr(bitsandbytes.optim, name)
    model, plain = models()
    with pytest.raises((RuntimeError, NotImplementedError), match=ADVICE.format(name)):
        train(model, make(model.parameters(), lr=1e-2, **options))
    model, plain = models()
    train(model, fsdp2.flatten_optimizer(make(model.parameters(), lr=1e-2, **options)))
    train(plain, make(plain.parameters(), lr=1e-2, **options), is_plain=True)
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert_same(param.detach(), expected.detach(), 1e-4, 1e-5, name)


def in_eight_bits(name: str) -> None:
    """Blocks of elements share a scale: no flat optimizer. The next advice is another optimizer."""
    make = getattr(bitsandbytes.optim, name)
    model, _ = models()
    with pytest.raises(RuntimeError, match=rf"{ADVICE.format(name)}; if that refuses it, use an optimizer that takes"):
        train(model, make(model.parameters(), lr=1e-2))
    model, plain = models()
    with pytest.raises(TypeError, match="or, if its own step takes no DTensors, another optimizer"):
        fsdp2.flatten_optimizer(make(model.parameters(), lr=1e-2))
    train(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), is_plain=True)
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert_same(param.detach(), expected.detach(), 1e-4, 1e-4, name)


def test_optimizers_of_bitsandbytes() -> None:
    checks = [(name, lambda name=name: flat(name)) for name in ("AdamW", "Lion", "AdamW32bit")]
    checks += [("SGD", lambda: flat("SGD", momentum=0.9))]
    checks += [(name, lambda name=name: in_eight_bits(name)) for name in ("AdamW8bit", "Lion8bit")]
    run_checks(2, checks)
