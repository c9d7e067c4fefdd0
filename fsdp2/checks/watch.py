"""Tells ranks that wait for a rank which can't come: it waits for them in a collective that is none of fsdp2.

A rank has raised, caught the error, and waits in `dist.barrier()`; others wait in a reduce-scatter for it. Each process
has a thread that looks twice a second. On a rank that waits in a collective of fsdp2 for a second, it leaves a note in
the store that all processes share. On a rank that has begun no collective of fsdp2 for a second, it reads these notes.
If the two ranks are known to wait for each other, it says goodbye for its own rank, whose thread is blocked: others
raise, and read where that is. Where it is not certain, it notes in the store where its rank is. Ranks that have waited
for a minute log that.

Two ranks are known to wait for each other if all of this is true:

- one waits for the header of the other, which has begun fewer collectives on that process group;
- the other is blocked in a collective on a process group that both are in: torch's flight recorder lists it as begun
  and not done, and as not begun on the first;
- the first has no other thread that may communicate.

A rank that computes, saves a file or is in a debugger is not blocked in a collective, and nobody raises.
"""

from __future__ import annotations

import atexit
import json
import linecache
import logging
import math
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
import torch.distributed as dist

from ..engine.comm import CommLabel
from ..torch_private.checks import can_watch, default_store, group_of_name, is_collective, recorded_collectives
from ..torch_private.internals import backend_name, is_like_gloo
from ..torch_private.rare_internals import has_backend
from .conversation import PLACE, Conversation, Waiting, place_of
from .headers import BLOCKED, without_sizes
from .level import is_on
from .named_comm import NamedPairwiseComm
from .watched_groups import conversations

PERIOD_S = 0.5
"""Seconds between two looks."""
LONGEST_LOOK_S = 30
"""Seconds for which the end of the process waits for a look that has begun."""
WAIT_S = 1.0
"""Seconds after which a rank that waits, or that has begun no collective, says so."""
ASK_S = 5.0
"""Seconds after which a rank that has begun no collective, and is not blocked, asks for notes. The process that keeps
them may have ended meanwhile, and torch prints a warning then."""
AGAIN_S = 5.0
"""Seconds after which a blocked rank reads the flight recorder again, if it is where it was and no note is new."""
LOG_S = 60.0
"""Seconds after which a rank that waits logs where others are."""

# A rank that is blocked reads where so many ranks are.
_MOST_PLACES = 16
# Keys in the store. The first counts notes, from the first one on.
_ANY, _WAITS = "fsdp2/waits", "fsdp2/waits of rank {}"
_LIBRARIES = (str(Path(torch.__file__).parent) + os.sep, str(Path(__file__).parents[1]) + os.sep)
_LOADERS = str(Path(torch.__file__).parent / "utils" / "data") + os.sep
_DISTRIBUTED = str(Path(dist.__file__).parent) + os.sep
_COLLECTIVES, _FUNCTIONAL = f"{_DISTRIBUTED}distributed_c10d.py", f"{_DISTRIBUTED}_functional_collectives.py"
# Files through which a functional collective waits.
_DISPATCH = (f"{_LIBRARIES[0]}_ops.py", f"{_LIBRARIES[0]}_library{os.sep}")
# Functions there that may wait for messages between two ranks.
_NOT_COLLECTIVE = ("send", "recv", "isend", "irecv", "batch_isend_irecv", "wait")
_WAIT = re.compile(r"(?<![\w.])(\w+)\.wait\(")
# Names of functions that only call others.
_WRAPPERS = ("wrapper", "inner", "decorate_context")


class Note(NamedTuple):
    """Holds what a rank that waits tells others.

    `group`: name of the process group; `num_errors`, `number`: as of its Conversation; `text`: what it waits in.
    `begun`: name of a process group -> how many collectives this rank has begun on it; those that other threads use are
    not there. `are_all`: on groups that are not there, and not in `shared`, it has begun none. `is_alone`: no other
    thread communicates.
    """

    group: str
    num_errors: int
    number: int
    text: str
    begun: dict[str, int]
    shared: list[str]
    are_all: bool
    is_alone: bool

    def lacks(self, group: str, number: int) -> bool:
        """Returns True if it is certain that the rank has not begun that collective."""
        if not self.is_alone or group in self.shared or (group not in self.begun and not self.are_all):
            return False
        return self.begun.get(group, 0) < number


def _warn(text: str, ranks: Iterable[int]) -> None:
    """Logs that this rank waits (`text`), and where up to three of `ranks` are, as far as they say it."""
    places = [f"rank {rank} is {place}" for rank in ranks if (place := place_of(rank))]
    found = "; ".join(places[:3]) or "no other rank says where it is"
    logging.getLogger("fsdp2").warning(f"{text}; {found}")


