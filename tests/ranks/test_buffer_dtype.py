"""Tests `MixedPrecisionPolicy(buffer_dtype=)` against plain models whose buffers have that dtype in each forward."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp2 import MixedPrecisionPolicy, full_params, fully_shard, replicate, skip_step_on_error
from helpers import assert_same, run_checks, shard_batch, world_sizes

BF16 = torch.bfloat16


class Scaled(nn.Module):
    """A layer whose output depends on a buffer that bf16 rounds (1.1), on whole numbers, flags and complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("scale", torch.full((6,), 1.1))
        self.register_buffer("rows", torch.tensor([299, 257]))
        self.register_buffer("mask", torch.tensor([True] * 5 + [False]))
        self.register_buffer("phase", torch.tensor([1 + 0.001j]))
        self.register_buffer("narrow", torch.full((6,), 1.1, dtype=BF16), persistent=False)
        self.seen: set[Any] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add((self.scale.dtype, self.rows.dtype, self.mask.dtype, self.phase.dtype, self.narrow.dtype))
        x = torch.tanh(self.linear(x)) * self.scale.to(x.dtype)
        return x.masked_fill(~self.mask, 0.5) + (self.rows[0] - 299) + self.narrow.to(x.dtype)


class Net(nn.Module):
    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.last = Scaled(), Scaled(), Scaled()
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x))
        return checkpoint(self.last, x, use_reentrant=False) if self.checkpoints else self.last(x)


def cast(model: nn.Module) -> None:
    for buffer in model.buffers():
        buffer.data = buffer.to(BF16) if buffer.is_floating_point() else buffer.data


def step(model: nn.Module, optimizer: Any, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def trains_like_plain_buffers_of_that_dtype() -> None:
    for checkpoints in (False, True):
        for way in ("fully_shard", "replicate"):
            torch.manual_seed(0)
            model: Any = Net(checkpoints).double()
            plain: Any = copy.deepcopy(model)
            exact = {name: buffer.clone() for name, buffer in model.named_buffers()}
            cast(plain)
            policy = MixedPrecisionPolicy(buffer_dtype=BF16)
            for each in (model.first, model) if way == "fully_shard" else (model,):
                (fully_shard if way == "fully_shard" else replicate)(each, mp_policy=policy)
            optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (model, plain)]
            for seed in range(3):
                x = torch.randn(12, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
                step(model, optimizers[0], shard_batch(x, dist.get_rank(), dist.get_world_size()))
                step(plain, optimizers[1], x)
            for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert_same(param, other, 1e-12, 1e-12, name)
            dtypes = (BF16, torch.int64, torch.bool, torch.complex64, BF16)
            assert {kinds for each in (model.first, model.second, model.last) for kinds in each.seen} == {dtypes}
            for _ in range(2):
                state = model.state_dict()
                for name, buffer in model.named_buffers():
                    assert buffer.dtype == (BF16 if exact[name].is_floating_point() else exact[name].dtype), name
                    assert name not in state or torch.equal(state[name], exact[name]), name
                    assert name not in state or state[name].dtype == exact[name].dtype, name


def only_modules_of_the_call_and_not_ignored_ones() -> None:
    torch.manual_seed(0)
    model: Any = Net()
    fully_shard(model.first)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(buffer_dtype=BF16), ignored_params=[model.last])
    for param in model.last.parameters():
        param.requires_grad_(False)
    model(torch.randn(2, 6)).sum().backward()
    seen = [{kinds[0] for kinds in each.seen} for each in (model.first, model.second, model.last)]
    exact = torch.full((6,), 1.1)
    assert seen == [{torch.float32}, {BF16}, {torch.float32}]
    copied = copy.deepcopy(model)
    for each in copied.modules():
        if isinstance(each, Scaled):
            each.seen.clear()
    assert torch.equal(copied.state_dict()["second.scale"], exact)
    copied(torch.randn(2, 6))
    assert torch.equal(copied.state_dict()["second.scale"], exact)
    assert [{kinds[0] for kinds in each.seen} for each in (copied.second, copied.last)] == [{BF16}, {torch.float32}]


