"""Random sequences of calls, on random models, against plain training: states that nobody thinks of.

A seed draws a model and its groups (see random_models.py), an optimizer, and what the program calls (random_calls.py).
After each call, what it returned, parameters and gradients are compared with the plain model's. Same on all ranks.

A failing seed is made minimal: what it takes to fail is printed as a recipe, which may be pasted into FOUND.

    FSDP2_NIGHTLY=1 python -m pytest tests/ranks/test_random_calls.py                   # eighteen times as many seeds
    FSDP2_RECIPE="(2, 17, {'call 3': 'step'})" python -m pytest tests/ranks/test_random_calls.py   # one, on two ranks

In place of the choices None: all that the seed draws.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist

import random_changes  # noqa: F401  adds its calls
from fsdp2.engine.placeholders import UnsynchronizedGrad
from helpers import NIGHTLY
from random_calls import CALLS, Draw, close, program
from random_models import make_model, shard, tolerance
from recipes import Recipe, asked_for, assert_none, differing
from sides import Side, assert_alike

FILE = "tests/ranks/test_random_calls.py"
LENGTH = 24
BATCH = 6
"""Seeds of one launch: the rest of it goes down with one that hangs."""
SEEDS = {2: range(BATCH * (60 if NIGHTLY else 4)), 3: range(1000, 1000 + BATCH * (30 if NIGHTLY else 1))}
BATCHES = [(n, first) for n, seeds in SEEDS.items() for first in seeds[::BATCH]]
WAITS = {"call 1": "sync", "call 2": "forward", "call 3": "backward"}
THAWS = {"tree.parts.0 kind": "lookup", "freeze module parts.0.table": True, "call 5": "freeze", "call 5 thaws": True}
FOUND = {
    "a gradient that waits loses what comes next": (2, Recipe(1001, WAITS)),
    "a gradient that waits outlives zero_grad": (
        2,
        Recipe(1002, {**WAITS, "call 4": "fail", "call 4 in backward": True}),
    ),
    "what stays is not gathered again after a step": (
        2,
        Recipe(0, {"no reshard after backward": True, "call 0": "forward"}),
    ),
    "what was thawed gets no gradient": (2, Recipe(3, THAWS)),
    "a plain optimizer can't step on a frozen parameter beside a sharded model": (
        2,
        Recipe(216, {"call 5": "forward", "call 7": "backward", "call 10": "freeze"}),
    ),
}
"""What has failed, with the library broken on purpose or not: the number of ranks, and the recipe."""
NEVER = ("conditional groups", "no saved-tensor hooks", "no unshard in backward")
"""Of random_models: the first has zeros for None on ranks that run a module, the others refuse a part of the calls."""
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.5),
    "foreach": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.5, weight_decay=0.01, foreach=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.02, eps=1e-2, foreach=False),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.02, eps=1e-2, fused=True),
}


def make_sides(recipe: Recipe, rank: int, world_size: int) -> tuple[Side, Side]:
    optimizer = OPTIMIZERS[recipe.pick("optimizer", "sgd", list(OPTIMIZERS), 0.8)]
    plain, _ = make_model(recipe)
    model, groups = make_model(recipe)
    shard(model, groups, recipe, world_size)
    return Side(model, optimizer, rank, world_size), Side(plain, optimizer, rank, world_size)


def error_of(run: Callable[[Side, Draw], None], side: Side, draw: Draw) -> Exception | None:
    side.shown.clear()
    try:
        run(side, draw)
    except Exception as error:
        return error
    return None


class Refused(Exception):
    """As the call may be."""


def run_call(name: str, sharded: Side, plain: Side, draw: Draw) -> str | None:
    """On both sides; what is wrong with how it ended. What both have refused is given up.

    Raises:
        Refused: by the sharded side alone, with one of the call's messages.
    """
    run, refusals = (CALLS[name].run, CALLS[name].refusals) if name in CALLS else (close, ())
    sharded.waits = plain.waits = any(isinstance(p.grad, UnsynchronizedGrad) for p in sharded.params.values())
    error = error_of(run, sharded, draw)
    if error is not None and any(text in str(error) for text in refusals):
        raise Refused
    plain_error = error_of(run, plain, draw)
    if error is None or plain_error is None:
        return None if error is plain_error else f"sharded: {error!r}, plain: {plain_error!r}"
    for side in (sharded, plain):
        side.give_up()
    return None


def met(text: str | None, group: dist.ProcessGroup) -> bool:
    """Whether some rank has found a difference: all end there, so that the next recipe begins together."""
    flag = torch.tensor(text is not None)
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=group)
    return bool(flag)


def first_difference(recipe: Recipe, rank: int, world_size: int, group: dist.ProcessGroup) -> str | None:
    torch.manual_seed(0)
    sharded, plain = make_sides(recipe, rank, world_size)
    roundings = {name: 8 * value for name, value in tolerance(recipe).items()}  # of more steps than three
    for choice, name in [*program(recipe, LENGTH), ("end", "close")]:
        text = None
        try:
            text = run_call(name, sharded, plain, Draw(recipe, choice))
            assert_alike(sharded, plain, roundings)
        except Refused:
            return None
        except AssertionError as error:
            text = text or str(error)
        if met(text, group):
            return text and f"{choice}, {name}: {text}"
    return None


def failures(recipes: Sequence[Recipe], world_size: int) -> list[tuple[Recipe, str]]:
    group: list[dist.ProcessGroup] = []

    def difference(_: int, recipe: Recipe, rank: int) -> str | None:
        if not group:
            group.append(dist.new_group())
        return first_difference(recipe, rank, world_size, group[0])

    return differing(recipes, world_size, difference, timeout=5 + 10 * len(recipes))


@pytest.mark.parametrize(("world_size", "first"), BATCHES)
def test_random_calls_are_exact_or_refused(world_size: int, first: int) -> None:
    """What one call leaves behind meets the next: a gradient that waits, a copy, a parameter that has been replaced."""
    asked = asked_for(world_size, NEVER)
    recipes = [Recipe(seed, never=NEVER) for seed in range(first, first + BATCH)] if asked is None else asked
    assert_none(recipes, world_size, lambda recipes: failures(recipes, world_size), FILE)


@pytest.mark.parametrize(("world_size", "recipe"), FOUND.values(), ids=FOUND)
def test_earlier_failures(world_size: int, recipe: Recipe) -> None:
    assert not failures([recipe], world_size)
