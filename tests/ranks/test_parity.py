"""Tests that sharded training computes what plain single-process training computes: losses, gradients, parameters.

There are two oracles, both plain torch:
- the *whole* batch on an unsharded copy of the model, which is independent of ranks. It is equal within fp32 rounding,
  because a mean over the batch is summed in another order than the average over the ranks' slices, and bitwise equal on
  one rank;
- the batch *slice by slice*, with gradients averaged by hand: the ranks should compute this bitwise, so it also holds
  where low precision makes the whole batch a poor oracle. Two terms have only one order of addition: it is bitwise on 1
  and 2 ranks.
"""

import copy
import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2 import MixedPrecisionPolicy, fully_shard
from helpers import alone, assert_same, assert_same_names, assert_shard_of, leaves, run_ranks, shard_batch, world_sizes
from models import (
    ConvNet,
    Experts,
    FrozenMix,
    MixedDtypes,
    OddMLP,
    SharedModule,
    SkippedModule,
    TinyGPT,
    TinyLSTM,
    TinyModel,
    mean_loss,
)

STEPS = 3
ROWS = 12  # divides by 1, 2, 3 and 4 ranks
EXACT = {"rtol": 0.0, "atol": 0.0}
ROUNDING = {
    torch.float32: {"rtol": 2e-5, "atol": 1e-6},
    torch.float64: {"rtol": 1e-11, "atol": 1e-13},
}
"""For another order of summation, grown over STEPS steps."""
LOW_PRECISION = {"rtol": 2e-2, "atol": 2e-3}
"""On 3 and more ranks, where sums are rounded to bf16, or from the second step on: one fp32 ulp of another order of
summation may move a parameter to the next bf16 value."""


# ---- the ways to wrap ------------------------------------------------------------------------------------------------


def whole(model: nn.Module, **options: Any) -> None:
    """One group for everything."""
    fully_shard(model, **options)


def children(model: nn.Module) -> list[nn.Module]:
    """The modules below the root that run by themselves: containers are opened."""
    opened = [list(m) if isinstance(m, nn.ModuleList) else [m] for m in dict.fromkeys(model.children())]
    return [m for modules in opened for m in modules]


def nested(model: nn.Module, **options: Any) -> None:
    """A group per child, and the root for the rest."""
    for child in children(model):
        fully_shard(child, **options)
    fully_shard(model, **options)


def pairs(model: nn.Module, **options: Any) -> None:
    """Two neighbours as one group, given as a list, and the root for the rest."""
    modules = children(model)
    for i in range(0, len(modules), 2):
        fully_shard(modules[i : i + 2], **options)
    fully_shard(model, **options)


def blocks(model: TinyGPT, **options: Any) -> None:
    """The usual recipe for a transformer; a tied embedding and head stay together in the root."""
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)


# ---- cases -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Case:
    """One model, wrapped one way, trained for STEPS steps."""

    build: Callable[[], TinyModel]
    wrap: Callable[..., None]
    optimizer: str = "sgd"
    reshard: bool | None = None
    dtype: torch.dtype | None = None
    policy: MixedPrecisionPolicy = MixedPrecisionPolicy()

    def __str__(self) -> str:
        build = getattr(self.build, "__name__", "TinyGPT(tied)")
        dtypes = [d for d in (self.dtype, self.policy.param_dtype, self.policy.reduce_dtype) if d is not None]
        wire = f"wire={self.policy.wire_dtype}"
        return " ".join(map(str, (build, self.wrap.__name__, self.optimizer, f"reshard={self.reshard}", *dtypes, wire)))

    @property
    def low_precision(self) -> bool:
        policy = self.policy
        return policy.param_dtype is not None or policy.wire_dtype is not None or self.build is MixedDtypes

    @property
    def reduces_in_bf16(self) -> bool:
        """Some gradients are rounded to bf16 on the way: summed in it, or stored in it."""
        return self.policy.reduce_dtype == torch.bfloat16 or self.build is MixedDtypes

    def model(self) -> TinyModel:
        """The same initial model, in every process and for the oracle."""
        torch.manual_seed(1)
        model = self.build()
        return model if self.dtype is None else model.to(self.dtype)

    def batch(self, model: TinyModel, step: int) -> Tensor:
        batch = model.example(rows=ROWS, seed=step)
        return batch.to(self.dtype) if self.dtype is not None and batch.is_floating_point() else batch

    def optimizer_for(self, model: nn.Module) -> torch.optim.Optimizer:
        """SGD multiplies by powers of two only, so a fused multiply-add in some vector lanes changes no bit.

        AdamW has a large `eps`: where the true gradient is 0 (a key bias), g / (|g| + 1e-8) would blow rounding up.
        """
        if self.optimizer == "sgd":
            return torch.optim.SGD(model.parameters(), lr=2.0**-2, foreach=True)
        return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, fused=True)


