"""Runs the programs in examples/ as their users do, on several ranks."""

import contextlib
import itertools
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
Prepare = Callable[[int], None]


def start_by_torchrun(name: str, ranks: int, *options: str) -> subprocess.Popen[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [*launcher, str(ROOT / "examples" / name), *options]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run_forked(
    name: str,
    ranks: int,
    *options: str,
    before: Prepare | None = None,
    killed_by: int | None = None,
    timeout: float = 120,
) -> str:
    """Returns the output of a program in forked processes that have imported torch: torchrun would take seconds each.

    `before(rank)` runs first in each. `killed_by`: the signal that is expected to end one; then the others may fail.
    `timeout`: seconds until the others are ended.
    """
    context, folder = multiprocessing.get_context("fork"), Path(tempfile.mkdtemp())
    with socket.socket() as any_free:
        any_free.bind(("localhost", 0))
        port = any_free.getsockname()[1]
    processes = [
        context.Process(target=_be_rank, args=(folder / str(rank), name, options, rank, ranks, port, before))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout)
        process.kill()
    output = "".join((folder / str(rank)).read_text() for rank in range(ranks))
    codes = [process.exitcode for process in processes]
    assert -killed_by in codes if killed_by else codes == [0] * ranks, output
    return output


def _be_rank(
    log: Path, name: str, options: Sequence[str], rank: int, ranks: int, port: int, before: Prepare | None
) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "CUDA_VISIBLE_DEVICES": ""}
    os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    sys.argv, sys.path[:0] = [name, *options], [str(ROOT / "examples")]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # pytest's filter, that makes errors of them, is not the user's
    with log.open("w", buffering=1) as output, contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            if before is not None:
                before(rank)
            runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        except BaseException:
            traceback.print_exc()
            raise


def kill_at(count: int, cls: Any, name: str, after: bool = False) -> None:
    """Kills this process in call number `count` of a method, instead of it or, with `after`, after it."""
    method, calls = getattr(cls, name), itertools.count(1)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_last = next(calls) == count
        result = method(self, *args, **kwargs) if after or not is_last else None
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(cls, name, call)
