"""Defines the times at which checks do what takes time, and the classes of checks.

Such a check is due at the times 1, 2, 4, ..., 64, and each 128th: often at first, when a program is written, and then
now and again. `observers.py` counts the times. They are gathers of one group for a `RankCheck`, which compares ranks,
and forward passes for a `ForwardCheck`, which checks forwards of groups. `Check` is the class of all checks that have a
switch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..engine.compare_ranks import RankObserver
from ..engine.events import Observer
from ..engine.inputs import HandedInputs

_PERIOD = 128


def is_check_time(number: int, always: bool = False) -> bool:
    """Returns True if a check is due at time `number`, or if `always`; never while a CUDA graph is recorded: the host
    would wait for the device.
    """
    return (always or not (number % _PERIOD and number & (number - 1))) and not is_capturing()


def is_capturing() -> bool:
    """Returns True while a CUDA graph is recorded."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def next_check_time(number: int) -> int:
    """Returns the first time after `number` at which `is_check_time` may be True."""
    return 1 << number.bit_length() if number < _PERIOD else (number // _PERIOD + 1) * _PERIOD


class Check(Observer):
    """Is the base class of checks that have a switch, see table.py. `always`: due each time (the level "debug")."""

    always = False

    def detached(self, root: Any) -> None:
        """Is called when the check has been switched off for this root. It must undo what it did to modules."""


class RankCheck(Check, RankObserver):
    """Is the base class of checks that compare something between ranks."""


class ForwardCheck(Check):
    """Checks some forwards of each group, see ForwardChecks. The host reads what a check computes on a device when the
    pass ends (reads.py).
    """

    def before_cast(self, state: Any, inputs: Sequence[Tensor], dtype: torch.dtype) -> None:
        """Is called before a forward of `state` casts floating-point `inputs` to `dtype`, if its first group is due."""

    def after_cast(self, state: Any, inputs: HandedInputs) -> None:
        """Is called when a forward of `state` has returned that got such inputs, if its first group was due."""

    def before_forward(self, group: Any, is_first: bool, is_thorough: bool) -> None:
        """Is called when a forward of `group` begins, if the group is due.

        `is_first`: it is the group's first. `is_thorough`: each forward is checked, at the debug level.
        """

    def after_forward(self, group: Any) -> None:
        """Is called when that forward has returned."""

    def after_failure(self, group: Any) -> None:
        """Is called when a forward of `group` has raised, also if the group was not due."""
