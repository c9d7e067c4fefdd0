"""When checks look at what takes time: often at first, when a program is written, and then now and again.

`Check` is the class of all checks that can be switched. Those that do something in each step say what they are about to
look at, and `observers.py` decides when: a `RankCheck` compares ranks, a `ForwardCheck` looks at one group's forward.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.events import Observer
from ..core.mesh import DataMesh
from .questions import Question

_PERIOD = 128


def is_time_to_look(number: int, always: bool = False) -> bool:
    """Returns True at time number 1, 2, 4, ..., 64, and every 128th, or `always`; never while a CUDA graph is recorded,
    for the host would wait for the device.
    """
    return (always or not (number % _PERIOD and number & (number - 1))) and not is_capturing()


def is_capturing() -> bool:
    """Returns True while a CUDA graph is recorded."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def next_look(number: int) -> int:
    """Returns the first time after `number` at which `is_time_to_look` may be True."""
    return 1 << number.bit_length() if number < _PERIOD else (number // _PERIOD + 1) * _PERIOD


class Check(Observer):
    """A check that can be switched, see table.py. `always`: it looks each time (the level "debug")."""

    always = False

    def detached(self, root: Any) -> None:
        """The check is switched off for this root. Nothing of it must stay behind."""


class Look(NamedTuple):
    """One time at which the ranks of a root compare numbers.

    `number`: how often they have communicated. `is_anew`: it is the first time, or all have loaded weights since.
    `mesh`: the mesh over which they compare; None if it connects no ranks.
    """

    root: Any
    number: int
    is_anew: bool
    mesh: DataMesh | None


class RankCheck(Check):
    """Compares something between ranks. All rank checks of a root that look at one time share an all-reduce."""

    def refuse(self, root: Any) -> None:
        """Raises RuntimeError if this rank, hence each one, finds a mistake. Ranks have compared nothing yet."""

    def questions(self, look: Look) -> Iterator[tuple[DataMesh, Question]]:
        """Yields what to compare, over which mesh. It must be the same on all ranks, apart from the numbers."""
        yield from ()


class ForwardCheck(Check):
    """Checks some forwards of each group, see ForwardChecks. The host reads what a check computes on a device when the
    pass ends (reads.py).
    """

    def before_cast(self, state: Any, inputs: Sequence[Tensor], dtype: torch.dtype) -> None:
        """A forward of `state` that this check checks is about to cast floating-point tensors among `inputs`."""

    def before_forward(self, group: Any, is_first: bool, is_thorough: bool) -> None:
        """A forward of `group` that this check checks begins.

        `is_first`: it is the group's first. `is_thorough`: each forward is checked, at the debug level.
        """

    def after_forward(self, group: Any) -> None:
        """That forward has returned."""

    def after_failure(self, group: Any) -> None:
        """A forward of `group`, which this check need not have checked, has raised."""