tied_gpt = functools.partial(TinyGPT, tied=True)
USED_ONCE = (OddMLP, TinyGPT, SkippedModule, FrozenMix, TinyLSTM, ConvNet, Experts)
DEEP = (TinyGPT, SharedModule, FrozenMix)
RESHARD = (None, True, False)

WHOLE_BATCH_CASES = [
    *(Case(build, wrap) for build in (*USED_ONCE, SharedModule) for wrap in (whole, leaves)),
    *(Case(build, nested, reshard=reshard) for build in DEEP for reshard in RESHARD),
    *(Case(build, leaves, reshard=False) for build in (SkippedModule, TinyLSTM, Experts)),
    *(Case(build, pairs, reshard=reshard) for build in (OddMLP, SkippedModule, ConvNet) for reshard in (None, False)),
    *(Case(OddMLP, whole, "adamw", reshard) for reshard in RESHARD),
    *(Case(TinyGPT, blocks, "adamw", reshard) for reshard in RESHARD),
    *(Case(build, leaves, "adamw") for build in (SkippedModule, FrozenMix)),
    *(Case(tied_gpt, wrap, "adamw") for wrap in (whole, blocks)),
    *(Case(build, nested, dtype=torch.float64) for build in (TinyGPT, SharedModule, Experts)),
    Case(OddMLP, whole, "adamw", dtype=torch.float64),
]

BF16_REDUCE_FP32 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
BF16_REDUCE_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
BF16_REDUCE_AS_STORED = MixedPrecisionPolicy(param_dtype=torch.bfloat16)  # torch 2.13 reduced in bf16 here
REDUCE_FP32 = MixedPrecisionPolicy(reduce_dtype=torch.float32)

FP32_CASES = [Case(build, wrap) for build in USED_ONCE for wrap in (whole, leaves)]

SLICE_BY_SLICE_CASES = [
    *(Case(build, leaves, policy=BF16_REDUCE_FP32) for build in (*USED_ONCE, SharedModule)),
    *(Case(build, whole, "adamw", policy=BF16_REDUCE_FP32) for build in (OddMLP, FrozenMix)),
    *(Case(TinyGPT, blocks, policy=BF16_REDUCE_FP32, reshard=reshard) for reshard in RESHARD),
    *(Case(tied_gpt, wrap, policy=BF16_REDUCE_FP32) for wrap in (whole, blocks)),
    *(Case(build, nested, policy=BF16_REDUCE_BF16) for build in (OddMLP, TinyGPT)),
    *(Case(build, nested, policy=BF16_REDUCE_AS_STORED) for build in (OddMLP, TinyGPT)),
]

BF16_WIRE = MixedPrecisionPolicy(torch.bfloat16, torch.float32, wire_dtype=torch.bfloat16)
ONLY_BF16_WIRE = MixedPrecisionPolicy(wire_dtype=torch.bfloat16)

WIRE_CASES = [
    *(Case(build, leaves, policy=BF16_WIRE) for build in USED_ONCE),
    *(Case(build, leaves, policy=ONLY_BF16_WIRE) for build in (OddMLP, TinyGPT, Experts)),
    *(Case(tied_gpt, wrap, policy=BF16_WIRE) for wrap in (whole, blocks)),
    Case(MixedDtypes, whole, policy=ONLY_BF16_WIRE),
]

