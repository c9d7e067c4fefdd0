"""Holds the level of each check, by its name: which are in force. table.py says what they do."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache

VARIABLE = "FSDP2_CHECKS"
LEVELS = ("off", "default", "debug")
NAMES = (
    "structure",
    "optimizers in backward",
    "empty memory",
    "starting weights",
    "buffers",
    "equal inputs",
    "step history",
    "clipping",
    "frozen parameters",
    "unmanaged parameters",
    "cast whole numbers",
    "buffers on meta",
    "written unsharded parameters",
    "moved data",
    "unseen writes",
    "kept memory",
    "entry points",
    "partial settings",
    "original parameters",
    "headers",
)


@cache
def _levels() -> dict[str, str]:
    """Returns the level of each check, by its name. They begin as the environment variable FSDP2_CHECKS says: `off`, or
    `entry points=off, ...`.

    Raises:
        ValueError: it names a check or a level that there is not.
    """
    levels = dict.fromkeys(NAMES, "default")
    for part in filter(None, map(str.strip, os.environ.get(VARIABLE, "").split(","))):
        name, separator, level = (each.strip() for each in part.rpartition("="))
        if level not in LEVELS or (name not in NAMES if separator else name != ""):
            raise ValueError(
                f"{VARIABLE}: expected {', '.join(LEVELS)}, for all checks, or name=level, as in 'entry points=off, "
                f"unseen writes=debug'; got {part!r}. Names: {', '.join(NAMES)}."
            )
        levels.update(dict.fromkeys([name] if separator else NAMES, level))
    return levels


def level_of(name: str) -> str:
    """Returns the level of the check of that name."""
    return _levels()[name]


def is_on(name: str) -> bool:
    """Returns True if the check of that name is not off."""
    return level_of(name) != "off"


def change_levels(wanted: Mapping[str, str]) -> None:
    """Changes the levels of these checks."""
    _levels().update(wanted)
