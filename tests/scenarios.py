"""Runs a scenario on a plain model with the whole batch, and on forked ranks, and compares the values that it shows."""

import itertools
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp2 import FSDPModule, fully_shard
from helpers import NIGHTLY, alone, assert_same, assert_shard_of, end_of_part, run_ranks, shard_batch
from models import TanhBlock, mean_loss

ROWS = 6  # divides by 2 and 3 ranks
WIDTH = 5
TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}


# ---- a scenario on a plain and on a sharded model --------------------------------------------------------------------


class Run:
    """Is one execution of a scenario. `shown` holds its shown values: (kind, name, value).

    With `expected`, the shown values of an earlier execution, the model is sharded, and each shown value is compared at
    once. The differences are kept until the end, because a rank that raised early would leave the others waiting.
    """

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        expected: list[tuple[str, str, Any]] | None = None,
        tolerance: dict[str, float] = TOLERANCE,
    ) -> None:
        self.rank, self.world_size, self.expected, self.tolerance = rank, world_size, expected, tolerance
        self.shown: list[tuple[str, str, Any]] = []
        self.different: list[str] = []

    @property
    def sharded(self) -> bool:
        return self.expected is not None

    # what a scenario builds with

    def build(self, build: Callable[..., nn.Module], *args: Any, seed: int = 1, **kwargs: Any) -> Any:
        """Returns the same initial model on every side."""
        torch.manual_seed(seed)
        return build(*args, **kwargs).double()

    def shard(self, module: Any, **options: Any) -> Any:
        return fully_shard(module, **options) if self.sharded else module

    def batch(self, *row_shape: int, seed: int, rows: int = ROWS) -> Tensor:
        """Returns this side's rows of batch number `seed`."""
        generator = torch.Generator().manual_seed(seed)
        batch = torch.randn(rows, *(row_shape or (WIDTH,)), generator=generator, dtype=torch.float64)
        return shard_batch(batch, self.rank, self.world_size)

    def set_sync(self, model: nn.Module, sync: bool) -> None:
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(sync)

    # what a scenario shows

    def value(self, name: str, value: Any) -> None:
        """Shows a tensor or anything else that is the same on every rank."""
        self._show("value", name, value)

    def mean(self, name: str, value: Tensor) -> None:
        """Shows a mean over the batch."""
        self._show("mean", name, value)

    def rows(self, name: str, value: Tensor) -> None:
        """Shows a tensor whose dim 0 is the batch."""
        self._show("rows", name, value)

    def grads(self, name: str, model: nn.Module) -> None:
        """Shows every gradient, also if it is None."""
        for fqn, param in model.named_parameters():
            self._show("shard", f"{name}: {fqn}.grad", param.grad)

    def params(self, name: str, model: nn.Module) -> None:
        """Shows names and values of the parameters, which are the sharded ones."""
        self.value(f"{name}: names", [fqn for fqn, _ in model.named_parameters()])
        for fqn, param in model.named_parameters():
            self._show("shard", f"{name}: {fqn}", param)

    def step(self, name: str, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor | None = None) -> None:
        """Shows loss and gradients, then steps and shows the parameters. With a loss, backward comes first."""
        if loss is not None:
            loss.backward()
            self.mean(f"{name}: loss", loss)
        self.grads(name, model)
        optimizer.step()
        self.params(name, model)
        optimizer.zero_grad()

    def _show(self, kind: str, name: str, value: Any) -> None:
        copied = value.detach().clone() if isinstance(value, Tensor) and not self.sharded else value
        self.shown.append((kind, name, copied))
        if self.expected is None:
            return
        try:
            self._compare(kind, name, value, self.expected[len(self.shown) - 1])
        except AssertionError as error:
            self.different.append(str(error))

    def _compare(self, kind: str, name: str, value: Any, expected: tuple[str, str, Any]) -> None:
        if expected[:2] != (kind, name):
            raise AssertionError(f"expected {expected[:2]}, got {(kind, name)}")
        whole = expected[2]
        if kind == "shard":
            assert_shard_of(value, whole, **self.tolerance, name=name)
        elif kind == "rows":
            assert_same(value, shard_batch(whole, self.rank, self.world_size), **self.tolerance, name=name)
        elif kind == "mean":
            mean = value.detach().clone()
            dist.all_reduce(mean)
            assert_same(mean / self.world_size, whole, **self.tolerance, name=name)
        elif isinstance(whole, Tensor):
            assert_same(value, whole, **self.tolerance, name=name)
        elif value != whole:
            raise AssertionError(f"{name}: expected {whole!r}, got {value!r}")


Scenario = Callable[..., None]


def wrapped(cases: Sequence[dict[str, Any]], wraps: Sequence[Any]) -> list[dict[str, Any]]:
    """Deals ways to wrap to cases in turn, each to one at least; at night each case has all of them."""
    if NIGHTLY:
        return [{**case, "wrap": wrap} for case in cases for wrap in wraps]
    return [{**cases[i % len(cases)], "wrap": wraps[i % len(wraps)]} for i in range(max(len(cases), len(wraps)))]


def check(scenario: Scenario, world_size: int = 2, tolerance: dict[str, float] = TOLERANCE, **choices: Any) -> None:
    """Runs a scenario with every combination of `choices`, plain and then sharded, in one launch.

    Values of `wrap` are dealt to the combinations of the others.
    """
    wraps = choices.pop("wrap", None)
    cases = [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]
    if wraps is not None:
        cases = wrapped(cases, wraps)

    def plain() -> list[list[tuple[str, str, Any]]]:
        runs = []
        for case in cases:
            runs.append(Run())
            scenario(runs[-1], **case)
            assert runs[-1].shown, "a scenario must show something"
        return [run.shown for run in runs]

    expected = alone(plain)

    def body(rank: int, _: int) -> list[str]:
        different = []
        for case, shown in zip(cases, expected, strict=True):
            run = Run(rank, world_size, shown, tolerance)
            different += [
                f"{describe(case)} {text}" for text in differences(run, partial(scenario, run, **case), shown)
            ]
            end_of_part()
        return different

    assert_none_differ(run_ranks(world_size, body, timeout=60))


