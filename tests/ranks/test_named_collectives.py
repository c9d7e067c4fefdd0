"""Tests that all ranks raise if they are out of step, with the collective of each, and that the next step is exact.

If a rank does not come, or has died, the others report where each rank was, as soon as the process group times out.
"""

import itertools
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import helpers
from fsdp2 import MixedPrecisionPolicy, clip_grad_norm_, fully_shard, replicate, set_checks
from fsdp2.checks import comm_watcher
from fsdp2.checks.level import _chosen
from fsdp2.collectives.coalesced import CoalescedComm
from helpers import NIGHTLY, RankError, alone, run_ranks
from scenarios import Run, assert_none_differ, loss_of

WIDTHS = (4, 240)
"""Of all that goes to one rank little, which travels with the header, and much, which does not."""
SOON_S = 10
"""A hang would be one of the default process group: half an hour."""
TIMEOUT_S = 2
DEPTH = 6
ROWS = 12
"""For three ranks or four."""


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Net(nn.Module):
    """Layers of one shape; all but one of them run, in `order`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(DEPTH))
        self.scale = nn.Parameter(torch.ones(width))
        self.order = (0, 1, 2, 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        for i in self.order:
            x = self.layers[i](x)
        return x * self.scale


def build(run: Run, width: int, **options: Any) -> Any:
    model = run.build(Net, width)
    for layer in model.layers:
        run.shard(layer, **options)
    return run.shard(model, **options)


def train(model: Net, x: Tensor) -> None:
    loss_of(model(x)).backward()


# ---- what one rank does while the others train -----------------------------------------------------------------------


class OnPurpose(Exception):
    pass


def raise_on_purpose(*_: Any) -> None:
    raise OnPurpose("bad sample")


def raises_in(register: str, fails: Callable[..., Any] = raise_on_purpose) -> Callable[[Net, Tensor], None]:
    def stray(model: Net, x: Tensor) -> None:
        handle = getattr(model.layers[2], register)(fails)
        try:
            train(model, x)
        finally:
            handle.remove()

    return stray


def raises_in_the_loss(model: Net, x: Tensor) -> None:
    loss_of(model(x))
    raise_on_purpose()


def in_order(*order: int) -> Callable[[Net, Tensor], None]:
    def stray(model: Net, x: Tensor) -> None:
        usual, model.order = model.order, order
        try:
            train(model, x)
        finally:
            model.order = usual

    return stray


def evaluates_once_more(model: Net, x: Tensor) -> None:
    with torch.no_grad():
        model(x)
    train(model, x)


def does_not_reduce(model: Any, x: Tensor) -> None:
    model.set_requires_gradient_sync(False)
    try:
        train(model, x)
        train(model, x)
    finally:
        model.set_requires_gradient_sync(True)


def freezes_a_bias(model: Net, x: Tensor) -> None:
    model.layers[4].linear.bias.requires_grad_(False)
    try:
        train(model, x)
    finally:
        model.layers[4].linear.bias.requires_grad_(True)


# Before some forwards ranks compare what they have done.
_BEGINS = "rank 2: (?:gathering|all-reducing what checks compare)"

STRAYS: dict[str, tuple[Callable[[Net, Tensor], None], str]] = {
    "raises": (raises_in("register_forward_hook"), "rank 2: raised OnPurpose in the forward of layers.2: bad sample"),
    "raises in backward": (raises_in("register_full_backward_hook"), "rank 2: raised OnPurpose: bad sample"),
    "raises in the loss": (raises_in_the_loss, "rank 2: beginning a forward"),
    "another order": (in_order(1, 0, 2, 4, 5), "rank 2: gathering"),
    "leaves one out": (in_order(0, 1, 4, 5), "ranks 0, 1: gathering layers.2.*rank 2: gathering layers.1"),
    # What follows is the same on all ranks, and is gathered ahead.
    "another tower": (in_order(0, 1, 3, 4, 5), "rank 2: gathering layers.3"),
    "evaluates once more": (evaluates_once_more, _BEGINS),
    "does not reduce": (does_not_reduce, "ranks 0, 1: reducing"),
    "freezes a bias": (freezes_a_bias, r"ranks 0, 1: reducing layers.4.*, tensors of .*rank 2: reducing layers.4"),
}


def plain(width: int) -> list[tuple[str, str, Any]]:
    run = Run()
    model = build(run, width)
    for number in range(2 * len(STRAYS) + 1):
        train(model, run.batch(width, seed=number, rows=ROWS))
        run.grads(f"step {number}", model)
        model.zero_grad()
    return run.shown


def strays_one_by_one(run: Run, width: int, level: int, *, named: bool = True, **options: Any) -> list[str]:
    """Each time the last rank does something else; then all train, which is compared. No barrier is in between.

    `named`: a rank that raises says so; else it begins the next forward, which others find.
    """
    model = build(run, width, **options)
    set_checks("debug" if level else "default")

    def step(number: int) -> None:
        train(model, run.batch(width, seed=number, rows=ROWS))
        run.grads(f"step {number}", model)
        model.zero_grad()

    step(0)
    problems = []
    for i, (name, (stray, expected)) in enumerate(STRAYS.items()):
        start = time.monotonic()
        try:
            (stray if run.rank == run.world_size - 1 else train)(model, run.batch(width, seed=100 + i, rows=ROWS))
            problems.append(f"{name}: nothing was raised")
        except OnPurpose:
            pass
        except RuntimeError as error:
            says = expected if named and not options else ""
            is_compared_first = level and "requires_grad differs between ranks" in str(error)
            if not (is_compared_first or re.search(f"ranks are out of step.*{says}", str(error))):
                problems.append(f"{name}: {error}")
        if time.monotonic() - start > SOON_S:
            problems.append(f"{name}: took {time.monotonic() - start:.0f} s")
        model.zero_grad()
        step(2 * i + 1)
        step(2 * i + 2)
    return problems + run.different[:2]


class HeaderlessComm(CoalescedComm):
    def compare(self, *_: Any) -> None:
        pass


@contextmanager
def coalesced() -> Iterator[None]:
    """As on NCCL, where collectives have no header."""
    with mock.patch.object(comm_watcher, "NamedPairwiseComm", HeaderlessComm):
        yield


@pytest.mark.parametrize("width", WIDTHS)
def test_all_ranks_raise_and_the_next_step_is_exact(width: int) -> None:
    expected = alone(lambda: plain(width))

    def body(rank: int, size: int) -> list[str]:
        problems = [f"level 0: {text}" for text in strays_one_by_one(new(rank), width, 0)]
        if width == WIDTHS[-1] and not NIGHTLY:  # at the debug level, what ranks compare does not depend on it
            return problems
        problems += [f"level 1: {text}" for text in strays_one_by_one(new(rank), width, 1)]
        with coalesced():
            headerless = strays_one_by_one(new(rank), width, 1, named=False)
            return problems + [f"coalesced: {text}" for text in headerless]

    def new(rank: int) -> Run:
        return Run(rank, 3, expected)

    assert_none_differ(run_ranks(3, body, timeout=120))


def test_replicas_of_ranks_that_are_out_of_step_raise_too() -> None:
    """They wait, in sums, for ranks that found it out among those that shard with them."""
    expected = alone(lambda: plain(4))

    def body(rank: int, size: int) -> list[str]:
        mesh = init_device_mesh("cpu", (2, 2))
        levels = (0, 1) if NIGHTLY else (0,)
        runs = {level: strays_one_by_one(Run(rank, size, expected), 4, level, mesh=mesh) for level in levels}
        return [f"level {level}: {text}" for level, texts in runs.items() for text in texts]

    assert_none_differ(run_ranks(4, body, timeout=120))


def own_sum() -> None:
    total = torch.ones(3, dtype=torch.int64)
    dist.all_reduce(total)
    assert total.tolist() == [2] * 3


def test_a_rank_that_raises_may_wait_in_a_collective_of_its_own() -> None:
    """The others raise at once, and come to that collective, too. All have ended the same step. Another model on the
    same process group goes on, too.
    """
    places = ("register_forward_pre_hook", "register_forward_hook", "register_full_backward_hook")
    recoveries = (lambda: None, dist.barrier, own_sum)

    def trained(run: Run, raises: bool) -> list[tuple[str, str, Any]]:
        models = [build(run, 4), build(run, 4)]
        for number, (place, recover) in enumerate(itertools.product(places, recoveries)):
            model, x = models[number % 2], run.batch(4, seed=100 + number)
            if raises and run.rank == 0:
                with pytest.raises(OnPurpose):
                    raises_in(place)(model, x)
            elif raises:
                assert "rank 0: raised OnPurpose" in error_of(lambda model=model, x=x: train(model, x))
            if raises:
                recover()
            for each in models:
                each.zero_grad()
                train(each, run.batch(4, seed=number))
                run.grads(f"step {number}", each)
        return run.shown

    expected = alone(lambda: trained(Run(), raises=False))

    def body(rank: int, size: int) -> list[str]:
        run = Run(rank, size, expected)
        trained(run, raises=True)
        return run.different

    assert_none_differ(run_ranks(2, body, timeout=3 * SOON_S))


def test_an_evaluation_that_raises_on_one_rank_disturbs_no_other() -> None:
    """It has all that the others need of it. Ranks evaluate different numbers of samples so."""

    def body(rank: int, size: int) -> None:
        model = build(Run(rank, size, []), 4)
        handle = model.register_forward_hook(raise_on_purpose) if rank == 0 else None
        with torch.no_grad(), pytest.raises(OnPurpose) if rank == 0 else nullcontext():
            model(torch.ones(1, 4, dtype=torch.float64))
        if handle is not None:
            handle.remove()
        with torch.no_grad():
            model(torch.ones(1, 4, dtype=torch.float64))

    run_ranks(2, body, timeout=3 * SOON_S)


def error_of(step: Callable[[], object]) -> str:
    with pytest.raises(RuntimeError) as caught:
        step()
    return str(caught.value)


def test_the_message_names_what_each_rank_does() -> None:
    def body(rank: int, size: int) -> list[str]:
        run, texts = Run(rank, size, []), []
        for level in (0, 1):
            model = build(run, 4)
            set_checks("debug" if level else "default")
            model.order = (0, 1, 4) if rank == 1 else (0, 1, 2)
            texts.append(error_of(lambda model=model: model(run.batch(4, seed=0))).partition(" All ")[0])
        return texts

    both = "rank 0: gathering layers.2{0}; rank 1: gathering layers.4{0}."
    expected = [f"ranks are out of step. {both.format(where)}" for where in ("", " (forward, step 0)")]
    assert run_ranks(2, body) == [expected] * 2


def test_models_of_different_widths() -> None:
    """Ranks compare shapes before they gather."""

    def body(rank: int, size: int) -> str:
        run = Run(rank, size, [])
        wide = build(run, 300 if rank == 1 else 4)
        with torch.no_grad():
            for param in wide.parameters():
                param.add_(1)  # ranks that start from other weights are told so before
        text = error_of(lambda: wide(torch.zeros(1, wide.scale.shape[0], dtype=torch.float64)))
        model = build(run, 4)
        model(run.batch(4, seed=0))  # on the same process group
        return text

    for text in run_ranks(2, body):
        assert "got the shape (4,) on rank 0, and the shape (300,) on rank 1" in text


def test_replicas_that_are_out_of_step() -> None:
    """Sums between replicas go by gloo's own collective, which would mix equal shapes, and crash on others."""

    def body(rank: int, size: int) -> tuple[str, Tensor]:
        run = Run(rank, size, [])
        model = build(run, 4, mesh=init_device_mesh("cpu", (2, 2)))
        if rank >= 2:
            model.order = (5, 1, 2, 4, 0)  # on all ranks that share a replica's shards: only the sums differ
        text = error_of(lambda: train(model, run.batch(4, seed=0, rows=12)))
        model.zero_grad()
        model.order = (0, 1, 2, 4, 5)
        train(model, torch.ones(3, 4, dtype=torch.float64))
        return text, model.layers[5].linear.weight.grad.full_tensor()

    texts, gradients = zip(*run_ranks(4, body), strict=True)
    for text in texts:
        assert re.search(r"rank [01]: summing replicas of layers.5; rank [23]: summing replicas of layers.0", text), (
            text
        )
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)


