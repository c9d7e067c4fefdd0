"""The reductions in flight, of all groups under one root."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, wait
from contextlib import nullcontext, suppress
from operator import attrgetter
from statistics import median_low
from typing import NamedTuple, Protocol

from .reduce import Pending, PendingReduce, Reduction
from .streams import GroupStreams

# So many reduced buckets may be on their way to the CPU, or be stepped on there, before the host waits for the oldest:
# what one group has at most, or two. That bounds what they take on the device, and in page-locked memory.
MAX_RETURNING = 8
# While more are packed, one of so many parts of a typical group's gradients may be in flight: the largest part in which
# they are reduced, see bucket.py.
PARTS_OF_WINDOW = 4


class Owner(Protocol):
    """A group's gradients, to which reductions belong: see GroupGradients."""

    backward_pass: object
    reduction: Reduction
    streams: GroupStreams | None

    def receive(self, pending: Pending, of_pass: object) -> None:
        """Take what comes out of a reduction."""

    def start_step(self, pending: Pending, of_pass: object) -> Future[None] | None:
        """Have that done on another thread, if an optimizer's step follows."""


class _Entry(NamedTuple):
    """A reduction in flight, and the backward pass that began it."""

    owner: Owner
    pending: Pending
    of_pass: object
    step: Future[None] | None = None


_num_halves, _nbytes = attrgetter("pending.num_halves"), attrgetter("pending.nbytes")


class ReductionQueue:
    """The reductions in flight of all groups under one root, oldest first.

    While the next bucket is packed, reductions whose inputs take at most `window` bytes run, or `max_running` buckets
    of any size, or their halves; older ones are finished first, which bounds what they hold. The window is a quarter of
    a typical group, one or two buckets: then compute waits in the middle of a group only where a gather and a reduction
    of a group take longer than its backward, so that it would have to wait in any case.
    """

    def __init__(self) -> None:
        self.max_running, self.window = 1, 0
        self._running: deque[_Entry] = deque()
        # Behind them: those that are reduced, and now are copied to the CPU, or stepped on.
        self._returning: deque[_Entry] = deque()

    def make_room(self) -> None:
        running = self._running
        while sum(map(_num_halves, running)) > 2 * self.max_running and sum(map(_nbytes, running)) > self.window:
            self._finish_oldest()
        for entry in running:
            if isinstance(entry.pending, PendingReduce) and entry.pending.has_second_stage:
                entry.pending.advance()

    def limit(self, max_running: int, group_nbytes: Iterable[int]) -> None:
        """Choose how many may run. `group_nbytes`: what the gradients of each group take when they are sent."""
        typical = median_low([nbytes for nbytes in group_nbytes if nbytes] or [0])
        self.max_running, self.window = max_running, typical // PARTS_OF_WINDOW + (max_running - 1) * typical

    def add(self, owner: Owner, pending: Pending) -> None:
        self._running.append(_Entry(owner, pending, owner.backward_pass))

    def has(self, owner: Owner) -> bool:
        return any(entry.owner is owner for entry in (*self._running, *self._returning))

    def take_over(self, other: ReductionQueue) -> None:
        if other is not self:
            self._running.extend(other._running)
            self._returning.extend(other._returning)
            other._running.clear()
            other._returning.clear()

    def finish_all(self) -> None:
        while self._running:
            self._finish_oldest()
        self._finish_returning(all_but=0)

    def finish_partial(self) -> None:
        """Finish those that leave something to be summed between replicas by a later one."""
        while any(entry.pending.is_partial for entry in self._running):
            self._finish_oldest()

    def abandon(self, backward_pass: object | None) -> None:
        """After an error: wait until no buffer is in use; drop the results of one pass (None: of all)."""
        entries, steps = [*self._returning, *self._running], []
        self._returning.clear()
        self._running.clear()
        for owner, pending, of_pass, step in entries:
            with suppress(RuntimeError):  # a peer is gone: then nothing writes to the buffers any more
                if step is not None:
                    steps.append(step)
                else:
                    with nullcontext() if owner.streams is None else owner.streams.at_home():
                        if backward_pass is None or of_pass is backward_pass:
                            pending.abandon()
                        else:
                            owner.receive(pending, of_pass)
        wait(steps)

    def _finish_oldest(self) -> None:
        streams = self._running[0].owner.streams
        if streams is not None and streams.are_apart():
            with streams.at_home():
                return self._finish_oldest()
        entry = self._running.popleft()
        if entry.owner.reduction.transfers is None or not entry.pending.start_return():
            entry.owner.receive(entry.pending, entry.of_pass)
            return
        step = entry.owner.start_step(entry.pending, entry.of_pass)
        self._returning.append(entry._replace(step=step))
        self._finish_returning(MAX_RETURNING)

    def _finish_returning(self, all_but: int) -> None:
        while len(self._returning) > all_but:
            owner, pending, of_pass, step = self._returning.popleft()
            if step is None:
                owner.receive(pending, of_pass)
            else:
                step.result()
