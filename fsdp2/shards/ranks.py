"""Shares small facts between ranks, and whole values: the collectives of tools, over process groups.

Each function takes process groups, one for each axis of a mesh (`Ranks.axis_groups`), and must be called by all of
their ranks. Most are the engine's own, see tensors.py: what is here knows no sharded module. Where ranks may have run
out of batches (`join`), those with which a tool begins to communicate raise on all ranks if some have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..checks.arguments import check_mesh
from ..engine import compare_ranks
from ..engine.collectives import make_comm
from ..engine.comm import Comm, Purpose, Work, all_gather_now
from ..engine.compat import backend_name
from ..engine.mesh import DataMesh
from ..engine.meshes import Axis, DataParallelMeshDims, default_mesh, sharding_axes, shared_data_mesh
from ..engine.rank_facts import all_reduce_over as all_reduce_at_once
from ..engine.rank_facts import broadcast_over as broadcast_at_once
from ..engine.rank_facts import gather_objects as gather_objects_at_once
from ..engine.rank_facts import gather_to_one, moves_data
from ..features.user_collectives import before_tools_communicate
from .ours import ranks_on as ranks_of_mesh
from .protocol import Ranks

__all__ = [
    "Axis",
    "Comm",
    "DataMesh",
    "DataParallelMeshDims",
    "Purpose",
    "Work",
    "all_gather_now",
    "all_reduce_over",
    "backend_name",
    "before_tools_communicate",
    "bounds_over",
    "broadcast_over",
    "check_mesh",
    "comm_over",
    "default_mesh",
    "gather_bytes",
    "gather_objects",
    "gather_to_one",
    "moves_data",
    "ranks_on",
    "sharding_axes",
    "shared_data_mesh",
]


def ranks_on(mesh: DeviceMesh) -> Ranks:
    """Returns the ranks of a mesh, all of which hold copies."""
    return ranks_of_mesh(DataMesh(mesh, (), tuple(range(mesh.ndim))))


def bounds_over(ranks: Ranks, numbers: Sequence[int], name: str) -> list[tuple[int, int]]:
    """Returns the least and the greatest of each number over `ranks`, all of which must call it. `name`: what they are,
    for errors.
    """
    before_tools_communicate(ranks.axis_groups)
    return compare_ranks.bounds_over(cast(Any, ranks), numbers, name)


def all_reduce_over(
    tensor: Tensor, groups: Sequence[dist.ProcessGroup], *, largest: bool, purpose: Purpose | None = None
) -> None:
    """Does what the engine's `all_reduce_over` does, behind `before_tools_communicate`."""
    before_tools_communicate(groups)
    all_reduce_at_once(tensor, groups, largest=largest, purpose=purpose)


def broadcast_over(tensor: Tensor, groups: Sequence[dist.ProcessGroup], sources: Sequence[int] | None = None) -> None:
    """Does what the engine's `broadcast_over` does, behind `before_tools_communicate`."""
    before_tools_communicate(groups)
    broadcast_at_once(tensor, groups, sources)


def gather_objects(value: Any, groups: Sequence[dist.ProcessGroup], device: torch.device) -> list[Any]:
    """Does what the engine's `gather_objects` does, behind `before_tools_communicate`."""
    before_tools_communicate(groups)
    return gather_objects_at_once(value, groups, device)


def comm_over(group: dist.ProcessGroup, device: torch.device, purpose: str) -> Comm:
    """Returns what issues collectives over a process group. `purpose`: named in errors, and by checks of ranks."""
    return make_comm(group, device, Purpose(purpose))


def gather_bytes(own: bytes, group: dist.ProcessGroup, device: torch.device) -> list[bytes]:
    """Returns `own` of each rank of `group`, in rank order. All of these must call it, with as many bytes."""
    before_tools_communicate([group])
    return all_gather_now(own, make_comm(group, device, Purpose()), device)