# ---- what ranks reduce besides ---------------------------------------------------------------------------------------


def normed() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()


def sharded(shard: Callable[..., Any] = fully_shard) -> Any:
    model, policy = normed(), MixedPrecisionPolicy(param_dtype=torch.float64)
    return shard(model, ignored_params={model[2].bias.requires_grad_(False)}, mp_policy=policy)


def one_evaluates(model: Any, x: Tensor, is_first: bool) -> None:
    model.train(not is_first)
    train(model, x)


def one_freezes_a_norm(model: Any, x: Tensor, is_first: bool) -> None:
    model[1].train(not is_first)
    train(model, x)


def one_asks_a_teacher(model: Any, x: Tensor, is_first: bool) -> None:
    teacher, y = sharded(), model(x)
    if is_first:
        teacher(x)
    loss_of(y).backward()


def one_compares_earlier(model: Any, x: Tensor, is_first: bool) -> None:
    model.eval()
    with torch.no_grad():
        for _ in range(1 + is_first):
            model(x)
    model.train()
    train(model, x)


def one_clips(model: Any, x: Tensor, is_first: bool) -> None:
    if is_first:
        clip_grad_norm_(model.parameters(), 1)
    train(model, x)


def one_penalises(model: Any, x: Tensor, is_first: bool) -> None:
    weight = model[0].weight.full_tensor().square().sum()
    (loss_of(model(x)) + (weight if is_first else 0)).backward()
    train(model, x)


