"""Tests `fsdp2.join` and torch's `Join([model])`: ranks with different numbers of batches train as on all of them.

The oracle is the plain model on the batches of all ranks that have one, step by step, in fp64.
"""

import copy
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from math import prod
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import fsdp2
from conditional_models import Dropped, Multimodal
from fsdp2 import MixedPrecisionPolicy, fully_shard, replicate
from fsdp2.checks import backward_ends
from fsdp2.checks.named_comm import NamedPairwiseComm
from fsdp2.codecs import Cast
from fsdp2.engine.compat import RESOLVES_GROUP
from fsdp2.engine.state import require_state
from fsdp2.features import conditional, join_consensus, user_collectives
from fsdp2.features.join_others import OtherModel
from helpers import NIGHTLY, RankError, assert_same, full, one_mesh, run_checks, run_ranks, world_sizes
from helpers import shard_blocks as shard
from models import ConvStack, OddMLP, SkippedModule, TinyGPT, TinyModel, build, mean_loss

EXACT = {"rtol": 1e-12, "atol": 1e-13}
Counts = Sequence[int]
"""How many batches each rank has."""


def batch_of(model: TinyModel, rank: int, i: int) -> Tensor:
    batch = model.example(rows=1 + (rank + i) % 3, seed=1000 * rank + i)
    return batch.double() if batch.is_floating_point() else batch


def fail(*_: Any) -> None:
    raise ValueError("a bad sample")


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return fsdp2.muon([param for param in model.parameters() if param.requires_grad], lr=0.05)


def two_sides(
    setup: Callable[[Any], Any] = shard, make: Callable[[], TinyModel] = OddMLP, optimize: Callable[..., Any] = adamw
) -> Any:
    """Returns this rank's number, and with an optimizer each a sharded model and the same one plain."""
    plain = build(make)
    model = setup(copy.deepcopy(plain))
    return dist.get_rank(), (model, optimize(model)), (plain, optimize(plain))


def plain_epoch(model: Any, optimizer: Any, counts: Counts, by_present: bool = False, zeros: bool = False) -> None:
    """Trains on all batches. Step i has those of the ranks that have so many.

    `zeros`: parameters without a gradient get one of zeros.
    """
    for i in range(max(counts)):
        model.before_step(i)
        present = [rank for rank, count in enumerate(counts) if i < count]
        divisor = len(present) if by_present else len(counts)
        sum(mean_loss(model(batch_of(model, rank, i))) for rank in present).div(divisor).backward()
        for param in model.parameters() if zeros else ():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        optimizer.step()
        optimizer.zero_grad()


def compare(model: nn.Module, plain: nn.Module, **tolerance: float) -> None:
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_same(param, expected, **(tolerance or EXACT), name=name)
        assert_same(param.grad, expected.grad, **(tolerance or EXACT), name=f"gradient of {name}")


def compare_states(optimizer: Any, plain: Any) -> None:
    assert len(optimizer.state) == len(plain.state)
    for own, other in zip(optimizer.param_groups[0]["params"], plain.param_groups[0]["params"], strict=True):
        for name, value in plain.state[other].items() if other in plain.state else ():
            assert_same(full(optimizer.state[own][name]), value, **EXACT, name=name)


def counts_for(num_ranks: int) -> list[Counts]:
    """Returns numbers of batches: one rank runs out first, or has none; all end at once; each at another time."""
    ranks = range(num_ranks)
    drawn = [[3 - (rank == 0) for rank in ranks], [2 * (rank != num_ranks - 1) for rank in ranks]]
    return [*drawn, [2] * num_ranks, [(rank * 2) % 5 for rank in ranks], [0] * num_ranks]


