"""Has ranks, which are threads, take turns, and says where each one waits if none can go on."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from ..torch_private.simulate import end_thread
from .process import RankProcess

_PACKAGE = f"{Path(__file__).resolve().parents[1]}{os.sep}"
_LIBRARIES = ("site-packages", "dist-packages", str(Path(threading.__file__).resolve().parent), "<frozen ")


ADVICE = "All ranks of a group must make the same calls in the same order."


class Stopped(BaseException):
    """Ends the thread of a rank after another one has failed, as torchrun ends the process."""


class OutOfStep(RuntimeError):
    """The error of ranks that differ in a collective, or of which none can go on. It says where each one is."""


class Wait:
    """Something that a rank can wait for: a collective, a message, a key of a store, the end of a sleep.

    `text`: says so in reports. `place`: the line of the user's program. `error`: what to raise instead of going on.
    """

    is_done = False
    hands_on = False
    """Let other ranks run, even if this one could go on."""

    def __init__(self, text: str) -> None:
        self.text, self.place = text, place_of(sys._getframe(1))
        self.error: BaseException | None = None

    def can_go_on(self) -> bool:
        """Returns True if the rank need not wait any longer."""
        return self.is_done or self.error is not None


class _Sleep(Wait):
    """The end of `time.sleep`."""

    hands_on = True

    def __init__(self, seconds: float) -> None:
        super().__init__(f"sleeps for {seconds} s")
        self.until = time.monotonic() + seconds

    def can_go_on(self) -> bool:
        return self.error is not None or time.monotonic() >= self.until


class Rank:
    """One simulated rank: its thread, its state of the process, and what it waits for."""

    def __init__(self, turns: Turns, number: int, process: RankProcess) -> None:
        self.turns, self.number, self.process = turns, number, process
        self.result: Any = None
        # Why its thread has ended early.
        self.error: BaseException | None = None
        self.has_begun = self.has_ended = self.is_stopped = False
        # Seconds of its thread on a core, without its waits.
        self.seconds = 0.0
        # Collectives that it has begun, messages that it has sent, and bytes that left it for other ranks.
        self.num_collectives = self.num_messages = self.num_bytes = 0
        # It does the work of a collective for all of its ranks.
        self.acts_for_others = False
        self.waits_for: Wait | None = None
        self._thread = 0
        # Released when the turn of this rank begins.
        self._turn = threading.Semaphore(0)

    def wait(self, wait: Wait) -> None:
        """Returns when `wait` is done. Other ranks run meanwhile.

        Raises:
            RuntimeError: no rank can go on.
            Stopped: another rank has failed.
        """
        self.waits_for = wait
        if wait.hands_on or not wait.can_go_on() or self.turns.failed is not None:
            self.turns.hand_on(self)
        self.waits_for = None
        if wait.error is not None:
            raise wait.error

    def let_others_run(self) -> None:
        """Has each rank that can go on run once. A loop that asks whether something is done calls it."""
        self.wait(_Sleep(0.0))

    def sleep_until_turn(self) -> None:
        """Waits for the turn of this rank, and gives it the state of the process."""
        self._thread = threading.get_ident()
        self._turn.acquire()
        self.process.enter()

    def begin_turn(self) -> None:
        """Wakes the thread of this rank."""
        self._turn.release()

    def state(self) -> str:
        """Returns where the rank is, for reports."""
        if self.error is not None:
            return f"failed with {type(self.error).__name__}: {str(self.error).partition(chr(10))[0]}"
        if self.has_ended:
            return "has ended"
        if not self.has_begun:
            return "has not begun"
        if self.waits_for is not None:
            return f"{self.waits_for.text} at {self.waits_for.place}"
        return f"runs at {place_of(sys._current_frames().get(self._thread))}"


class _Here(threading.local):
    """The rank of a thread."""

    rank: Rank | None = None


_here = _Here()


def this_rank(doing: str) -> Rank:
    """Returns the rank whose thread calls this.

    Raises:
        NotImplementedError: a rank has started the thread, or none has. `doing`: what it was about to do.
    """
    if _here.rank is None:
        raise NotImplementedError(
            f"simulated ranks: {doing} is called by the thread {threading.current_thread().name}, which is no rank. A "
            "simulated rank communicates in the thread in which its program began. Switch off what communicates in the "
            "background (asynchronous checkpoints, for example), or run the program with torchrun."
        )
    return _here.rank


def rank_of_thread() -> Rank | None:
    """Returns the rank whose thread calls this. None: the thread is no rank."""
    return _here.rank


class Turns:
    """All ranks of a simulation, of which one runs at a time."""

    def __init__(self, processes: Sequence[RankProcess]) -> None:
        self.ranks = [Rank(self, number, process) for number, process in enumerate(processes)]
        self.running: Rank | None = None
        # Where the ranks of each process group meet, by numbers.
        self.rooms: dict[int, Any] = {}
        # The first rank that has failed.
        self.failed: Rank | None = None
        self._all_ended = threading.Event()

    def start(self, program: Callable[[Rank], Any], on_error: Callable[[Rank], None]) -> None:
        """Starts `program` on each rank, and gives rank 0 the first turn. `on_error`: called with the first rank that
        raises, in its thread.
        """
        for rank in self.ranks:
            arguments = (rank, program, on_error)
            threading.Thread(target=self._run, args=arguments, name=f"rank {rank.number}", daemon=True).start()
        self._begin(self.ranks[0])

    def join(self, seconds: float) -> bool:
        """Waits until all ranks have ended, or so long. Returns True if they have."""
        return self._all_ended.wait(seconds)

    def _run(self, rank: Rank, program: Callable[[Rank], Any], on_error: Callable[[Rank], None]) -> None:
        _here.rank = rank
        rank.sleep_until_turn()
        rank.has_begun = True
        try:
            if self.failed is not None:
                raise Stopped
            rank.result = program(rank)
        except Stopped:
            rank.is_stopped = True
        except BaseException as error:
            rank.error = error
            if self.failed is None:
                self.failed = rank
                on_error(rank)
        rank.has_ended, rank.seconds = True, time.thread_time()
        self.hand_on(rank)
        end_thread()

    def hand_on(self, rank: Rank) -> None:
        """Ends the turn of `rank`, and begins that of the next rank that can go on. Returns at the next turn of `rank`,
        or at once, if it has ended.
        """
        following = self._next_after(rank)
        if following is not rank:
            rank.process.leave()
            if following is None:
                self._all_ended.set()
                return
            self._begin(following)
            if not rank.has_ended:
                rank.sleep_until_turn()

    def _begin(self, rank: Rank) -> None:
        self.running = rank
        rank.begin_turn()

    def _next_after(self, rank: Rank) -> Rank | None:
        """Returns the next rank that can go on, in the order of ranks. None: all have ended.

        If none can although some have not ended, all of them raise.
        """
        first = rank.number + 1
        alive = [each for each in (*self.ranks[first:], *self.ranks[:first]) if not each.has_ended]
        if self.failed is not None:
            for each in alive:
                if each.waits_for is not None and each.waits_for.error is None:
                    each.waits_for.error = Stopped()
        while alive:
            for each in alive:
                if each.waits_for is None or each.waits_for.can_go_on():
                    return each
            sleeping = [each.waits_for.until for each in alive if isinstance(each.waits_for, _Sleep)]
            if sleeping:
                _sleep(max(0.0, min(sleeping) - time.monotonic()))
                continue
            text = f"no rank can go on. {ADVICE}\n{self.report()}"
            for each in alive:
                assert each.waits_for is not None, "it would run"
                each.waits_for.error = OutOfStep(text)
        return None

    def report(self) -> str:
        """Returns what each rank does, a line for all that do the same."""
        return listed((each.number, each.state()) for each in self.ranks)


_sleep = time.sleep


def sleep(seconds: float) -> None:
    """Replaces `time.sleep`: other ranks run meanwhile."""
    rank = rank_of_thread()
    if rank is None:
        _sleep(seconds)
    else:
        rank.wait(_Sleep(seconds))


def listed(texts: Iterable[tuple[int, str]]) -> str:
    """Returns a line for each text, with the ranks that have it. `texts`: pairs of a rank and its text."""
    found: dict[str, list[int]] = {}
    for rank, text in texts:
        found.setdefault(text, []).append(rank)
    return "\n".join(f"  {ranks_text(ranks)}: {text}" for text, ranks in found.items())


def ranks_text(ranks: Sequence[int]) -> str:
    """Returns "rank 3", or "ranks 0-3, 7" for several."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][-1] == rank - 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    text = ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}"


def place_of(frame: FrameType | None) -> str:
    """Returns the innermost line of the user's program in a stack: neither of a library nor of fsdp2."""
    first = frame
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_PACKAGE) and not any(part in name for part in _LIBRARIES):
            return f"{name}:{frame.f_lineno} ({frame.f_code.co_name})"
        frame = frame.f_back
    return "?" if first is None else f"{first.f_code.co_filename}:{first.f_lineno} ({first.f_code.co_name})"
