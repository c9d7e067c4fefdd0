"""Describes, as one value, the ranks that share and replicate one group's parameters. One rank is an ordinary size.

`Topology` says for each axis of a device mesh what its ranks store, what they gather, and how they reduce gradients.
`DataMesh` derives the process groups from it.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ..torch_private import internals
from ..torch_private.internals import DTensorSpec


class Gathered(Enum):
    """When the ranks along an axis gather what the others hold."""

    NEVER = "never: each rank holds all of it"
    AT_USE = "at each use"
    AFTER_WRITE = "once after each write; until the next, each rank keeps what it needs of it"


class Reduced(Enum):
    """How the ranks along an axis sum their gradients."""

    SCATTER = "reduce-scatter"
    ALL = "all-reduce"


class Use(Enum):
    """What the ranks along one axis of a device mesh share.

    `rests_cut`: parameters, gradients and optimizer states are cut along the axis; else each rank has all of them.
    `gathered`, `reduced`: when parameters are gathered along it, and how gradients are summed.

    SHARD: FSDP. REPLICATE: the replicas of HSDP, or DDP. OUTER_SHARD: replicas that share one set of
    shards. Between writes each replica computes and reduces along SHARD as in HSDP, from secondary shards.
    """

    rests_cut: bool
    gathered: Gathered
    reduced: Reduced

    def __init__(self, rests_cut: bool, gathered: Gathered, reduced: Reduced) -> None:
        self.rests_cut, self.gathered, self.reduced = rests_cut, gathered, reduced

    SHARD = True, Gathered.AT_USE, Reduced.SCATTER
    OUTER_SHARD = True, Gathered.AFTER_WRITE, Reduced.SCATTER
    REPLICATE = False, Gathered.NEVER, Reduced.ALL


@dataclass(frozen=True)
class Topology:
    """The use of each axis of `mesh`. None: it belongs to the model (tensor parallelism)."""

    mesh: DeviceMesh
    uses: tuple[Use | None, ...]

    def axes(self, gathered: Gathered) -> tuple[int, ...]:
        """Returns the indices of the axes along which parameters are gathered then."""
        return tuple(axis for axis, use in enumerate(self.uses) if use is not None and use.gathered is gathered)

    def group(self, gathered: Gathered) -> dist.ProcessGroup | None:
        """Returns this rank's process group along these axes, which count as one. None: there are none."""
        return _group_over(self.mesh, self.axes(gathered))

    def __str__(self) -> str:
        names = self.mesh.mesh_dim_names or range(self.mesh.ndim)
        uses = [use.name if use is not None else "of the model" for use in self.uses]
        return ", ".join(f"{name}: {use}" for name, use in zip(names, uses, strict=True))