def pairs(ways: Sequence[Any], others: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Returns each way with one of the others, which are dealt to them in turn; at night with each."""
    if NIGHTLY:
        return [*itertools.product(ways, others)]
    return [*zip(ways, itertools.cycle(others))]


def train_joined(
    counts: Counts,
    joins: Callable[..., Any],
    by_present: bool = False,
    make: Callable[[], TinyModel] = OddMLP,
    setup: Callable[[Any], Any] = shard,
    tolerance: float = 1e-12,
    optimize: Callable[..., Any] = adamw,
) -> None:
    """Two epochs of `backward(); step(); zero_grad()`, the second with other numbers; then a step of all ranks."""
    rank, (model, optimizer), (plain, expected) = two_sides(setup, make, optimize)
    same = {"rtol": tolerance, "atol": tolerance / 10}
    for of_ranks in (counts, counts[::-1]):
        plain_epoch(plain, expected, of_ranks, by_present, zeros=setup is unused)
        with joins(model, optimizer, divide_by_initial_world_size=not by_present):
            for i in range(of_ranks[rank]):
                model.before_step(i)
                mean_loss(model(batch_of(plain, rank, i))).backward()
                optimizer.step()
                optimizer.zero_grad()
        compare(model, plain, **same)
    if max(counts) and tolerance == 1e-12:
        compare_states(optimizer, expected)
    plain_epoch(plain, expected, [1] * len(counts), zeros=setup is unused)
    model.before_step(0)
    mean_loss(model(batch_of(plain, rank, 0))).backward()
    optimizer.step()
    optimizer.zero_grad()
    compare(model, plain, **same)


def ours(model: Any, optimizer: Any, **options: Any) -> Any:
    return fsdp2.join(model, optimizer=optimizer, **options)


def torchs(model: Any, optimizer: Any, **options: Any) -> Any:
    return Join([model], optimizer=optimizer, **options)


@pytest.mark.parametrize("num_ranks", world_sizes(1, 2, 3, nightly=[4]))
def test_each_batch_counts_once(num_ranks: int) -> None:
    """With both contexts, both divisors, and all numbers of batches, 0 included."""
    checks = [
        (f"{joins.__name__} {counts} {by_present}", partial(train_joined, counts, joins, by_present))
        for i, counts in enumerate(counts_for(num_ranks))
        for joins, by_present in ((ours, i % 2 == 0), (torchs, i % 2 == 1))
        if NIGHTLY or num_ranks == 2 or (joins is ours) == (i % 2 == 0)
    ]
    run_checks(num_ranks, checks)


# ---- ways to shard that test_training.py does not draw


def on_mesh(names: tuple[str, ...] | None = None, **options: Any) -> Callable[[Any], Any]:
    """Shards on 2 x 2 ranks; the mesh is made when ranks run."""
    return lambda model: shard(model, mesh=one_mesh((2, 2), names), **options)


def unused(model: Any) -> Any:
    """A parameter that no rank uses gets a gradient of zeros."""
    shard(model)
    model.set_reduce_scatter_unused_params(True)
    return model


def checkpointed(model: Any) -> Any:
    """Recomputes each block in backward."""
    for block in model.blocks:
        run = block.forward
        block.forward = lambda *args, run=run: checkpoint(run, *args, use_reentrant=False)
    return shard(model)


def hooked(model: Any) -> Any:
    """Sums by a hook, whose own collective is part of a reduction that ranks have agreed on."""
    shard(model, replicate)
    model.register_comm_hook(None, allreduce_hook)
    return model


WAYS: dict[str, tuple[Callable[[], TinyModel], Callable[[Any], Any]]] = {
    "a hook": (OddMLP, hooked),
    "unused": (SkippedModule, unused),
    "used by none": (SkippedModule, shard),
    "checkpointing": (TinyGPT, checkpointed),
}


class OddMatrices(OddMLP):
    """Trains its matrices alone."""

    def __init__(self) -> None:
        super().__init__()
        for param in self.parameters():
            param.requires_grad_(param.dim() == 2)


def test_ways_to_shard() -> None:
    """Also with an optimizer whose step communicates: ranks that have joined take part."""
    counts = [((3, 1), False), ((0, 2), True)]
    checks = [
        (f"{name} {each}", partial(train_joined, each, ours, by_present, make, setup))
        for (name, (make, setup)), (each, by_present) in pairs([*WAYS.items()], counts)
    ]
    checks += [
        (f"muon {each}", partial(train_joined, each, joins, make=OddMatrices, optimize=muon))
        for (each, _), joins in zip(counts, (ours, torchs), strict=True)
    ]
    run_checks(2, checks)


class Recounting(Dropped):
    """Leaves out layers by the number of rows, so that ranks differ; `example` makes batches of it."""

    def forward(self, x: Tensor) -> Tensor:
        self.plan = frozenset(("0",) if len(x) == 1 else ("1", "2") if len(x) == 2 else ())
        return super().forward(x)


class Seeing(Multimodal):
    """Runs its towers by the number of rows."""

    def forward(self, x: Tensor) -> Tensor:
        self.plan = frozenset(("image",) if len(x) == 1 else ("audio", "image") if len(x) == 2 else ())
        return super().forward(x)


def conditionally(model: Any) -> Any:
    for module, is_conditional in model.groups():
        fully_shard(module, conditional=is_conditional)
    return model


def on_two_axes(model: Any) -> Any:
    mesh = one_mesh((2, 2))
    for module, is_conditional in model.groups():
        fully_shard(module, mesh=mesh, conditional=is_conditional)
    return model


@pytest.mark.parametrize("num_ranks", world_sizes(2, nightly=[3]))
def test_conditional_modules(num_ranks: int) -> None:
    """Ranks that are present leave modules out, and ranks that have joined leave out all."""
    makes: dict[str, Any] = {"dropped": Recounting, "again": partial(Recounting, recompute=False), "towers": Seeing}
    checks = [
        (f"{name} {counts}", partial(train_joined, counts, ours, False, make, conditionally))
        for name, make in makes.items()
        for counts in counts_for(num_ranks)[:2]
    ]
    run_checks(num_ranks, checks)


class Wide(OddMLP):
    """Has layers that tensor parallelism can cut evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(5, 8), nn.Linear(8, 3)


def train_tensor_parallel() -> None:
    """Ranks that share a batch run out together. Those that share parameters are counted."""
    plain = build(Wide)
    model, mesh = copy.deepcopy(plain), one_mesh((2, 2), ("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"wide": ColwiseParallel(), "narrow": RowwiseParallel()})
    shard(model, mesh=mesh["dp"])
    optimizer, expected, rank = adamw(model), adamw(plain), mesh.get_local_rank("dp")
    with fsdp2.join(model, optimizer=optimizer):
        for i in range((1, 3)[rank]):
            mean_loss(model(batch_of(plain, rank, i))).backward()
            optimizer.step()
            optimizer.zero_grad()
    plain_epoch(plain, expected, (1, 3))
    for (name, param), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(full(param), other, rtol=1e-12, atol=1e-13), name


# ---- what a loop does


def micro_steps(counts: Counts, rank: int, accumulates: int) -> Iterator[tuple[int, bool]]:
    """Yields the number of each micro-batch of a rank, and whether it is the last of a step."""
    yield from ((i, i % accumulates == accumulates - 1) for i in range(counts[rank]))


def accumulate_plainly(plain: Any, optimizer: Any, counts: Counts, accumulates: int) -> None:
    for first in range(0, max(counts), accumulates):
        for i in range(first, first + accumulates):
            for rank in (rank for rank, count in enumerate(counts) if i < count):
                mean_loss(plain(batch_of(plain, rank, i))).div(len(counts)).backward()
        optimizer.step()
        optimizer.zero_grad()


def train_accumulating(counts: Counts, how: str, setup: Callable[[Any], Any] = shard) -> None:
    """A rank may run out amid an accumulation: what it has accumulated counts."""
    plain, rank, accumulates = build(ConvStack), dist.get_rank(), 3
    model = setup(copy.deepcopy(plain))
    optimizer, expected = adamw(model), adamw(plain)
    with fsdp2.join(model, optimizer=optimizer):
        for i, is_last in micro_steps(counts, rank, accumulates):
            if how == "replicas last":
                model.set_requires_all_reduce(is_last)
            elif how != "each":
                model.set_requires_gradient_sync(is_last)
            mean_loss(model(batch_of(plain, rank, i))).backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad(set_to_none=how != "each")
    accumulate_plainly(plain, expected, counts, accumulates)
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert_same(param, other, **EXACT, name="a parameter")
    compare_states(optimizer, expected)


def test_ranks_run_out_amid_an_accumulation() -> None:
    drawn = pairs(((6, 2), (1, 6), (0, 3)), ("last", "each"))
    run_checks(2, [(f"{how} {counts}", partial(train_accumulating, counts, how)) for counts, how in drawn])


def test_on_two_axes() -> None:
    codecs = on_mesh(mp_policy=MixedPrecisionPolicy(replica_codec=Cast(torch.float32)))
    amid = pairs(("last", "replicas last", "each"), ((6, 2, 3, 4), (3, 3, 1, 0)))
    checks: list[tuple[str, Callable[[], None]]] = [
        (f"{how} {counts}", partial(train_accumulating, counts, how, on_mesh())) for how, counts in amid
    ]
    checks += [
        ("towers", partial(train_joined, (1, 3, 2, 0), ours, True, Seeing, on_two_axes)),
        ("codecs of replicas", partial(train_joined, (2, 2, 0, 1), ours, True, OddMLP, codecs, 1e-5)),
        ("tensor parallelism", train_tensor_parallel),
    ]
    run_checks(4, checks)


def train_stepping(counts: Counts, setup: Callable[[Any], Any] = shard) -> None:
    """Clips, steps and follows a schedule in the function that all ranks call."""
    plain, rank = build(), dist.get_rank()
    model = setup(copy.deepcopy(plain))
    sides = []
    for side in (model, plain):
        optimizer = adamw(side)
        sides.append((side, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)))
    norms: list[float] = []

    def step(side: Any, optimizer: Any, schedule: Any) -> float:
        clip = fsdp2.clip_grad_norm_ if side is model else torch.nn.utils.clip_grad_norm_
        norm = clip(side.parameters(), 0.1)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        return float(norm)

    for of_ranks in (counts, counts[::-1]):
        with fsdp2.join(model, partial(step, *sides[0])) as joined:
            for i in range(of_ranks[rank]):
                mean_loss(model(batch_of(plain, rank, i))).backward()
                norms.append(joined.step())
        norms = norms[-of_ranks[rank] or len(norms) :]
        for i in range(max(of_ranks)):
            present = [each for each, count in enumerate(of_ranks) if i < count]
            sum(mean_loss(plain(batch_of(plain, each, i))) for each in present).div(len(of_ranks)).backward()
            norm = step(*sides[1])
            assert i >= of_ranks[rank] or abs(norms[i] - norm) < 1e-12
        compare(model, plain)
    compare_states(sides[0][1], sides[1][1])
    assert sides[0][2].get_last_lr() == sides[1][2].get_last_lr()


def train_in_backward(counts: Counts, setup: Callable[[Any], Any] = shard) -> None:
    rank, (model, optimizer), (plain, expected) = two_sides(setup)
    model.set_optimizer_in_backward(optimizer)
    with Join([model]):
        for i in range(counts[rank]):
            mean_loss(model(batch_of(plain, rank, i))).backward()
    plain_epoch(plain, expected, counts)
    for param, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert_same(param, other, **EXACT, name="a parameter")
    compare_states(optimizer, expected)


def weigh(counts: Counts, sync: str, num_batches: int | None, setup: Callable[[Any], Any] = shard) -> None:
    """Steps of two micro-batches, divided by the rows of all ranks that have some."""
    rank, (model, optimizer), (plain, expected) = two_sides(setup)

    def loss_sum(side: Any, rows: Tensor) -> Tensor:
        return (side(rows) - 0.5).square().sum()

    means = []
    with fsdp2.join(model, optimizer=optimizer):
        for i in range(counts[rank]):
            with fsdp2.accumulate(model, sync=sync, num_batches=num_batches) as acc:
                for k in range(2):
                    rows = batch_of(plain, rank, 2 * i + k)
                    acc.backward(loss_sum(model, rows), weight=len(rows))
            means.append((acc.mean_loss, acc.total_weight))
            optimizer.step()
            optimizer.zero_grad()
    for i in range(max(counts)):
        parts = [batch_of(plain, each, 2 * i + k) for each, count in enumerate(counts) if i < count for k in range(2)]
        total = sum(map(len, parts))
        loss = sum(loss_sum(plain, rows) for rows in parts) / total
        loss.backward()
        expected.step()
        expected.zero_grad()
        if i < counts[rank]:
            assert means[i][1] == total
            assert abs(means[i][0] - float(loss.detach())) < 1e-12
    compare(model, plain)
    compare_states(optimizer, expected)


def evaluate(counts: Counts, setup: Callable[[Any], Any] = shard) -> None:
    """A loop without grad, and one in inference mode, between training steps."""
    plain, rank = build(), dist.get_rank()
    model = setup(copy.deepcopy(plain))
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode(), fsdp2.join(model):
            for i in range(counts[rank]):
                rows = batch_of(plain, rank, i)
                assert_same(model(rows), plain(rows), **EXACT, name="an output")
    optimizer, expected = adamw(model), adamw(plain)
    for i in range(2):
        mean_loss(model(batch_of(plain, rank, i))).backward()
        optimizer.step()
        optimizer.zero_grad()
    plain_epoch(plain, expected, [2] * len(counts))
    compare(model, plain)


def cleared_first(counts: Counts, to_none: bool, setup: Callable[[Any], Any] = shard) -> None:
    """zero_grad at the beginning of each step: what the last one has left is there behind the block, on all ranks."""
    rank, (model, optimizer), (plain, expected) = two_sides(setup)
    with fsdp2.join(model, optimizer=optimizer):
        for i in range(counts[rank]):
            optimizer.zero_grad(set_to_none=to_none)
            mean_loss(model(batch_of(plain, rank, i))).backward()
            optimizer.step()
    for i in range(max(counts)):
        expected.zero_grad()
        present = [each for each, count in enumerate(counts) if i < count]
        sum(mean_loss(plain(batch_of(plain, each, i))) for each in present).div(len(counts)).backward()
        expected.step()
    compare(model, plain)
    compare_states(optimizer, expected)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_loops(num_ranks: int) -> None:
    setup = shard if num_ranks == 2 else on_mesh()
    counts = [(3, 1), (0, 2)] if num_ranks == 2 else [(1, 3, 2, 2), (2, 2, 0, 1)]
    loops: list[tuple[str, Callable[..., None]]] = [
        ("step", partial(train_stepping, setup=setup)),
        ("in backward", partial(train_in_backward, setup=setup)),
        ("no grad", partial(evaluate, setup=setup)),
        ("each", partial(weigh, sync="each", num_batches=2, setup=setup)),
        ("last", partial(weigh, sync="last", num_batches=2, setup=setup)),
        ("unknown", partial(weigh, sync="last", num_batches=None, setup=setup)),
        ("cleared first", partial(cleared_first, to_none=True, setup=setup)),
        ("zeroed first", partial(cleared_first, to_none=False, setup=setup)),
    ]
    run_checks(num_ranks, [(f"{name} {each}", partial(loop, each)) for (name, loop), each in pairs(loops, counts)])


# ---- running statistics


class WithNorm(TinyModel):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(5, 7, bias=False), nn.BatchNorm1d(7), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(torch.cat([x, 2 * x]))))[: len(x)]


