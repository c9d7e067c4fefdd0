"""Says when the work of a step ends whose collectives share links, event by event.

A collective holds a link only while its bytes pass it: from when all that it waits for has ended, and its latency has
passed. Those whose bytes pass a link at the same time share it equally. A ring over several machines needs the links
inside them and the cards between them, each for its own time, and ends when both are through.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heappop, heappush
from itertools import count
from math import inf

# How long each link would be busy with the bytes of a collective, if it were alone: inside machines, and between them.
Demand = tuple[float, float]
# What rounding may leave of the time that a collective still needed at the event before.
_ROUNDING = 1e-9


class End:
    """Is the end of something: a collective, a copy, or all that a stream was given. Its `time` is in seconds, None
    until `Links.run` has come to it.
    """

    __slots__ = ("_beside", "_demand", "_followers", "_missing", "_parts", "_passing", "time")

    def __init__(self, time: float | None = None) -> None:
        self.time = time
        self._parts: tuple[Behind, ...] = ()
        self._followers: list[End] = []
        self._missing = 0
        self._demand: Demand | None = None
        self._passing = 0  # how many links its bytes still pass
        self._beside: Beside | None = None


# A point of time: so many seconds behind an end.
Behind = tuple[End, float]
# What slows a computation down: an end, until which something else runs; the seconds that the computation takes by
# itself; and what each second beside that costs it, in seconds, 0 to 1 (1: it waits until then).
Beside = tuple[End, float, float]


class Links:
    """Holds what is to begin behind what, and finds out when each of it ends."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, End]] = []
        self._numbers = count()

    def compute(self, begin: End, beside: Beside) -> End:
        """Returns the end of a computation that begins at `begin`, and is slowed down."""
        return self._add(((begin, 0.0), (beside[0], -inf)), beside=beside)

    def add(self, parts: Iterable[Behind], demand: Demand | None = None) -> End:
        """Returns the end of what begins at the last of these points of time: then it ends, if it has no `demand`, or
        else when the links have passed its bytes.
        """
        return self._add((*parts,), demand)

    def _add(self, parts: tuple[Behind, ...], demand: Demand | None = None, beside: Beside | None = None) -> End:
        end = End()
        end._parts, end._demand, end._beside = parts, demand, beside
        for before, _ in end._parts:
            if before.time is None:
                before._followers.append(end)
                end._missing += 1
        if not end._missing:
            self._follow([end])
        return end

    def run(self) -> None:
        """Finds out when all ends that were added come."""
        now, heap = 0.0, self._heap
        # For each link, what passes it, and for how long it would still do so alone.
        passing: tuple[dict[End, float], ...] = ({}, {})
        while heap or any(passing):
            steps = [min(link.values()) * len(link) for link in passing if link]
            step = min([*steps, heap[0][0] - now]) if heap else min(steps)
            now += step
            for link in passing:
                spent = step / max(1, len(link))
                for end, left in [*link.items()]:
                    link[end] = left - spent
                    if link[end] <= left * _ROUNDING:
                        del link[end]
                        end._passing -= 1
                        if not end._passing:
                            end.time = now
                            self._follow(_ready(end))
            while heap and heap[0][0] <= now:
                _, _, end = heappop(heap)
                for link, seconds in zip(passing, end._demand or (), strict=True):
                    if seconds:
                        link[end] = seconds
                        end._passing += 1

    def _follow(self, ready: list[End]) -> None:
        """Begins what has nothing before it any more whose end is unknown, and what that lets begin."""
        while ready:
            end = ready.pop()
            time = max([before.time + seconds for before, seconds in end._parts if before.time is not None])
            end._parts = ()
            if end._beside is not None:
                time += _seconds(time, *end._beside)
            if end._demand is not None and any(end._demand):
                heappush(self._heap, (time, next(self._numbers), end))
            else:
                end.time = time
                ready += _ready(end)


def _seconds(began: float, other: End, alone: float, price: float) -> float:
    """Returns what a computation takes that is slowed down from `began` until `other`."""
    assert other.time is not None, "it has ended"
    left = max(0.0, other.time - began) if alone else 0.0
    return alone + price * (left if price == 1 else min(left, alone / (1 - price)))


def _ready(end: End) -> list[End]:
    """Returns what has only waited for `end`, whose time is known."""
    followers, end._followers = end._followers, []
    for each in followers:
        each._missing -= 1
    return [each for each in followers if not each._missing]
