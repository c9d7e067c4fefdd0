"""Saves and loads checkpoints of examples that may be stopped at any time, and handles SIGTERM.

A folder that has the name of a checkpoint is complete, and can be loaded on any number of ranks. Schedulers send
SIGTERM some time before they kill, to one process or to all (torchrun passes it on, and kills after 30 seconds): ranks
then agree to stop after the same step, save, and exit with 0.
"""

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp2 import checkpoint

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]  # one for all parameters, or several


class StopSignal:
    """Notes SIGTERM from now on, instead of ending the process."""

    def __init__(self) -> None:
        self.came = False
        signal.signal(signal.SIGTERM, self._note)

    def _note(self, *_: Any) -> None:
        self.came = True  # wherever the step is: nothing else is safe there

    def end_at_once(self) -> None:
        """Lets SIGTERM end the process again: all is saved, and no further step asks `agreed`."""
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self.came:
            os.kill(os.getpid(), signal.SIGTERM)

    def agreed(self, device: torch.device) -> bool:
        """Returns True if any rank has got the signal. Every rank must call it, between steps."""
        came = torch.tensor(int(self.came), device=device)
        dist.all_reduce(came, dist.ReduceOp.MAX)
        return bool(came)


def name_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06}"


def find_last(folder: Path) -> Path | None:
    """Returns the checkpoint that was saved last in `folder`, `folder` itself if it is one, or None."""
    return folder if (folder / ".metadata").is_file() else checkpoint.latest(folder)


def save(folder: Path, step: int, model: nn.Module, optimizer: Optimizers) -> None:
    """Saves a checkpoint: each rank writes its own shards. Every rank must call it."""
    checkpoint.save(name_of(folder, step), model, optimizer, extra={"step": step})


def resume(path: Path, model: nn.Module, optimizer: Optimizers) -> int:
    """Loads a checkpoint of any number of ranks, and returns its step. Every rank must call it."""
    return checkpoint.load(path, model, optimizer)["step"]