def train_norm(counts: Counts) -> None:
    """Running statistics are means over the ranks with a batch; a rank that has joined has them, and counters, too."""
    rank, (model, optimizer), (plain, expected) = two_sides(make=WithNorm)
    with fsdp2.join(model, optimizer=optimizer):
        for i in range(counts[rank]):
            mean_loss(model(batch_of(plain, rank, i))).backward()
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with fsdp2.join(model), torch.no_grad():
        for i in range(counts[rank]):
            model(batch_of(plain, rank, i))
    assert not model.training
    for i in range(max(counts)):
        present = [each for each, count in enumerate(counts) if i < count]
        before = {name: buffer.clone() for name, buffer in plain.named_buffers()}
        after = []
        for each in present:
            plain.load_state_dict(before, strict=False)
            (mean_loss(plain(batch_of(plain, each, i))) / len(counts)).backward()
            after.append({name: buffer.clone() for name, buffer in plain.named_buffers()})
        for name in ("norm.running_mean", "norm.running_var"):
            plain.get_buffer(name).copy_(sum(each[name] for each in after) / len(after))
        expected.step()
        expected.zero_grad()
    compare(model, plain)
    for name, buffer in plain.named_buffers():
        assert_same(model.get_buffer(name), buffer, **EXACT, name=name)


