"""Inputs, and buffers."""

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fsdp2
from outcomes import EXACT, LOUD, Side
from situations.common import Net, ends, loss_of, sgd, shard, train

# ---- inputs and buffers


@ends(EXACT, only_ours=True)
def the_same_batch_on_all_ranks(side: Side) -> None:
    """All ranks train on the same rows, which is a warning"""
    everywhere = Side()
    model = shard(side, Net())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(everywhere, model)
    said = [str(each.message) for each in caught]
    side.value("warned", any("got the same inputs" in each for each in said) or not side.is_sharded)
    side.weights("of the whole batch", model)


@ends(EXACT)
def rows_that_are_alike_once(side: Side) -> None:
    """A first batch that is the same on all ranks, and later ones that are not: no warning"""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = shard(side, Net())
        train(Side(), model, steps=1)
        train(side, model, steps=5)


@ends(EXACT)
def the_same_ids_and_other_masks(side: Side) -> None:
    """Inputs of which one tensor only differs between ranks, and inputs of one value each: no warning"""

    class Masked(Net):
        def forward(self, x: Tensor, *, mask: dict[str, Tensor]) -> Tensor:
            return super().forward(x) * mask["rows"]

    def run(model: Any, x: Tensor, rows: Tensor) -> None:
        for _ in range(4):
            loss_of(model(x, mask={"rows": rows})).backward()

    rows = torch.arange(8.0)[:, None]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = shard(side, Masked())
        run(model, torch.ones(8 // side.num_ranks, 5), rows.chunk(side.num_ranks)[side.rank])
        side.grads("of masks", model)
        model = shard(side, Masked())
        run(model, torch.zeros(4, 5), torch.ones(4, 1))
        side.grads("of zeros", model)


@ends(EXACT)
def the_same_rows_in_evaluation(side: Side) -> None:
    """The whole validation set on each rank: no warning"""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = shard(side, Net())
        for step in range(4):
            with torch.no_grad():
                side.value(f"evaluated {step}", model.eval()(Side().batch(9)))
            train(side, model.train(), steps=1, name=f"step {step}")


class Waves(nn.Module):
    """Features of positions, or time steps, which must be exact; then weights, in the policy's dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, positions: Tensor) -> Tensor:
        waves = torch.sin(positions.float() * 0.37)
        return self.linear(waves.to(self.linear.weight.dtype))


def positions_in_low_precision(side: Side, way: str = "", **options: Any) -> None:
    model = Waves().float()
    policy = side.policy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, **options)
    side.fully_shard(model if side.is_sharded else model.bfloat16(), mp_policy=policy)
    positions = (side.batch(0) * 1000).round().float()
    positions = {"integers": positions.long(), "meant": positions.bfloat16()}.get(way, positions)
    side.rows("output", model(positions).float())


@ends(
    LOUD,
    tolerance=0.05,
    advises="Pass cast_forward_inputs=False there, and cast in the module what may be rounded; or pass integers; or",
    ways=("integers", "meant"),
)
def inputs_cast(side: Side, way: str = "") -> None:
    """fp32 positions or time steps go into a module whose `param_dtype` is bf16"""
    positions_in_low_precision(side, way)


@ends(EXACT, tolerance=0.05, follows="inputs_cast")
def inputs_not_cast(side: Side) -> None:
    """The same with `cast_forward_inputs=False`"""
    positions_in_low_precision(side, cast_forward_inputs=False)


@ends(EXACT)
def batch_norm(side: Side) -> None:
    """BatchNorm, on the rows of each rank: evaluation by the mean of the ranks' statistics"""
    model = side.fully_shard(nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)))
    optimizer, stats = sgd(model), (model[1].running_mean, model[1].running_var)
    for step in range(3):
        before = [each.clone() for each in stats]
        seen = []
        for _, rows in side.parts(2, step):
            for each, old in zip(stats, before, strict=True):
                each.copy_(old)
            loss_of(model(rows)).backward()
            seen.append([each.clone() for each in stats])
        if not side.is_sharded:
            for each, of_ranks in zip(stats, zip(*seen, strict=True), strict=True):
                each.copy_(torch.stack(of_ranks).mean(0))
            for parameter in model.parameters():
                parameter.grad /= 2
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    side.rows("evaluated", model(side.batch(9)))