MIXED_DTYPE_CASES = [
    *(Case(MixedDtypes, wrap, reshard=reshard) for wrap in (whole, pairs) for reshard in (None, False)),
    *(Case(MixedDtypes, wrap, policy=REDUCE_FP32) for wrap in (whole, nested)),
    Case(MixedDtypes, whole, "adamw", policy=REDUCE_FP32),
]


# ---- training, plain and sharded -------------------------------------------------------------------------------------


@dataclasses.dataclass
class Step:
    """What one training step leaves behind: the gradients before, the parameters after the optimizer's step."""

    loss: Tensor
    grads: dict[str, Tensor | None]
    params: dict[str, Tensor]


def whole_batch_gradients(model: TinyModel, batch: Tensor) -> Tensor:
    """The first oracle. Leaves the gradients in `model`; returns the loss."""
    loss = mean_loss(model(batch))
    loss.backward()
    return loss.detach()


def slice_by_slice_gradients(
    model: TinyModel, batch: Tensor, *, world_size: int, policy: MixedPrecisionPolicy
) -> Tensor:
    """The second oracle: each rank's slice on a copy in the compute dtype, gradients averaged in the reduce dtype.

    With a wire dtype, those that the ranks would send, rounded to it.
    """
    losses = []
    totals: dict[str, Tensor] = {}
    stored = {name: p.dtype for name, p in model.named_parameters()}
    for rank in range(world_size):
        rank_model = copy.deepcopy(model)
        rows = shard_batch(batch, rank, world_size)
        if policy.param_dtype is not None:
            rank_model.to(policy.param_dtype)
            rows = rows.to(policy.param_dtype) if rows.is_floating_point() else rows
        loss = mean_loss(rank_model(rows))
        loss.backward()
        losses.append(loss.detach())
        for name, p in rank_model.named_parameters():
            if p.grad is not None:
                grad = p.grad.to(policy.wire_dtype or p.grad.dtype).to(policy.reduce_dtype or stored[name])
                totals[name] = totals[name] + grad if name in totals else grad
    for name, p in model.named_parameters():
        p.grad = (totals[name] / world_size).to(p.dtype) if name in totals else None
    return torch.stack(losses).mean()


def plain_training(case: Case, gradients: Callable[[TinyModel, Tensor], Tensor]) -> list[Step]:
    model = case.model()
    optimizer = case.optimizer_for(model)
    steps = []
    for step in range(STEPS):
        model.before_step(step)
        loss = gradients(model, case.batch(model, step))
        grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        optimizer.step()
        steps.append(Step(loss, grads, {name: p.detach().clone() for name, p in model.named_parameters()}))
        optimizer.zero_grad()
    return steps


@functools.cache
def expected_from_whole_batch() -> dict[Case, list[Step]]:
    steps = alone(lambda: [plain_training(case, whole_batch_gradients) for case in WHOLE_BATCH_CASES])
    return dict(zip(WHOLE_BATCH_CASES, steps, strict=True))


def expected_slice_by_slice(case: Case, world_size: int) -> list[Step]:
    gradients = functools.partial(slice_by_slice_gradients, world_size=world_size, policy=case.policy)
    return plain_training(case, gradients)


def sharded_training(case: Case, rank: int, world_size: int) -> Iterator[Step]:
    """The same on one rank of `world_size`; gradients and parameters are the live, sharded ones."""
    model = case.model()
    case.wrap(model, mp_policy=case.policy, reshard_after_forward=case.reshard)
    optimizer = case.optimizer_for(model)
    for step in range(STEPS):
        model.before_step(step)
        loss = mean_loss(model(shard_batch(case.batch(model, step), rank, world_size)))
        loss.backward()
        loss = loss.detach()
        dist.all_reduce(loss)
        grads = {name: p.grad for name, p in model.named_parameters()}
        optimizer.step()
        yield Step(loss / world_size, grads, dict(model.named_parameters()))
        optimizer.zero_grad()


# ---- comparing -------------------------------------------------------------------------------------------------------

Tolerance = dict[str, float]


