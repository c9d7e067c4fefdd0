"""Calls functions before the next write to a sharded parameter (see dtensor/sharded_dtensor.py).

Operations on a DTensor write to it, which its class sees before they run. Writes through its local tensor, once a user
has that, are not seen by anything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakMethod


class WriteNotices:
    """Holds the functions to call before the next write.

    `are_seen`: True if all writes are seen before they happen: the class of sharded parameters sees operations, and no
        local tensor has been returned to a user since `are_awaited` was set.
    `sees_operations`: True if operations that write are seen, whoever holds local tensors.
    `are_awaited`: True once `before_next_write` has been called.
    """

    def __init__(self) -> None:
        self.are_seen = self.are_awaited = self.sees_operations = False
        self._actions: set[WeakMethod[Callable[[], object]]] = set()
        self._watching: list[WeakMethod[Callable[[], object]]] = []
        self._thread = threading.local()

    def see_operations(self) -> None:
        """Notes that operations announce writes to sharded parameters before they happen, from now on."""
        self.are_seen = self.sees_operations = True

    def before_next_write(self, action: Callable[[], object]) -> None:
        """Calls `action`, a bound method, once before the next write, if its object is alive then. It calls it at once
        if that write might not be seen.
        """
        self.are_awaited = True
        if self.are_seen:
            self._actions.add(WeakMethod(action))
        else:
            action()

    def before_each_seen_write(self, action: Callable[[], object]) -> None:
        """Calls `action`, a bound method, before each write that is seen, while its object is alive."""
        self._watching = [each for each in self._watching if each() is not None] + [WeakMethod(action)]

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Context: writes on this thread call nothing. It is for callers whose writes need no notification."""
        self._thread.is_quiet = True
        try:
            yield
        finally:
            self._thread.is_quiet = False

    def notify(self) -> None:
        """Calls the functions that wait for a write. Call it before a write to a sharded parameter."""
        while self._actions and not getattr(self._thread, "is_quiet", False):
            action = self._actions.pop()()
            if action is not None:
                action()
        for each in self._watching:
            action = each()
            if action is not None:
                action()

    def note_returned(self) -> None:
        """Notes that a user gets the local tensor of a sharded parameter, and may write to it at any time."""
        if self.are_awaited:
            self.are_seen = False
        self.notify()


notices = WriteNotices()
