"""Tests gradients that are sent in fewer bits than they are summed in: each rank's are rounded once, sums are not.

The oracle is plain: every rank's gradients of the unsharded model, rounded by hand, added in rank order and divided in
the reduce dtype. gloo adds them in that order, too, so gradients are bitwise equal on any number of ranks.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.func import functional_call
from torch.nn.utils import clip_grad_norm_ as clip

from fsdp2 import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    clip_grad_norm_,
    fully_shard,
    padding_report,
)
from fsdp2.checks.named_comm import NamedPairwiseComm
from fsdp2.codecs import Rows, sum_decoded
from fsdp2.engine import buckets
from fsdp2.engine import group as groups
from fsdp2.engine.comm import CoalescedComm, Comm, Purpose, SoloComm
from fsdp2.engine.gloo import PairwiseComm
from fsdp2.engine.gradients import GroupGradients
from fsdp2.engine.state import groups_below
from helpers import Differences, assert_same, full, run_checks, world_sizes
from simulated_device import simulated_device

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


def keep_vectors(param: nn.Parameter) -> torch.dtype | None:
    return param.dtype if param.dim() == 1 else None


@dataclasses.dataclass(frozen=True)
class ToBfloat16:
    """A codec as a user writes one, from the documentation alone: what it sends are bytes for all that others know.

    What it does must be what `wire_dtype=torch.bfloat16` does, bit for bit.
    """

    feedback: bool = False
    exchanges: ClassVar[bool] = True

    def packed_dtype(self, summed: torch.dtype) -> torch.dtype:
        return summed

    def sent_nbytes(self, numel: int, summed: torch.dtype) -> int:
        return 2 * numel

    def encode(self, numbers: Tensor, seed: int) -> Tensor:
        assert not numbers.isnan().any(), "padding holds anything"
        return numbers.bfloat16().view(torch.uint8)

    def decode(self, wire: Tensor, numbers: Tensor) -> None:
        numbers.copy_(wire.view(BF16))

    def sum(self, rows: Rows, total: Tensor) -> None:
        sum_decoded(self, rows, total)


POLICIES = {
    "bf16": MixedPrecisionPolicy(BF16, F32, wire_dtype=BF16),
    "fp32": MixedPrecisionPolicy(wire_dtype=BF16),
    "fp16 wire, fp64 sums": MixedPrecisionPolicy(BF16, F64, wire_dtype=F16),
    "bf16, fp32 vectors": MixedPrecisionPolicy(BF16, F32, wire_dtype=BF16, param_dtype_override_fn=keep_vectors),
    # Where ranks sum what they receive, these travel as they come.
    "bf16 as it comes": MixedPrecisionPolicy(BF16, F32),
    "codec, bf16": MixedPrecisionPolicy(BF16, F32, gradient_codec=ToBfloat16()),
    "codec, fp32": MixedPrecisionPolicy(gradient_codec=ToBfloat16()),
    "codec with feedback": MixedPrecisionPolicy(gradient_codec=ToBfloat16(feedback=True)),
    "fp16 as it comes, fp32 vectors": MixedPrecisionPolicy(F16, F32, param_dtype_override_fn=keep_vectors),
}


class Odd(nn.Module):
    """Even, uneven and one-row matrices, a vector and a scalar; parts that a forward may use or not."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(16, 24, bias=False), nn.Linear(16, 7, bias=False)
        self.out = nn.Linear(31, 5, bias=False)
        self.shift, self.scale = nn.Parameter(torch.randn(24)), nn.Parameter(torch.tensor(1.5))
        self.short = nn.Parameter(torch.ones(1, 5))

    def forward(self, x: Tensor, use: str = "lr") -> Tensor:
        left = self.left(x) + self.shift if "l" in use else x.new_zeros(len(x), 24)
        right = self.right(x) if "r" in use else x.new_zeros(len(x), 7)
        return self.out(torch.tanh(torch.cat([left, right], 1)).to(x.dtype)) * self.scale * self.short