@ends(EXACT)
def frozen_batch_norm(side: Side) -> None:
    """BatchNorm that uses the statistics it was given"""
    model = side.fully_shard(nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5).eval(), nn.Linear(5, 3)))
    train(side, model)


class Remembering(nn.Module):
    """Writes what it computes into its arguments, in the dtype of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor, cache: Tensor, states: list[Tensor]) -> Tensor:
        hidden = self.linear(x.to(self.linear.weight.dtype))
        cache[:, len(states)] = hidden.detach()
        states.append(hidden)
        return hidden


def written_by_forward(side: Side) -> tuple[nn.Module, Tensor, list[Tensor]]:
    model = Remembering().float()
    side.fully_shard(model, mp_policy=side.policy(param_dtype=torch.float32))
    cache, states = torch.zeros(len(side.batch(0)), 4, 5, dtype=torch.float64), [side.batch(9)]
    for step in range(3):
        model(side.batch(step), cache, states)
    return model, cache, states


@ends(EXACT, tolerance=1e-5)
def cache_that_forward_writes(side: Side) -> None:
    """A policy casts a cache to which forward writes"""
    _, cache, _ = written_by_forward(side)
    side.rows("cache", cache)


@ends(EXACT, tolerance=1e-5)
def states_that_forward_appends(side: Side) -> None:
    """A policy casts a tensor in a list to which forward appends; a loss of all in the list"""
    model, _, states = written_by_forward(side)
    side.value("length", len(states))
    torch.stack([loss_of(each.double()) for each in states[1:]]).sum().backward()
    side.grads("gradients", model)


@ends(LOUD, "cast_forward_inputs")
def leaf_that_forward_writes(side: Side) -> None:
    """A policy casts a leaf that requires a gradient; forward writes to it"""

    class Scaling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x.mul_(2) if side.is_sharded else x)

    model = side.fully_shard(Scaling(), mp_policy=side.policy(param_dtype=torch.float32, output_dtype=torch.float64))
    x = side.batch(0).requires_grad_()
    loss_of(model(x)).backward()
    side.rows("gradient", x.grad)


@ends(EXACT)
def statistics_read_behind_the_last_forward(side: Side) -> None:
    """`update_bn` after training, then the running statistics are read"""
    model = side.fully_shard(nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5, momentum=0.5), nn.Linear(5, 3)))
    batches = [side.batch(seed) for seed in range(3)]
    torch.optim.swa_utils.update_bn(batches, model)
    side.value("mean", model[1].running_mean)
    side.value("counted", model[1].num_batches_tracked)


class WithBuffer(nn.Module):
    """Adds a buffer to its input; in training, it averages inputs into it before, of all ranks if `all_reduces`."""

    def __init__(self, buffer: Tensor, averages: bool = False, all_reduces: bool = False, **options: Any) -> None:
        super().__init__()
        self.linear, self.averages, self.all_reduces = nn.Linear(5, 3), averages, all_reduces
        self.register_buffer("centre", buffer, **options)

    def forward(self, x: Tensor) -> Tensor:
        if self.averages and self.training:
            mean = x.detach().mean(0)
            if self.all_reduces:
                dist.all_reduce(mean)
                mean /= dist.get_world_size()
            self.centre.lerp_(mean, 0.5)
        return self.linear(x + self.centre)


def drawn(rank: int) -> Tensor:
    return torch.randn(5, generator=torch.Generator().manual_seed(rank))


@ends(
    LOUD,
    "centre holds other values on rank 1 than on rank 0: a buffer that ranks have built",
    advises=(
        "Call fsdp2.sync_module_states({}), {} fully_shard, which gives all ranks the first one's; or set the same",
        "or, if each rank is to have its own, register it with persistent=False",
    ),
    ways=("sync", "seed", "own"),
)
def a_buffer_of_each_ranks_seed(side: Side, way: str = "") -> None:
    """A random buffer, drawn from each rank's seed"""
    model = WithBuffer(drawn(0 if way == "seed" else side.rank), persistent=way != "own")
    if way == "sync" and side.is_sharded:
        fsdp2.sync_module_states(model)
    side.fully_shard(model)
    if way != "own":
        return train(side, model)
    optimizer = sgd(model)
    for step in range(4):
        parts = side.parts(2, step)
        for rank, rows in parts:
            model.centre = drawn(rank)
            (loss_of(model(rows)) / len(parts)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return side.weights("trained", model)


@ends(EXACT, only_ours=True, follows="a_buffer_of_each_ranks_seed")
def a_buffer_of_each_ranks_seed_synchronised(side: Side) -> None:
    """The same with `sync_module_states` after `fully_shard`"""
    model = side.fully_shard(WithBuffer(drawn(side.rank)))
    if side.is_sharded:
        fsdp2.sync_module_states(model)
    train(side, model)


@ends(
    LOUD,
    "centre holds other values on rank 1 than on rank 0: a buffer that was the same on all ranks",
    advises=(
        "All-reduce what the module writes to it (torch.distributed.all_reduce)",
        "If each rank is to have its own, register it with persistent=False",
    ),
    ways="all-reduced",
)
def a_buffer_of_each_ranks_rows(side: Side, way: str = "") -> None:
    """A buffer that each rank averages of its own rows, and evaluation with it"""
    all_reduces = bool(way) and side.is_sharded
    model = side.fully_shard(WithBuffer(torch.zeros(5), averages=True, all_reduces=all_reduces))
    train(side, model, steps=9)
    with torch.no_grad():
        side.rows("evaluated", model.eval()(side.batch(9)))


class Observed(nn.Module):
    """Keeps the range of its inputs, as an observer of quantization; computes with it if `reads`."""

    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        self.linear, self.reads = nn.Linear(5, 3), reads
        self.register_buffer("least", torch.tensor(0.0))
        self.register_buffer("most", torch.tensor(0.0))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.least = torch.minimum(self.least, x.detach().min())
            self.most = torch.maximum(self.most, x.detach().max())
        return self.linear(x / (self.most - self.least) if self.reads else x)


def train_observed(side: Side, model: nn.Module, steps: int = 5) -> None:
    train(side, model, steps=steps)
    with torch.no_grad():
        side.rows("evaluated", model.eval()(side.batch(9)))


@ends(EXACT)
def ranges_that_are_only_observed(side: Side) -> None:
    """Observers of quantization, of each rank's own rows, which nothing reads yet"""
    train_observed(side, side.fully_shard(nn.Sequential(nn.Linear(5, 5), Observed())))


@ends(LOUD, "1.least, 1.most holds other values on rank 1 than on rank 0: a buffer that was the same on all ranks")
def ranges_that_quantise(side: Side) -> None:
    """The same ranges, by which inputs are scaled"""
    train_observed(side, side.fully_shard(nn.Sequential(nn.Linear(5, 5), Observed(reads=True))))


@ends(LOUD, "1.least, 1.most holds other values on rank 1 than on rank 0: a buffer that was the same on all ranks")
def ranges_that_quantise_later(side: Side) -> None:
    """The same ranges, only observed at first, by which inputs are scaled from step 5 on"""
    model = side.fully_shard(nn.Sequential(nn.Linear(5, 5), Observed()))
    train(side, model, steps=4, name="observed")
    model[1].reads = True
    train_observed(side, model, steps=12)


class Monitored(Net):
    """Its root keeps a running mean of features for a log, and counts inputs above zero, block by block."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean_feature", torch.zeros(5))
        for block in self.blocks:
            block.register_buffer("num_above", torch.zeros(5, dtype=torch.int64))

    def features(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            block.num_above += (x > 0).sum(0)
            x = block(x)
        self.mean_feature.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return x


@ends(EXACT)
def buffers_of_a_log(side: Side) -> None:
    """A running mean and counts of each rank's own rows, which nothing reads but a log"""
    model = shard(side, Monitored())
    train(side, model, steps=5)
    assert model.mean_feature.abs().sum() > 0


@ends(LOUD, "mean_feature holds other values on rank 1")
def buffer_of_own_rows_that_a_loss_reads(side: Side) -> None:
    """A running mean of each rank's own rows, of an inner module, which the root's forward subtracts"""

    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = Monitored(), nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            output = self.inner(x)
            return (output - self.inner.mean_feature.sum()) * self.scale

    model = Centred()
    shard(side, model.inner)
    train(side, side.fully_shard(model), steps=5)
