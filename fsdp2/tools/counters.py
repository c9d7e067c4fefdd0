"""Counts what a sharded model communicates, and the memory that it takes, as numbers for any metrics system."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..engine.events import Observer
from ..engine.group import FSDPParamGroup
from ..engine.root import Root
from ..engine.state import groups_below, require_module
from .watched_comms import Collective, watch

__all__ = ["counters"]
_COUNTED = (
    *("forward_passes", "backward_passes"),
    *("all_gathers", "all_gather_bytes", "reduce_scatters", "reduce_scatter_bytes", "all_reduces", "all_reduce_bytes"),
    *("host_waits", "host_wait_seconds"),
)


def counters(model: nn.Module) -> dict[str, float]:
    """Returns what a sharded model has done since the last call, as a flat dict of numbers.

    The first call begins to count, and returns zeros. Before it nothing is counted, and costs nothing; from then on
    each collective costs some microseconds of the host. Call it where you log: after each optimizer step, it tells of
    that step; after each tenth, of ten. It does not communicate; each rank has its own numbers, and the same keys.

    - `forward_passes`, `backward_passes`: how many the root ran.
    - `all_gathers`, `reduce_scatters`, `all_reduces`: collectives of parameters and gradients. An all-to-all that
      reduces gradients counts as a reduce-scatter.
    - `all_gather_bytes`, `reduce_scatter_bytes`, `all_reduce_bytes`: bytes of the whole tensors, padding included. Of n
      ranks, each sends (n-1)/n of them in a gather or a reduce-scatter, and twice that in an all-reduce.
    - `host_waits`, `host_wait_seconds`: how often, and for how long, the host waited for collectives. On a device it
      only tells the stream to wait, which takes microseconds: a profile shows how long that waits.
    - `resting_bytes`: this rank's shards, now.
    - `unsharded_peak_bytes`: the most memory of unsharded parameters at one time.
    - `allocated_peak_bytes`, `reserved_peak_bytes`: the most memory that tensors took, and that the allocator held;
      where the device has statistics. Each call begins new peaks, by `torch.cuda.reset_peak_memory_stats`.

    Consensus of ranks, checks, `Muon` and checkpoints communicate besides, and are not counted.

    Args:
        model: a module that fsdp2 has sharded. Numbers are those of all groups under its root.

    Raises:
        TypeError, ValueError: it is no module, or fsdp2 has not sharded it.

    Example:
        ```python
        fsdp2.counters(model)  # begins to count
        for step, batch in enumerate(batches):
            train(model, batch)
            wandb.log(fsdp2.counters(model), step=step)
        ```
    """
    require_module("model", model, "counters")
    roots = [root for root in dict.fromkeys(group.root for group in groups_below(model)) if root is not None]
    if not roots:
        raise ValueError(f"model: expected a module that fsdp2 has sharded, got {type(model).__name__}")
    counts, gathered = Counter[str](dict.fromkeys(_COUNTED, 0)), 0
    for root in roots:
        found = root.events.of(_Counts)
        if found is None:
            found = _Counts()
            root.add(found)
        counts.update(found.counts)
        gathered += found.peak
        found.restart(root)
    resting = sum(param.local.nbytes for root in roots for group in root.groups for param in group.params)
    peaks = _device_peaks({root.group.mesh.device for root in roots})
    return {**counts, "resting_bytes": resting, "unsharded_peak_bytes": gathered, **peaks}


def _device_peaks(devices: set[torch.device]) -> dict[str, float]:
    """Returns the peaks of torch's allocators since the last call, and begins new ones."""
    peaks = Counter[str]()
    for device in devices:
        module: Any = torch.get_device_module(device)
        if device.type != "meta" and hasattr(module, "reset_peak_memory_stats"):
            peaks["allocated_peak_bytes"] += module.max_memory_allocated(device)
            peaks["reserved_peak_bytes"] += module.max_memory_reserved(device)
            module.reset_peak_memory_stats(device)
    return dict(peaks)


class _Counts(Observer):
    """Counts under one root. It keeps no group: what tells it of collectives outlives models."""

    def __init__(self) -> None:
        self.counts = Counter[str]()
        self.peak = 0
        self._unsharded: dict[int, int] = {}  # of the groups whose unsharded parameters have memory now, their bytes

    def attached(self, root: Root) -> None:
        self.restart(root)

    def restart(self, root: Root) -> None:
        """Begins at 0."""
        self.counts.clear()
        self._unsharded = {id(group): group.nbytes for group in root.groups if _has_memory(group)}
        self.peak = sum(self._unsharded.values())
        watch(root.groups, self)

    # ---- collectives

    @contextmanager
    def launching(self, collective: Collective) -> Iterator[None]:
        self.counts[f"{collective.kind}s"] += 1
        self.counts[f"{collective.kind}_bytes"] += collective.nbytes
        yield

    @contextmanager
    def waiting(self, collective: Collective) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.counts["host_waits"] += 1
        self.counts["host_wait_seconds"] += time.perf_counter() - began  # type: ignore[assignment]

    # ---- events of the engine

    def pass_began(self, root: Root) -> None:
        watch(root.groups, self)  # groups may communicate otherwise than before
        self.counts["forward_passes"] += 1

    def backward_ended(self, root: Root) -> None:
        self.counts["backward_passes"] += 1

    def before_gather(self, group: FSDPParamGroup) -> None:
        self._note(group)

    def unsharded(self, group: FSDPParamGroup) -> None:
        self._note(group)

    def before_free(self, group: FSDPParamGroup) -> None:
        self._unsharded.pop(id(group), None)

    def memory_kept(self, group: FSDPParamGroup) -> None:
        self._note(group)

    def _note(self, group: FSDPParamGroup) -> None:
        self._unsharded[id(group)] = group.nbytes
        self.peak = max(self.peak, sum(self._unsharded.values()))


def _has_memory(group: FSDPParamGroup) -> bool:
    buffers = group.parameters.buffers
    return bool(group.params) and buffers is not None and buffers.hold_memory()