def loss_of(output: Tensor) -> Tensor:
    return output.float().square().mean()


def plain_model() -> Odd:
    torch.manual_seed(1)
    return Odd()


def batch(rank: int, number: int) -> Tensor:
    return torch.randn(6, 16, generator=torch.Generator().manual_seed(100 * number + rank))


@dataclasses.dataclass(frozen=True)
class Pass:
    """A backward: which parts the forward used, by rank if ranks differ ("l,r"), and how far its gradients go ("wait",
    "scatter" or "reduce").
    """

    use: str = "lr"
    mode: str = "reduce"

    def used_by(self, rank: int) -> str:
        parts = self.use.split(",")
        return parts[rank % len(parts)]


@dataclasses.dataclass(frozen=True)
class Case:
    """How the model is sharded, and its backward passes."""

    policy: str = "bf16"
    passes: tuple[Pass, ...] = (Pass(),)
    mesh: tuple[int, int] | None = None
    nested: bool = False
    last_dim: bool = False
    # Each gradient in a bucket of its own, from where it lies if it can; or all of them packed.
    direct: bool = True
    # As on NCCL.
    all_to_all: bool = False
    offload: bool = False
    # Ranks reduce zeros for parameters that they do not use.
    fills: bool = False


# ---- the oracle


def gradients_of_a_rank(
    model: Odd, policy: MixedPrecisionPolicy, x: Tensor, use: str, scale: float = 1.0
) -> dict[str, Tensor]:
    kept = policy.param_dtype_override_fn or (lambda param: None)
    leaves = {
        name: param.detach().to(kept(param) or policy.param_dtype or F32).requires_grad_()
        for name, param in model.named_parameters()
    }
    (loss_of(functional_call(model, leaves, (x.to(policy.param_dtype or F32), use))) * scale).backward()
    return {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def wire_of(policy: MixedPrecisionPolicy) -> torch.dtype | None:
    """The dtype to which gradients are rounded on their way."""
    return policy.wire_dtype or (BF16 if policy.gradient_codec else None)


def mean(parts: list[Tensor]) -> Tensor:
    return functools.reduce(operator.add, parts) / len(parts)


def expected_gradients(case: Case, replicas: list[list[int]]) -> dict[str, Tensor]:
    """Full gradients wait in the reduce dtype, and are rounded when they leave; sums between replicas are not. With
    feedback, what rounding takes away is in the next gradient that leaves.
    """
    policy, model = POLICIES[case.policy], plain_model()
    has_feedback = policy.gradient_codec is not None and policy.gradient_codec.feedback
    lost: dict[tuple[int, str], Tensor] = {}
    summed = policy.reduce_dtype or F32
    waiting: dict[int, dict[str, Tensor]] = {rank: {} for row in replicas for rank in row}
    partial: list[dict[str, Tensor]] = [{} for _ in replicas]
    reduced: dict[str, Tensor] = {}
    for number, each in enumerate(case.passes):
        for rank, waits in waiting.items():
            for name, grad in gradients_of_a_rank(model, policy, batch(rank, number), each.used_by(rank)).items():
                waits[name] = waits.get(name, 0) + grad.to(summed)
        if each.mode == "wait":
            continue
        for row, kept in zip(replicas, partial, strict=True):
            for name, param in model.named_parameters() if case.fills else ():
                for rank in row:
                    waiting[rank].setdefault(name, torch.zeros_like(param, dtype=summed))
            for name in list(waiting[row[0]]):
                whole = {rank: waiting[rank].pop(name) for rank in row}
                if has_feedback:
                    whole = {rank: value + lost.get((rank, name), 0) for rank, value in whole.items()}
                sent = [value.to(wire_of(policy) or summed).to(summed) for value in whole.values()]
                lost |= {(rank, name): whole[rank] - each for rank, each in zip(row, sent, strict=True)}
                kept[name] = kept.get(name, 0) + mean(sent)
        if each.mode == "reduce":
            for name in list(partial[0]):
                reduced[name] = reduced.get(name, 0) + mean([kept.pop(name) for kept in partial]).to(F32)
    return reduced


# ---- the same, sharded


def comm_over(all_to_all: bool) -> AbstractContextManager[Any]:
    """In it, groups communicate that way."""

    def make_comm(group: Any, device: torch.device, purpose: Purpose) -> Comm:
        if group is None:
            return SoloComm()
        return CoalescedComm(group, purpose) if all_to_all else NamedPairwiseComm(group, purpose)

    return mock.patch.object(groups, "make_comm", make_comm)


def shard(case: Case, model: Odd) -> None:
    world_size = dist.get_world_size()
    options: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", case.mesh or (world_size,)),
        "mp_policy": POLICIES[case.policy],
        "shard_placement_fn": (lambda p: Shard(p.dim() - 1) if p.dim() else None) if case.last_dim else None,
    }
    if case.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    for module in (model.left, model.right, model.out) if case.nested else ():
        fully_shard(module, **options)
    fully_shard(model, **options)
    model.set_reduce_scatter_unused_params(case.fills)  # type: ignore[operator]


