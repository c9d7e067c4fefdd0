"""Runs a command with limits on its time and output, and ends it as a whole: all that it has started ends with it."""

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from .jobs import ROOT

# Every process that a command starts inherits this variable, also those in sessions of their own.
MARK = "FSDP2_BENCHMARK_COMMAND"
# A command that writes more than this is stopped: its log would be too large to be fetched.
MAX_OUTPUT_BYTES = 1_500_000
# For so long a command that is to end may write where its threads stand.
GRACE_S = 3.0
_POLL_S = 0.05
_WITHOUT_CORE = ("sh", "-c", 'ulimit -c 0; exec "$@"', "sh")


@dataclass(frozen=True)
class Ended:
    """Says how a command has ended, in words, and after how many seconds."""

    outcome: str
    seconds: float

    @property
    def is_done(self) -> bool:
        return self.outcome == "done"

    def __str__(self) -> str:
        return f"{self.outcome}, {self.seconds:.0f} s"


def run_limited(
    command: Sequence[str], seconds: float, log: Path, environment: Mapping[str, str] | None = None
) -> Ended:
    """Runs a command from the root of the repository and appends its output to `log`.

    After `seconds` it is stopped: Python programs write first where their threads stand. Whatever happens, none of the
    processes that it has started is left, unless one hangs in the kernel.
    """
    mark = uuid.uuid4().hex
    # Signals that abort have Python write the stacks of all threads.
    own = {**(os.environ if environment is None else environment), MARK: mark, "PYTHONFAULTHANDLER": "1"}
    start, before = time.monotonic(), log.stat().st_size if log.exists() else 0
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*_WITHOUT_CORE, *command],
            cwd=ROOT,
            env=own,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    stopped = ""
    try:
        while process.poll() is None and not stopped:
            if time.monotonic() - start > seconds:
                stopped = f"stopped after {seconds:.0f} s"
            elif log.stat().st_size - before > MAX_OUTPUT_BYTES:
                stopped = f"stopped after {MAX_OUTPUT_BYTES / 1e6:.1f} MB of output"
            else:
                time.sleep(_POLL_S)
        if stopped:
            _signal_group(process.pid, signal.SIGABRT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
    finally:
        end_all(process, mark)
    code = process.poll()
    outcome = stopped or ("done" if code == 0 else f"failed ({code})")
    return Ended(outcome, time.monotonic() - start)


def end_all(process: "subprocess.Popen[bytes]", mark: str) -> None:
    """Kills the process group of a command, and what it has started in others."""
    _signal_group(process.pid, signal.SIGKILL)
    for _ in range(20):  # one that is killed may have started another just before
        left = _find_marked(mark)
        for pid in left:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not left:
            break
        time.sleep(_POLL_S)
    with suppress(subprocess.TimeoutExpired):  # it hangs in a driver: nothing ends it
        process.wait(GRACE_S)


def _signal_group(group: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _find_marked(mark: str) -> list[int]:
    """Returns the processes that have inherited `mark` and run. Only Linux tells."""
    needle, found = f"{MARK}={mark}".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if needle in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found