class Watch:
    """Looks at what one rank waits for.

    Args:
        world: the default process group.
    """

    def __init__(self, world: dist.ProcessGroup) -> None:
        self._world, self.rank, self._store = weakref.ref(world), world.rank(), default_store()
        # The threads that may run this rank's collectives of fsdp2.
        self._threads = {threading.get_ident()}
        self._noted: Waiting | None = None
        # How many collectives of fsdp2 this rank has begun, and since when there are no more.
        self._num_begun, self._idle_since = 0, time.monotonic()
        self._is_logged = False
        # Where it is blocked in a collective of its own, and since when; whether that was logged.
        self._blocked, self._is_blocked_logged = ("", 0.0), False
        # When it has asked for notes last without being blocked.
        self._asked_at = -math.inf
        # What it has noted last of its place; when it has read the flight recorder last, and the count of notes then.
        self._place, self._read_at, self._num_notes = "", -math.inf, b""

    def look(self) -> bool:
        """Returns False if the default process group is gone."""
        world = self._world()
        if world is None or dist.group.WORLD is not world:
            return False
        now, known = time.monotonic(), conversations()
        self._threads |= {each.thread for each in known if each.thread is not None}
        for conversation in known:
            waiting = conversation.waiting
            if waiting is not None:
                self._look_while_waiting(conversation, waiting, now)
                return True
        if self._noted is not None:
            self._noted, self._is_logged = None, False
            self._store.set(_WAITS.format(self.rank), "")
        num_begun = sum(each.num_begun for each in known)
        if num_begun != self._num_begun:
            self._num_begun, self._idle_since = num_begun, now
            self._note_place("")
        elif now - self._idle_since >= WAIT_S:
            # Not the frame of this function: what it has would stay in a cycle, with all that other threads compute.
            # This thread may have got the number of one that has ended.
            threads = self._threads - {threading.get_ident()}
            own = {thread: frame for thread, frame in sys._current_frames().items() if thread in threads}
            is_late = now - max(self._idle_since, self._asked_at) >= ASK_S
            are_blocked = any(map(is_blocked, own.values()))
            places = {thread: describe(own[thread]) for thread in own} if is_late or are_blocked else {}
            self._look_while_blocked(" and ".join(places.values()) if are_blocked else "", now)
            if places and self._store.check([_ANY]):
                self._look_at_others(own, places, now)
            self._asked_at = now if is_late else self._asked_at
        return True

    def _note_place(self, place: str) -> bool:
        """Returns True if it has changed since the last look."""
        has_changed, self._place = place != self._place, place
        if has_changed:
            self._store.set(PLACE.format(self.rank), place)
        return has_changed

    # ---- on a rank that waits

    def _look_while_waiting(self, conversation: Conversation, waiting: Waiting, now: float) -> None:
        self._idle_since = now
        self._note_place("")
        if now - waiting.since < WAIT_S:
            return
        if self._noted is not waiting:
            self._noted = waiting
            self._note(conversation, waiting)
            self._store.add(_ANY, 1)
        elif now - waiting.since > LOG_S and not self._is_logged:
            self._is_logged = True
            _warn(
                f"rank {self.rank} has waited for {now - waiting.since:.0f} s in {without_sizes(waiting.text)}",
                conversation.others(),
            )

    def _note(self, conversation: Conversation, waiting: Waiting) -> None:
        found = recorded_collectives()
        if found is None or conversation.waiting is not waiting:
            return  # the recorder is off, or this rank has gone on
        shared = {each.group for each in found[0] if each.thread not in self._threads}
        note = Note(
            conversation.name,
            waiting.num_errors,
            waiting.number,
            without_sizes(waiting.text),
            {each.group: each.number for each in found[0]},
            sorted(shared),
            found[1],
            not self._may_others_communicate(),
        )
        self._store.set(_WAITS.format(self.rank), json.dumps(note))

    def _may_others_communicate(self) -> bool:
        """Returns True if there is another thread, which may come to a collective: it saves a checkpoint, or waits for
        jobs. Threads of data loaders and progress bars do not.
        """
        own = self._threads | {threading.get_ident()}
        others = [frame for thread, frame in sys._current_frames().items() if thread not in own]
        return not all(map(_is_harmless, others))

    # ---- on a rank that waits in a collective that is none of fsdp2

    def _look_while_blocked(self, place: str, now: float) -> None:
        """Logs once where others are if this rank is blocked in one place for a minute: all may be, in different ones.

        `place`: "" if it is not blocked.
        """
        before, since = self._blocked
        if place != before:
            self._blocked, self._is_blocked_logged = (place, now), False
        elif place and now - since >= LOG_S / 2:
            if self._note_place(place):
                self._store.add(_ANY, 1)  # has ranks that are late say where they are
            elif now - since >= LOG_S and not self._is_blocked_logged:
                self._is_blocked_logged = True
                ranks = [rank for rank in range(min(dist.get_world_size(), _MOST_PLACES)) if rank != self.rank]
                _warn(f"rank {self.rank} has been {place} for {now - since:.0f} s", ranks)

    # ---- on a rank that others may wait for

    def _look_at_others(self, frames: Mapping[int, FrameType], places: Mapping[int, str], now: float) -> None:
        before, self._num_notes = self._num_notes, self._store.get(_ANY)
        has_moved = self._note_place(" and ".join(places.values()))
        if not has_moved and self._num_notes == before and now - self._read_at < AGAIN_S:
            return
        for thread, place in places.items():
            if not is_blocked(frames[thread]):
                continue
            self._read_at = now
            for rank, note in self._find_waiting(thread):
                comm = NamedPairwiseComm(group_of_name(note.group), CommLabel("a goodbye"))
                texts = {rank: note.text, self.rank: f"{BLOCKED}{place}"}
                comm.leave_blocked(note.num_errors, note.number, texts)

    def _find_waiting(self, thread: int) -> Iterator[tuple[int, Note]]:
        """Yields each rank that waits for this one, while this one waits for it in `thread`, and its note."""
        collectives, _ = recorded_collectives() or ([], False)
        own = [each for each in collectives if each.thread == thread and not each.is_done]
        for rank in dist.get_process_group_ranks(group_of_name(own[-1].group)) if own else ():
            key = _WAITS.format(rank)
            if rank == self.rank or not self._store.check([key]):
                continue
            text = self._store.get(key)
            if not text:
                continue  # it waits no more
            note = Note(*json.loads(text))
            with suppress(LookupError, RuntimeError):  # this rank may not be in its group
                is_member = self.rank in dist.get_process_group_ranks(group_of_name(note.group))
                if is_member and all(note.lacks(each.group, each.number) for each in own):
                    yield rank, note


