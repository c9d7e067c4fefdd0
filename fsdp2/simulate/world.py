"""Runs a program on simulated ranks. Replaces meanwhile what would reach other processes, or block all ranks."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from ..torch_private.simulate import require_rank_worlds, threads_as_ranks
from .group import LocalGroup
from .process import OwnModules, ProcessState, RankProcess
from .store import LocalStore
from .turns import Rank, Turns, rank_of_thread, sleep, this_rank

_SECONDS_BETWEEN_LOOKS = 0.05


class _Prefixed:
    """A stream that begins each line with the rank that prints it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        # The rank whose line is not finished, as that of a prompt.
        self._unfinished: Rank | None = None

    def write(self, text: str) -> int:
        rank = rank_of_thread()
        for line in text.splitlines(keepends=True):
            if self._unfinished is not None and self._unfinished is not rank:
                self._stream.write("\n")
                self._unfinished = None
            prefix = "" if rank is None or self._unfinished is not None else f"[{rank.number}] "
            self._stream.write(prefix + line)
            self._unfinished = None if line.endswith("\n") else rank
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Signals:
    """Calls the signal handlers of all ranks when the process gets a signal. Only its main thread may set handlers."""

    def __init__(self) -> None:
        self._usual = signal.signal
        self._handlers: dict[int, dict[Rank, Any]] = {}
        self._before: dict[int, Any] = {}

    def set(self, number: int, handler: Any) -> Any:
        """Replaces `signal.signal`."""
        rank = rank_of_thread()
        if rank is None:
            return self._usual(number, handler)
        handlers = self._handlers.setdefault(number, {})
        before = handlers.get(rank, self._before.get(number, signal.getsignal(number)))
        handlers[rank] = handler
        return before

    def follow(self) -> None:
        """Has the process call the handlers that ranks have set. The main thread must call it."""
        for number in self._handlers.keys() - self._before.keys():
            self._before[number] = self._usual(number, self._call)

    def restore(self) -> None:
        """Gives the process the handlers that it had."""
        for number, handler in self._before.items():
            self._usual(number, handler)

    def _call(self, number: int, frame: Any) -> None:
        for handler in [*self._handlers[number].values()]:
            if callable(handler):
                handler(number, frame)


def _rendezvous_by(store: dist.Store) -> Callable[..., Iterator[tuple[dist.Store, int, int]]]:
    """Returns a function to replace torch's `rendezvous`, by which `init_process_group` finds other processes."""

    def rendezvous(url: str, rank: int = -1, world_size: int = -1, **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
        own = this_rank("init_process_group")
        num_ranks = len(own.turns.ranks)
        if rank not in (-1, own.number) or world_size not in (-1, num_ranks):
            raise ValueError(
                f"init_process_group: expected rank {own.number} of {num_ranks}, as simulated, got rank {rank} of "
                f"{world_size}. Leave rank and world_size out, or read them from RANK and WORLD_SIZE."
            )
        yield store, own.number, num_ranks

    return rendezvous


@contextmanager
def _replaced(*replacements: tuple[Any, str, Any]) -> Iterator[None]:
    """Context: these attributes of objects have these values."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replacements]
    for owner, name, value in replacements:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def simulate(
    program: Callable[[Rank], Any],
    num_ranks: int,
    on_error: Callable[[Rank], None],
    folder: Path | None = None,
    packages: Collection[str] = (),
) -> Turns:
    """Runs `program(rank)` on simulated ranks until all have ended. The state of the process is then as before.

    At Ctrl-C it prints where each rank is.

    Args:
        on_error: called for the first rank that fails, in its thread, before the others are stopped.
        folder: each rank has its own copy of the modules below it, and its own `__main__`.
        packages: each rank has its own copy of these, too.
    """
    if rank_of_thread() is not None:
        raise RuntimeError("simulated ranks: expected a call by a program, got one by a simulated rank of it")
    require_rank_worlds()
    store, signals, num_threads = LocalStore(), _Signals(), torch.get_num_threads()

    def run(rank: Rank) -> Any:
        torch.set_num_threads(num_threads)  # OpenMP counts them for each thread
        return program(rank)

    replaced = _replaced(
        (dist.distributed_c10d, "ProcessGroupGloo", LocalGroup),
        (dist.distributed_c10d, "rendezvous", _rendezvous_by(store)),
        (dist, "TCPStore", lambda *_, **__: store),
        (time, "sleep", sleep),
        (signal, "signal", signals.set),
        (sys, "stdout", _Prefixed(sys.stdout)),
        (sys, "stderr", _Prefixed(sys.stderr)),
    )
    with threads_as_ranks(), replaced:
        modules = OwnModules(folder, packages)
        turns = Turns([RankProcess(rank, num_ranks, modules) for rank in range(num_ranks)])
        caller = ProcessState(modules)
        caller.leave()
        sys.meta_path.insert(0, modules)
        try:
            turns.start(run, on_error)
            while not turns.join(_SECONDS_BETWEEN_LOOKS):
                signals.follow()
        except KeyboardInterrupt:
            print(f"Interrupted. Where the ranks are:\n{turns.report()}", file=sys.stderr)
            raise
        finally:
            sys.meta_path.remove(modules)
            signals.restore()
            caller.enter()
    return turns
