"""Calls functions before the next write to a sharded parameter, as far as its class can tell: see sharded_dtensor.py.

A DTensor is written to by operations on it, which its class sees before they run, or through its local tensor, once a
user has got that: then nothing tells.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakMethod


class WriteNotices:
    """Holds what is to be called before the next write.

    `are_told`: True if writes are noticed before they happen: the class of sharded parameters tells, and no local
        tensor has been handed out since `are_awaited` was set.
    `are_awaited`: True once `before_next_write` has been called.
    """

    def __init__(self) -> None:
        self.are_told = self.are_awaited = False
        self._actions: set[WeakMethod[Callable[[], object]]] = set()
        self._thread = threading.local()

    def before_next_write(self, action: Callable[[], object]) -> None:
        """Has `action`, a bound method, called once before the next write, if its object is alive then. Calls it now if
        nothing would tell of that write.
        """
        self.are_awaited = True
        if self.are_told:
            self._actions.add(WeakMethod(action))
        else:
            action()

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Context: writes on this thread call nothing. It is for callers whose writes disturb nothing."""
        self._thread.is_quiet = True
        try:
            yield
        finally:
            self._thread.is_quiet = False

    def tell(self) -> None:
        """A sharded parameter is about to be written to: calls what waits for that."""
        while self._actions and not getattr(self._thread, "is_quiet", False):
            action = self._actions.pop()()
            if action is not None:
                action()

    def note_handed_out(self) -> None:
        """The local tensor of a sharded parameter is handed out: its holder may write to it at any time."""
        if self.are_awaited:
            self.are_told = False
            self.tell()


notices = WriteNotices()
