"""Holds which fixes are in force. A function that has replaced one of torch's asks before it does anything else."""

from __future__ import annotations

import os
from collections.abc import Collection

VARIABLE = "FSDP2_DTENSOR_FIXES"

# Names of the fixes that are switched off. A function that runs in each step asks it directly.
off: set[str] = set()


def is_on(name: str) -> bool:
    """Returns True if the fix of that name is in force."""
    return name not in off


def switch(names: Collection[str], on: bool) -> None:
    """Switches the fixes of these names on or off."""
    if on:
        off.difference_update(names)
    else:
        off.update(names)


def read_environment(known: Collection[str]) -> None:
    """Switches off the fixes that the environment variable FSDP2_DTENSOR_FIXES names: `off`, or `-views,-random`.

    Raises:
        ValueError: it names a fix that is not in `known`.
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