def test_running_statistics() -> None:
    """Over so many steps that checks which compare ranks are due several times."""
    run_checks(3, [(f"{counts}", partial(train_norm, counts)) for counts in ((5, 2, 9), (0, 4, 1))])


# ---- what can't be followed


def loop(model: Any, rank: int, counts: Counts, act: Callable[[int], None], **options: Any) -> None:
    """Runs a loop in which `act` is called behind each backward."""
    with fsdp2.join(model, **options) as joined:
        for i in range(counts[rank]):
            mean_loss(model(batch_of(OddMLP(), rank, i))).backward()
            act(i)
    assert joined is not None


def alone_by_an_exception() -> None:
    """The last rank with a batch leaves amid a forward, which the other follows."""
    model, rank = shard(build()), dist.get_rank()

    def fail(*_: Any) -> None:
        if model.training and rank == 0 and runs == 1:
            raise ValueError("a bad sample")

    model.narrow.register_forward_hook(fail)
    runs = 0

    def run() -> None:
        nonlocal runs
        with fsdp2.join(model):
            for runs in range(2 - rank):
                model(batch_of(OddMLP(), rank, runs))

    with pytest.raises((ValueError, RuntimeError), match="a bad sample" if rank == 0 else "rank 0 has left the block"):
        run()


def caught_at_the_end() -> None:
    """The last forward raises, and is left out, as is a step that raises on all ranks that call it."""
    rank, (model, optimizer), (plain, expected) = two_sides()

    with fsdp2.join(model, optimizer=optimizer):
        for i in range(3 - 2 * rank):
            mean_loss(model(batch_of(plain, rank, i))).backward()
            with pytest.raises(ValueError, match="a bad sample"), model.narrow.register_forward_hook(fail):
                model(batch_of(plain, rank, i))
            optimizer.step()
            optimizer.zero_grad()
            with pytest.raises(ValueError, match="a bad sample"), model.narrow.register_forward_hook(fail):
                model(batch_of(plain, rank, i))
    plain_epoch(plain, expected, (3, 1))
    compare(model, plain)


