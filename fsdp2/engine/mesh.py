"""Describes, as one value, the ranks that share and replicate one group's parameters. One rank is an ordinary size."""

from __future__ import annotations

import copy
import math
import weakref
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from . import compat
from .compat import DTensorSpec


@dataclass(frozen=True)
class DataMesh:
    """Says which axes of a device mesh shard the parameters, and which replicate them: FSDP, HSDP and replication."""

    mesh: DeviceMesh
    shard_axes: tuple[int, ...]
    replicate_axes: tuple[int, ...] = ()
    _device: torch.device = field(init=False, compare=False, repr=False)
    _specs: dict[Any, DTensorSpec] = field(default_factory=dict, init=False, compare=False, repr=False)
    _plain: dict[Any, Distribution] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        kind = self.mesh.device_type
        device = (kind,) if kind in ("cpu", "meta") else (kind, torch.get_device_module(kind).current_device())
        object.__setattr__(self, "_device", torch.device(*device))

    def __reduce__(self) -> Any:
        return DataMesh, (self.mesh, self.shard_axes, self.replicate_axes)

    def __deepcopy__(self, memo: dict[int, Any]) -> DataMesh:
        copied = DataMesh(copy.deepcopy(self.mesh, memo), self.shard_axes, self.replicate_axes)
        object.__setattr__(copied, "_device", self._device)
        return copied

    def dtensor_spec(
        self, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...], dtype: torch.dtype
    ) -> DTensorSpec:
        """Returns the spec of a contiguous parameter on `mesh`; equal ones share it, for it takes long to build."""
        # By identity: meshes of another default process group would be equal. The spec keeps its mesh alive.
        key = (id(mesh), placements, shape, dtype)
        spec = self._specs.get(key)
        if spec is None:
            spec = self._specs[key] = compat.dtensor_spec(mesh, placements, shape, dtype)
        return spec

    def plain_distribution(self, dim: int, is_scalar: bool) -> Distribution:
        """Returns the distribution of parameters that are no DTensors, which all share it."""
        key = (dim, is_scalar)
        if key not in self._plain:
            sharded = () if is_scalar else self.shard_axes
            placements = tuple(Shard(dim) if axis in sharded else Replicate() for axis in range(self.mesh.ndim))
            self._plain[key] = Distribution(self.mesh, placements, dim)
        return self._plain[key]

    @property
    def device(self) -> torch.device:
        """Parameters are gathered on this device of the mesh's type: of several, on that which was current when this
        was built. Other threads, which may never have chosen theirs, use the same.
        """
        return self._device

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        return _group_over(self.mesh, self.shard_axes)

    @property
    def replicate_group(self) -> dist.ProcessGroup | None:
        return _group_over(self.mesh, self.replicate_axes)

    @property
    def replicas_may_grow(self) -> bool:
        """True if ranks may join and leave the replica group."""
        group = self.replicate_group
        return group is not None and compat.size_may_change(group)

    @cached_property
    def size(self) -> int:
        """Number of ranks that share one copy of the parameters."""
        return math.prod(self.mesh.size(axis) for axis in self.shard_axes)

    @cached_property
    def rank(self) -> int:
        """Index of this rank among those."""
        rank = 0
        for axis in self.shard_axes:
            rank = rank * self.mesh.size(axis) + self.mesh.get_local_rank(axis)
        return rank

    @cached_property
    def num_ranks(self) -> int:
        """Number of ranks that share or replicate the parameters."""
        return math.prod(self.mesh.size(axis) for axis in (*self.shard_axes, *self.replicate_axes))

    @property
    def axis_groups(self) -> list[dist.ProcessGroup]:
        """This rank's process group along each axis on which other ranks share or replicate the parameters."""
        axes = sorted((*self.shard_axes, *self.replicate_axes))
        return [self.mesh.get_group(axis) for axis in axes if self.mesh.size(axis) > 1]


def _group_over(mesh: DeviceMesh, axes: tuple[int, ...]) -> dist.ProcessGroup | None:
    """Returns the process group of this rank along `axes`; several count as one, for which a group is made once."""
    if len(axes) < 2:
        return mesh.get_group(axes[0]) if axes else None
    return compat.mesh_over(mesh, axes).get_group()


# Those in use: the groups of a model share one, and with it the specs of equal parameters.
_in_use: weakref.WeakValueDictionary[Any, DataMesh] = weakref.WeakValueDictionary()