def buffers_change_between_and_in_forwards() -> None:
    """Written, loaded and replaced between forwards; written in a forward, replaced in a forward; a failed forward."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.register_buffer("offset", torch.tensor([1.1]))
            self.register_buffer("count", torch.zeros(1))
            self.register_buffer("total", torch.zeros(1))
            self.fails = False

        def forward(self, x: Tensor) -> Tensor:
            self.count.add_(1)
            self.total = self.total + 2
            if self.fails:
                raise ValueError
            return x * self.weight * self.offset.to(x.dtype)

    model: Any = fully_shard(Counts(), mp_policy=MixedPrecisionPolicy(buffer_dtype=BF16))
    x = torch.ones(4)
    for offset in (1.1, 2.3, 3.7, 4.9):
        with torch.no_grad():
            if offset == 2.3:
                model.offset.fill_(offset)
            elif offset == 3.7:
                model.offset = torch.tensor([offset])
            elif offset == 4.9:
                model.load_state_dict({**model.state_dict(), "offset": torch.tensor([offset])})
        assert torch.equal(model(x)[:1].detach(), torch.tensor([offset]).bfloat16().float())
    model.fails = True
    with pytest.raises(ValueError, match=r"^$"):
        model(x)
    with torch.inference_mode():
        model.fails = False
        model(x)
    assert [getattr(model, name).item() for name in ("count", "total")] == [6.0, 12.0]
    assert {buffer.dtype for buffer in model.buffers()} == {BF16}
    state = model.state_dict()
    assert {value.dtype for name, value in state.items() if name != "weight"} == {torch.float32}
    assert state["offset"].item() == pytest.approx(4.9, abs=1e-6)  # loaded exactly, computed with when rounded
    assert [state["count"].item(), state["total"].item()] == [6.0, 12.0]
    with full_params(model):
        assert model.offset.dtype == BF16


def running_statistics_are_rounded_and_averaged() -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))
    fully_shard(model[1], mp_policy=MixedPrecisionPolicy(BF16, torch.float32, buffer_dtype=BF16))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(BF16, torch.float32))
    for seed in range(3):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(100 * seed + dist.get_rank()))
        model(x).square().mean().backward()
    mean = model[1].running_mean
    of_ranks = [torch.empty_like(mean) for _ in range(dist.get_world_size())]
    dist.all_gather(of_ranks, mean)
    assert all(torch.equal(each, mean) for each in of_ranks), "averaged alike"
    assert mean.dtype == BF16
    assert mean.abs().max() > 0
    saved = model.state_dict()["1.running_mean"]
    assert saved.dtype == torch.float32
    assert torch.equal(saved, mean.float())
    assert model[1].num_batches_tracked.item() == 3


def pickled_moved_and_built_on_meta() -> None:
    model: Any = fully_shard(Net(), mp_policy=MixedPrecisionPolicy(buffer_dtype=BF16))
    exact = torch.full((6,), 1.1)
    twin = pickle.loads(pickle.dumps(model)).to("cpu")
    assert twin.first.scale.dtype == BF16
    assert torch.equal(twin.state_dict()["first.scale"], exact)
    with torch.device("meta"):
        model = Net()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(buffer_dtype=BF16))
    model.to_empty(device="cpu")
    model.load_state_dict(
        {name: value for name, value in twin.state_dict().items() if "linear" not in name}, strict=False
    )
    assert model.first.scale.dtype == BF16
    assert torch.equal(model.state_dict()["first.scale"], exact)
    model.half()
    assert model.first.scale.dtype == torch.float16  # the program has chosen it, until the next forward


def of_a_skipped_step() -> None:
    """Exact values outlive it."""
    model: Any = fully_shard(Net(), mp_policy=MixedPrecisionPolicy(buffer_dtype=BF16))
    with skip_step_on_error(model, catch=ValueError) as attempt:
        model(torch.randn(2, 6))
        raise ValueError
    assert attempt.skipped
    assert torch.equal(model.state_dict()["first.scale"], torch.full((6,), 1.1))


CHECKS = (
    trains_like_plain_buffers_of_that_dtype,
    only_modules_of_the_call_and_not_ignored_ones,
    buffers_change_between_and_in_forwards,
    running_statistics_are_rounded_and_averaged,
    pickled_moved_and_built_on_meta,
    of_a_skipped_step,
)


@pytest.mark.parametrize("world_size", world_sizes(1, 2, nightly=[3]))
def test_buffer_dtype(world_size: int) -> None:
    run_checks(world_size, [(each.__name__, each) for each in CHECKS])
