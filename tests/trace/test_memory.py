"""Formulas for what a step may hold, held against every allocation that is counted.

G: bytes of one full group.  S = G / ranks: of its shard.  All blocks are equal; activations are far below a percent.
"""

import dataclasses
import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from benchmarks.meters import AllocationMeter
from fsdp2 import MixedPrecisionPolicy, fully_shard, reduce, units
from fsdp2.comm import PairwiseComm, SoloComm
from helpers import fake_world

RANKS, BLOCKS, DIM = 8, 6, 512
GROUP = DIM * DIM * 4 * 4  # four fp32 matrices
SLACK = 0.02 * GROUP
BF16_REDUCE_FP32 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
BF16_WIRE = dataclasses.replace(BF16_REDUCE_FP32, wire_dtype=torch.bfloat16)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.fixture(autouse=True)
def _world() -> Iterator[None]:
    with fake_world(RANKS):
        yield


def build(model: nn.Sequential | None = None, **options: object) -> nn.Module:
    model = model or nn.Sequential(*[Block() for _ in range(BLOCKS)])
    for block in model:
        fully_shard(block, **options)  # type: ignore[arg-type]
    return fully_shard(model, **options)  # type: ignore[arg-type]


def measure(in_backward: bool = False, **options: object) -> dict[str, float]:
    """Resting bytes, peaks of forward and of the whole step above resting, bytes that outlive the model.

    `in_backward`: clear each gradient as soon as it is there, as an optimizer that steps then does.
    """
    gc.collect()  # what earlier tests have left, if it went meanwhile, would count as released
    with AllocationMeter() as meter:
        model = build(**options)
        for param in model.parameters() if in_backward else ():
            param.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
        batch = torch.ones(1, DIM, requires_grad=True)
        for _ in range(2):  # in the second step the order is known: gathers run ahead
            gc.collect()
            with meter.region("step"):
                with meter.region("forward"):
                    loss = model(batch).float().sum()
                loss.backward()
                model.zero_grad()
                batch.grad = None
        del model, batch, loss
        gc.collect()
    resting = meter.allocated_before("step")
    return {
        "resting": resting,
        "forward": meter.peak_during("forward") - resting,
        "step": meter.peak_during("step") - resting,
        "left": meter.allocated_at_end(),
    }


@pytest.mark.parametrize("options", [{}, {"mp_policy": BF16_REDUCE_FP32}], ids=["fp32", "bf16/fp32"])
def test_wrapping_leaves_the_shards_and_holds_one_block_more(options: dict[str, object]) -> None:
    """The full storage of a block, besides the plain model that is being replaced."""
    with AllocationMeter() as meter:
        plain = nn.Sequential(*[Block() for _ in range(BLOCKS)])
        with meter.region("wrapping"):
            model = build(plain, **options)
        del plain
        gc.collect()
    assert meter.peak_during("wrapping") <= (BLOCKS + 1 + 1 / RANKS) * GROUP + SLACK
    assert meter.allocated_at_end() <= BLOCKS * GROUP / RANKS + SLACK
    del model


@pytest.mark.parametrize("options", [{}, {"mp_policy": BF16_REDUCE_FP32}], ids=["fp32", "bf16/fp32"])
def test_at_rest_there_are_the_shards_and_nothing_else(options: dict[str, object]) -> None:
    """A full copy, a gather buffer or a gradient that survives the step would show."""
    memory = measure(**options)
    shards = BLOCKS * GROUP / RANKS
    assert shards <= memory["resting"] <= shards + SLACK
    assert memory["left"] <= 1024, "deleting the model must free everything"


@pytest.mark.parametrize("options", [{}, {"mp_policy": BF16_REDUCE_FP32}], ids=["fp32", "bf16/fp32"])
def test_forward_holds_two_groups(options: dict[str, object]) -> None:
    """The one that computes and the one gathered ahead: no gather buffer beside them, no temporary for the cast."""
    full = GROUP // 2 if options else GROUP
    memory = measure(**options)
    assert 2 * full <= memory["forward"] <= 2.05 * full


def test_forward_without_resharding_holds_all_groups() -> None:
    assert BLOCKS * GROUP <= measure(reshard_after_forward=False)["forward"] <= BLOCKS * GROUP + SLACK


def test_fp32_step_holds_two_groups_and_the_gradients_on_their_way() -> None:
    """One matrix each is a bucket, and its gradient is sent from where autograd put it.

    The peak comes when the second block has three gradients, two of them on their way and one just computed, while the
    first is gathered ahead: 2 G + 3 G/4, and the shards of the gradients so far: S of each block behind, 3 S/4 here.
    """
    expected = 2 * GROUP + 3 * GROUP / 4 + (BLOCKS - 2 + 3 / 4) * GROUP / RANKS
    assert 0.98 * expected <= measure()["step"] <= expected + SLACK


