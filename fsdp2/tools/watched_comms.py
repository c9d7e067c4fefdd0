"""Tells others of each collective that groups issue and wait for, while that is asked for.

The methods of a group's Comms are replaced on the objects meanwhile. So nothing runs besides when nobody watches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from itertools import count
from typing import Any, NamedTuple, Protocol
from weakref import ref

from torch import Tensor

from ..engine.comm import Comm, Work
from ..engine.group import FSDPParamGroup


class Collective(NamedTuple):
    """Describes one collective: `kind`, FQN of its group's module, bytes of all ranks, and a number of its own."""

    kind: str
    name: str
    nbytes: int
    number: int

    def __str__(self) -> str:
        return f"{self.kind} {self.name} {self.nbytes} bytes"


class Watcher(Protocol):
    """Is told of collectives."""

    def launching(self, collective: Collective) -> AbstractContextManager[Any]:
        """Returns a context in which the host issues it."""

    def waiting(self, collective: Collective) -> AbstractContextManager[Any]:
        """Returns a context in which the host, or on a device its stream, waits for it."""


# Position of the tensors of all ranks among the arguments of each method of a Comm.
_METHODS = {"all_gather": 0, "reduce_scatter": 1, "exchange": 0, "all_reduce": 0}
_numbers = count(1)


def watch(groups: Iterable[FSDPParamGroup], watcher: Watcher) -> Callable[[], None]:
    """Tells `watcher` of the collectives of `groups` from now on. Returns a function that ends it.

    Models may be freed meanwhile: nothing here keeps them alive.
    """
    comms = {id(comm): comm for group in groups for comm in group.comms if comm is not None and comm.size > 1}
    watched = [ref(comm) for comm in comms.values()]
    for comm in comms.values():
        watchers = _watchers_of(comm)
        if not watchers:
            vars(comm).update({kind: _WatchedMethod(ref(comm), kind, watchers) for kind in _METHODS})
        if watcher not in watchers:
            watchers.append(watcher)
    return partial(_end, watched, watcher)


def _end(comms: list[ref[Comm]], watcher: Watcher) -> None:
    for comm in filter(None, [each() for each in comms]):
        watchers = _watchers_of(comm)
        if watcher in watchers:
            watchers.remove(watcher)
            for kind in () if watchers else _METHODS:
                del vars(comm)[kind]


class _WatchedMethod(NamedTuple):
    """Stands in for a method of a Comm on the object, and tells `watchers`, which a Comm's methods share, of calls."""

    comm: ref[Comm]
    kind: str
    watchers: list[Watcher]

    def __call__(self, *arguments: Any) -> Any:
        comm, whole = self.comm(), arguments[_METHODS[self.kind]]
        assert comm is not None, "its method is called"
        nbytes = sum(each.nbytes for each in ([whole] if isinstance(whole, Tensor) else whole))
        # By an exchange gradients are reduced, too.
        shown, watchers = "reduce_scatter" if self.kind == "exchange" else self.kind, (*self.watchers,)
        collective = Collective(shown, comm.comm_label.name, nbytes, next(_numbers))
        with ExitStack() as stack:
            for watcher in watchers:
                stack.enter_context(watcher.launching(collective))
            result = getattr(type(comm), self.kind)(comm, *arguments)
            if self.kind == "exchange":
                work, rows = result
                return _WatchedWork(work, collective, watchers), rows
            return _WatchedWork(result, collective, watchers)


def _watchers_of(comm: Comm) -> list[Watcher]:
    """Returns the list of those who watch a Comm; a new one if nobody does."""
    method = vars(comm).get("all_gather")
    return method.watchers if isinstance(method, _WatchedMethod) else []


class _WatchedWork:
    """Is the Work of a watched collective."""

    def __init__(self, work: Work, collective: Collective, watchers: Sequence[Watcher]) -> None:
        self._work, self._collective, self._watchers = work, collective, watchers

    def wait(self) -> None:
        watchers, self._watchers = self._watchers, ()  # told of the first time
        with ExitStack() as stack:
            for watcher in watchers:
                stack.enter_context(watcher.waiting(self._collective))
            self._work.wait()
