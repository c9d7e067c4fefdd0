"""Tests gradients of one byte an element: in each dtype, behind a failed pass, and what tools say of them.

The oracle is plain: every rank's gradients of the unsharded model. Each rank's error is at most a step for each
element, and a step is the largest gradient of a block divided by 127. test_training.py draws a codec in training, bit
for bit; unit/test_int8.py has what this one rounds to.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2 import MixedPrecisionPolicy, clip_grad_norm_, compare, describe, fully_shard
from fsdp2.compression import Compression, Int8
from helpers import assert_same, full, run_checks, world_sizes

INT8, KEPT = Int8(), Int8(feedback=True)
F32, BF16 = torch.float32, torch.bfloat16


class Net(nn.Module):
    """Even and uneven rows, one row, and a lone large matrix in a group of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(12, 96, bias=False)
        self.left, self.right = nn.Linear(96, 24), nn.Linear(96, 7, bias=False)
        self.scale = nn.Parameter(torch.ones(1, 31))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.head(x))
        return torch.cat([self.left(x), self.right(x)], 1) * self.scale


def plain_model() -> Net:
    torch.manual_seed(1)
    return Net()


def batch(rank: int, number: int = 0) -> Tensor:
    return torch.randn(6, 12, generator=torch.Generator().manual_seed(100 * number + rank))


def loss_of(output: Tensor) -> Tensor:
    return output.float().square().mean()


def shard(model: Net, codec: Any = INT8, **options: Any) -> Any:
    options.setdefault("mp_policy", MixedPrecisionPolicy(compression=Compression(reduce_scatter=codec)))
    for module in (model.head, model):
        fully_shard(module, **options)
    return model


# ---- rounding at random


def each_rank_rounds_otherwise() -> None:
    """The mean of equal gradients, which ranks round to one of two neighbouring steps, lies between these for some
    elements. If all rounded alike, errors would not become smaller in the mean.
    """
    ranks, plain = dist.get_world_size(), plain_model()
    loss_of(plain(batch(0))).backward()
    model = shard(plain_model())
    loss_of(model(batch(0))).backward()
    heads = plain.head.weight.grad, full(model.head.weight.grad)
    segments = zip(*[head.flatten().chunk(ranks) for head in heads], strict=True)
    steps = [
        arrived / (gradient.abs().max() / 127)
        for segment in segments
        for gradient, arrived in zip(*[each.split(128) for each in segment], strict=True)
    ]
    between = (torch.cat(steps) - torch.cat(steps).round()).abs() > 0.2
    assert 0.1 < between.float().mean() < 0.9


# ---- the published faults of quantised ZeRO++


class Awkward(nn.Module):
    """Sizes that no block divides, one of them published (2305), and weights that are frozen."""

    def __init__(self, narrow: torch.dtype, wide: torch.dtype) -> None:
        super().__init__()
        self.base, self.odd = nn.Linear(461, 5, bias=False, dtype=narrow), nn.Linear(5, 77, dtype=wide)
        self.frozen = nn.Linear(461, 5, bias=False, dtype=narrow)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        narrow = self.base(x.to(self.base.weight.dtype)) + self.frozen(x.to(self.frozen.weight.dtype))
        return self.odd(torch.tanh(narrow).to(self.odd.weight.dtype))


DTYPES = [(BF16, BF16), (torch.float16, torch.float16), (F32, F32), (torch.float64,) * 2, (BF16, F32), (F32, BF16)]
"""Of a base and of what is trained on it. Published: bf16 read as fp16 (DeepSpeed #7775, #8215); buffers and scales of
the first parameter's dtype for all (#8072, #8073, #8128); frozen weights that come back as fp32 (#4885)."""


