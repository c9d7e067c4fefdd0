"""Defines where a rank runs: on this machine as it is, or in a network namespace with a link of limited bandwidth."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Place:
    """Holds the prefix of a rank's command, and the interface by which it reaches the others."""

    prefix: tuple[str, ...] = ()
    interface: str = os.environ.get("GLOO_SOCKET_IFNAME", "lo")


class UnavailableError(Exception):
    """Says what this machine lacks for a suite."""


@contextmanager
def open_throttled_link(megabits: int) -> Iterator[list[Place]]:
    """Yields two places, joined by a link of so many megabits a second, each way, whose names are this process's own.

    Raises:
        UnavailableError: this process is not root, or the machine lacks `ip`, `tc` or support in its kernel.
    """
    spaces = [f"fsdp2-{os.getpid()}-{rank}" for rank in range(2)]
    try:
        _join(spaces, megabits)
        yield [Place(("ip", "netns", "exec", space), "wire") for space in spaces]
    finally:
        for space in spaces if shutil.which("ip") else ():
            subprocess.run(["ip", "netns", "delete", space], capture_output=True)


def _join(spaces: list[str], megabits: int) -> None:
    missing = [name for name in ("ip", "tc") if not shutil.which(name)]
    if missing or os.geteuid() != 0:
        raise UnavailableError(f"needs {' and '.join(missing) or 'root'}")
    first, second = spaces
    for space in spaces:
        _call(f"ip netns add {space}")
    _call(f"ip link add name wire netns {first} type veth peer name wire netns {second}")
    for rank, space in enumerate(spaces):
        _call(f"ip -netns {space} address add 10.0.0.{rank + 1}/24 dev wire")
        _call(f"ip -netns {space} link set wire up")
        # A queue that overflows would measure how TCP recovers.
        _call(f"tc -netns {space} qdisc add dev wire root tbf rate {megabits}mbit burst 1mb limit 64mb")


def _call(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True)
    if done.returncode:
        raise UnavailableError(f"`{command}`: {done.stderr.strip()}")


def sent_bytes(interface: str) -> int:
    """Returns all bytes that have left this machine, or network namespace, through an interface, with headers."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    (counts,) = (line.split(":")[1].split() for line in lines if line.strip().startswith(f"{interface}:"))
    return int(counts[8])
