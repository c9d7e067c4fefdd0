"""Which fixes of `table.py` are in force: what has replaced a function of torch asks before it does anything else."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from functools import wraps
from typing import Any

VARIABLE = "FSDP2_DTENSOR_FIXES"

# Names of those that are not.
_off: set[str] = set()


def is_on(name: str) -> bool:
    """Returns True if the fix of that name is in force."""
    return name not in _off


def switched(name: str, plainly: Callable[..., Any], fixed: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function in place of torch's `plainly`: `fixed` while the fix of that name is in force."""

    @wraps(plainly)
    def call(*args: Any, **kwargs: Any) -> Any:
        return (plainly if name in _off else fixed)(*args, **kwargs)

    return call


def switch(names: Collection[str], on: bool) -> None:
    """Puts these in force, or not."""
    if on:
        _off.difference_update(names)
    else:
        _off.update(names)


def read_environment(known: Collection[str]) -> None:
    """Leaves out those that the environment variable FSDP2_DTENSOR_FIXES names: `off`, or `-views,-random`.

    Raises:
        ValueError: it names one that is not in `known`.
    """
    text = os.environ.get(VARIABLE, "").strip()
    if text in ("", "on"):
        return
    names = known if text == "off" else [each.strip().removeprefix("-") for each in text.split(",")]
    unknown = [each for each in names if each not in known]
    if unknown or (text != "off" and not all(each.strip().startswith("-") for each in text.split(","))):
        raise ValueError(
            f"{VARIABLE}: expected on, off, or names to leave out, as in -views,-random; got {text!r}. Names: "
            f"{', '.join(known)}."
        )
    switch(names, on=False)
