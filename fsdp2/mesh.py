"""The ranks that share and replicate one group's parameters, as one value. One rank is an ordinary size."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from . import torch_compat


@dataclass(frozen=True)
class DataMesh:
    """Which axes of a device mesh shard the parameters, and which replicate them: FSDP, HSDP and replication alike.

    `shard_axis`, `replicate_axis`: axes of `mesh`, None if there is none.
    """

    mesh: DeviceMesh
    shard_axis: int | None
    replicate_axis: int | None = None

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        return None if self.shard_axis is None else self.mesh.get_group(self.shard_axis)

    @property
    def replicate_group(self) -> dist.ProcessGroup | None:
        return None if self.replicate_axis is None else self.mesh.get_group(self.replicate_axis)

    @property
    def size(self) -> int:
        """Number of ranks that share one copy of the parameters."""
        return 1 if self.shard_axis is None else self.mesh.size(self.shard_axis)

    @property
    def rank(self) -> int:
        """Place of this rank among those."""
        return 0 if self.shard_axis is None else self.mesh.get_local_rank(self.shard_axis)

    def placements(self, dim: int = 0) -> tuple[Placement, ...]:
        """How a parameter that is sharded along `dim` lies on `mesh`."""
        return tuple(Shard(dim) if axis == self.shard_axis else Replicate() for axis in range(self.mesh.ndim))

    @property
    def device(self) -> torch.device:
        """Where shards live: the mesh's device type, and its current device if there are several."""
        if self.mesh.device_type in ("cpu", "meta"):
            return torch.device(self.mesh.device_type)
        return torch.device(self.mesh.device_type, torch.get_device_module(self.mesh.device_type).current_device())


def data_mesh(mesh: DeviceMesh) -> DataMesh:
    """One axis shards; of two, the first replicates and the second shards (HSDP)."""
    if mesh.ndim > 2:
        raise ValueError(
            f"mesh: expected one axis (sharded) or two (replicated, sharded), got {mesh.ndim} (shape "
            f"{tuple(mesh.shape)}). Pass the data-parallel axes only, e.g. mesh['dp'], or name them by dp_mesh_dims."
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"mesh: rank {dist.get_rank()} is not part of {mesh}")
    return DataMesh(mesh, 0) if mesh.ndim == 1 else DataMesh(mesh, 1, 0)


@dataclass(frozen=True)
class Distribution:
    """How one parameter lies.

    `mesh`, `placements`: of the sharded parameter.
    `full_mesh`, `full_placements`: of the full parameter, a DTensor under tensor parallelism; None: a plain tensor.
    `dim`: along which the data-parallel ranks cut it.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    full_mesh: DeviceMesh | None
    full_placements: tuple[Placement, ...]
    dim: int


def distribute(parameter: Tensor, mesh: DataMesh, dim: int) -> Distribution:
    """How `parameter` lies when `mesh` shards it along `dim`. A DTensor is cut further, on axes beside its own.

    Raises:
        ValueError: a DTensor on a mesh that has no root in common with `mesh`, or with a placement it can't keep.
    """
    if not isinstance(parameter, DTensor):
        return Distribution(mesh.mesh, mesh.placements(dim), None, (), dim)
    inner, placements = parameter.device_mesh, parameter.placements
    if any(placement.is_partial() for placement in placements):
        raise ValueError(f"expected a DTensor that is sharded or replicated, got placements {placements}")
    try:
        whole = torch_compat.concatenate_meshes(mesh.mesh, inner)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"expected a DTensor on axes of the same device mesh as {mesh.mesh}, got one on {inner}. Build one mesh of "
            "all axes by init_device_mesh, and slice it by name."
        ) from error
    parts = [inner.size(axis) for axis, placement in enumerate(placements) if placement.is_shard(dim)]
    outer = mesh.placements(dim)
    if math.prod(parts) > 1:
        strided = torch_compat.strided_shard(dim, math.prod(parts))
        outer = tuple(strided if placement.is_shard() else placement for placement in outer)
    return Distribution(whole, outer + placements, inner, placements, dim)


def default_mesh() -> DeviceMesh:
    """All ranks, on the accelerator if there is one. Initialises the default process group from the environment."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if not dist.is_initialized():
        dist.init_process_group()
    return init_device_mesh(accelerator.type if accelerator else "cpu", (dist.get_world_size(),))
