"""The ranks that share one group's parameters, as one value. One rank is an ordinary size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard


@dataclass(frozen=True)
class ShardMesh:
    """A one-axis device mesh, with what the rest of the package asks of it."""

    mesh: DeviceMesh

    def __post_init__(self) -> None:
        if self.mesh.ndim != 1:
            raise NotImplementedError(
                f"mesh: expected one axis, got {self.mesh.ndim} (shape {tuple(self.mesh.shape)}). Meshes of several "
                "axes (HSDP, tensor parallelism) are not supported yet; pass one axis, e.g. mesh['dp']."
            )
        if self.mesh.get_coordinate() is None:
            raise ValueError(f"mesh: rank {dist.get_rank()} is not part of {self.mesh}")

    @property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group()

    @property
    def size(self) -> int:
        return self.mesh.size()

    @property
    def rank(self) -> int:
        return self.mesh.get_local_rank()

    @property
    def placements(self) -> tuple[Shard]:
        return (Shard(0),)

    @property
    def device(self) -> torch.device:
        """Where shards live: the mesh's device type, and its current device if there are several."""
        if self.mesh.device_type in ("cpu", "meta"):
            return torch.device(self.mesh.device_type)
        return torch.device(self.mesh.device_type, torch.get_device_module(self.mesh.device_type).current_device())


def default_mesh() -> DeviceMesh:
    """All ranks, on the accelerator if there is one. Initialises the default process group from the environment."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if not dist.is_initialized():
        dist.init_process_group()
    return init_device_mesh(accelerator.type if accelerator else "cpu", (dist.get_world_size(),))