def test_passes_that_raise() -> None:
    run_checks(2, [("alone", alone_by_an_exception), ("at the end", caught_at_the_end)])


def refuse(act: Callable[[Any, Any, int], None], present: str, joined: str, **options: Any) -> None:
    """Rank 1 has fewer batches. All ranks raise, each what it is to, and the next step is exact."""
    rank, plain = dist.get_rank(), build()
    model = shard(copy.deepcopy(plain))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with pytest.raises(RuntimeError, match=joined if rank == 1 else present):
        loop(model, rank, (3, 1, 3), lambda i: act(model, optimizer, i), **options)
    optimizer.zero_grad()
    model.requires_grad_(True)
    adam, expected = adamw(model), adamw(plain)
    mean_loss(model(batch_of(plain, rank, 0))).backward()
    adam.step()
    adam.zero_grad()
    plain_epoch(plain, expected, [1] * 3)
    compare(model, plain)


LEFT = r"rank \d, which leaves the block of join by an exception|rank 0 has left the block of join"


def clip_outside(model: Any, optimizer: Any, i: int) -> None:
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def clip_by_fsdp2_outside(model: Any, optimizer: Any, i: int) -> None:
    fsdp2.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def scale_outside(model: Any, optimizer: Any, i: int) -> None:
    for param in model.parameters():
        param.grad.mul_(0.5)


def assign_outside(model: Any, optimizer: Any, i: int) -> None:
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()


def step_unknown(model: Any, optimizer: Any, i: int) -> None:
    if i:
        optimizer.step()
    optimizer.zero_grad()


def write(model: Any, optimizer: Any, i: int) -> None:
    optimizer.zero_grad()
    if i:
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(1)


def change_rate(model: Any, optimizer: Any, i: int) -> None:
    optimizer.step()
    optimizer.zero_grad()
    optimizer.param_groups[0]["lr"] = 0.0 if i == 0 else -0.0


def raise_amid(model: Any, optimizer: Any, i: int) -> None:
    if dist.get_rank() == 0 and i == 1:
        raise RuntimeError("a bad sample")
    optimizer.step()
    optimizer.zero_grad()


def close_over(model: Any, optimizer: Any, i: int) -> None:
    optimizer.zero_grad()

    def closure() -> Tensor:
        loss = mean_loss(model(batch_of(OddMLP(), dist.get_rank(), i)))
        loss.backward()
        return loss

    optimizer.step(closure)


def unfreeze(model: Any, optimizer: Any, i: int) -> None:
    optimizer.zero_grad()
    if i == 1:
        model.wide.bias.requires_grad_(False)


def test_what_ranks_without_batches_cannot_follow() -> None:
    """Every rank raises, and soon; nothing is silently wrong."""
    held = "some ranks have run out of batches, and can't do to their part of this gradient"
    checks: list[tuple[str, Callable[[], None]]] = [
        ("clip", partial(refuse, clip_outside, f"^clip_grad_norm_: {held}", LEFT)),
        ("clip by fsdp2", partial(refuse, clip_by_fsdp2_outside, f"^clip_grad_norm_: {held}", LEFT)),
        ("scale", partial(refuse, scale_outside, held, LEFT)),
        ("assign", partial(refuse, assign_outside, "its gradient was changed since", "its gradient was changed since")),
        ("unknown", partial(refuse, step_unknown, "has not stepped in this block", "has not stepped in this block")),
        ("write", partial(refuse, write, "written to outside of a step", "written to outside of a step")),
        ("rate", partial(refuse, change_rate, "differ between ranks", "differ between ranks")),
        ("closure", partial(refuse, close_over, "have none for its closure", LEFT)),
        ("amid", partial(refuse, raise_amid, "a bad sample|rank 0, which leaves|rank 0 has left", LEFT)),
        ("unfreeze", partial(refuse, unfreeze, "requires_grad was changed", "requires_grad was changed")),
        (
            "early",
            partial(
                refuse,
                lambda *_: None,
                "at least one rank that exhausted",
                "Rank 1 exhausted all",
                throw_on_early_termination=True,
            ),
        ),
    ]
    run_checks(3, checks)


def refuse_arguments() -> None:
    model = shard(build())
    with pytest.raises(RuntimeError, match="expected the root"):
        fsdp2.join(model.wide)
    with pytest.raises(TypeError, match="step: expected a function"):
        fsdp2.join(model, 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="optimizer: expected"):
        fsdp2.join(model, optimizer=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="unexpected keyword"):
        Join([model], other=1)
    with pytest.raises(RuntimeError, match="fully_shard was applied to"):
        fsdp2.join(OddMLP())
    with fsdp2.join(model) as joined:
        with pytest.raises(RuntimeError, match="in another block"):
            fsdp2.join(model)
        with pytest.raises(RuntimeError, match="got none"):
            joined.step()
        with pytest.raises(NotImplementedError, match=r"can't follow both.*Write one module"):
            fsdp2.join(shard(build()))
    other = shard(build())
    with pytest.raises(NotImplementedError, match="Expected one sharded model"), Join([model, other]):
        other(batch_of(OddMLP(), 0, 0))
    with fsdp2.join(model, enable=False):
        mean_loss(model(batch_of(OddMLP(), 0, 0))).backward()