def check_step(actual: Step, expected: Step, tolerance: Tolerance, loss_tolerance: Tolerance) -> None:
    assert_same_names(actual.params, expected.params)
    assert_same(actual.loss, expected.loss, **loss_tolerance, name="loss")
    for name, grad in expected.grads.items():
        assert_shard_of(actual.grads[name], grad, **tolerance, name=f"{name}.grad")
    for name, param in expected.params.items():
        assert_shard_of(actual.params[name], param, **tolerance, name=name)


def check_cases(
    world_size: int, expected: dict[Case, list[Step]], tolerances: Callable[[Case, int], tuple[Tolerance, Tolerance]]
) -> None:
    """Train every case on forked ranks, all in one launch, and compare each of its steps; name each case that differs.

    `tolerances(case, step)` is for gradients and parameters, and for the loss.
    """

    def first_difference(case: Case, rank: int) -> str | None:
        """Trains to the end in any case: a rank that left early would leave the others waiting."""
        different = None
        for number, actual in enumerate(sharded_training(case, rank, world_size)):
            try:
                check_step(actual, expected[case][number], *tolerances(case, number))
            except AssertionError as error:
                different = different or f"[{case}] step {number}: {error}"
        return different

    def body(rank: int, _: int) -> list[str]:
        different = []
        for case in expected:
            print(f"rank {rank}: {case}", file=sys.stderr, flush=True)  # for the report of a hang
            try:
                different.append(first_difference(case, rank))
            except Exception as error:
                raise RuntimeError(f"[{case}] failed. Before it: {list(filter(None, different))}") from error
        return list(filter(None, different))

    different = [text for texts in run_ranks(world_size, body) for text in texts]
    assert not different, f"{len(different)} differences:\n" + "\n".join(different)


@pytest.mark.parametrize("world_size", world_sizes(1, 3, 4, nightly=[2]))
def test_training_matches_the_plain_model_on_the_whole_batch(world_size: int) -> None:
    """A lost, doubled, unscaled or stale gradient or parameter, in any of these models and ways to wrap them.

    Each on 1 and 2 ranks, and on either 3 or 4: every model, and every way, is on both.
    """
    expected = expected_from_whole_batch()
    if world_size > 2:
        expected = {case: expected[case] for i, case in enumerate(expected) if (i + i // 2) % 2 == world_size % 2}

    def tolerances(case: Case, step: int) -> tuple[Tolerance, Tolerance]:
        tolerance = EXACT if world_size == 1 else ROUNDING[case.dtype or torch.float32]
        return tolerance, tolerance

    check_cases(world_size, expected, tolerances)


SLICE_BY_SLICE = {"one dtype": SLICE_BY_SLICE_CASES, "mixed dtypes": MIXED_DTYPE_CASES, "wire": WIRE_CASES}
ON_2_RANKS = {"one dtype": FP32_CASES}
"""On others the whole batch says as much: on one rank it is the slice, and on three both are equal within rounding."""


@pytest.mark.parametrize(
    ("world_size", "kind"), [*itertools.product(world_sizes(1, 2, nightly=[3]), SLICE_BY_SLICE), (4, "wire")], ids=str
)
def test_training_matches_the_slices_of_the_batch_computed_one_by_one(world_size: int, kind: str) -> None:
    """A cast too many, too early or too late, or a sum in the wrong dtype, hides below whole-batch tolerances.

    Mixed dtypes: one buffer for a group's gradients, or one reduce dtype for all, breaks fp32 beside bf16.
    """
    cases = SLICE_BY_SLICE[kind] + (ON_2_RANKS.get(kind, []) if world_size == 2 else [])

    def tolerances(case: Case, step: int) -> tuple[Tolerance, Tolerance]:
        loss_tolerance = ROUNDING[torch.float32]
        if world_size <= 2:
            return EXACT, loss_tolerance
        if case.low_precision and (step > 0 or case.reduces_in_bf16):
            return LOW_PRECISION, LOW_PRECISION
        return ROUNDING[torch.float32], loss_tolerance

    expected = alone(lambda: [expected_slice_by_slice(case, world_size) for case in cases])
    check_cases(world_size, dict(zip(cases, expected, strict=True)), tolerances)
