"""Defines recipes: the choices of a seed by name, so that a failing one can be made minimal, printed and pasted."""

import ast
import os
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import pytest

from helpers import RankError, run_ranks

SHRINK_S = 100
"""Leaves time before pytest's timeout."""


class Recipe:
    """Makes choices by name, at random when they are first used: each by itself, so that none depends on another.

    With `only`, just those are random; all others are the plainest, and so are the choices of `never`.
    """

    def __init__(self, seed: int, only: dict[str, Any] | None = None, never: Sequence[str] = ()) -> None:
        self.seed, self._is_drawn, self._never = seed, only is None, never
        self.chosen = dict(only or {})
        self.log: TextIO | None = None

    def __repr__(self) -> str:
        return f"Recipe({self.seed}, {self.chosen})"

    def pick(self, name: str, plainest: Any, others: Sequence[Any], chance: float) -> Any:
        """Returns one of the `others` with probability `chance`. A name has one value."""
        draw = random.Random(f"{self.seed} {name}")
        if self._is_drawn and others and name not in self._never and draw.random() < chance:
            self.chosen[name] = draw.choice(others)
            if self.log is not None:
                print((name, self.chosen[name]), file=self.log, flush=True)
        value = self.chosen.get(name, plainest)
        return value if value in others else plainest

    def without(self, names: Sequence[str]) -> "Recipe":
        return Recipe(self.seed, {name: value for name, value in self.chosen.items() if name not in names})


def asked_for(world_size: int, never: Sequence[str] = ()) -> list[Recipe] | None:
    """Returns the recipe that the user asks for, as a failure prints it, if it is for so many ranks, or None."""
    text = os.environ.get("FSDP2_RECIPE")
    if text is None:
        return None
    asked_size, seed, chosen = ast.literal_eval(text)
    return [Recipe(seed, chosen, never)] if asked_size == world_size else []


def differing(
    recipes: Sequence[Recipe],
    world_size: int,
    difference: Callable[[int, Recipe, int], str | None],
    timeout: float = 120,
) -> list[tuple[Recipe, str]]:
    """Returns the recipes in which `difference(number, recipe, rank)` finds one on some rank, with all their choices,
    and the text; or the one in which a rank dies or hangs.
    """

    def body(rank: int, _: int, log: TextIO) -> list[tuple[int, dict[str, Any], str]]:
        different = []
        for number, recipe in enumerate(recipes):
            if rank == 0:
                recipe.log = log
                print((recipe.seed, recipe.chosen), file=log, flush=True)
            try:
                text = difference(number, recipe, rank)
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
            if text is not None:
                different.append((recipe.seed, recipe.chosen, f"rank {rank}, {text}"))
        return different

    with tempfile.TemporaryFile("w+") as log:
        try:
            by_rank = run_ranks(world_size, body, log, timeout=timeout)
        except RankError as error:
            return [(_last_in(log), str(error))]
    found = {seed: (Recipe(seed, chosen), text) for of_rank in by_rank for seed, chosen, text in of_rank}
    return list(found.values())


def _last_in(log: TextIO) -> Recipe:
    """Returns the recipe that the first rank had begun, with its choices so far."""
    log.seek(0)
    for name, value in map(ast.literal_eval, log):
        if isinstance(name, int):
            seed, chosen = name, value
        else:
            chosen[name] = value
    return Recipe(seed, chosen)


def shrink(recipe: Recipe, fails: Callable[[Recipe], bool]) -> Recipe:
    """Returns a recipe that still fails, but not without any one of its choices, as far as possible in SHRINK_S."""
    deadline = time.monotonic() + SHRINK_S
    names = list(recipe.chosen)
    size = len(names)
    while size > 0:
        first = 0
        while first < len(names) and time.monotonic() < deadline:
            fewer = recipe.without(names[first : first + size])
            if fails(fewer):
                recipe, names = fewer, names[:first] + names[first + size :]
            else:
                first += size
        size //= 2
    return recipe


def assert_none(
    recipes: Sequence[Recipe], world_size: int, find: Callable[[Sequence[Recipe]], list[tuple[Recipe, str]]], file: str
) -> None:
    """Fails if `find` finds any, with the first of them made minimal."""
    failed = find(recipes) if recipes else []
    if not failed:
        return

    def still_fails(recipe: Recipe) -> bool:
        try:
            return bool(find([recipe]))
        except RankError:  # plain training refuses it
            return False

    minimal = shrink(failed[0][0], still_fails)
    texts = [f"seed {recipe.seed}: {text}" for recipe, text in failed]
    command = f'FSDP2_RECIPE="{(world_size, minimal.seed, minimal.chosen)}" python -m pytest {file}'
    lines = [
        f"{len(failed)} of {len(recipes)} recipes differ",
        *texts,
        "The first, made minimal:",
        repr(minimal),
        command,
    ]
    pytest.fail("\n".join(lines), pytrace=False)
