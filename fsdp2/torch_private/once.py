"""Runs a function once in a process, also if several threads call it: ranks may be threads of one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from threading import RLock
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

# Held while such a function runs. One lock for all of them, which call each other. None of them communicates.
_running = RLock()


def once(function: Function) -> Function:
    """Decorator: `functools.cache`, but no two threads run `function` at the same time.

    A thread waits while another runs it. So torch is changed once, and a class of modules is made once.
    """
    cached = cache(function)

    @wraps(function)
    def call(*args: Any) -> Any:
        with _running:
            return cached(*args)

    return call  # type: ignore[return-value]
