"""Tests what frozen weights cost: their shards and their gathers; no gradient, no reduction, no memory in backward.

G is the bytes of one unsharded group, a frozen matrix and two thin factors. A is the bytes of the factors.
"""

from collections.abc import Iterator

import pytest
import torch
from recorder import record
from torch import Tensor, nn

from benchmarks.meters import AllocationMeter
from fsdp2 import MixedPrecisionPolicy, fully_shard
from helpers import fake_world

RANKS, BLOCKS, DIM = 8, 5, 512
MATRIX = DIM * DIM * 4
FACTORS = 2 * DIM * RANKS * 4  # as many rows as ranks: nothing is padded
GROUP = MATRIX + FACTORS
SLACK = 0.03 * GROUP


class LoRA(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(DIM, DIM, bias=False)
        self.down = nn.Parameter(torch.zeros(RANKS, DIM))
        self.up = nn.Parameter(torch.zeros(DIM, RANKS))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + x @ self.down.T @ self.up.T)


@pytest.fixture(autouse=True)
def _world() -> Iterator[None]:
    with fake_world(RANKS):
        yield


def build(frozen: bool, **options: object) -> nn.Module:
    model = nn.Sequential(*[LoRA() for _ in range(BLOCKS)])
    for block in model:
        block.base.requires_grad_(not frozen)
        fully_shard(block, **options)  # type: ignore[arg-type]
    return fully_shard(model, **options)  # type: ignore[arg-type]


def step(model: nn.Module) -> None:
    model(torch.ones(1, DIM)).float().sum().backward()


def bytes_of(event: str, lines: list[str]) -> int:
    return sum(int(line.split()[-1]) for line in lines if line.startswith(event))


@pytest.mark.parametrize("reduce_dtype", [None, torch.bfloat16], ids=str)
def test_only_trainable_gradients_are_reduced(reduce_dtype: torch.dtype | None) -> None:
    """Byte for byte the factors'. With everything trainable it is the whole group: the count does count."""
    half = 2 if reduce_dtype else 1
    for frozen in (True, False):
        model = build(frozen, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
        lines = record(model)
        step(model)
        assert bytes_of("reduce", lines) == BLOCKS * (FACTORS if frozen else GROUP) // half
        assert [p.grad is None for p in model.parameters()] == [not p.requires_grad for p in model.parameters()]


def peaks(frozen: bool) -> tuple[float, float]:
    """Peak of backward above resting, and what is left after it, gradients that is."""
    with AllocationMeter() as meter:
        model = build(frozen)
        step(model)
        model.zero_grad()
        with meter.region("step"):
            step(model)
    resting = meter.allocated_before("step")
    return meter.peak_during("step") - resting, meter.allocated_at_end() - resting


def test_frozen_weights_have_no_memory_in_backward() -> None:
    """Two groups, the one that computes and the one gathered ahead, and the factors' gradients on their way."""
    peak, left = peaks(frozen=True)
    assert 2 * GROUP <= peak <= 2 * GROUP + 6 * FACTORS + SLACK
    assert BLOCKS * FACTORS / RANKS <= left <= BLOCKS * FACTORS / RANKS + 0.01 * MATRIX
    trainable_peak, trainable_left = peaks(frozen=False)
    assert trainable_peak >= peak + 0.9 * MATRIX, "a full gradient is counted where there is one"
    assert trainable_left >= BLOCKS * MATRIX / RANKS


def test_a_frozen_group_is_gathered_and_no_more() -> None:
    """A block that is frozen altogether, between others: nothing of it is reduced, and nothing of it is left."""
    model = build(frozen=True)
    model[2].requires_grad_(False)
    lines = record(model)
    step(model)
    reduced = [line.split()[1] for line in lines if line.startswith("reduce")]
    assert sorted(set(reduced)) == ["0", "1", "3", "4"]
    assert all(p.grad is None for p in model[2].parameters())