def on_axes(mesh: DeviceMesh, shard_axes: tuple[int, ...], replicate_axes: tuple[int, ...] = ()) -> DataMesh:
    """
    Raises:
        ValueError: this rank is not part of `mesh`; an axis is given twice; or see `check_order`.
    """
    if mesh.get_coordinate() is None:
        raise ValueError(f"mesh: rank {dist.get_rank()} is not part of {mesh}. Pass the mesh that it is part of.")
    if len({*shard_axes, *replicate_axes}) < len(shard_axes + replicate_axes):
        names = mesh.mesh_dim_names or range(mesh.ndim)
        shard, replicate = ([names[axis] for axis in axes] for axes in (shard_axes, replicate_axes))
        raise ValueError(
            f"mesh: expected each axis once, got {shard} to shard and {replicate} to replicate. Leave it out of one."
        )
    # By identity: meshes of another default process group would be equal. While the value lives, so does its mesh.
    key = (id(mesh), shard_axes, replicate_axes)
    found = _in_use.get(key)
    if found is None:
        found = DataMesh(mesh, shard_axes, replicate_axes)
        check_order(mesh, shard_axes, found.shard_group)
        _in_use[key] = found
    return found


def check_order(mesh: DeviceMesh, axes: tuple[int, ...], group: dist.ProcessGroup | None) -> None:
    """Checks that ranks have the same order along `axes` of `mesh`, which shard, as in `group`, theirs.

    A gather concatenates what ranks hold in the order of their process group, which torch sorts. DTensor, initialisers
    and checkpoints cut by the coordinates of the mesh.

    Raises:
        ValueError: the orders differ; on all ranks of the mesh, whichever of them are in another order.
    """
    if group is None or math.prod(mesh.size(axis) for axis in axes) == 1:
        return
    rows, mine = compat.ranks_along(mesh, axes), dist.get_rank()
    own, in_group = next(row for row in rows if mine in row), dist.get_process_group_ranks(group)
    wrong = own if own != in_group else None
    if in_group == sorted(in_group):
        wrong = next((row for row in rows if row != sorted(row)), None)
    if wrong is not None:
        names = mesh.mesh_dim_names
        axis = ", ".join(repr(names[axis]) if names else str(axis) for axis in axes)
        raise ValueError(
            f"mesh: expected ranks in ascending order along the axis that shards ({axis}), as in their process group, "
            f"got {wrong}: gathers would follow one order, initialisers and checkpoints the other. List the ranks of "
            "each row in ascending order, as init_device_mesh does; of axes that shard together, build the mesh with "
            "these axes last, in their order."
        )


def data_mesh(mesh: DeviceMesh) -> DataMesh:
    """Returns a mesh whose only axis shards, or whose first axis replicates and whose second shards (HSDP)."""
    if mesh.ndim > 2:
        raise ValueError(
            f"mesh: expected one axis (sharded) or two (replicated, sharded), got {mesh.ndim} (shape "
            f"{tuple(mesh.shape)}). Pass the data-parallel axes only, e.g. mesh['dp'], or name them by dp_mesh_dims."
        )
    return on_axes(mesh, (0,)) if mesh.ndim == 1 else on_axes(mesh, (1,), (0,))


def replicated_data_mesh(mesh: DeviceMesh) -> DataMesh:
    """Returns a mesh of one axis, which replicates."""
    if mesh.ndim != 1:
        raise ValueError(f"mesh: expected one axis, which replicates, got {mesh.ndim} (shape {tuple(mesh.shape)})")
    return on_axes(mesh, (), (0,))


@dataclass(frozen=True)
class Distribution:
    """Says how one parameter is distributed: `mesh` and `placements` of the sharded parameter, and the `dim` along
    which the ranks of the shard group cut it. The unsharded parameter is a plain tensor; extensions have other kinds.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    dim: int

    def is_of_sharded(self, tensor: DTensor) -> bool:
        """Returns True if `tensor` is distributed like the sharded parameter."""
        return tensor.placements == self.placements and tensor.device_mesh == self.mesh

    def gathered_part(self, whole: Tensor) -> Tensor:
        """Returns what the ranks of the shard group share of the whole parameter."""
        return whole

    def as_parameter(self, gathered: Tensor, shape: tuple[int, ...], requires_grad: bool) -> nn.Parameter:
        """Returns an unsharded parameter over `gathered`; `shape` is that of the whole parameter."""
        return nn.Parameter(gathered, requires_grad)

    def gathered_gradient(self, gradient: Tensor) -> Tensor:
        """Returns a gradient of the unsharded parameter as the ranks of the shard group share it."""
        return gradient


def distribute(parameter: Tensor, mesh: DataMesh, dim: int) -> Distribution:
    """Returns how a plain `parameter` is distributed when `mesh` shards it along `dim`; a scalar is replicated.

    Raises:
        ValueError: `mesh` is a larger mesh, see DataParallelMeshDims.
    """
    if mesh.mesh.ndim > len(mesh.shard_axes + mesh.replicate_axes):
        raise ValueError(f"dp_mesh_dims: expected a DTensor on {mesh.mesh}, got a {type(parameter).__name__}")
    return mesh.plain_distribution(dim, parameter.dim() == 0)
