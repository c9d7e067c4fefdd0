"""Runs functions on several ranks in one process, for tests of programs that use process groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from .simulate.turns import OutOfStep, Rank
from .simulate.world import simulate

__all__ = ["run"]

Result = TypeVar("Result")


def run(fn: Callable[[int], Result], ranks: int) -> list[Result]:
    """Calls `fn(rank)` on simulated ranks, which are threads of this process and run one at a time, and returns their
    results in the order of ranks.

    Each rank has a default process group with the semantics and the sums of gloo on the CPU, the environment that
    torchrun sets, and its own generators of random numbers: torch's and the default dtype begin as the caller has them.
    Modules, and so their global variables, are shared. The state of the caller is unchanged afterwards. Results are the
    ranks' own objects: sharded tensors among them belong to a process group that is gone.

    A breakpoint in `fn` works on any rank.

    Args:
        fn: what a rank does. It may be a local function.
        ranks: how many ranks, from 1 on.

    Raises:
        RuntimeError: ranks wait for each other in vain. The message says in which call each one waits, and where.
        NotImplementedError: `fn` communicates in a thread that it has started.
        ValueError: `ranks` is less than 1.
        BaseException: the first error that a rank raises. A note says which rank, and where the others were.
    """
    if ranks < 1:
        raise ValueError(f"fsdp2.testing.run: expected one rank or more, got {ranks}")

    def in_group(rank: Rank) -> Result:
        dist.init_process_group("gloo")
        try:
            return fn(rank.number)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    reports: list[str] = []
    turns = simulate(in_group, ranks, lambda failed: reports.append(failed.turns.report()))
    if turns.failed is not None:
        error = turns.failed.error
        assert error is not None, "it has failed"
        if hasattr(error, "add_note"):  # from Python 3.11 on
            where = "" if isinstance(error, OutOfStep) else f" Where the ranks were:\n{reports[0]}"
            error.add_note(f"Rank {turns.failed.number} has raised it.{where}")
        raise error
    return [rank.result for rank in turns.ranks]