def leave_by_an_exception() -> None:
    """torch's Join tells nobody; the model is as before when it is dropped, also if it was never entered."""
    model, plain = shard(build()), build()
    rows = batch_of(plain, dist.get_rank(), 0)

    def fail() -> None:
        with Join([model]):
            mean_loss(model(rows)).backward()
            raise ValueError("a bad sample")

    with pytest.raises(ValueError, match="a bad sample"):
        fail()
    fsdp2.join(model)
    model.zero_grad()
    mean_loss(model(rows)).backward()
    model.zero_grad()
    assert require_state(model).root.consensus is None
    assert not user_collectives._collectives.functions, "torch's collectives are in their places again"
    optimizer, expected = adamw(model), adamw(plain)
    with fsdp2.join(model):
        mean_loss(model(rows)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert "_join_config" not in vars(model)
    plain_epoch(plain, expected, [1] * dist.get_world_size())
    compare(model, plain)


def test_arguments() -> None:
    run_checks(2, [("arguments", refuse_arguments), ("an exception", leave_by_an_exception)])


# ---- what it costs


def count_messages(model: Any, optimizer: Any, joins: bool, batches: Counts) -> list[str]:
    """Returns what this rank sends: "count" and "agree" of join, and whatever else."""
    sent: list[str] = []

    def counting(module: Any, name: str, as_what: str) -> Any:
        usual = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            sent.append(as_what)
            return usual(*args, **kwargs)

        return mock.patch.object(module, name, call)

    rank = dist.get_rank()
    with (
        counting(join_consensus, "all_reduce_now", "count"),
        counting(conditional, "all_reduce_now", "agree"),
        counting(NamedPairwiseComm, "_exchange", "exchange"),
        fsdp2.join(model, optimizer=optimizer) if joins else nullcontext(),
    ):
        for i in range(batches[rank]):
            mean_loss(model(batch_of(OddMLP(), rank, i))).backward()
            optimizer.step()
            optimizer.zero_grad()
        own = [*sent]
    return own


def test_a_step_of_all_ranks_costs_one_count() -> None:
    """As long as all ranks are present, one number is all-reduced in each forward pass, and nothing else differs. Then
    there is one more for each event.
    """

    def check() -> None:
        models = [shard(build()) for _ in range(3)]
        runs = [(model, torch.optim.SGD(model.parameters(), lr=0.1)) for model in models]
        with mock.patch.object(backward_ends, "compare_first", return_value=None):  # which a block leaves out
            without = count_messages(*runs[0], False, (4, 4))
        joined = count_messages(*runs[1], True, (4, 4))
        assert joined.count("count") == 4
        assert [each for each in joined if each != "count"] == without
        uneven = count_messages(*runs[2], True, (4, 3))
        if dist.get_rank() == 1:
            assert uneven == joined[: len(uneven)]
        else:
            assert uneven.count("count") == 3 + 3  # forward, backward and step of the last batch
            forward = 2 + 3 + 1  # what it is, and in which modes; gathers; its end
            backward = 2 + 3 * 2 + 2  # what it is, and of which gradients; reductions of what; its end; what is left
            step = 3  # what it is; of which gradients; the optimizer's settings
            assert uneven.count("agree") == forward + backward + step

    run_checks(2, [("counts", check)])


# ---- together with others


def scaled(counts: Counts) -> None:
    """A GradScaler that skips a step skips it on all ranks."""
    rank, (model, optimizer), (plain, expected) = two_sides()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)

    def step() -> None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    with fsdp2.join(model, step) as joined:
        for i in range(counts[rank]):
            loss = mean_loss(model(batch_of(plain, rank, i)))
            scaler.scale(loss * (torch.inf if i == 1 else 1)).backward()
            joined.step()
    for i in (i for i in range(max(counts)) if i != 1):
        present = [each for each, count in enumerate(counts) if i < count]
        sum(mean_loss(plain(batch_of(plain, each, i))) for each in present).div(len(counts)).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        expected.step()
        expected.zero_grad()
    compare(model, plain)
    scales = [torch.zeros(()) for _ in counts]
    dist.all_gather(scales, torch.tensor(scaler.get_scale()))
    assert len({float(each) for each in scales}) == 1


def debugged(model: Any) -> Any:
    shard(model)
    model.set_debug_level(1)
    return model


def finalizing(counts: Counts) -> None:
    plain, rank = build(), dist.get_rank()
    model = shard(copy.deepcopy(plain))
    model.set_manual_backward_finalization(True)
    optimizer, expected = adamw(model), adamw(plain)
    with fsdp2.join(model, optimizer=optimizer):
        for i in range(counts[rank]):
            model.wide.unshard()
            mean_loss(model(batch_of(plain, rank, i))).backward()
            model.finalize_backward()
            optimizer.step()
            optimizer.zero_grad()
    plain_epoch(plain, expected, counts)
    compare(model, plain)


