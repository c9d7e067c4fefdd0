"""Random models, wrapped and trained at random, against plain training: combinations that nobody thinks of.

A seed draws a model and its groups (see random_models.py), then three training steps: which parts each forward skips,
how many micro-batches, with or without gradient sync, one backward for several forwards, evaluation and `zero_grad` in
between. All of it is the same on all ranks. fp64, so that any real difference stands out, or fp32 beside it.

A failing seed is made minimal: what it takes to fail is printed as a recipe.

    FSDP2_NIGHTLY=1 python -m pytest tests/ranks/test_random_models.py                      # eight times as many seeds
    FSDP2_RECIPE="(2, 17, {'tree parts': 2})" python -m pytest tests/ranks/test_random_models.py   # one, on two ranks

In place of the choices None: all that the seed draws.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor
from torch.nn import Module

from fsdp2 import FSDPModule
from helpers import NIGHTLY, alone, assert_same, assert_same_names, shard_batch
from random_models import (
    DIM,
    VOCAB,
    Group,
    Root,
    branches,
    make_model,
    optional_modules,
    reduced_together,
    shard,
    tolerance,
)
from recipes import Recipe, asked_for, assert_none, differing, shrink
from sides import assert_part

ROWS = 12  # divides by 1 to 4 ranks
STEPS = 3
FILE = "tests/ranks/test_random_models.py"
TIMES = 8 if NIGHTLY else 1
SEEDS = {
    1: range(3 * TIMES),
    2: range(1000, 1000 + 12 * TIMES),
    3: range(2000, 2000 + 6 * TIMES),
    4: range(3000, 3000 + 4 * TIMES),
}
"""By the number of ranks: 25, or 200."""
NESTED = {
    "tree parts": 3,
    "tree.parts.0 kind": "branch",
    "tree.parts.0 parts": 2,
    "tree again": 1,
    "group a pair of tree": True,
    "group tree.parts.0.parts.1.down": True,
    "step 0.0 skips 1.1 on": (1,),
    "conditional groups": True,
    "conditional pair of tree": True,
    "conditional tree.parts.0.parts.1.down": True,
}
FOUND = {"ranks gather for others a group that runs, and need it once more": (2, Recipe(3029, NESTED))}
"""What has failed: the number of ranks, and the recipe."""


# ---- drawing and training steps --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """One optimizer step. For each micro-batch and branch, `skips` has the parts it leaves out, and the ranks
    on which it does (None: on all).
    """

    skips: tuple[tuple[dict[int, Sequence[int] | None], ...], ...]
    mode: str  # "sync each": reduce every backward; "sync last": only the last; "one backward" for all forwards; ...
    evaluates: str | None
    gathers_by_hand: bool
    set_to_none: bool
    zeroes: str  # when gradients are zeroed, beside or instead of after the step


SOME_RANKS = ((0,), (1,), (2, 3), (0, 2), (1, 2, 3))


def make_plan(model: Root, groups: list[Group], recipe: Recipe) -> list[StepPlan]:
    optional = optional_modules(groups)

    def skipped_on(name: str, part: Module) -> tuple[bool, Sequence[int] | None]:
        some = recipe.pick(f"{name} on", None, SOME_RANKS if part in optional else (), 0.5)
        return some is not None or recipe.pick(name, False, (True,), 0.15), some

    def skips(name: str) -> tuple[dict[int, Sequence[int] | None], ...]:
        drawn = [
            {i: skipped_on(f"{name} skips {j}.{i}", part) for i, part in enumerate(branch.parts)}
            for j, branch in enumerate(branches(model))
        ]
        return tuple({i: ranks for i, (skips, ranks) in of_branch.items() if skips} for of_branch in drawn)

    def step(name: str) -> StepPlan:
        micros = recipe.pick(f"{name} micro-batches", 1, (2, 3), 0.5)
        modes = ("sync last", "sync last", "one backward", "all-reduce last")
        return StepPlan(
            skips=tuple(skips(f"{name}.{micro}") for micro in range(micros)),
            mode=recipe.pick(f"{name} mode", "sync each", modes, 0.75),
            evaluates=recipe.pick(f"{name} evaluates", None, ("no grad", "inference", "grad"), 0.25),
            gathers_by_hand=recipe.pick(f"{name} gathers by hand", False, (True,), 0.15),
            set_to_none=recipe.pick(f"{name} zeroes in place", False, (True,), 0.3) is False,
            zeroes=recipe.pick(f"{name} zeroes", "", ("never", "before backward", "between micro-batches"), 0.3),
        )

    return [step(f"step {number}") for number in range(STEPS)]


@dataclasses.dataclass
class Observed:
    """What a step shows from outside. On a sharded model, gradients and parameters are the live, sharded ones."""

    evaluation: Tensor | None
    grads: dict[str, Tensor | None]
    params: dict[str, Tensor]


class Trainer:
    """Trains the plain model and the sharded one by the same lines; the plain one does what all `ranks` do."""

    def __init__(self, model: Root, groups: list[Group], recipe: Recipe, ranks: Sequence[int], world_size: int) -> None:
        self.model, self.seed, self.ranks, self.world_size = model, recipe.seed, ranks, world_size
        self.plan, self.together = make_plan(model, groups, recipe), reduced_together(model, groups)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5, foreach=True)

    def steps(self) -> Iterator[Observed]:
        for number, step in enumerate(self.plan):
            evaluation = self.evaluate(number, step)
            self.backward(number, step)
            if not isinstance(self.model, FSDPModule) and self.world_size > 1:
                self.fill_with_zeros()
            grads = {name: p.grad for name, p in self.model.named_parameters()}
            self.optimizer.step()
            yield Observed(evaluation, grads, dict(self.model.named_parameters()))
            if step.zeroes != "never":
                self.optimizer.zero_grad(set_to_none=step.set_to_none)

    def fill_with_zeros(self) -> None:
        """A conditional group that is used at all is reduced in full."""
        for params in self.together:
            if any(param.grad is not None for param in params):
                for param in params:
                    if param.grad is None and param.requires_grad:
                        param.grad = torch.zeros_like(param)

    def forward(self, number: int, step: StepPlan, micro: int) -> Tensor:
        """The rows of all of `ranks`."""
        return torch.cat([self.forward_on(rank, number, step, micro) for rank in self.ranks])

    def forward_on(self, rank: int, number: int, step: StepPlan, micro: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 100 + number * 10 + micro)
        x = torch.randn(ROWS, DIM, generator=generator, dtype=torch.float64)
        tokens = torch.randint(VOCAB, (ROWS,), generator=generator)
        for branch, skips in zip(branches(self.model), step.skips[micro], strict=True):
            branch.skipped = frozenset(i for i, ranks in skips.items() if ranks is None or rank in ranks)
        return self.model(*(shard_batch(t, rank, self.world_size) for t in (x, tokens)))

    def evaluate(self, number: int, step: StepPlan) -> Tensor | None:
        if isinstance(self.model, FSDPModule) and step.gathers_by_hand:
            self.model.unshard()
        if step.evaluates is None:
            return None
        with torch.inference_mode(step.evaluates == "inference"), torch.set_grad_enabled(step.evaluates == "grad"):
            return self.forward(number, step, 0).detach()

    def backward(self, number: int, step: StepPlan) -> None:
        losses = []
        for micro in range(len(step.skips)):
            last = micro == len(step.skips) - 1
            self.set_sync(step.mode, last)
            losses.append((self.forward(number, step, micro) - 0.5).square().mean() / len(step.skips))
            if step.zeroes == "before backward" and micro == 0:
                self.optimizer.zero_grad(set_to_none=step.set_to_none)
            if last or step.mode != "one backward":
                sum(losses).backward()
                losses = []
                if step.zeroes == "between micro-batches" and not last:
                    self.optimizer.zero_grad(set_to_none=step.set_to_none)

    def set_sync(self, mode: str, last: bool) -> None:
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last or mode != "sync last")
            self.model.set_requires_all_reduce(last or mode not in ("sync last", "all-reduce last"))


# ---- comparing -------------------------------------------------------------------------------------------------------


def train_plain(recipe: Recipe, world_size: int) -> list[Observed]:
    model, groups = make_model(recipe)
    return [
        Observed(
            seen.evaluation,
            {name: None if g is None else g.clone() for name, g in seen.grads.items()},
            {name: p.detach().clone() for name, p in seen.params.items()},
        )
        for seen in Trainer(model, groups, recipe, range(world_size), world_size).steps()
    ]


def check(actual: Observed, expected: Observed, rank: int, world_size: int, tolerance: dict[str, float]) -> None:
    if expected.evaluation is not None:
        rows = shard_batch(expected.evaluation, rank, world_size)
        assert_same(actual.evaluation, rows, **tolerance, name="evaluation output")
    assert_same_names(actual.params, expected.params)
    for name, grad in expected.grads.items():
        assert_part(actual.grads[name], grad, f"{name}.grad", tolerance)
    for name, param in expected.params.items():
        assert_part(actual.params[name], param, name, tolerance)


def first_difference(recipe: Recipe, rank: int, world_size: int, expected: list[Observed]) -> str | None:
    """Trains to the end even if there is one: a rank that left early would hang the others."""
    model, groups = make_model(recipe)
    shard(model, groups, recipe, world_size)
    different = None
    for number, actual in enumerate(Trainer(model, groups, recipe, [rank], world_size).steps()):
        try:
            check(actual, expected[number], rank, world_size, tolerance(recipe))
        except AssertionError as error:
            different = different or f"step {number}: {error}"
    return different


# ---- the test --------------------------------------------------------------------------------------------------------


def failures(recipes: Sequence[Recipe], world_size: int) -> list[tuple[Recipe, str]]:
    """Those recipes whose sharded training differs from the plain one, or fails, with all that they chose, and how."""
    expected = alone(lambda: [train_plain(recipe, world_size) for recipe in recipes])

    def difference(number: int, recipe: Recipe, rank: int) -> str | None:
        return first_difference(recipe, rank, world_size, expected[number])

    return differing(recipes, world_size, difference)


@pytest.mark.parametrize("world_size", SEEDS)
def test_random_models_train_as_plain_ones(world_size: int) -> None:
    """Features that work alone break together: a twice-called part in a group that a micro-batch skips, for one."""
    asked = asked_for(world_size)
    recipes = [Recipe(seed) for seed in SEEDS[world_size]] if asked is None else asked
    assert_none(recipes, world_size, lambda recipes: failures(recipes, world_size), FILE)


@pytest.mark.parametrize(("world_size", "recipe"), FOUND.values(), ids=FOUND)
def test_earlier_failures(world_size: int, recipe: Recipe) -> None:
    assert not failures([recipe], world_size)


def test_a_recipe_shrinks_to_what_it_takes_to_fail() -> None:
    recipe = Recipe(0, dict.fromkeys("abcdefg", True))
    minimal = shrink(recipe, lambda fewer: {"b", "f"} <= set(fewer.chosen))
    assert minimal.chosen == {"b": True, "f": True}
