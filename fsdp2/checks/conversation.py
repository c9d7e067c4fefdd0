"""Exchanges the messages of collectives over gloo. Ranks compare their headers before they read anything else."""

from __future__ import annotations

import re
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import RLock, get_ident
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from ..engine.comm import CommLabel, Work
from ..engine.root import Root
from ..torch_private.checks import default_store
from .headers import GOODBYE, HEADER_NBYTES, TABLE, Header, differ, out_of_step, text_of, without_sizes

# Tags of messages, which must not meet a user's: of headers, one for each time that ranks were out of step, and of what
# follows them.
_HEADER_TAG = 0x0F5D_0000
_DATA_TAG = 0x4000_0000
_CLOSED = re.compile("closed|reset by peer|broken pipe|refused", re.IGNORECASE)


def roots_of(comm_labels: Iterable[CommLabel]) -> list[Root]:
    """Returns the roots whose collectives these are."""
    return [root for root in dict.fromkeys(comm_label.root() for comm_label in [*comm_labels]) if root is not None]


def tell_out_of_step(comm_labels: Iterable[CommLabel]) -> None:
    """Tells the roots whose collectives these are that ranks are out of step."""
    for root in roots_of(comm_labels):
        root.note_out_of_step()


class Waiting(NamedTuple):
    """What a rank waits for. `num_errors`: how often ranks were out of step before; `number`: that of the collective
    since then; `since`: a time of `time.monotonic()`.
    """

    text: str
    num_errors: int
    number: int
    since: float


# A rank waits until others have said goodbye, behind all collectives.
_AGAIN, LAST = "beginning again, as ranks were out of step", 1 << 62


class Exchange:
    """One collective in flight, as a Work: the messages between this rank and the others.

    A rank's first message begins with its header; a small tensor may ride behind that.

    `rows`: where first messages arrive, by the rank that sends them.
    `take_leave`: called, if ranks are out of step, with this exchange and those that began later (NamedPairwiseComm).
    `find_ended`: returns the ranks to which connections are closed.
    """

    def __init__(
        self,
        conversation: Conversation,
        comm_label: CommLabel,
        header: Header,
        rows: dict[int, Tensor],
        take_leave: Callable[[Sequence[Exchange]], None],
        find_ended: Callable[[], set[int]],
    ) -> None:
        self.comm_label, self.header, self.rows = comm_label, header, rows
        self.take_leave, self.find_ended = take_leave, find_ended
        # First messages that are sent, and received, by rank; all that follow, by rank; riders, as (target, row).
        self.sent: list[Work] = []
        self.received: dict[int, Work] = {}
        self.rest: dict[int, list[Work]] = {rank: [] for rank in rows}
        self.riders: list[tuple[Tensor, Tensor]] = []
        self.error: str | None = None
        self.is_compared = self.differs = False
        self.number = 0
        self._conversation = conversation

    def wait(self) -> None:
        """Raises RuntimeError: ranks are out of step, or one does not answer."""
        self._conversation.compare_until(self)
        if self.error is not None:
            raise RuntimeError(self.error)
        riders, self.riders = self.riders, []
        for target, source in riders:
            target.copy_(source.narrow(0, HEADER_NBYTES, target.numel()))
        rest, self.rest = self.rest, {}
        try:
            for works in rest.values():
                for work in works:
                    work.wait()
        except RuntimeError as error:
            error.args = (str(error) + self._conversation.table(self, set(self.rows), str(error)),)
            raise

    def receive(self) -> tuple[set[int], str]:
        """Waits for first messages. Returns whose came, and why others' did not."""
        came, problem = set(self.rows), ""
        for source, work in self.received.items():
            try:
                work.wait()
            except RuntimeError as error:  # then all other works of the process group end at once
                came.discard(source)
                problem = problem or str(error)
        self.differs = any(differ(row, self.header) for row in self.rows.values())
        try:
            for work in () if self.differs else self.sent:  # who has left takes it later
                work.wait()
        except RuntimeError as error:
            problem = problem or str(error)
        return came, problem

    def fail(self, error: RuntimeError) -> None:
        """Adds to an error where ranks are, if the collective could not even begin."""
        error.args = (str(error) + self._conversation.table(self, set(), str(error)),)
        self._conversation.give_up([self], str(error))