def penalised(counts: Counts) -> None:
    """Two forwards for each backward, one without grad between them, and a gradient of inputs."""
    rank, (model, optimizer), (plain, expected) = two_sides()

    def loss_of(side: Any, rows: Tensor) -> Tensor:
        first = mean_loss(side(rows))
        with torch.no_grad():
            factor = side(rows).mean()
        return first + factor * mean_loss(side(2 * rows))

    with fsdp2.join(model, optimizer=optimizer):
        for i in range(counts[rank]):
            rows = batch_of(plain, rank, i).requires_grad_()
            torch.autograd.grad(mean_loss(model(rows)), rows)
            loss_of(model, rows.detach()).backward()
            optimizer.step()
            optimizer.zero_grad()
    for i in range(max(counts)):
        present = [each for each, count in enumerate(counts) if i < count]
        sum(loss_of(plain, batch_of(plain, each, i)) for each in present).div(len(counts)).backward()
        expected.step()
        expected.zero_grad()
    compare(model, plain)


def caught(counts: Counts) -> None:
    """Forwards and backwards that raise on all ranks, and are left out."""
    rank, (model, optimizer), (plain, expected) = two_sides()

    with fsdp2.join(model, optimizer=optimizer):
        for i in range(counts[rank]):
            rows = batch_of(plain, rank, i)
            with pytest.raises(ValueError, match="a bad sample"), model.narrow.register_forward_hook(fail):
                model(rows)
            output = model(rows)
            output.register_hook(fail)
            with pytest.raises(ValueError, match="a bad sample"):
                mean_loss(output).backward()
            mean_loss(model(rows)).backward()
            optimizer.step()
            optimizer.zero_grad()
    plain_epoch(plain, expected, counts)
    compare(model, plain)


def whole(model: Any) -> None:
    with fsdp2.full_params(model):
        pass


# What users call that communicates: each takes all ranks.
COLLECTIVES: dict[str, Callable[[Any], Any]] = {
    "torch's": lambda model: dist.all_reduce(torch.ones(())),
    "functional": lambda model: funcol.all_reduce(torch.ones(()), "sum", dist.group.WORLD).item(),
    "full_tensor": lambda model: next(model.parameters()).full_tensor(),
    "norm": lambda model: next(model.parameters()).norm().full_tensor(),
    "StepMeter": lambda model: fsdp2.StepMeter(model).step(1.0, tokens=1),
    "check": lambda model: fsdp2.check(model),
    "full_params": whole,
    "stream": lambda model: [*fsdp2.stream_full_params(model)],
    "sync": lambda model: fsdp2.sync_module_states(model),
}