def run_passes(case: Case, model: Any) -> None:
    for number, each in enumerate(case.passes):
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(each.mode != "wait")
        model.set_requires_all_reduce(each.mode == "reduce")
        rank = dist.get_rank()
        loss_of(model(batch(rank, number), each.used_by(rank))).backward()


def check_gradients(case: Case) -> None:
    ranks = torch.arange(dist.get_world_size()).view(case.mesh or (1, -1)).tolist()
    expected = expected_gradients(case, ranks)
    with ExitStack() as patches:
        patches.enter_context(comm_over(case.all_to_all))
        for comm in (PairwiseComm, CoalescedComm) if case.direct else ():
            patches.enter_context(mock.patch.object(comm, "direct_min_bytes", 16))
            patches.enter_context(mock.patch.object(buckets, "MIN_BUCKET_BYTES", 1))
            patches.enter_context(mock.patch.object(buckets, "MIN_PIECE_BYTES", 16))
        if case.offload:
            patches.enter_context(simulated_device())
        model = plain_model()
        shard(case, model)
        run_passes(case, model)
        seen = [
            grads._plan(bucket.indices, grads._may_be_sums).layout
            for grads in all_gradients(model)
            for bucket in grads.buckets
        ]
    assert goes_direct(case) in (None, any(layout.direct for layout in seen))
    for name, param in model.named_parameters():
        grad = None if param.grad is None else full(param.grad)
        assert_same(grad, expected.get(name), 0, 0, f"{name}.grad")


def all_gradients(model: nn.Module) -> list[GroupGradients]:
    return [group.gradients for group in groups_below(model)]


def goes_direct(case: Case) -> bool | None:
    """Whether autograd gives some gradient of whole rows in the wire dtype; None: it does not matter."""
    shards = case.mesh[1] if case.mesh else dist.get_world_size()
    if "as it comes" in case.policy and len(case.passes) > 1:
        return None  # what has waited is cast before it travels
    if shards == 1 or case.last_dim:
        return None
    return case.direct and case.policy.startswith(("bf16", "fp16 as it comes", "codec, fp32"))


def run_cases(world_size: int, cases: list[Case]) -> None:
    run_checks(world_size, [(str(case), functools.partial(check_gradients, case)) for case in cases])


WITH_A_DEVICE = ("bf16", "fp32", "codec, fp32", "codec with feedback")
WAYS = [Case(policy, direct=direct) for policy in POLICIES for direct in (True, False)]
NESTED = [Case(policy, nested=True) for policy in POLICIES]


@pytest.mark.parametrize("world_size", world_sizes(1, 2, 3, nightly=[4]))
def test_gradients_are_means_of_the_sent_values(world_size: int) -> None:
    """One rounding too many or too few, a sum of two in bf16, a wrong offset: each moves a bit."""
    more = [Case(policy, last_dim=True) for policy in POLICIES]
    apart = [Case(policy, offload=True, direct=direct) for policy in WITH_A_DEVICE for direct in (True, False)]
    run_cases(world_size, WAYS + NESTED + more + apart)


