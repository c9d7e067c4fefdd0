"""Keeps the threads in which gloo sends and receives from interrupting other threads."""

import os
import sys
from contextlib import suppress
from pathlib import Path


def let_callers_finish() -> None:
    """Has gloo's threads of this process wait for a core rather than take that of a thread which just sends.

    A thread that sends holds a lock on the connection. Data that arrives wakes gloo's thread. Where all cores are busy,
    Linux gives that thread the core of the sender, and it asks for the lock again and again until its time slice ends:
    milliseconds in which neither makes progress. Under SCHED_BATCH a thread that wakes interrupts no other. That needs
    no privilege, and changes nothing where cores are free.

    It has an effect on Linux with torch 2.13 or later, where these threads have names. Elsewhere, or where it is
    forbidden, it does nothing. A policy of gloo's threads that is not the default one stays.
    """
    if sys.platform != "linux":
        return
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # ended meanwhile; or forbidden
            is_gloo = (thread / "comm").read_text() == "gloo_tcp_loop\n"
            if is_gloo and os.sched_getscheduler(int(thread.name)) == os.SCHED_OTHER:
                os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))