def communicate(counts: Counts, where: str, by: str = "torch's", sizes: Sequence[int] = (2,)) -> None:
    """A collective of a user's own takes all ranks: while all are present, and in the function that all call."""
    torchs = vars(funcol)[RESOLVES_GROUP]
    plain, rank = build(), dist.get_rank()
    model = shard(copy.deepcopy(plain), mesh=one_mesh(sizes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    seen: list[str] = []

    def sum_up(*_: Any) -> None:
        COLLECTIVES[by](model)
        seen.append(by)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()
        if where == "step":
            sum_up()

    if where == "forward":
        model.narrow.register_forward_hook(sum_up)

    def run() -> None:
        with fsdp2.join(model, step) as joined:
            for i in range(counts[rank]):
                if where == "before":
                    sum_up()
                mean_loss(model(batch_of(plain, rank, i))).backward()
                joined.step()
                if where == "behind":
                    sum_up()

    if where == "step":
        run()
        assert seen == [by] * max(counts)
    else:
        with pytest.raises(RuntimeError, match="a collective of your own in the loop"):
            run()
        assert seen == [by] * min(counts)
    plain_step = batch_of(plain, rank, 0)
    assert_same(model(plain_step), plain(plain_step), **EXACT, name="the next output")
    assert vars(funcol)[RESOLVES_GROUP] is torchs


def test_together_with_others() -> None:
    checks = [
        (f"{check.__name__} {counts}", partial(check, counts))
        for check in (scaled, finalizing, penalised, caught)
        for counts in ((3, 1), (1 if check is scaled else 0, 2))  # a scaler must have scaled a loss
    ]
    checks.append(("debug level", partial(train_joined, (3, 1), ours, False, OddMLP, debugged)))
    checks += [
        (f"a collective {where}", partial(communicate, (3, 2), where))
        for where in ("step", "before", "forward", "behind")
    ]
    run_checks(2, checks)


@pytest.mark.parametrize("replicas", [1, 2])
def test_collectives_of_tools_and_of_operations(replicas: int) -> None:
    """Ranks that have run out wait for a count of ranks there, which is no part of these collectives: without an error,
    all would hang. With replicas, an operation communicates along one axis of the mesh only.
    """
    counts, sizes = ((2, 1), (2,)) if replicas == 1 else ((2, 1, 2, 0), (2, 2))
    checks = [
        (f"{by} {where}", partial(communicate, counts, where, by, sizes))
        for by in COLLECTIVES
        for where in ("step", "behind")
        if by != "torch's" and (replicas == 1 or (by in ("full_tensor", "check", "full_params") and where == "behind"))
    ]
    run_checks(prod(sizes), checks)


# ---- other models in the loop


def build_other() -> Any:
    model = build()
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.5)
    return model


def distill(how: str, counts: Counts, sizes: Sequence[int]) -> None:
    """A teacher runs for each batch. Ranks that have run out gather its parameters for the others."""
    rank, plain, plain_teacher = dist.get_rank(), build(), build_other()
    mesh = one_mesh(sizes)
    model = shard(copy.deepcopy(plain), mesh=mesh)
    stays = False if how == "kept" else None
    teacher = shard(copy.deepcopy(plain_teacher).requires_grad_(False), mesh=mesh, reshard_after_forward=stays)
    alike = shard(build().requires_grad_(False), mesh=mesh)  # which ranks do not take for the teacher
    optimizer, expected = adamw(model), adamw(plain)
    if how != "first":
        for each in (alike, teacher):
            each(batch_of(plain, rank, 0))

    def loss_of(student: Any, other: Any, rows: Tensor) -> Tensor:
        if how == "through":  # gradients of the student go through the teacher
            return mean_loss(other(student(rows)))
        targets: list[Tensor] = []

        @torch.no_grad()
        def run(*_: Any) -> None:
            targets.append(other(rows))

        with student.narrow.register_forward_hook(run) if how == "inside" else nullcontext():
            output = student(rows)
        if how != "inside":
            run()
        return (output - targets[0]).square().mean()

    def follow(student: Any, other: Any) -> None:
        with torch.no_grad():
            for own, param in zip(other.parameters(), student.parameters(), strict=True):
                own.lerp_(param, 0.1)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()
        follow(model, teacher)

    for of_ranks in (counts, counts[::-1]):
        with fsdp2.join(model, step) as joined:
            for i in range(of_ranks[rank]):
                loss_of(model, teacher, batch_of(plain, rank, i)).backward()
                joined.step()
        for i in range(max(of_ranks)):
            present = [each for each, count in enumerate(of_ranks) if i < count]
            losses = [loss_of(plain, plain_teacher, batch_of(plain, each, i)) for each in present]
            torch.stack(losses).sum().div(len(counts)).backward()
            expected.step()
            expected.zero_grad()
            follow(plain, plain_teacher)
        compare(model, plain)
        rows = batch_of(plain, rank, 0)
        assert_same(teacher(rows), plain_teacher(rows), **EXACT, name="the teacher's next output")
    assert not any(isinstance(each, OtherModel) for each in require_state(teacher).root.events.observers)


def refuse_other(how: str, counts: Counts, sizes: Sequence[int]) -> None:
    """All ranks raise where some have run out, and can't do for another model what the others do."""
    rank, mesh = dist.get_rank(), one_mesh(sizes)
    model = shard(build(), mesh=mesh)
    if how == "unknown" and not counts[rank]:
        fully_shard(nn.Linear(5, 5), mesh=mesh)  # so the next one has another number
    other, optimizer = shard(build_other(), mesh=mesh), adamw(model)

    def run() -> None:
        with fsdp2.join(model, optimizer=optimizer):
            for i in range(counts[rank]):
                rows = batch_of(OddMLP(), rank, i)
                if how == "unknown":
                    with torch.no_grad():
                        other(rows)
                mean_loss(model(rows)).backward()
                optimizer.step()
                optimizer.zero_grad()
                if how == "trained":
                    mean_loss(other(rows)).backward()

    if how == "trained":
        other(batch_of(OddMLP(), rank, 0))
    expected = "of another sharded model that trains" if how == "trained" else "can't tell which of its own"
    with pytest.raises(RuntimeError, match=expected):
        run()
    rows = batch_of(OddMLP(), rank, 0)
    assert_same(other(rows), build_other()(rows), **EXACT, name="the next output")
    if how == "unknown":  # nobody has stepped
        assert_same(model(rows), build()(rows), **EXACT, name="the model's next output")


@pytest.mark.parametrize("replicas", [1, 2])
def test_other_models_in_the_loop(replicas: int) -> None:
    counts, sizes = ((3, 1), (2,)) if replicas == 1 else ((2, 1, 2, 1), (2, 2))
    none = [count * (i % 2 == 0) for i, count in enumerate(counts)]
    hows = ("usual", "through", "inside", "kept", "first") if replicas == 1 or NIGHTLY else ("usual", "through")
    checks = [(f"a teacher, {how}", partial(distill, how, none if how == "usual" else counts, sizes)) for how in hows]
    checks.append(("trained", partial(refuse_other, "trained", counts, sizes)))
    if replicas == 1:
        checks.append(("unknown", partial(refuse_other, "unknown", none, sizes)))
    run_checks(prod(sizes), checks)


# ---- ranks that stop without it


@pytest.mark.parametrize(
    ("counts", "question"),
    [
        (
            (7, 6),
            r"The process of rank 1 has ended: see its log. Rank 1 has not begun step 7: .*\n.*Where each rank was",
        ),
        ((2, 1, 1), r"anks 1, 2 have not begun step 2: is a call under `if rank == 0:`, or do they leave a loop"),
    ],
)
def test_a_rank_that_stops_is_named(counts: Counts, question: str) -> None:
    """As soon as its process has ended, which is what a program does behind its loop."""

    def body(rank: int, _: int) -> None:
        model = shard(build())
        for i in range(counts[rank]):
            mean_loss(model(batch_of(OddMLP(), rank, i))).backward()
            model.zero_grad()
        os._exit(0)

    with pytest.raises(RankError, match=f"(?s){question}"):
        run_ranks(len(counts), body, timeout=30)


def test_a_rank_that_stops_amid_a_step_is_not() -> None:
    def body(rank: int, _: int) -> None:
        model = shard(build())
        if rank == 1:
            model.wide.register_forward_pre_hook(lambda *_: os._exit(0))
        model(batch_of(OddMLP(), rank, 0))

    with pytest.raises(RankError) as caught:
        run_ranks(2, body, timeout=30)
    assert "Where each rank was" in str(caught.value)
    assert "has not begun" not in str(caught.value)
