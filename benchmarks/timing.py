"""Takes turns: the only fair way to time several things on a machine that others use, too."""

import ctypes
import gc
import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

Call = Callable[[], object]
# Of malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def interleave(
    calls: Mapping[str, Call], *, rounds: int, warmup: int, measure: Callable[[Any], float]
) -> dict[str, list[float]]:
    """Returns `measure` of each call, once a round, in a new random order in each: a call finds the caches as the call
    before it has left them. No garbage is collected while a call runs.

    `warmup`: the number of measurements of each call that go before, and are dropped.
    """
    draw = random.Random(0)
    for call in calls.values():
        repeat(warmup, partial(measure, call))
    gc.collect()
    gc.freeze()
    gc.disable()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name in draw.sample(list(calls), len(calls)):
            times[name].append(measure(calls[name]))
        gc.collect()
    gc.enable()
    gc.unfreeze()
    return times


def repeat(count: int, call: Call) -> None:
    for _ in range(count):
        call()


def subtract(times: list[float], base: list[float], scale: float = 1.0) -> list[float]:
    """Subtracts round by round, so that a disturbance of one round stays in it."""
    return [(mine - theirs) * scale for mine, theirs in zip(times, base, strict=True)]


def keep_freed_memory() -> None:
    """Has the C library (glibc) keep freed memory, rather than return it to the system and take it anew.

    It returns what happens to lie at the end of the heap: the phase that frees it takes longer then, and so do those
    that touch new pages. Which these are changes from run to run, and says nothing about a library.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_TRIM_THRESHOLD, 1 << 30)
        set_option(_M_MMAP_THRESHOLD, 32 << 20)  # more is refused


def process_seconds(call: Call) -> float:
    """Returns the CPU time of all threads of this process."""
    start = time.process_time()
    call()
    return time.process_time() - start
