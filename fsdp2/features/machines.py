"""Makes a mesh of what the launcher has told each process: a replica on each machine."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..engine.meshes import default_mesh, initialise
from ..engine.rank_facts import gather_by_rank

_SIZE, _RANK = "LOCAL_WORLD_SIZE", "LOCAL_RANK"


def hsdp_mesh(device_type: str | None = None, *, ranks_per_replica: int | None = None) -> DeviceMesh:
    """Returns a mesh of two axes, "replicate" and "shard", with one replica on each machine: for `fully_shard(mesh=)`.

    The ranks of a machine, as torchrun numbers and counts them in LOCAL_RANK and LOCAL_WORLD_SIZE, share the shards. It
    initialises the default process group if there is none. Every rank must call it.

    Args:
        device_type: "cuda", "cpu", ... None: the accelerator if there is one, else the CPU.
        ranks_per_replica: so many ranks of a machine share the shards, in place of all; a divisor of their number.

    Raises:
        TypeError: `ranks_per_replica` is not an int.
        RuntimeError: on all ranks: the launcher has not set these variables; machines have different numbers of ranks;
            or the ranks of a machine do not follow one another.
        ValueError: `ranks_per_replica` does not divide the ranks of a machine.

    Example:
        ```python
        mesh = fsdp2.hsdp_mesh()
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        ```
    """
    if isinstance(ranks_per_replica, bool) or not isinstance(ranks_per_replica, (int, type(None))):
        raise TypeError(f"ranks_per_replica: expected an int or None, got {ranks_per_replica!r}")
    if ranks_per_replica is not None and ranks_per_replica < 1:
        raise ValueError(f"ranks_per_replica: expected at least 1, got {ranks_per_replica}")
    kind, world_size, size = _machines(device_type)
    count = size if ranks_per_replica is None else ranks_per_replica
    if size % count:
        raise ValueError(f"ranks_per_replica: expected a divisor of the {size} ranks of a machine, got {count}")
    return init_device_mesh(kind, (world_size // count, count), mesh_dim_names=("replicate", "shard"))


def _kind_and_world(device_type: str | None) -> tuple[str, int]:
    """Returns the type of the devices, and the number of ranks. It initialises the default process group."""
    if device_type is not None and not isinstance(device_type, str):
        raise TypeError(f"device_type: expected a str or None, got {device_type!r}")
    kind = device_type or default_mesh().device_type
    initialise()
    return kind, dist.get_world_size()


def _machines(device_type: str | None) -> tuple[str, int, int]:
    """Returns the type of the devices, the number of ranks, and of those of each machine. Every rank must call it."""
    kind, world_size = _kind_and_world(device_type)
    own = tuple(int(os.environ.get(name) or -1) for name in (_SIZE, _RANK))
    world = dist.group.WORLD
    assert world is not None, "just initialised"
    told = gather_by_rank(own, [world], torch.device("cpu" if kind == "cpu" else kind))
    return kind, world_size, _ranks_of_a_machine(told)


def _ranks_of_a_machine(told: dict[int, tuple[int, ...]]) -> int:
    """Returns how many ranks each machine has. `told`: rank -> its LOCAL_WORLD_SIZE and LOCAL_RANK."""
    missing = [rank for rank, values in told.items() if min(values) < 0]
    if missing:
        raise RuntimeError(
            f"hsdp_mesh: rank {missing[0]} has no {_SIZE} or no {_RANK} in its environment. Start the program by "
            "torchrun, or set both; or call init_device_mesh(device_type, (machines, ranks_of_one), "
            'mesh_dim_names=("replicate", "shard")).'
        )
    sizes: dict[int, int] = {}
    for rank, (size, _) in told.items():
        sizes.setdefault(size, rank)
    if len(sizes) > 1:
        counts = ", ".join(f"{size} at rank {rank}" for size, rank in sizes.items())
        raise RuntimeError(
            f"hsdp_mesh: expected as many ranks on each machine, got {_SIZE} {counts}. A replica on each machine "
            "would have shards of other sizes. Start as many on each; or shard over all ranks, without a mesh."
        )
    (size,) = sizes
    for rank, (_, local) in told.items():
        if local != rank % size:
            raise RuntimeError(
                f"hsdp_mesh: expected the ranks of a machine to follow one another, got {_RANK} {local} at rank "
                f"{rank} with {size} ranks on each machine. Have the launcher number ranks machine by machine."
            )
    return size
