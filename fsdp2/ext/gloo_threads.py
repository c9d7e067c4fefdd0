"""The threads in which gloo sends and receives, and whom they may interrupt."""

import os
import sys
from contextlib import suppress
from pathlib import Path


def let_callers_finish() -> None:
    """Has gloo's threads of this process wait for a core rather than take that of a thread which just sends.

    Whoever sends holds a lock on the connection meanwhile. What arrives wakes gloo's thread, to which Linux, where all
    cores are busy, gives the core of the sender; and there it asks for the lock, over and over, for all of its time
    slice: milliseconds, in which nobody gets on. Under SCHED_BATCH a thread that wakes interrupts nobody. That takes no
    privilege, and changes nothing where cores are free. On Linux, with torch 2.13 or later, where these threads have
    names; elsewhere, or where it is forbidden, all stays as it is. What gloo's threads were given besides (a priority,
    a policy that is not the default) stays, too.
    """
    if sys.platform != "linux":
        return
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # ended meanwhile; or forbidden
            is_gloo = (thread / "comm").read_text() == "gloo_tcp_loop\n"
            if is_gloo and os.sched_getscheduler(int(thread.name)) == os.SCHED_OTHER:
                os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))