def values_and_dtypes_stay(narrow: torch.dtype, wide: torch.dtype) -> None:
    """Of weights and of gradients, each in its own dtype: values within a step of its own scale."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    plain = Awkward(narrow, wide)
    plain.base.weight.data *= 1e3 if narrow != torch.float16 else 1.0  # as fp16, bits of bf16 are other numbers
    policy = MixedPrecisionPolicy(compression=Compression(reduce_scatter=Int8(), all_gather=Int8()))
    model: Any = fully_shard(copy.deepcopy(plain), mp_policy=policy)
    x = torch.randn(6, 461, generator=torch.Generator().manual_seed(rank)) / 1e3
    for name, expected in plain.named_parameters():
        weight, largest = full_weight(model, name), expected.double().abs().max()
        assert weight.dtype == expected.dtype, name
        step = largest / 127 + largest * torch.finfo(expected.dtype).eps
        assert (weight.double() - expected.double()).abs().max() <= step * 1.01, name
    given = []
    for other in range(ranks):
        rounded = copy.deepcopy(plain)
        for name, weight in rounded.named_parameters():
            weight.data.copy_(full_weight(model, name))
        data = torch.randn(6, 461, generator=torch.Generator().manual_seed(other)) / 1e3
        rounded(data).double().square().sum().backward()
        given.append({name: p.grad for name, p in rounded.named_parameters() if p.grad is not None})
    model(x).double().square().sum().backward()
    norm = clip_grad_norm_(model.parameters(), 1e9)
    assert norm > 0, "a norm of 0 for ever (DeepSpeed #6926)"
    for name, param in model.named_parameters():
        if name == "frozen.weight":
            assert param.grad is None
            continue
        parts = [own[name] for own in given]
        # A block may be of several parameters of one dtype.
        largest = [max(float(p.abs().max()) for p in own.values() if p.dtype == param.dtype) for own in given]
        bound = sum(largest) / ranks * (1 / 127 + 4 * torch.finfo(param.dtype).eps)
        assert param.grad.dtype == param.dtype
        mean = sum(part.double() for part in parts) / ranks
        assert (full(param.grad).double() - mean).abs().max() <= bound * 1.01 + 1e-12, name


def full_weight(model: Any, name: str) -> Tensor:
    """Returns a weight as modules compute with it."""
    model.unshard()
    weight = model.get_parameter(name).detach().clone()
    model.reshard()
    return weight


# ---- tools, and a failed pass


def what_describe_says() -> None:
    description = describe(shard(plain_model()))
    assert "reduce_scatter by Int8(block=128, feedback=False)" in str(description)
    reduced = {each.name: each.reduced_nbytes for each in description.groups}
    assert reduced["head"] == INT8.sent_nbytes(96 * 12, F32) == 1200, (
        "1152 bytes, 9 scales, 12 bytes to a multiple of 16"
    )


def compared_with_a_reference() -> None:
    """What is rounded is no difference."""
    model, rows = shard(plain_model()), torch.cat([batch(rank) for rank in range(dist.get_world_size())])
    assert not compare(plain_model(), model, rows, lambda module, x: loss_of(module(x))).differences


def a_failed_pass_drops_what_was_not_sent() -> None:
    """The next pass is as the first of a new model but for random numbers: feedback rounds to the nearest."""
    model, fresh = shard(plain_model(), KEPT), shard(plain_model(), KEPT)
    loss_of(model(batch(dist.get_rank(), 1))).backward()
    model.zero_grad()

    def fail(_: Any) -> None:
        raise ValueError("on purpose")

    handle = model.head.register_forward_hook(lambda *args: args[2].register_hook(fail) and None)
    with pytest.raises(ValueError, match="on purpose"):
        loss_of(model(batch(dist.get_rank(), 2))).backward()
    handle.remove()
    for each in (model, fresh):
        loss_of(each(batch(dist.get_rank(), 3))).backward()
    for (name, param), other in zip(model.named_parameters(), fresh.parameters(), strict=True):
        assert_same(full(param.grad), full(other.grad), 0, 0, name)


@pytest.mark.parametrize("world_size", world_sizes(2, nightly=(3, 4)))
def test_one_byte_an_element(world_size: int) -> None:
    checks: list[Callable[[], None]] = [
        each_rank_rounds_otherwise,
        *(functools.partial(values_and_dtypes_stay, *dtypes) for dtypes in DTYPES),
        what_describe_says,
        compared_with_a_reference,
        a_failed_pass_drops_what_was_not_sent,
    ]
    run_checks(world_size, [(str(check), check) for check in checks])
