"""Runs the programs in examples/ as their users do, on several ranks."""

import contextlib
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]


def run_by_torchrun(name: str, ranks: int, *options: str) -> str:
    """What it prints."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [*launcher, str(ROOT / "examples" / name), *options]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr[-4000:]
    return finished.stdout


def run_forked(name: str, ranks: int, *options: str) -> str:
    """What it prints, in forked processes that have imported torch: torchrun's take seconds each for that."""
    context, folder = multiprocessing.get_context("fork"), Path(tempfile.mkdtemp())
    with socket.socket() as any_free:
        any_free.bind(("localhost", 0))
        port = any_free.getsockname()[1]
    processes = [
        context.Process(target=_be_rank, args=(folder / str(rank), name, options, rank, ranks, port))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        process.kill()
    output = "".join((folder / str(rank)).read_text() for rank in range(ranks))
    assert [process.exitcode for process in processes] == [0] * ranks, output
    return output


def _be_rank(log: Path, name: str, options: Sequence[str], rank: int, ranks: int, port: int) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "CUDA_VISIBLE_DEVICES": ""}
    os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    sys.argv, sys.path[:0] = [name, *options], [str(ROOT / "examples")]
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # pytest's filter, that makes errors of them, is not the user's
    with log.open("w", buffering=1) as output, contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
        except BaseException:
            traceback.print_exc()
            raise
