"""Shares small facts between ranks, and whole values: the collectives of tools, over process groups.

Each function takes process groups, one for each axis of a mesh (`Ranks.axis_groups`), and must be called by all of
their ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ..checks.compare_ranks import bounds_over
from ..engine.comm import Comm, Purpose, Work
from ..engine.compat import backend_name
from ..engine.events import strategies
from ..engine.meshes import Axis, default_mesh, sharding_axes
from ..engine.rank_facts import (
    all_gather_now,
    all_reduce_over,
    broadcast_over,
    gather_objects,
    gather_to_one,
    moves_data,
)

__all__ = [
    "Axis",
    "Comm",
    "Purpose",
    "Work",
    "all_gather_now",
    "all_reduce_over",
    "backend_name",
    "bounds_over",
    "broadcast_over",
    "comm_over",
    "default_mesh",
    "gather_bytes",
    "gather_objects",
    "gather_to_one",
    "moves_data",
    "sharding_axes",
]


def comm_over(group: dist.ProcessGroup, device: torch.device, purpose: str) -> Comm:
    """Returns what issues collectives over a process group. `purpose`: named in errors, and by checks of ranks."""
    return strategies().make_comm(group, device, Purpose(purpose))


def gather_bytes(own: bytes, group: dist.ProcessGroup, device: torch.device) -> list[bytes]:
    """Returns `own` of each rank of `group`, in rank order. All of these must call it, with as many bytes."""
    return all_gather_now(own, strategies().make_comm(group, device, Purpose()), device)
