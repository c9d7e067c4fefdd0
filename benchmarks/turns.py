"""Runs several programs that take turns, so that each meets the same disturbances: one process for each library."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence


def run_in_turns(commands: Mapping[str, Sequence[str]], **environment: str) -> None:
    """Starts a process for each name, one after the other, and gives each a turn again and again until all have ended.

    Args:
        commands: name -> command of a program that calls `take_turn`.
        environment: variables that replace those of this process.

    Raises:
        RuntimeError: a process has failed. It has written why to stderr.
    """
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for name, command in commands.items():
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            processes[name] = subprocess.Popen(command, env={**os.environ, **environment}, **pipes)  # type: ignore[call-overload]
            _wait(processes[name], name)
        waiting = dict(processes)
        while waiting:
            for name, process in [*waiting.items()]:
                if process.poll() is None:
                    process.stdin.write(b"\n")  # type: ignore[union-attr]
                    process.stdin.flush()  # type: ignore[union-attr]
                if not _wait(process, name):
                    del waiting[name]
    finally:
        for process in processes.values():
            process.kill()
            with process:  # closes its pipes
                pass


def _wait(process: "subprocess.Popen[bytes]", name: str) -> bool:
    """Waits until the process asks for a turn, and returns False if it has ended."""
    while (line := process.stdout.readline()) != b"turn\n":  # type: ignore[union-attr]
        if not line:
            status = process.wait()
            if status:
                raise RuntimeError(f"the process of {name} has ended with status {status}")
            return False
        sys.stderr.write(line.decode(errors="replace"))
    return True


def take_turn() -> None:
    """Waits for this process's turn."""
    print("turn", flush=True)
    if not sys.stdin.readline():
        os._exit(1)  # the process that gives turns is gone