# ---- where a thread is


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    """Yields a frame and those that have called it, the innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_harmless(frame: FrameType) -> bool:
    """Returns True if a thread whose innermost frame this is was started to do what needs no collective: by the file of
    the first function that it runs.
    """
    files = [each.f_code.co_filename for each in _outward(frame) if each.f_code.co_filename != threading.__file__]
    file = files[-1] if files else ""
    return file.startswith(_LOADERS) or file.endswith((f"tqdm{os.sep}_monitor.py", f"checks{os.sep}watch.py"))


def is_blocked(frame: FrameType) -> bool:
    """Returns True if a thread whose innermost frame this is waits for a collective, as far as frames can tell."""
    code = frame.f_code
    if code.co_filename == _COLLECTIVES:
        return code.co_name not in _NOT_COLLECTIVE
    behind = next((each for each in _outward(frame) if not each.f_code.co_filename.startswith(_DISPATCH)), None)
    if behind is not None and behind.f_code.co_filename == _FUNCTIONAL:
        return True
    waited = _WAIT.search(linecache.getline(code.co_filename, frame.f_lineno))
    return waited is not None and is_collective({**frame.f_globals, **frame.f_locals}.get(waited[1]))


def describe(frame: FrameType) -> str:
    """Returns where a thread is: the function of torch or fsdp2 that user code has called, and the user's line."""
    inside: list[str] = []
    for each in _outward(frame):
        code = each.f_code
        if code.co_filename.startswith((*_LIBRARIES, "<")):
            inside.append(code.co_name)
            continue
        where = f"{os.path.basename(code.co_filename)}:{each.f_lineno} ({code.co_name})"
        for name in reversed(inside):
            if name.startswith("__"):
                break  # an operation that torch dispatches
            if not name.startswith(("_", *_WRAPPERS)):
                return f"in {name}, called at {where}"
        return f"at {where}"
    return f"in {inside[-1]}"


# ---- the thread

# Default process groups whose ranks have a thread that looks for them, and these threads, with what ends them.
_started: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
_running: dict[threading.Thread, threading.Event] = {}


def start() -> None:
    """Starts the thread that looks for this rank, unless it runs. It ends with the default process group."""
    world = dist.group.WORLD
    if world is None or world in _started or world.size() == 1 or is_like_gloo(world):  # which needs no watch
        return
    _started.add(world)
    if not can_watch():
        return
    end = threading.Event()
    thread = threading.Thread(target=_run, args=(Watch(world), end), name="fsdp2 watch", daemon=True)
    _running[thread] = end
    thread.start()


def start_early() -> None:
    """Starts the thread in a call that one rank may leave with an error before it communicates."""
    world, cpu = dist.group.WORLD, torch.device("cpu")
    if world is not None and is_on() and has_backend(world, cpu) and backend_name(world, cpu) == "gloo":
        start()


def _run(watch: Watch, end: threading.Event) -> None:
    try:
        while not end.wait(PERIOD_S) and watch.look():
            pass
    except Exception:  # the process that keeps the store is gone, for example: nobody is told any more
        logging.getLogger("fsdp2").debug(f"rank {watch.rank} looks no more at what ranks wait for", exc_info=True)
    _running.pop(threading.current_thread(), None)


@atexit.register
def _stop() -> None:
    """Ends the threads before the interpreter does: it would abort the process if it found one in a call to the store.
    No look waits for another rank, but on a busy machine it may take seconds.
    """
    for thread, end in [*_running.items()]:
        end.set()
        thread.join(timeout=LONGEST_LOOK_S)


def _forget() -> None:
    """Forgets threads that the process from which this one was forked has."""
    _started.clear()
    _running.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
