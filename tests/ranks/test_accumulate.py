"""Tests `fsdp2.accumulate` and `no_sync`: gradients are those of the mean over all weights, or all ranks raise.

The oracle is the plain model on all micro-batches of all ranks at once, in fp64. Weights and rows are drawn for each
micro-batch of each rank; some weights are 0.
"""

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp2
from cut_gradients import small_pieces
from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, replicate
from fsdp2.checks.named_comm import NamedPairwiseComm
from fsdp2.compression import Compression
from fsdp2.engine.state import groups_below
from helpers import NIGHTLY, assert_same, full, run_checks, world_sizes
from helpers import shard_blocks as shard
from models import FrozenMix, OddMLP, SkippedModule, TanhBlock, TinyGPT, TinyModel, build

EXACT = {"rtol": 1e-12, "atol": 1e-13}
SETTINGS = ("reduce_gradients", "all_reduce", "divide_factor", "divide_late", "reshard_after_backward")
Part = tuple[Tensor, Tensor]
"""The rows of one micro-batch, and the weight of each."""


def draw(model: TinyModel, seed: int, micro_batches: int, ranks: int) -> list[list[Part]]:
    """Returns the micro-batches of each rank. Any has 1 to 4 rows, of weight 0, 1 or 2.5; one at least is not 0."""
    source = random.Random(seed)

    def part(i: int) -> Part:
        rows = source.randint(1, 4)
        batch = model.example(rows=rows, seed=1000 * seed + i)
        weights = torch.tensor([source.choice((0.0, 1.0, 2.5)) for _ in range(rows)], dtype=torch.float64)
        if i == 0:
            weights[0] = 1.0
        return (batch.double() if batch.is_floating_point() else batch), weights

    return [[part(rank * micro_batches + i) for i in range(micro_batches)] for rank in range(ranks)]


def loss_sum(model: nn.Module, part: Part) -> Tensor:
    rows, weights = part
    return ((model(rows) - 0.5).square().flatten(1).mean(1) * weights).sum()


def plain_backward(model: TinyModel, parts: list[list[Part]]) -> tuple[float, float]:
    """Returns the mean loss, and the sum of all weights."""
    every = [part for own in parts for part in own]
    total = sum(weights.sum() for _, weights in every)
    loss = sum(loss_sum(model, part) for part in every) / total
    loss.backward()
    return loss.item(), total.item()


