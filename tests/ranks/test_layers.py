"""Tests layers that keep statistics or use random numbers: norms in mixed precision, dropout under recomputation.

All other layers are in the models of test_training and test_random_models.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.checkpoint_activation import checkpoint as checkpoint_composably
from torch.utils.checkpoint import checkpoint

from fsdp2 import MixedPrecisionPolicy, fully_shard
from helpers import Differences, assert_same, full, run_checks, shard_batch
from models import mean_loss
from scenarios import TOLERANCE, WIDTH, loss_of, sgd

RANKS, ROWS = 2, 6


def same_rows(*shape: int, seed: int) -> Tensor:
    """On every rank, so that a statistic over a batch is one over the whole batch."""
    return torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(seed))


# ---- norms -----------------------------------------------------------------------------------------------------------


class Norms(nn.Module):
    """Batch norm, with buffers, and three norms without, between weights that are cast."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 6, 3)
        self.batch, self.group = nn.BatchNorm2d(6), nn.GroupNorm(2, 6)
        self.mix = nn.Linear(6, 5)
        self.layer, self.rms = nn.LayerNorm(5), nn.RMSNorm(5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.batch(self.conv(x))
        x = self.group(torch.tanh(x)).flatten(2).transpose(1, 2)
        return self.head(self.rms(self.layer(self.mix(x))))


class Precision:
    """Which dtype each parameter computes in, as a policy of ours and as a plain forward.

    `kept`: children that compute in fp32. torch has no batch norm of bf16 weights with fp32 statistics on a CPU.
    """

    def __init__(self, low: torch.dtype | None, *kept: str) -> None:
        self.low, self.kept = low, kept

    def policy(self, model: nn.Module) -> MixedPrecisionPolicy:
        stay = {p for name, p in model.named_parameters() if name.split(".")[0] in self.kept}
        return MixedPrecisionPolicy(
            self.low, torch.float32, param_dtype_override_fn=lambda p: p.dtype if p in stay else None
        )

    def plain_output(self, model: nn.Module, x: Tensor) -> Tensor:
        if self.low is None:
            return model(x)
        weights = {
            name: p if name.split(".")[0] in self.kept else p.to(self.low) for name, p in model.named_parameters()
        }
        return torch.func.functional_call(model, weights, (x.to(self.low),))


def statistics(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer for name, buffer in model.named_buffers() if name.startswith("batch.")}


def norms_match(precision: Precision, children: bool) -> None:
    """Gradients, parameters, statistics in fp32 as they were, and what evaluation makes of these."""
    different = Differences()
    torch.manual_seed(1)
    model, expected = Norms(), Norms()
    expected.load_state_dict(model.state_dict())
    policy = precision.policy(model)
    for child in model.children() if children else ():
        fully_shard(child, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizers = sgd(model), sgd(expected)
    for step in range(3):
        x = same_rows(2, 5, 5, seed=step)
        mean_loss(model(x)).backward()
        mean_loss(precision.plain_output(expected, x)).backward()
        for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
            gradient = full(p.grad)
            with different.noted():
                assert_same(gradient, q.grad, rtol=1e-5, atol=1e-6, name=f"step {step}: {name}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for (name, actual), whole in zip(statistics(model).items(), statistics(expected).values(), strict=True):
            with different.noted():
                assert_same(actual, whole, rtol=1e-5, atol=1e-6, name=f"step {step}: {name}")
    model.eval()
    expected.eval()
    with torch.no_grad(), different.noted():
        x = same_rows(2, 5, 5, seed=9)
        assert_same(model(x), precision.plain_output(expected, x), rtol=1e-2, atol=1e-2, name="evaluated")
    assert {buffer.dtype for buffer in statistics(model).values()} == {torch.float32, torch.int64}
    different.raise_first()


# ---- random numbers --------------------------------------------------------------------------------------------------


class Drops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.dropout(torch.tanh(self.up(x)), 0.4, self.training)
        return x + nn.functional.dropout(self.down(hidden), 0.2, self.training)


class Dropping(nn.Module):
    """`how`: runs one of its blocks."""

    def __init__(self, how: Callable[..., Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Drops() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.how(block, x)
        return self.head(nn.functional.dropout(x, 0.3, self.training))


def call(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


WAYS: dict[str, Callable[..., Tensor]] = {
    "plain": call,
    "reentrant": functools.partial(checkpoint, use_reentrant=True),
    "non-reentrant": functools.partial(checkpoint, use_reentrant=False),
    "composable": call,
}


def build(way: str, sharded: bool) -> Dropping:
    torch.manual_seed(1)
    model = Dropping(WAYS[way]).double()
    for block in model.blocks:
        if way == "composable":
            checkpoint_composably(block)
        if sharded:
            fully_shard(block)
    return fully_shard(model) if sharded else model


def dropout_matches(way: str, reshards: bool) -> None:
    """Each rank draws its own masks, by its own seed; what is recomputed has the same masks, and nothing else draws.

    The oracle runs every rank's rows with that rank's seed, without checkpointing.
    """
    different, model, expected = Differences(), build(way, sharded=True), build("plain", sharded=False)
    model.set_reshard_after_forward(reshards)
    optimizers = sgd(model), sgd(expected)
    for step in range(2):
        batch = same_rows(WIDTH, seed=step).double()
        for rank in range(RANKS):
            torch.manual_seed(10 * step + rank)
            (loss_of(expected(shard_batch(batch, rank, RANKS))) / RANKS).backward()
        torch.manual_seed(10 * step + dist.get_rank())
        loss_of(model(shard_batch(batch, dist.get_rank(), RANKS).requires_grad_())).backward()
        for (name, p), q in zip(model.named_parameters(), expected.parameters(), strict=True):
            gradient = full(p.grad)
            with different.noted():
                assert_same(gradient, q.grad, **TOLERANCE, name=f"step {step}: {name}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    different.raise_first()


def sharding_draws_nothing() -> None:
    """Construction, forward and backward leave the random state as the plain model leaves it."""
    states = []
    for sharded in (True, False):
        model = build("non-reentrant", sharded)
        torch.manual_seed(3)
        loss_of(model(same_rows(WIDTH, seed=1).double())).backward()
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")  # torch's own RMSNorm
def test_norms_and_dropout() -> None:
    low = torch.bfloat16
    precisions = [Precision(None), Precision(low, "batch"), Precision(low, "batch", "group", "layer", "rms")]
    checks: list[tuple[str, Callable[[], Any]]] = [
        *(
            (f"norms {each.low} {each.kept} {children}", functools.partial(norms_match, each, children))
            for each in precisions
            for children in (False, True)
        ),
        *(
            (f"dropout {way} {reshards}", functools.partial(dropout_matches, way, reshards))
            for way in WAYS
            for reshards in (True, False)
        ),
        ("sharding draws nothing", sharding_draws_nothing),
    ]
    run_checks(RANKS, checks)
