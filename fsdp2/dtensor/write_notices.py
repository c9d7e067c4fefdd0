"""Who is about to write to a sharded parameter, where its class tells: see sharded_dtensor.py.

A DTensor is written to by operations on it, which its class sees before they run, or by its local tensor, once somebody
has got that: then nothing tells.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakMethod


class WriteNotices:
    """What is to be done before the next write.

    `are_told`: writes are noticed before they are made: the class of sharded parameters tells, and no local tensor has
    been handed out while `are_awaited`.
    """

    def __init__(self) -> None:
        self.are_told = self.are_awaited = False
        self._actions: set[WeakMethod[Callable[[], object]]] = set()
        self._thread = threading.local()

    def before_next_write(self, action: Callable[[], object]) -> None:
        """Has `action`, a method of an object that is alive then, run once before the next write; now, if nothing would
        tell.
        """
        self.are_awaited = True
        if self.are_told:
            self._actions.add(WeakMethod(action))
        else:
            action()

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """On this thread, writes inside are not told of: who makes them knows that nobody minds."""
        self._thread.is_quiet = True
        try:
            yield
        finally:
            self._thread.is_quiet = False

    def tell(self) -> None:
        """A sharded parameter is about to be written to."""
        while self._actions and not getattr(self._thread, "is_quiet", False):
            action = self._actions.pop()()
            if action is not None:
                action()

    def note_handed_out(self) -> None:
        """The local tensor of a sharded parameter is handed out: who has it may write at any time from now on."""
        if self.are_awaited:
            self.are_told = False
            self.tell()


notices = WriteNotices()
