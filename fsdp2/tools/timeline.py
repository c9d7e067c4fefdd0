"""Draws the timeline of a user's own steps, with the memory over time: `with fsdp2.trace(model, "step.json")`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch import nn

from ..shards.find import shards_of
from ..shards.tensors import require_module
from .timeline_of_events import record_events
from .timeline_of_hooks import record_hooks

__all__ = ["trace"]


@contextmanager
def trace(model: nn.Module, path: str | os.PathLike[str]) -> Iterator[None]:
    """Context: records what fsdp2 does in the steps inside, and writes it as a picture for Perfetto or a browser.

    Open the file at https://ui.perfetto.dev, or in chrome://tracing. It shows passes, forwards of modules, each
    collective from its launch until it was waited for, the host's launches and waits, reshards and optimizer steps,
    with the FQNs and bytes of their groups; and counters of memory in bytes: resting shards, unsharded parameters,
    gradients (sharded, unsynchronized, and being reduced), on CUDA also all that is allocated. Times are those of the
    host: on a GPU the work itself runs later, for which torch's profiler is right (it shows the same names).

    Of a model of torch's FSDP2 it shows passes, forwards, where backward reaches modules, optimizer steps, and the
    memory of shards and gradients. Hooks see no collectives; torch's profiler shows them.

    It does not communicate. Every rank may enter it; the first writes the file, or each one does, if the path contains
    "{rank}". A file is written also if a step raises. Outside of the context nothing is recorded, and nothing costs
    time. Ranks that record nothing run nothing besides.

    Args:
        model: a sharded module: the root, so that passes are shown, or any module inside.
        path: the file to write, for example "step.json" or "step-{rank}.json".

    Raises:
        TypeError, ValueError: `model` is no module, or has no sharded modules.

    Example:
        ```python
        with fsdp2.trace(model, "step.json"):
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        ```
    """
    require_module("model", model, "trace")
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path: expected the name of a file, got {type(path).__name__}")
    shards = shards_of(model)
    if not shards.groups:
        raise ValueError(f"model: expected sharded modules, {type(model).__name__} has none")
    rank, text = dist.get_rank(), os.fspath(path)
    if rank and "{rank}" not in text:
        yield
        return
    target = Path(text.replace("{rank}", str(rank)))
    is_foreign = all(group.is_foreign for group in shards.groups)
    with record_hooks(model, shards, rank, target) if is_foreign else record_events(model, rank, target):
        yield