def test_optimizer_in_backward_holds_no_gradients_but_those_on_their_way() -> None:
    """As above without the shards of complete gradients; those that are being reduced are two, of S/4 each."""
    expected = 2 * GROUP + 3 * GROUP / 4 + 2 * GROUP / RANKS / 4
    assert 0.98 * expected <= measure(in_backward=True)["step"] <= expected + SLACK


def test_mixed_precision_step_holds_two_groups_and_the_gradients_on_their_way() -> None:
    """As above, but a bucket is packed into fp32, twice its size, before it is sent.

    The peak comes when the second block's last gradient is packed, while the one before it is on its way.
    """
    full = GROUP / 2
    gradients = full / 4 + 2 * (GROUP / 4)
    expected = 2 * full + gradients + (BLOCKS - 1) * GROUP / RANKS
    assert 0.98 * expected <= measure(mp_policy=BF16_REDUCE_FP32)["step"] <= expected + SLACK


@pytest.mark.parametrize("pairwise", [False, True])
def test_bf16_wire_step_holds_each_gradient_twice_while_it_travels(
    pairwise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket is sent from where autograd put it; what arrives is as large (gloo: without this rank's own slice).

    The peak comes when the second block's last gradient is computed, two others travel, and what arrived of the older
    one is summed, for which the CPU casts one slice at a time. As much as for fp32 reductions by a reduce-scatter; on
    gloo these receive, too, and hold about a group more.
    """
    received = 1.0
    if pairwise:
        monkeypatch.setattr(reduce, "make_comm", lambda group, _: PairwiseComm(group) if group else SoloComm())
        monkeypatch.setattr(PairwiseComm, "direct_min_bytes", 128 * 1024)
        received = (RANKS - 1) / RANKS
    full = GROUP / 2
    gradients = (1 + 2 * (1 + received)) * full / 4
    expected = 2 * full + gradients + (BLOCKS - 2 + 3 / 4 + 1 / 4) * GROUP / RANKS
    assert 0.98 * expected <= measure(mp_policy=BF16_WIRE)["step"] <= expected + SLACK
    widened = 2 * (1 + received) * GROUP / 4 if pairwise else 2 * GROUP / 4
    ordinary = 2 * full + full / 4 + widened + (BLOCKS - 1) * GROUP / RANKS
    assert 0.98 * ordinary <= measure(mp_policy=BF16_REDUCE_FP32)["step"] <= ordinary + SLACK


def test_model_is_freed_with_its_last_reference() -> None:
    """Hooks, contexts and saved tensors hold each other; a cycle through autograd could never be collected."""
    model = build()
    model(torch.ones(1, DIM)).sum().backward()
    reference = weakref.ref(model[0].layers[0])
    del model
    gc.collect()
    assert reference() is None


VOCAB = 9 * GROUP // (4 * 4 * DIM)  # an embedding, and a head, of 2.25 groups each


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def peaks_of_language(ranks: int, **options: object) -> tuple[float, float]:
    """Peaks of forward and of the whole step above resting, in groups, where the model's own call has both."""
    gc.collect()
    with AllocationMeter() as meter:
        model = Language()
        for block in model.blocks:
            fully_shard(block, **options)  # type: ignore[arg-type]
        fully_shard(model, **options)  # type: ignore[arg-type]
        tokens = torch.zeros(1, dtype=torch.long)
        for _ in range(2):
            with meter.region("step"):
                with meter.region("forward"):
                    loss = model(tokens).float().sum()
                loss.backward()
                model.zero_grad()
    resting, group = meter.allocated_before("step"), GROUP / (2 if options else 1)
    return (meter.peak_during("forward") - resting) / group, (meter.peak_during("step") - resting) / group


def test_an_embedding_and_a_head_left_in_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward holds the larger of them and a block; backward a head, its gradient, a block, and what is on its way: in
    mixed precision two of 16 pieces of the gradient in fp32. All sharded gradients are an eighth, in fp32.
    """
    monkeypatch.setattr(reduce, "MIN_PIECE_BYTES", 1 << 16)
    large = 2.25
    forward, step = peaks_of_language(RANKS)
    assert large < forward <= large + 1 + 0.05
    assert 2 * large < step <= 2 * large + 1 + large / RANKS + 0.05
    forward, step = peaks_of_language(RANKS, mp_policy=BF16_REDUCE_FP32)
    assert large < forward <= large + 1 + 0.05
    assert 2 * large < step <= 2 * large + 1 + 2 * large * (2 / 16 + 1 / RANKS) + 0.05
    monkeypatch.setattr(units, "MIN_UNIT_BYTES", 1 << 40)
    forward_of_one, step_of_one = peaks_of_language(RANKS, mp_policy=BF16_REDUCE_FP32)
    assert forward_of_one > forward + 2, "the formula can be missed"
    assert step_of_one > step + 6, "so can this one"