@pytest.mark.parametrize("world_size", [2, 4])
def test_by_all_to_all(world_size: int) -> None:
    """The collective of NCCL and others where dtypes differ, on gloo, which has it as well."""
    replicas = [Case(policy, mesh=(2, 2)) for policy in ("bf16", "codec, bf16")] if world_size == 4 else []
    cases = [case for case in WAYS + NESTED + replicas if wire_of(POLICIES[case.policy]) is not None]
    run_cases(world_size, [dataclasses.replace(case, all_to_all=True) for case in cases])


@pytest.mark.parametrize("mesh", [(2, 2), (1, 2), (2, 1)], ids=str)
def test_replicas_sum_in_the_reduce_dtype(mesh: tuple[int, int]) -> None:
    """What a replica has summed is rounded no more, neither between passes nor on its way to the other replica."""
    accumulated = (Pass(mode="scatter"), Pass("l", "wait"), Pass("r", "scatter"), Pass("l"), Pass())
    cases = [Case(policy, passes, mesh) for policy in POLICIES for passes in ((Pass(),), accumulated)]
    run_cases(mesh[0] * mesh[1], cases)


def test_unsynchronized_gradients_are_rounded_when_they_are_sent() -> None:
    """They add up in the reduce dtype; beside fresh ones of the wire dtype, in a bucket or on their own. Ranks know how
    others' travel, though only on some of them a gradient has waited.
    """
    passes = [
        (Pass(mode="wait"), Pass(mode="wait"), Pass()),
        (Pass("l", "wait"), Pass("r")),
        (Pass("lr", "wait"), Pass("r"), Pass()),
        (Pass("l,r", "wait"), Pass("r,l", "wait"), Pass("lr")),
        (Pass("l,r", "wait"), Pass("lr"), Pass("lr")),
        (Pass(), Pass("l"), Pass("r"), Pass()),
    ]
    ways = [way for way in WAYS if not way.policy.startswith("codec,") or (way.direct and "bf16" in way.policy)]
    run_cases(2, [dataclasses.replace(way, passes=each) for way in ways for each in passes])


@pytest.mark.parametrize("world_size", world_sizes(2, nightly=[3]))
def test_zeros_for_unused_parameters_carry_what_was_not_sent(world_size: int) -> None:
    passes = Pass(), Pass("l,r"), Pass("l"), Pass("r,l"), Pass()
    ways = [way for way in WAYS if way.policy in ("bf16", "codec, bf16", "codec with feedback")]
    run_cases(world_size, [dataclasses.replace(way, passes=passes, fills=True) for way in ways])


def waits_inside_a_pass() -> None:
    """An inner backward's gradients wait, and those of the outer one are added, before they leave."""
    model, rank, ranks = plain_model(), dist.get_rank(), range(dist.get_world_size())
    shard(Case("bf16 as it comes"), model)
    inner, output = loss_of(model(batch(rank, 0))), model(batch(rank, 1))

    def run_inner(_: Any) -> None:
        inner.backward()
        model.set_requires_gradient_sync(True)

    output.grad_fn.register_prehook(run_inner)  # behind that of the module, which begins the pass
    model.set_requires_gradient_sync(False)
    loss_of(output).backward()
    grads = [
        [gradients_of_a_rank(plain_model(), POLICIES["bf16"], batch(each, n), "lr") for n in (0, 1)] for each in ranks
    ]
    for name, param in model.named_parameters():
        sums = [first[name].float() + second[name].float() for first, second in grads]
        assert name != "left.weight" or all((each != each.bfloat16()).any() for each in sums), "nothing to round"
        assert_same(full(param.grad), mean(sums), 0, 0, f"{name}.grad")


def test_gradients_accumulated_inside_a_pass_are_not_rounded() -> None:
    run_checks(2, [("waits inside a pass", waits_inside_a_pass)])


