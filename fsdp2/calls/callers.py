"""Finds out in whose code an error is raised. Nothing here runs unless there is one."""

from __future__ import annotations

import sys
from collections.abc import Container
from types import FrameType

from torch.optim import Optimizer


def function_that_calls(names: Container[str]) -> str | None:
    """Returns which function of `names` this is called in, the innermost first, or None."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in names:
            return frame.f_code.co_name
        frame = frame.f_back
    return None


def optimizer_that_calls() -> Optimizer | None:
    """Returns the optimizer in whose methods this is called, or None: the code is one that a user can't change."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        if isinstance(found, Optimizer):
            return found
        frame = frame.f_back
    return None