@dataclass(frozen=True)
class DataMesh:
    """A device mesh, with the axes that shard the parameters, and those that replicate them: FSDP, HSDP, replication.

    `mesh`: the one that sharded parameters are on. `joins`: what the axes of the user's mesh are used for, if it
    has outer axes (`Use.OUTER_SHARD`): `mesh` joins these and those that shard to one axis. None: `mesh` is the user's.
    """

    mesh: DeviceMesh
    shard_axes: tuple[int, ...]
    replicate_axes: tuple[int, ...] = ()
    joins: Topology | None = None
    _device: torch.device = field(init=False, compare=False, repr=False)
    _specs: dict[Any, DTensorSpec] = field(default_factory=dict, init=False, compare=False, repr=False)
    _plain: dict[Any, Distribution] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        kind = self.mesh.device_type
        device = (kind,) if kind in ("cpu", "meta") else (kind, torch.get_device_module(kind).current_device())
        object.__setattr__(self, "_device", torch.device(*device))

    def __reduce__(self) -> Any:
        return DataMesh, (self.mesh, self.shard_axes, self.replicate_axes, self.joins)

    def __deepcopy__(self, memo: dict[int, Any]) -> DataMesh:
        joins = None if self.joins is None else Topology(copy.deepcopy(self.joins.mesh, memo), self.joins.uses)
        copied = DataMesh(copy.deepcopy(self.mesh, memo), self.shard_axes, self.replicate_axes, joins)
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
            spec = self._specs[key] = internals.dtensor_spec(mesh, placements, shape, dtype)
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

    @cached_property
    def topology(self) -> Topology:
        """The use of each axis of the user's mesh."""
        uses = dict.fromkeys(self.shard_axes, Use.SHARD) | dict.fromkeys(self.replicate_axes, Use.REPLICATE)
        return self.joins or Topology(self.mesh, tuple(map(uses.get, range(self.mesh.ndim))))

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the parts of one copy of the parameters, and gather them from their shards."""
        return _group_over(self.mesh, self.shard_axes)

    @property
    def replicate_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same shards, and all-reduce gradients."""
        return _group_over(self.mesh, self.replicate_axes)

    @cached_property
    def has_outer_shard(self) -> bool:
        """True if replicas share one set of shards (`Use.OUTER_SHARD`). Then gradients are reduced in two steps."""
        return bool(self.topology.axes(Gathered.AFTER_WRITE))

    @property
    def inner_group(self) -> dist.ProcessGroup | None:
        """The ranks of the shard group that gather at each use from secondary shards, and reduce first."""
        return self.topology.group(Gathered.AT_USE)

    @property
    def outer_group(self) -> dist.ProcessGroup | None:
        """The ranks of the shard group that reduce-scatter what their inner groups have reduced."""
        return self.topology.group(Gathered.AFTER_WRITE)

    @property
    def replicas_may_grow(self) -> bool:
        """True if ranks may join and leave the replica group."""
        group = self.replicate_group
        return group is not None and internals.size_may_change(group)

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
    def has_other_axes(self) -> bool:
        """True if some axes of the user's mesh belong to the model: its parameters are DTensors on them."""
        return self.mesh.ndim > len(self.shard_axes + self.replicate_axes)

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
    return internals.mesh_over(mesh, axes).get_group()


@dataclass(frozen=True)
class Distribution:
    """The distribution of one parameter: `mesh` and `placements` of the sharded parameter, and the `dim` along
    which the ranks of the shard group cut it. The unsharded parameter is a plain tensor; extensions have other kinds.
    """

    # True if modules compute with a part that attributes describe: `whole` and `attributes` do something then.
    is_annotated: ClassVar[bool] = False

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    dim: int

    @property
    def attributes(self) -> dict[str, Any]:
        """Those that the unsharded parameter has, and the sharded one has not."""
        return {}

    def whole(self, parameter: nn.Parameter) -> nn.Parameter:
        """Returns a parameter that a module has before it is sharded as one of the whole shape."""
        return parameter

    def is_of_sharded(self, tensor: DTensor) -> bool:
        """Returns True if `tensor` is distributed like the sharded parameter."""
        return tensor.placements == self.placements and tensor.device_mesh == self.mesh

    def gathered_part(self, whole: Tensor) -> Tensor:
        """Returns what the ranks of the shard group share of the whole parameter."""
        return whole

    def as_parameter(self, gathered: Tensor, shape: tuple[int, ...], requires_grad: bool) -> nn.Parameter:
        """Returns an unsharded parameter over `gathered`; `shape` is that of the whole parameter."""
        if type(gathered) is not Tensor:
            return nn.Parameter(gathered, requires_grad)
        parameter: nn.Parameter = internals.of_class(gathered, nn.Parameter, requires_grad)  # in half the time
        return parameter

    def gathered_gradient(self, gradient: Tensor) -> Tensor:
        """Returns a gradient of the unsharded parameter as the ranks of the shard group share it."""
        return gradient


def distribute(parameter: Tensor, mesh: DataMesh, dim: int) -> Distribution:
    """Returns how a plain `parameter` is distributed when `mesh` shards it along `dim`; a scalar is replicated.

    Raises:
        ValueError: `mesh` is a larger mesh, see DataParallelMeshDims.
    """
    if mesh.has_other_axes:
        raise ValueError(f"dp_mesh_dims: expected a DTensor on {mesh.mesh}, got a {type(parameter).__name__}")
    return mesh.plain_distribution(dim, parameter.dim() == 0)