def different_numbers_of_batches(wire_dtype: torch.dtype | None) -> None:
    """Without gathers in between, ranks may: of three batches on one rank, and one on the other, the sums."""
    rank, model = dist.get_rank(), plain_model()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(BF16, F32, wire_dtype=wire_dtype), reshard_after_forward=False)
    numbers = (range(3), range(1))
    for number in numbers[rank]:
        last = number == numbers[rank][-1]
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
        loss_of(model(batch(rank, number))).backward()
    grads = [
        [gradients_of_a_rank(plain_model(), POLICIES["bf16"], batch(each, n), "lr") for n in numbers[each]]
        for each in range(2)
    ]
    for name, param in model.named_parameters():
        sums = [functools.reduce(operator.add, (grad[name].float() for grad in own)) for own in grads]
        assert_same(full(param.grad), mean(sums), 0, 0, f"{name}.grad")


def refused() -> None:
    with pytest.raises(RuntimeError, match=r"float32.*bfloat16.*give MixedPrecisionPolicy its reduce_dtype as wire"):
        different_numbers_of_batches(None)


def test_ranks_that_accumulate_different_numbers_of_batches() -> None:
    """They don't know of each other what has waited: refused, unless gradients are cast before they travel."""
    run_checks(2, [("cast", functools.partial(different_numbers_of_batches, F32)), ("refused", refused)])


def reported_padding(policy: str) -> int:
    """Bytes of the gradients in one reduction, as `padding_report` says."""
    model = nn.Linear(16, 24, bias=False)
    fully_shard(model, mp_policy=POLICIES[policy])
    (report,) = padding_report(model)
    return report.reduce.nbytes


def padding_counts_what_travels() -> None:
    assert [reported_padding(policy) for policy in ("bf16", "bf16 as it comes")] == [2 * 16 * 24] * 2
    assert reported_padding("fp16 wire, fp64 sums") == 2 * 16 * 24
    with comm_over(all_to_all=True):
        assert reported_padding("bf16 as it comes") == 4 * 16 * 24


def test_padding_report_counts_the_sent_bytes() -> None:
    run_checks(2, [("padding", padding_counts_what_travels)])


# ---- what is usual between backward and step


class Side:
    """A model, sharded or plain, and what steps it."""

    def __init__(self, model: Odd) -> None:
        self.model = model
        self.scaler = GradScaler("cpu", init_scale=2.0**22, backoff_factor=2.0**-8, growth_interval=2)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)

    def step(self, clip: Callable[..., Tensor] | None) -> Tensor:
        """The norm of the unscaled gradients, before they are clipped."""
        self.scaler.unscale_(self.optimizer)
        norm = full(clip(self.model.parameters(), 0.05)) if clip else torch.zeros(())
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return norm


def clipped_and_scaled(policy_name: str, clips: bool) -> None:
    """What is clipped and unscaled are the sums, after the wire; where that has too few exponents, all ranks skip.

    Without clipping bitwise. A norm may differ in its last bit, so each step begins with the same values.
    """
    policy, tolerance = POLICIES[policy_name], 1e-6 if clips else 0
    model, different, scales = plain_model(), Differences(), []
    shard(Case(policy_name), model)
    ours, reference = Side(model), Side(plain_model())
    for number in range(4):
        scale = ours.scaler.get_scale()
        ours.scaler.scale(loss_of(ours.model(batch(dist.get_rank(), number)))).backward()
        reference.scaler.scale(torch.zeros(()))  # begins to scale
        sent = [
            gradients_of_a_rank(reference.model, policy, batch(rank, number), "lr", scale)
            for rank in range(dist.get_world_size())
        ]
        for name, param in reference.model.named_parameters():
            parts = [each[name].to(policy.wire_dtype).to(policy.reduce_dtype or F32) for each in sent]
            param.grad = mean(parts).to(F32)
        norm, expected = ours.step(clip_grad_norm_ if clips else None), reference.step(clip if clips else None)
        scales.append(ours.scaler.get_scale())
        with different.noted():
            assert scales[-1] == reference.scaler.get_scale(), f"step {number}"
            assert_same(norm, expected, tolerance, 0, f"step {number}: norm")
        for (name, actual), whole in zip(ours.model.named_parameters(), reference.model.parameters(), strict=True):
            value = full(actual)
            with different.noted():
                assert_same(value, whole.detach(), tolerance, tolerance, f"step {number}: {name}")
            whole.data.copy_(value)
    different.raise_first()
    assert (scales[0] < 2.0**22) == (policy.wire_dtype is F16), "beyond 65504"
    assert scales[-1] > scales[0], "steps were taken"


