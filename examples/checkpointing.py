"""Saves and loads checkpoints of examples that may be stopped at any time, and handles SIGTERM.

A checkpoint is written under another name, and renamed when all ranks have written: a folder that has the name of a
checkpoint is complete, and can be loaded on any number of ranks. Schedulers send SIGTERM some time before they kill, to
one process or to all (torchrun passes it on, and kills after 30 seconds): ranks then agree to stop after the same step,
save, and exit with 0.
"""

import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

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
    """Returns the last checkpoint in `folder`, `folder` itself if it is one, or None if there is none."""
    if (folder / ".metadata").is_file():
        return folder
    return max(folder.glob("step-*"), default=None)


def save(folder: Path, step: int, model: nn.Module, optimizer: Optimizers) -> None:
    """Saves a checkpoint: each rank writes its own shards. Every rank must call it."""
    partial = folder / "partial"
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)  # what an interrupted run has left
    dist.barrier()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state, "step": step}, checkpoint_id=partial)
    if dist.get_rank() == 0:  # it returns from dcp.save when all ranks have written, and flushed, their files
        _replace(name_of(folder, step), partial)


def _replace(complete: Path, new: Path) -> None:
    old = complete.with_name(complete.name.replace("-", "--"))  # for `find_last`, before all others
    shutil.rmtree(old, ignore_errors=True)
    if complete.exists():  # by an earlier run
        complete.rename(old)
    new.rename(complete)
    shutil.rmtree(old, ignore_errors=True)
    descriptor = os.open(complete.parent, os.O_RDONLY)
    os.fsync(descriptor)  # a name is on the disk only when its folder is
    os.close(descriptor)


def resume(checkpoint: Path, model: nn.Module, optimizer: Optimizers) -> int:
    """Loads what `save` wrote on any number of ranks, and returns its step. Every rank must call it."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": 0}
    dcp.load(state, checkpoint_id=checkpoint)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return state["step"]