def differences(run: Run, scenario: Callable[[], None], shown: Sequence[Any]) -> list[str]:
    """Returns the differences on one rank, with errors and missing values."""
    try:
        scenario()
    except (Exception, pytest.fail.Exception):
        run.different.append(traceback.format_exc())
    if not run.different and len(run.shown) < len(shown):
        run.different.append(f"expected {len(shown)} values, got {len(run.shown)}")
    return run.different[:2]  # the first tell most: others follow from them


def assert_none_differ(of_ranks: Sequence[Sequence[str]]) -> None:
    different = list(dict.fromkeys(text for texts in of_ranks for text in texts))
    assert not different, f"{len(different)} differences:\n" + "\n".join(different[:12])


def describe(case: dict[str, Any]) -> str:
    return "[" + ", ".join(f"{key}={getattr(value, '__name__', value)}" for key, value in case.items()) + "]"


# ---- models and ways to wrap them ------------------------------------------------------------------------------------


class Block(TanhBlock):
    """Has layers of odd widths."""

    def __init__(self, width: int = WIDTH, inner: int = 3) -> None:
        super().__init__(width, inner)


class Net(nn.Module):
    """Has a stem, blocks, a scale of the root's own, a head."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x * self.scale)


class Uneven(nn.Module):
    """An embedding, whose backward does not read its weight; blocks, one of which runs twice; one that never runs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WIDTH + 1, WIDTH)
        self.first, self.twice, self.never = Block(), Block(), Block()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x + self.embed((x > 0).sum(1)))
        return self.head(self.twice(self.twice(x) * self.scale))


class KeepsWeight(torch.autograd.Function):
    """Computes x @ weight.T and stores the weight where autograd does not see it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight = x, weight
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return grad @ ctx.weight, grad.T @ ctx.x


class Fails(nn.Module):
    """Raises `error` in forward or in backward when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.when = ""
        self.error: type[BaseException] = ValueError

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        if self.when == "forward":
            raise self.error("on purpose")
        if self.when == "backward":
            x.register_hook(self.fail)
        return self.linear(x.tanh())

    def fail(self, grad: Tensor) -> None:
        raise self.error("on purpose")


class MayFail(nn.Module):
    """Fails in the middle, two levels deep."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.middle = nn.Sequential(nn.Linear(WIDTH, WIDTH), Fails(), nn.Linear(WIDTH, WIDTH))
        self.last = Block()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


def loss_of(output: Tensor) -> Tensor:
    return (output - 0.5).square().mean()


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    # foreach: DTensor plans one operation on all parameters, rather than one for each shape among them, as it does for
    # the buffers of momentum.
    return torch.optim.SGD(model.parameters(), **{"lr": 0.25, "foreach": True, **options})


Wrap = Callable[..., None]


def whole(run: Run, model: nn.Module) -> None:
    """Makes one group, whose parameters stay unsharded between forward and backward, as a root's do."""
    run.shard(model)


def blocks(run: Run, model: nn.Module, reshard_after_forward: bool | None = None) -> None:
    """Makes a group per direct child or block, and the root."""
    for child in model.children():
        for module in child if isinstance(child, nn.ModuleList) else [child]:
            run.shard(module, reshard_after_forward=reshard_after_forward)
    run.shard(model, reshard_after_forward=reshard_after_forward)


def kept(run: Run, model: nn.Module) -> None:
    """Makes the groups of `blocks`; the parameters of all stay unsharded between forward and backward."""
    blocks(run, model, reshard_after_forward=False)


def leaves(run: Run, model: nn.Module) -> None:
    """Makes a group per module with parameters, three levels deep; the root's parameters are resharded, too."""
    for module in reversed(list(model.modules())):
        if module is model or module._parameters or isinstance(module, Block):
            run.shard(module, reshard_after_forward=True)


# What is kept is kept everywhere in the nightly run; elsewhere where a test names it, and in random and real programs.
WRAPS = (whole, blocks, kept, leaves) if NIGHTLY else (whole, blocks, leaves)


def train_and_evaluate(run: Run, model: nn.Module, steps: int) -> None:
    """Runs steps of SGD, an evaluation before each; the second accumulates two batches, of which one is not reduced."""
    optimizer = sgd(model)
    for step in range(steps):
        if step == 1:
            run.set_sync(model, False)
            loss_of(model(run.batch(seed=10))).backward()
            run.set_sync(model, True)
        with torch.no_grad():
            run.rows(f"evaluated {step}", model(run.batch(seed=step + 20)))
        run.step(f"step {step}", model, optimizer, loss_of(model(run.batch(seed=step))))


# ---- a sharded model beside a plain one, on every rank ------------------------------------------------------------


def train_beside(model: nn.Module, plain: nn.Module, batches: Callable[[int], Tensor]) -> None:
    """Runs three steps of SGD, the second of two micro-batches of which the first is not synchronised."""
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, foreach=True) for each in (model, plain)]
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(3):
        for part in range(2 if step == 1 else 1):
            whole = batches(2 * step + part)
            if step == 1:
                model.set_requires_gradient_sync(part == 1)  # type: ignore[operator]
            mean_loss(model(shard_batch(whole, rank, size))).backward()
            mean_loss(plain(whole)).backward()
        for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert_same(param.grad, expected.grad, 1e-5, 1e-6, f"step {step}, {name}.grad")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_same(param, expected, 1e-5, 1e-6, name)