@pytest.mark.parametrize("world_size", [1, 3])
def test_clipping_and_loss_scaling(world_size: int) -> None:
    cases = [(name, clips) for name in ("bf16", "fp16 wire, fp64 sums") for clips in (False, True)]
    run_checks(world_size, [(str(case), functools.partial(clipped_and_scaled, *case)) for case in cases])


# ---- parameters that are not plain, with whole numbers that bf16 rounds


def numbers(*shape: int, seed: int) -> Tensor:
    return torch.randint(-20, 21, shape, generator=torch.Generator().manual_seed(seed)).float()


def of_a_rank(first: Tensor, second: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Gradients of two matrices, one behind the other: exact in fp32, in whatever order they are computed."""
    x, y = numbers(3, 8, seed=rank), numbers(3, 6, seed=10 + rank)
    return (second.T @ y.T @ x), y.T @ (x @ first.T)


def tensor_parallel() -> None:
    """Each rank sends its part of the gradient of a DTensor, to those that have the same part."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    first, second = numbers(10, 8, seed=20), numbers(6, 10, seed=21)
    model = nn.Sequential(nn.Linear(8, 10, bias=False), nn.Linear(10, 6, bias=False))
    model[0].weight.data.copy_(first), model[1].weight.data.copy_(second)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"], mp_policy=POLICIES["fp32"])
    rank = mesh.get_local_rank("dp")
    (model(numbers(3, 8, seed=rank)) * numbers(3, 6, seed=10 + rank)).sum().backward()
    for i in range(2):
        whole = [of_a_rank(first, second, each)[i] for each in range(2)]
        assert any((part != part.bfloat16()).any() for part in whole), "otherwise nothing is rounded"
        expected = mean([part.bfloat16().float() for part in whole])
        assert_same(full(model[i].weight.grad), expected, 0, 0, f"{i}.weight.grad")


def extended() -> None:
    """Its gradient may come in any dtype: here in fp32, of a parameter that is gathered in bf16."""
    model = nn.Linear(8, 6, bias=False)
    model.weight.data.copy_(numbers(6, 8, seed=20))
    fully_shard(model, mp_policy=POLICIES["fp32"])
    local = model.weight._local_tensor
    local.fsdp_pre_all_gather = lambda mesh: ((local.bfloat16(),), None)
    local.fsdp_post_all_gather = post_all_gather
    rank = dist.get_rank()
    x, y = numbers(3, 8, seed=rank) * 7, numbers(3, 6, seed=10 + rank)
    (model(x) * y).sum().backward()
    parts = [numbers(3, 6, seed=10 + each).T @ (numbers(3, 8, seed=each) * 7) for each in range(2)]
    assert any((part != part.bfloat16()).any() for part in parts), "otherwise nothing is rounded"
    assert_same(full(model.weight.grad), mean([part.bfloat16().float() for part in parts]), 0, 0, "weight.grad")


def post_all_gather(outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: Tensor | None = None) -> Any:
    value = outputs[0].float()
    if out is not None:
        out.copy_(value)
        return None
    return value, (value,)


def test_tensor_parallel_gradients() -> None:
    run_checks(4, [("tensor parallel", tensor_parallel)])


def test_gradients_of_extensions() -> None:
    run_checks(2, [("extended", extended)])
