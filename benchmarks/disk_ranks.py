"""Starts gloo ranks that measure one disk."""

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp


def run_on_disk(work: Callable[..., None], args: argparse.Namespace) -> tuple[list[Any], str]:
    """Runs `work` on `args.ranks` ranks, on a new folder in `args.folder`, which is removed afterwards.

    Each rank is called with its number, that of ranks, `args`, the file of a store, the folder, and a queue for its
    result. Returns the results, in the order in which they came, and the machine's load before and after as a text.
    """
    folder, before = Path(tempfile.mkdtemp(dir=args.folder)), os.getloadavg()[0]
    context = mp.get_context("spawn")
    queue = context.Queue()
    ranks = [
        context.Process(target=work, args=(rank, args.ranks, args, str(folder / "store"), folder, queue))
        for rank in range(args.ranks)
    ]
    try:
        for each in ranks:
            each.start()
        found = [queue.get(timeout=3600) for _ in ranks]
        for each in ranks:
            each.join()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return found, f"load {before:.1f} to {os.getloadavg()[0]:.1f}"