ALONE: dict[Callable[[Any, Tensor, bool], None], str] = {
    one_evaluates: "running statistics of 1",
    one_freezes_a_norm: "running statistics of 1",
    one_asks_a_teacher: "what checks compare of root",
    one_compares_earlier: "what checks compare of root",
    one_clips: "norms in clip_grad_norm_",
    one_penalises: r"the gradient of 0.weight.full_tensor\(\)",
}


def errors_alone(
    rank: int, stray: Callable[[Any, Tensor, bool], None], level: int, shard: Callable[..., Any] = fully_shard
) -> str:
    x = torch.randn(2, 8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    plain, model = normed(), sharded(shard)
    set_checks("debug" if level else "default")
    sum(loss_of(plain(rows)) / 2 for rows in x).backward()
    train(model, x[rank])
    error = error_of(lambda: stray(model, x[rank], rank == 0))
    model.train()[2].bias.requires_grad_(False)
    for _ in range(4):
        model.zero_grad()
        train(model, x[rank])
        torch.testing.assert_close(model[0].weight.grad.full_tensor(), plain[0].weight.grad)
    return error


@pytest.mark.parametrize("stray", ALONE, ids=lambda stray: stray.__name__)
def test_one_rank_reduces_something_else(stray: Callable[[Any, Tensor, bool], None]) -> None:
    """An all-reduce itself has no header: whoever stood in it would wait for ever."""

    def body(rank: int, size: int) -> list[str]:
        error = errors_alone(rank, stray, level=0)
        with coalesced():
            return [error, errors_alone(rank, stray, level=1)]

    for errors in run_ranks(2, body, timeout=30):
        for error in errors:
            assert re.search(rf"ranks are out of step\..*all-reducing .*{ALONE[stray]}", error), error


@pytest.mark.parametrize("stray", [one_evaluates, one_freezes_a_norm], ids=lambda stray: stray.__name__)
def test_one_replica_averages_other_statistics(stray: Callable[[Any, Tensor, bool], None]) -> None:
    """Where nothing is gathered, too, ranks go on from the modules that train then, not from those that trained when
    they were out of step.
    """

    def body(rank: int, size: int) -> list[str]:
        return [errors_alone(rank, stray, level, replicate) for level in (0, 1)]

    for error in (error for errors in run_ranks(2, body, timeout=30) for error in errors):
        assert re.search(rf"ranks are out of step\..*all-reducing .*{ALONE[stray]}", error), error


# ---- who does not come -----------------------------------------------------------------------------------------------


def fate(rank: int, levels: tuple[int, ...], stop: Callable[[], None]) -> str:
    """How a step ends on one of three ranks, the last of which stops in the middle; there is a world for each level."""
    timeout = timedelta(seconds=TIMEOUT_S)
    groups = [dist.new_group([3 * i, 3 * i + 1, 3 * i + 2], timeout=timeout) for i in range(len(levels))]
    world, place = divmod(rank, 3)
    run = Run(place, 3, [])
    model = build(run, 4, mesh=DeviceMesh.from_group(groups[world], "cpu"))
    set_checks("debug" if levels[world] else "default")
    train(model, run.batch(4, seed=0))
    model.zero_grad()
    if place == 2:
        model.layers[2].register_forward_pre_hook(lambda *_: stop())
    dist.barrier()  # nobody shall give up on one that has not begun
    start = time.monotonic()
    try:
        train(model, run.batch(4, seed=0))
    except (RuntimeError, OnPurpose) as error:
        assert time.monotonic() - start < TIMEOUT_S + SOON_S
        return str(error)
    return "nothing was raised"


def assert_tells_where(text: str, rank: int, level: int) -> None:
    others = rank // 3 * 3
    # The last rank has begun to gather what follows the layer in which it stopped. If it has died, others may not have
    # heard of that.
    pattern = rf"rank {others + 2}: (has not come|its process has ended); \d\.\d s ago it was .*layers\.[24]"
    assert "Where each rank was:" in text, text
    assert re.search(pattern, text), text
    assert re.search(rf"rank {rank}: gathering layers\.[45].*\(this one\)", text), text
    assert re.search(r"\(while gathering layers\.[45], \d+ bytes; forward, step 1\)", text), text


def test_ranks_that_sleep_are_named(tmp_path: Path) -> None:
    def body(rank: int, size: int) -> str:
        def sleep() -> None:
            while not all((tmp_path / str(other)).exists() for other in (rank - 2, rank - 1)):
                time.sleep(0.05)

        text = fate(rank, (0, 1), sleep)
        (tmp_path / str(rank)).touch()
        return text

    for rank, text in enumerate(run_ranks(6, body, timeout=60)):
        if rank % 3 < 2:
            assert_tells_where(text, rank, rank // 3 % 2)


def test_dead_ranks_are_named(tmp_path: Path) -> None:
    def body(rank: int, size: int) -> None:
        (tmp_path / str(rank)).write_text(fate(rank, (0, 1), lambda: os._exit(1)))

    with mock.patch.object(helpers, "GRACE_S", 60), pytest.raises(RankError, match="rank 2, 5 of 6 failed"):
        run_ranks(6, body, timeout=60)
    for rank in (0, 1, 3, 4):
        assert_tells_where((tmp_path / str(rank)).read_text(), rank, rank // 3)


# ---- the debug level -------------------------------------------------------------------------------------------------


def test_the_environment_sets_the_level() -> None:
    def body(rank: int, size: int) -> list[str]:
        run = Run(rank, size, [])
        model = build(run, 4)
        model.order = (rank,)
        return [error_of(lambda: model(run.batch(4, seed=0)))]

    _chosen.cache_clear()
    with mock.patch.dict(os.environ, FSDP2_CHECKS="debug"):
        for texts in run_ranks(2, body):
            assert "gathering layers.1 (forward, step 0)" in texts[0]


def test_what_is_not_compared_changes_no_tags() -> None:
    """Ranks may freeze different parameters while they evaluate: what comes after headers arrives nevertheless."""

    def body(rank: int, size: int) -> None:
        torch.manual_seed(0)
        plain = nn.Linear(1200, 1200)  # of which a rank sends more than fits with a header
        model = fully_shard(nn.Linear(1200, 1200))
        with torch.no_grad():
            for p, q in zip(plain.parameters(), model.parameters(), strict=True):
                q.copy_(DTensor.from_local(p.chunk(size)[rank], q.device_mesh, q.placements))  # type: ignore[attr-defined]
        model.bias.requires_grad_(rank == 0)
        x = torch.ones(2, 1200)
        with torch.no_grad():
            for _ in range(2):
                helpers.assert_same(model(x), plain(x), rtol=1e-5, atol=1e-5, name="output")

    run_ranks(2, body, timeout=SOON_S * 3)
