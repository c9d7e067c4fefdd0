"""Chooses how much all checks in this process check: "off", "default" or "debug"."""

from __future__ import annotations

import os
from functools import cache
from typing import Any

VARIABLE = "FSDP2_CHECKS"
LEVELS = ("off", "default", "debug")


@cache
def _chosen() -> list[str]:
    """Returns a list of one level, which `choose_level` replaces."""
    return [require_level(os.environ.get(VARIABLE) or "default", f"environment variable {VARIABLE}")]


def level() -> str:
    """Returns the level in force: what `set_checks` has chosen, or else the environment variable FSDP2_CHECKS.

    Raises:
        ValueError: the variable has another value.
    """
    return _chosen()[0]


def require_level(value: Any, what: str) -> str:
    """Returns `value` if it is a level. `what`: what has it.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(value, str) or value not in LEVELS:
        raise ValueError(f"{what}: expected one of {', '.join(LEVELS)}, got {value!r}")
    return value


def is_on() -> bool:
    """Returns True unless the level is "off"."""
    return _chosen()[0] != "off"


def is_debug() -> bool:
    """Returns True if the level is "debug"."""
    return _chosen()[0] == "debug"


def choose_level(chosen: str) -> None:
    """Changes the level from now on."""
    _chosen()[0] = chosen