class Conversation:
    """Orders the collectives of one process group, and compares their headers in the order in which they begin.

    Messages that follow headers are matched by tags that derive from what was compared of all headers so far: what is
    sent by ranks that are out of step arrives nowhere. After an error tags begin anew, on all ranks.

    `group`: a weak reference to the process group. `comm_labels`: those of its collectives.
    """

    def __init__(self, group: weakref.ref[dist.ProcessGroup], comm_labels: weakref.WeakSet[CommLabel]) -> None:
        self._group, self.comm_labels = group, comm_labels
        # What this rank says when it leaves, and the goodbyes that it has sent, until all ranks have.
        self.goodbye = GOODBYE
        self.partings: list[Work] = []
        # Rank -> what it was doing, if this rank's goodbye was sent while its thread was blocked elsewhere.
        self.left: dict[int, str] | None = None
        # Held while messages are posted: another thread may say goodbye for one that is blocked.
        self.lock = RLock()
        # What this rank waits for now.
        self.waiting: Waiting | None = None
        # How many collectives have begun, in all and since ranks were last out of step; how often they were.
        self.num_begun = self.number = self.num_errors = 0
        # The thread that has begun the last one.
        self.thread: int | None = None
        self._pending: deque[Exchange] = deque()
        self._sequence = 0
        # What all ranks were doing when they last compared headers, and when that was.
        self._last: tuple[str, float] | None = None
        # Sent before the last error: those who left earlier take it when they come back.
        self._left_behind: list[Work] = []

    @property
    def header_tag(self) -> int:
        return _HEADER_TAG + self.num_errors % 0x10000

    @property
    def name(self) -> str:
        """The name of the process group, by which all ranks know it."""
        group = self._group()
        assert group is not None, "a rank waits there"
        return group.group_name

    def others(self) -> list[int]:
        """Returns the other ranks."""
        return [rank for rank in self._ranks() if rank != dist.get_rank()]

    def begin(self, exchange: Exchange) -> int:
        """Returns the tag of the messages that follow its first ones."""
        self._pending.append(exchange)
        self.num_begun += 1
        self.number += 1
        exchange.number, self.thread = self.number, get_ident()
        self._sequence = zlib.crc32(exchange.header.code, self._sequence)
        return _DATA_TAG | self._sequence & 0x3FFF_FFFF

    def compare_until(self, last: Exchange) -> None:
        """Compares headers, in order, of all up to `last`, unless that has been done."""
        while not last.is_compared:
            exchange = self._pending.popleft()
            exchange.is_compared = True
            self.waiting = Waiting(exchange.header.text, self.num_errors, exchange.number, time.monotonic())
            try:
                came, problem = exchange.receive()
            finally:
                self.waiting = None
            if problem:
                self.give_up([exchange], problem + self.table(exchange, came, problem))
            elif exchange.differs:
                if not self.partings:  # else that was said when this rank left
                    tell_out_of_step(self.comm_labels)
                with suppress(RuntimeError), self._parting():  # one is gone: then nothing arrives any more
                    exchange.take_leave([exchange, *self._pending])
                texts = {source: text_of(row) for source, row in exchange.rows.items()}
                texts[self._own_rank()] = exchange.header.text
                self.give_up([exchange], out_of_step({self._ranks()[i]: texts[i] for i in sorted(texts)}))
            else:
                self._last = exchange.header.text, time.monotonic()

    def come_back(self, take_leave: Callable[[Sequence[Exchange]], None]) -> None:
        """Waits, behind a goodbye, until all ranks have said theirs, and whatever began before is compared."""
        if self._pending:
            self.compare_until(self._pending[-1])
        if self.partings:
            with suppress(RuntimeError), self._parting():  # one is gone: whoever asks for the next collective is told
                take_leave([])
            self.give_up([], "")

    @contextmanager
    def _parting(self) -> Iterator[None]:
        """Context: this rank waits for the goodbyes of others."""
        self.waiting = Waiting(_AGAIN, self.num_errors, LAST, time.monotonic())
        try:
            yield
        finally:
            self.waiting = None

    def give_up(self, begun: Sequence[Exchange], error: str) -> None:
        """Drops those collectives, and all whose headers are still to be compared: they will not happen."""
        self._left_behind, self.partings, self.goodbye = self.partings, [], GOODBYE
        for each in (*begun, *self._pending):
            self._left_behind += each.sent
            each.is_compared, each.error = True, error
            each.rest, each.riders = {}, []
        self._pending.clear()
        self.num_errors += 1
        self._sequence, self.number = self.num_errors, 0

    def table(self, exchange: Exchange, came: set[int], problem: str) -> str:
        """Returns where each rank was, as far as headers have told. `problem`: the error of a message."""
        ended = exchange.find_ended() if _CLOSED.search(problem) else set()
        doing, before = without_sizes(exchange.header.text), ""
        if self._last is not None:
            before = f"; {time.monotonic() - self._last[1]:.1f} s ago it was {without_sizes(self._last[0])}"
        own, lines = self._own_rank(), []
        for i, rank in enumerate(self._ranks()):
            elsewhere = f"its process has ended{before}" if i in ended else f"has not come{before}{_place(rank)}"
            lines.append(
                f"  rank {rank}: {doing if i == own or i in came - ended else elsewhere}{' (this one)' * (i == own)}"
            )
        missing = ended or {*range(len(lines))} - came - {own}
        names = [str(rank) for i, rank in enumerate(self._ranks()) if i in missing]
        return "\n".join([_hint(exchange.comm_label, names, bool(ended)) + TABLE, *lines])

    def _ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self._group())

    def _own_rank(self) -> int:
        group = self._group()
        assert group is not None, "its messages are under way"
        return group.rank()


PLACE = "fsdp2/place of rank {}"
"""The key in the store of all processes under which a rank that has begun no collective for a second notes where it
is."""


def place_of(rank: int) -> str:
    """Returns where another rank is, if it has noted that."""
    try:
        store, key = default_store(), PLACE.format(rank)
        return store.get(key).decode() if store.check([key]) else ""
    except RuntimeError:  # the process that keeps it is gone
        return ""


def _place(rank: int) -> str:
    place = place_of(rank)
    return f"; it is {place}" if place else ""


def _hint(comm_label: CommLabel, names: Sequence[str], have_ended: bool) -> str:
    """Returns what to look at where ranks have ended, or are absent at the first gather of a forward pass."""
    root = comm_label.root()
    is_between = root is not None and root.where()[0] == "forward" and not root.prefetcher.has_begun
    if not names or not (have_ended or is_between):
        return ""
    ranks, have, do, they = f"rank {names[0]}", "has", "does", "it"
    if len(names) > 1:
        ranks, have, do, they = f"ranks {', '.join(names)}", "have", "do", "they"
    step = f" not begun step {root.num_backwards + 1}" if is_between and root is not None else ""
    ended = f"The process of {ranks} has ended: see its log." if have_ended else ""
    if not is_between:
        return f"\n{ended}"
    question = f"is a call under `if rank == 0:`, or {do} {they} leave a loop earlier?"
    return "\n" + " ".join(filter(None, [ended, f"{ranks[0].upper()}{ranks[1:]} {have}{step}: {question}"]))
