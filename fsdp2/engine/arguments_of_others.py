"""Has a function name the table that says what takes the place of an argument of DDP's or FSDP1's."""

from __future__ import annotations

from collections.abc import Callable, Set
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def refuses(names: Set[str], where: str, of: str, table: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Returns a decorator of a function `where`, which then raises a TypeError for each keyword argument in `names`,
    those of the class `of`, with the name of the guide of `table`.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def refusing(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in sorted(kwargs.keys() & names):
                raise TypeError(
                    f"{where}: {name} is an argument of {of}. The guide examples/guides/from-{table.lower()}.md says "
                    "what to write for each."
                )
            return function(*args, **kwargs)

        return refusing

    return decorate
