"""Reads how Linux schedules the threads in which gloo sends and receives. fsdp2 changes it; others must not profit."""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

DEFAULT = getattr(os, "SCHED_OTHER", 0)


def read_policies() -> dict[int, int]:
    """Returns the policy of each of gloo's threads of this process, by its id, or None where threads have no names."""
    policies = {}
    for thread in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # ended meanwhile
            if (thread / "comm").read_text() == "gloo_tcp_loop\n":
                policies[int(thread.name)] = os.sched_getscheduler(int(thread.name))
    return policies


def set_policies(policies: Mapping[int, int]) -> None:
    for thread, policy in policies.items():
        os.sched_setscheduler(thread, policy, os.sched_param(0))