def hsdp() -> dict[str, Any]:
    return {"mesh": init_device_mesh("cpu", (2, dist.get_world_size() // 2))}


def same(model: nn.Module, expected: nn.Module, **tolerance: float) -> None:
    for (name, param), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert_same(param.grad, other.grad, **(tolerance or EXACT), name=name)


def settings(model: nn.Module) -> list[Any]:
    return [getattr(group.settings, name) for group in groups_below(model) for name in SETTINGS]


def step(model: Any, parts: list[Part], **options: Any) -> Any:
    with fsdp2.accumulate(model, **options) as acc:
        for part in parts:
            acc.backward(loss_sum(model, part), weight=part[1].sum())
    return acc


def trains(
    make: Callable[[], TinyModel], apply: Callable[[Any], Any], sync: str, known: bool, data: Any = None
) -> None:
    """Gradients, mean loss and total weight of each step, on any partition; and the parameters that follow."""
    rank, ranks = data() if data else (dist.get_rank(), dist.get_world_size())
    model, plain = apply(build(make)), build(make)
    before = settings(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    for number in range(2):
        micro_batches = 3 - number
        for each in (model, plain):
            each.before_step(number)
        parts = draw(model, number, micro_batches, ranks)
        acc = step(model, parts[rank], sync=sync, num_batches=micro_batches if known else None)
        expected = plain_backward(plain, parts)
        assert (acc.mean_loss, acc.total_weight) == pytest.approx(expected, rel=1e-12)
        same(model, plain)
        assert settings(model) == before
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


WAYS = [(sync, known) for sync in ("last", "each") for known in (True, False)]
TWO_WAYS = (WAYS, WAYS) if NIGHTLY else ((WAYS[0], WAYS[3]), (WAYS[1], WAYS[2]))
"""Of which either two have each value of either choice."""
ONE_AXIS = (OddMLP, TinyGPT, FrozenMix, SkippedModule)


@pytest.mark.parametrize("ranks", world_sizes(1, 2, nightly=[3]))
def test_random_partitions(ranks: int) -> None:
    cases: list[tuple[str, Callable[[], None]]] = []
    for i, make in enumerate((*ONE_AXIS, None)):
        apply = partial(shard, apply=replicate) if make is None else shard
        for way in TWO_WAYS[i % 2] if ranks > 1 else WAYS[i : i + 1]:
            cases.append((f"{make} {way}", partial(trains, make or OddMLP, apply, *way)))
    run_checks(ranks, cases)


def tensor_parallel(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    parallelize_module(model, mesh["tp"], {"wide": ColwiseParallel(), "narrow": RowwiseParallel()})
    return shard(model, mesh=mesh["shard"])


class Wide(OddMLP):
    """Has layers that tensor parallelism can cut evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(5, 8), nn.Linear(8, 3)


def a_loss_of_tensor_parallelism() -> None:
    """It is a DTensor, whose value is that of both ranks."""
    model, plain = tensor_parallel(build(Wide)), build(Wide)
    mesh = init_device_mesh("cpu", (2, 2))
    (part,) = draw(model, 0, 1, 1)[0]
    with fsdp2.accumulate(model, num_batches=1) as acc:
        loss = DTensor.from_local(loss_sum(model, part), DeviceMesh.from_group(mesh.get_group(1), "cpu"), [Replicate()])
        acc.backward(loss, weight=part[1].sum())
    assert acc.mean_loss == pytest.approx(plain_backward(plain, [[part]])[0], rel=1e-12)
    same(model, plain)


def test_four_ranks() -> None:
    """HSDP, and tensor parallelism: its two ranks have the same rows, which count once."""
    hybrid, of_pair = (lambda model: shard(model, **hsdp())), (lambda: (dist.get_rank() // 2, 2))
    cases: list[tuple[str, Callable[[], None]]] = []
    cases += [(f"hsdp {way}", partial(trains, TinyGPT, hybrid, *way)) for way in TWO_WAYS[0]]
    cases += [(f"tp {way}", partial(trains, Wide, tensor_parallel, *way, data=of_pair)) for way in TWO_WAYS[1]]
    run_checks(4, [*cases, ("a loss of tensor parallelism", a_loss_of_tensor_parallelism)])


# ---- other ways to train ---------------------------------------------------------------------------------------------


def in_pieces() -> None:
    """Large gradients are reduced part by part, and divided once."""
    with small_pieces(piece_bytes=64):
        for sync, known in TWO_WAYS[0]:
            trains(OddMLP, shard, sync, known)


def offloaded() -> None:
    for sync in ("last", "each"):
        trains(OddMLP, partial(shard, offload_policy=CPUOffloadPolicy()), sync, known=True)


def finalized_by_hand() -> None:
    """Gradients are complete when the block ends, also where backward leaves reductions in flight."""

    def apply(model: Any) -> Any:
        shard(model).set_manual_backward_finalization(True)
        return model

    for sync, known in TWO_WAYS[1]:
        trains(OddMLP, apply, sync, known)


def summed_in_bf16() -> None:
    """The sum of all weights, 1001, is no number of bf16: sums are divided in fp32, and rounded once."""
    model: Any = nn.Linear(4, 1, bias=False)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
    weight = 1001 / dist.get_world_size()
    with fsdp2.accumulate(model, sync="each") as acc:
        acc.backward(model(torch.ones(1, 4)).sum() * 1001, weight=weight)
    (total,) = {x.item() for x in full(model.weight.grad).flatten()}
    expected = torch.tensor(1001.0).bfloat16().float() * dist.get_world_size() / 1001
    assert total == expected.bfloat16().item()


def scaled_in_fp16() -> None:
    """A scale that overflows is noticed as ever."""
    policy = MixedPrecisionPolicy(torch.float16, torch.float32)
    torch.manual_seed(1)
    plain = OddMLP()
    torch.manual_seed(1)
    model = shard(OddMLP(), mp_policy=policy)
    scaler = GradScaler("cpu", init_scale=2.0**10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = draw(model, 0, 2, dist.get_world_size())
    floats = [[(rows.float(), weights.float()) for rows, weights in own] for own in parts]
    with fsdp2.accumulate(model, num_batches=2) as acc:
        for rows, weights in floats[dist.get_rank()]:
            loss = ((model(rows).float() - 0.5).square().mean(1) * weights).sum()
            acc.backward(scaler.scale(loss), weight=weights.sum())
    scaler.unscale_(optimizer)
    loss, total = plain_backward(plain, floats)
    assert (acc.mean_loss / 2.0**10, acc.total_weight) == pytest.approx((loss, total), rel=1e-2)
    same(model, plain, rtol=2e-2, atol=2e-3)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**10


class WithTower(TinyModel):
    """Has a tower that a forward runs if its first row is positive: on some ranks only."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.tower = nn.Linear(5, 5), TanhBlock(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.base(x)
        return self.tower(x) if x.detach()[0, 0] > 0 else x * 1.0


def conditional_modules() -> None:
    def apply(model: Any) -> Any:
        fully_shard(model.tower, conditional=True)
        return fully_shard(model)

    for sync, known in TWO_WAYS[0]:
        trains(WithTower, apply, sync, known)


def a_penalty_by_autograd_grad() -> None:
    """A pass for gradients of inputs is no foreign backward."""
    model, plain = shard(build()), build()
    x = draw(model, 3, 1, 1)[0][0][0].requires_grad_()

    def penalised(each: Any) -> Tensor:
        output = each(x).square().sum()
        (gradient,) = torch.autograd.grad(output, x, create_graph=True)
        return output + gradient.square().sum()

    with fsdp2.accumulate(model) as acc:
        for weight in (1, 2):
            acc.backward(penalised(model) * weight, weight=weight)
    penalised(plain).backward()
    same(model, plain)


def weights_of_any_type() -> None:
    """Numbers and tensors of any real dtype. A factor of the user's does not count inside, and is there again."""
    model, plain = shard(build()), build()
    model.set_gradient_divide_factor(3.0, recurse=True)
    before = settings(model)
    rows = build().example(rows=2, seed=0).double()
    with fsdp2.accumulate(model, num_batches=4) as acc:
        for weight in (1, 0.5, torch.tensor([2]), torch.tensor(3, dtype=torch.int16)):
            acc.backward(model(rows).sum() * weight, weight=weight)
    plain(rows).sum().backward()
    same(model, plain)
    assert acc.total_weight == 6.5 * dist.get_world_size()
    assert settings(model) == before


def one_small_collective() -> None:
    """A step gathers one row of numbers for each rank, and reduces as often as without."""

    def count(train: Callable[[], object]) -> tuple[list[int], int]:
        sent: list[int] = []
        reduced: list[int] = []
        gather, scatter = NamedPairwiseComm.all_gather, NamedPairwiseComm.reduce_scatter

        def gathering(self: Any, outputs: Any, inputs: Any) -> Any:
            sent.extend([each.nbytes for each in inputs if each.dtype == torch.float64])
            return gather(self, outputs, inputs)

        def reducing(self: Any, *args: Any) -> Any:
            reduced.append(1)
            return scatter(self, *args)

        with (
            mock.patch.object(NamedPairwiseComm, "all_gather", gathering),
            mock.patch.object(NamedPairwiseComm, "reduce_scatter", reducing),
        ):
            train()
        return sent, len(reduced)

    model = shard(OddMLP())
    parts = [(rows.float(), weights) for rows, weights in draw(model, 0, 3, 1)[0]]

    def by_hand() -> None:
        for i, part in enumerate(parts):
            model.set_requires_gradient_sync(i == 2)
            loss_sum(model, part).backward()
        model.zero_grad()

    def once(**options: Any) -> None:
        step(model, parts, **options)
        model.zero_grad()

    by_hand()
    none, reductions = count(by_hand)
    assert not none
    assert count(partial(once, num_batches=3)) == ([56], reductions)
    assert count(once) == ([56], reductions)
    assert count(partial(once, num_batches=3, sync="each")) == ([56], 3 * reductions)


def what_waits() -> None:
    """Between micro-batches: whole gradients, or this rank's shards of sums; and no `.grad` that could be used."""
    model = shard(build())
    (part,), ranks = draw(model, 0, 1, 1)[0], dist.get_world_size()
    whole = sum(param.numel() for param in model.parameters())
    for sync, share in (("last", 1), ("each", ranks)):
        with fsdp2.accumulate(model, sync=sync) as acc:
            for _ in range(2):
                acc.backward(loss_sum(model, part), weight=1)
                held = [group.gradients for group in groups_below(model)]
                left = [each.unsynchronized for each in held]
                waits = [each.unreduced if sync == "last" else each.reduced_in_shard for each in left]
                numel = sum(value.numel for each in waits for value in each.values())
                assert whole <= numel * share < whole * 1.3, "and padding"
                assert sync == "last" or not any(each.unreduced for each in left)
                with pytest.raises(RuntimeError, match="complete when the block ends"):
                    fsdp2.clip_grad_norm_(model.parameters(), 1.0)
        model.zero_grad()


def copied_inside() -> None:
    """A copy that is made amid a block is a model like any other."""
    model, plain = shard(build()), build()
    part = draw(model, 0, 1, 1)[0][0]
    with fsdp2.accumulate(model) as acc:
        twin = copy.deepcopy(model)
        acc.backward(loss_sum(model, part), weight=1)
    loss_sum(twin, part).backward()
    loss_sum(plain, part).backward()
    same(twin, plain)


def test_ways_on_two_ranks() -> None:
    checks = (
        *(in_pieces, offloaded, finalized_by_hand, summed_in_bf16, scaled_in_fp16, a_penalty_by_autograd_grad),
        *(weights_of_any_type, one_small_collective, what_waits, copied_inside, conditional_modules),
    )
    run_checks(2, [(check.__name__, check) for check in checks])


# ---- no_sync ---------------------------------------------------------------------------------------------------------


def no_sync_gives_settings_back() -> None:
    """Gradients add up as with plain training; nothing is sent inside; each module has its own setting again."""
    model, plain = shard(build()), build()
    model.wide.set_requires_gradient_sync(False)
    before = settings(model)
    parts = [part for part, *_ in draw(model, 0, 1, 3)]
    for part in parts[:2]:
        with model.no_sync():
            loss_sum(model, part).backward()
        assert settings(model) == before
    with pytest.raises(ZeroDivisionError), model.no_sync():
        _ = 1 / 0
    assert settings(model) == before
    model.set_requires_gradient_sync(True)
    loss_sum(model, parts[2]).backward()
    for part in parts:
        loss_sum(plain, part).backward()
    same(model, plain)


# ---- errors ----------------------------------------------------------------------------------------------------------


@contextmanager
def nothing_stays(model: Any, message: str, kind: type[Exception] = RuntimeError) -> Iterator[None]:
    """Context: this raises, on this rank; settings are as they were, and the next step is exact."""
    before = settings(model)
    with pytest.raises(kind, match=message):
        yield
    assert settings(model) == before
    assert all(param.grad is None for param in model.parameters())
    plain = build()
    parts, rank = draw(plain, 7, 2, dist.get_world_size()), dist.get_rank()
    step(model, parts[rank], sync="last", num_batches=2)
    plain_backward(plain, parts)
    same(model, plain)
    model.zero_grad()


BAD = {"nan": "weight=nan to its micro-batch number 2", "inf": "weight=inf", "-1": "weight=-1 to"}


def bad_weights(sync: str, known: bool) -> None:
    """One rank's weight is bad: all raise, and name it."""
    model = shard(build())
    part = draw(model, 0, 1, 1)[0][0]
    for bad, message in BAD.items():
        with (
            nothing_stays(model, f"rank 1 gave {message}"),
            fsdp2.accumulate(model, sync=sync, num_batches=2 if known else None) as acc,
        ):
            for i in range(2):
                is_bad = i == dist.get_rank() == 1
                acc.backward(loss_sum(model, part), weight=float(bad) if is_bad else 1)
    with nothing_stays(model, "sum up to 0"), fsdp2.accumulate(model, sync=sync, num_batches=1 if known else None):
        watched(model).backward(loss_sum(model, part), weight=0)


def watched(model: Any) -> Any:
    """Returns the block that a model is in."""
    from fsdp2.features.accumulate import AccumulationWatch

    return groups_below(model)[0].root.events.of(AccumulationWatch).active


def misused(sync: str, known: bool) -> None:
    model = shard(build())
    part, optimizer = draw(model, 0, 1, 1)[0][0], torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"sync": sync, "num_batches": 2 if known else None}

    def block(act: Callable[[Any], object], before: int = 1, after: int = 1) -> None:
        with fsdp2.accumulate(model, **options) as acc:
            for i in range(before + after):
                if i == before:
                    act(acc)
                acc.backward(loss_sum(model, part), weight=1)
            if not after:
                act(acc)

    def raises(act: Callable[[Any], object], message: str, *counts: int, kind: Any = RuntimeError) -> None:
        with nothing_stays(model, message, kind):
            block(act, *counts)

    def fail(_: Any) -> None:
        raise KeyError("on purpose")

    def fail_in_backward(acc: Any) -> None:
        loss = loss_sum(model, part)
        loss.register_hook(fail)
        acc.backward(loss, weight=1)

    def fail_amid_backward(acc: Any) -> None:
        rows, _ = part
        output = model(rows)
        output.register_hook(fail)
        acc.backward(output.sum(), weight=1)

    for counts in ((0, 2), (1, 1), (2, 0)):
        raises(
            lambda _: loss_sum(model, part).backward(), "a backward pass inside of accumulate has no weight", *counts
        )
        raises(lambda _: optimizer.step(), "SGD.step: it is inside of a block", *counts)
        raises(lambda _: fsdp2.accumulate(model).__enter__(), "in another block", *counts)
        raises(fail, "on purpose", *counts, kind=KeyError)
    for failing in (fail_in_backward, fail_amid_backward):
        raises(failing, "on purpose", 1, 0, kind=KeyError)
    raises(lambda _: model.zero_grad(), "cleared inside of accumulate")
    raises(lambda _: optimizer.zero_grad(set_to_none=False), "cleared inside of accumulate")
    raises(lambda acc: acc.backward(3.0, weight=1), "loss: expected a tensor", kind=TypeError)
    raises(lambda acc: acc.backward(torch.ones(()), weight="x"), "weight: expected a number", kind=TypeError)
    raises(lambda acc: acc.backward(torch.ones(2), weight=1), "loss: expected one element", kind=ValueError)
    if known:
        raises(lambda acc: acc.backward(loss_sum(model, part), weight=1), "got one more", 2, 0)
        raises(lambda _: None, "rank 0 has run 1 of num_batches=2", 1, 0)
    acc = fsdp2.accumulate(model)
    for use in (lambda: acc.mean_loss, lambda: acc.backward(torch.ones(()), weight=1)):
        with pytest.raises(RuntimeError, match="block"):
            use()


def refused_at_entry() -> None:
    """What the block can't be exact with; and what is no root."""

    def refused(model: Any, message: str, kind: Any = RuntimeError, **options: Any) -> None:
        before = settings(model)
        with pytest.raises(kind, match=message), fsdp2.accumulate(model, **options):
            pass
        assert settings(model) == before

    model = shard(build())
    refused(model, "sync: expected", ValueError, sync="first")
    refused(model, "num_batches: expected at least", ValueError, num_batches=0)
    refused(model, "num_batches: expected an int", TypeError, num_batches=True)
    refused(model.wide, "expected the root")
    loss_sum(model, draw(model, 0, 1, 1)[0][0]).backward()
    refused(model, "weight: it has a gradient")
    model.zero_grad()
    model.wide.set_requires_gradient_sync(False)
    refused(model, "not synchronised now")
    model.wide.set_requires_gradient_sync(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.set_optimizer_in_backward(optimizer)
    refused(model, "steps in backward")
    for policy in (
        MixedPrecisionPolicy(torch.float16, torch.float16),
        MixedPrecisionPolicy(reduce_dtype=torch.float32, compression=Compression(reduce_scatter=torch.float16)),
    ):
        refused(shard(OddMLP(), mp_policy=policy), "in float16")
    apart = OddMLP()
    fully_shard(apart.wide, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("experts", "shard"))["shard"])
    refused(fully_shard(apart), rf"same ranks, got wide on \[{dist.get_rank()}\] and root on \[0, 1\]")


def another_number_of_micro_batches() -> None:
    """Ranks that gather in each micro-batch are out of step: all of them raise, and go on."""
    model = shard(build(), reshard_after_forward=True)
    part = draw(model, 0, 1, 1)[0][0]
    for sync in ("last", "each"):
        with nothing_stays(model, "out of step"):
            step(model, [part] * (1 + dist.get_rank()), sync=sync)


def a_rank_that_raises_alone() -> None:
    """Others have begun the last backward: they get an error at once, and the step after it is exact on all."""
    model = shard(build())
    part = draw(model, 0, 1, 1)[0][0]
    raises = dist.get_rank() == 1
    kind, message = (KeyError, "on purpose") if raises else (RuntimeError, "rank 1: raised KeyError: 'on purpose'")
    with nothing_stays(model, message, kind), fsdp2.accumulate(model, num_batches=2) as acc:
        acc.backward(loss_sum(model, part), weight=1)
        loss = loss_sum(model, part)
        if raises:
            raise KeyError("on purpose")
        acc.backward(loss, weight=1)


def entered_by_one_rank() -> None:
    model = shard(build())
    part = draw(model, 0, 1, 1)[0][0]
    with nothing_stays(model, "must be inside of fsdp2.accumulate on all ranks, or on none"):
        if dist.get_rank():
            step(model, [part] * 2, sync="each")
        else:
            loss_sum(model, part).backward()


def hooks_before_an_error() -> None:
    """Hooks of parameters, which may step on gradients, see zeros and not NaN."""
    model, seen = shard(build()), []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.to_local().abs().sum().item()))
    part = draw(model, 0, 1, 1)[0][0]
    for weight in (0.0, 1.0 - 2 * dist.get_rank()):
        with pytest.raises(RuntimeError, match="were dropped"), fsdp2.accumulate(model, num_batches=1) as acc:
            acc.backward(loss_sum(model, part), weight=weight)
    assert seen
    assert not any(seen)


def test_errors_on_two_ranks() -> None:
    cases: list[tuple[str, Callable[[], None]]] = [
        (f"{check.__name__} {sync} {known}", partial(check, sync, known))
        for check, ways in zip((bad_weights, misused), TWO_WAYS, strict=True)
        for sync, known in ways
    ]
    checks = (
        *(refused_at_entry, no_sync_gives_settings_back, another_number_of_micro_batches),
        *(a_rank_that_raises_alone, hooks_before_an_error, entered_by_one_rank),
    )
    run_checks(2, [*cases, *((check.__name__, check) for check in checks)])
