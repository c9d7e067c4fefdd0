"""Shares small facts between ranks, and whole values: the collectives of tools, over process groups.

Each function takes process groups, one for each axis of a mesh (`Ranks.axis_groups`), and must be called by all of
their ranks. Most are the engine's own, see tensors.py: what is here knows no sharded module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..checks.arguments import check_mesh
from ..collectives.choose import make_comm
from ..collectives.gather_bytes import all_gather_now
from ..collectives.meshes import Axis, DataParallelMeshDims, default_mesh, sharding_axes, shared_data_mesh
from ..engine.comm import Comm, CommLabel, Work
from ..engine.mesh import DataMesh
from ..ranks import compare_ranks
from ..ranks.rank_facts import all_reduce_over, broadcast_over, gather_objects, gather_to_one, moves_data
from ..torch_private.internals import backend_name
from .ours import ranks_on as ranks_of_mesh
from .protocol import Ranks

__all__ = [
    "Axis",
    "Comm",
    "CommLabel",
    "DataMesh",
    "DataParallelMeshDims",
    "Work",
    "all_gather_now",
    "all_reduce_over",
    "backend_name",
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
    return compare_ranks.bounds_over(cast(Any, ranks), numbers, name)


def comm_over(group: dist.ProcessGroup, device: torch.device, comm_label: str) -> Comm:
    """Returns what issues collectives over a process group. `comm_label`: named in errors, and by checks of ranks."""
    return make_comm(group, device, CommLabel(comm_label))


def gather_bytes(own: bytes, group: dist.ProcessGroup, device: torch.device) -> list[bytes]:
    """Returns `own` of each rank of `group`, in rank order. All of these must call it, with as many bytes."""
    return all_gather_now(own, make_comm(group, device, CommLabel()), device)
