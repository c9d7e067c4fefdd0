"""Finds the ranks that share parameters: all ranks, named axes of a larger mesh, a mesh for one parameter."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from ..engine.mesh import DataMesh, Topology, Use
from ..torch_private import internals
from .choose import require_backend

# ---- as users say it


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Names the axes of a device mesh that shard the parameters, and those that replicate them.

    Several names count as one axis, in the order of the mesh. The other axes belong to the model.

    Args:
        shard: axes along which parameters are cut, gathered for each use, and gradients are reduce-scattered.
        replicate: axes along which all ranks store and compute with the same; gradients are all-reduced.
        outer_shard: axes along which HSDP's replicas share one set of shards: sharded parameters, gradients and
            optimizer states are cut along these axes, too. After each write the first forward gathers over all ranks.
            Until the next write, each rank keeps a shard, in compute dtypes, of what the ranks of `shard` have, and
            further forwards and backwards gather along `shard` only. Gradients are reduce-scattered along `shard`, then
            along these axes. They are left of those of `shard` in the mesh.

    Raises:
        ValueError: no name is given.
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None
    outer_shard: str | tuple[str, ...] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if all(given is None or given in ("", (), []) for given in vars(self).values()):
            raise ValueError("DataParallelMeshDims: expected names for shard or replicate, got neither")
        for field_ in fields(self):
            given: Any = getattr(self, field_.name)
            names = given if isinstance(given, tuple | list) else (given,)
            if given is not None and not all(isinstance(name, str) for name in names):
                raise TypeError(f"DataParallelMeshDims.{field_.name}: expected names of axes, got {given!r}")


@dataclass(frozen=True)
class ShardPlacementResult:
    """What `shard_placement_fn` may return for a parameter that is sharded over another mesh than the others.

    Args:
        placement: the Shard(dim) to use; None: Shard(0).
        mesh_info: a DeviceMesh, read as `fully_shard` reads its `mesh`; or an object that says which axes of its `mesh`
            shard and replicate by `shard_mesh_dim` and `replicate_mesh_dim` (None: no axis), such as torch's own.
    """

    placement: Shard | None
    mesh_info: Any


def described_data_mesh(mesh_info: Any) -> DataMesh:
    """Returns the mesh that the `mesh_info` of a ShardPlacementResult describes.

    Raises:
        TypeError: it describes none.
        ValueError: this rank is not part of the mesh, or an axis both shards and replicates.
    """
    if isinstance(mesh_info, DeviceMesh):
        return data_mesh(mesh_info)
    mesh = getattr(mesh_info, "mesh", None)
    axes = [getattr(mesh_info, name, None) for name in ("shard_mesh_dim", "replicate_mesh_dim")]
    if not isinstance(mesh, DeviceMesh) or axes == [None, None]:
        raise TypeError(f"mesh_info: expected a DeviceMesh, or an object with one in `mesh`, got {mesh_info!r}")
    shard, replicate = (() if axis is None else (axis % mesh.ndim,) for axis in axes)
    return on_axes(mesh, shard, replicate)


def shared_data_mesh(mesh: DeviceMesh | None, dims: Any) -> DataMesh:
    """Returns the mesh that the arguments `mesh` and `dp_mesh_dims` describe; without both, all ranks shard."""
    mesh = default_mesh() if mesh is None else mesh
    return data_mesh(mesh) if dims is None else named_data_mesh(mesh, dims)


def named_data_mesh(mesh: DeviceMesh, dims: Any) -> DataMesh:
    """Returns the mesh of those axes of `mesh` that `dims`, a DataParallelMeshDims, names.

    Raises:
        ValueError: the mesh has no such name, or no names; or one is given twice.
        NotImplementedError: `outer_shard` is given, and other axes replicate, or belong to the model.
    """
    axes = []
    for names in (dims.shard, dims.replicate, getattr(dims, "outer_shard", None)):  # torch's own has the first two
        names = (names,) if isinstance(names, str) else tuple(names or ())
        known = mesh.mesh_dim_names or ()
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ValueError(f"dp_mesh_dims: expected names among {known}, got {unknown}")
        axes.append(tuple(sorted(known.index(name) for name in names)))
    return on_axes(mesh, *axes)


# ---- from axes to their use

# Those in use: the groups of a model share one, and with it the specs of equal parameters.
_in_use: weakref.WeakValueDictionary[Any, DataMesh] = weakref.WeakValueDictionary()


def on_axes(
    mesh: DeviceMesh,
    shard_axes: tuple[int, ...],
    replicate_axes: tuple[int, ...] = (),
    outer_axes: tuple[int, ...] = (),
) -> DataMesh:
    """Returns the mesh whose axes are used so: `Use.SHARD`, `Use.REPLICATE`, `Use.OUTER_SHARD`.

    Raises:
        ValueError: this rank is not part of `mesh`; an axis is given twice; or see `check_order`.
        ValueError, NotImplementedError: see `_joined`.
        RuntimeError: a process group has no backend for the device of the mesh.
    """
    if mesh.get_coordinate() is None:
        raise ValueError(f"mesh: rank {dist.get_rank()} is not part of {mesh}. Pass the mesh that it is part of.")
    given = shard_axes + replicate_axes + outer_axes
    if len({*given}) < len(given):
        names = mesh.mesh_dim_names or range(mesh.ndim)
        shard, replicate, outer = ([names[axis] for axis in axes] for axes in (shard_axes, replicate_axes, outer_axes))
        rest = f" and {outer} as outer_shard" if outer else ""
        raise ValueError(
            f"mesh: expected each axis once, got {shard} to shard and {replicate} to replicate{rest}. Leave it out of "
            "one."
        )
    # By identity: meshes of another default process group would be equal. While the value lives, so does its mesh.
    key = (id(mesh), shard_axes, replicate_axes, outer_axes)
    found = _in_use.get(key)
    if found is None:
        if outer_axes:
            found = _joined(mesh, shard_axes, replicate_axes, outer_axes)
        else:
            found = DataMesh(mesh, shard_axes, replicate_axes)
        check_order(found.mesh, found.shard_axes, found.shard_group)
        for group in (found.shard_group, found.replicate_group):
            require_backend(group, found.device)
        _in_use[key] = found
    return found


def _joined(
    mesh: DeviceMesh, shard_axes: tuple[int, ...], replicate_axes: tuple[int, ...], outer_axes: tuple[int, ...]
) -> DataMesh:
    """Returns the mesh whose only axis joins the outer axes (`Use.OUTER_SHARD`) and those that shard. If one of both
    kinds has one rank, all others shard, as in FSDP.

    Raises:
        ValueError: no axis shards; or one that shards is left of an outer one.
        NotImplementedError: there are other axes, of replicas or of the model.
    """
    names = mesh.mesh_dim_names
    assert names is not None, "outer axes are chosen by name"
    shard, replicate, outer = ([names[axis] for axis in axes] for axes in (shard_axes, replicate_axes, outer_axes))
    if not shard:
        raise ValueError(
            f"dp_mesh_dims: expected names for shard as well as outer_shard={outer}, got none. If no ranks compute as "
            "replicas, all ranks shard: pass these names as `shard`."
        )
    if replicate:
        raise NotImplementedError(
            f"dp_mesh_dims: outer_shard={outer} together with replicate={replicate} is not supported. Name all of "
            "these axes in outer_shard, or all in replicate."
        )
    if mesh.ndim > len(shard_axes + outer_axes):
        raise NotImplementedError(
            f"dp_mesh_dims: outer_shard={outer} on a mesh with further axes, {names}, is not supported. Pass the "
            f"axes of data parallelism only: mesh[{', '.join(map(repr, outer + shard))}]."
        )
    if max(outer_axes) > min(shard_axes):
        raise ValueError(
            f"dp_mesh_dims: expected the axes of outer_shard, {outer}, left of those that shard, {shard}, got the "
            f"mesh {names}: ranks that compute together are neighbours. Build the mesh in that order."
        )
    uses = tuple(Use.OUTER_SHARD if axis in outer_axes else Use.SHARD for axis in range(mesh.ndim))
    topology, joined = Topology(mesh, uses), internals.mesh_over(mesh, tuple(range(mesh.ndim)))
    sizes = [math.prod(mesh.size(axis) for axis in axes) for axes in (shard_axes, outer_axes)]
    if 1 in sizes:
        return DataMesh(joined, (0,))
    return DataMesh(joined, (0,), (), topology)


def check_order(mesh: DeviceMesh, axes: tuple[int, ...], group: dist.ProcessGroup | None) -> None:
    """Checks that ranks have the same order along `axes` of `mesh`, which shard, as in `group`, theirs.

    A gather concatenates what ranks hold in the order of their process group, which torch sorts. DTensor, initialisers
    and checkpoints cut by the coordinates of the mesh.

    Raises:
        ValueError: the orders differ; on all ranks of the mesh, whichever of them are in another order.
    """
    if group is None or math.prod(mesh.size(axis) for axis in axes) == 1:
        return
    rows, mine = internals.ranks_along(mesh, axes), dist.get_rank()
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


# ---- which ranks share a tensor


@dataclass(frozen=True)
class Axis:
    """Identifies the ranks among which tensors are sharded: axes of several meshes with the same ranks are equal."""

    ranks: tuple[int, ...]
    device_type: str
    group: dist.ProcessGroup = field(compare=False)


def sharding_axes(mesh: DeviceMesh, placements: Sequence[Any]) -> tuple[Axis, ...]:
    """Returns the axes along which a DTensor's parts differ: those that shard it, and those of partial results."""
    groups = [
        mesh.get_group(axis)
        for axis, placement in enumerate(placements)
        if mesh.size(axis) > 1 and not placement.is_replicate()
    ]
    return tuple(Axis(tuple(dist.get_process_group_ranks(group)), mesh.device_type, group) for group in groups)


# Default process group -> the mesh that default_mesh returned last. Neither is kept alive by this.
_last_default: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.ref[DeviceMesh]] = weakref.WeakKeyDictionary()


def initialise() -> None:
    """Initialises the default process group if there is none, from what torchrun sets.

    Raises:
        RuntimeError: there is none, and torchrun has not started the program.
    """
    if dist.is_initialized():
        return
    try:
        dist.init_process_group()
    except ValueError as error:
        raise RuntimeError(
            "there is no process group, and none can be made: torchrun has not started this program. Call "
            "torch.distributed.init_process_group(backend, rank=..., world_size=..., init_method=...) first, or start "
            f"the program by torchrun --nproc-per-node=N. ({error})"
        ) from error


def default_mesh() -> DeviceMesh:
    """Returns a mesh of all ranks, on the accelerator if there is one; initialises the default process group.

    It is the same object for all calls while it is in use, because meshes that are equal, but different objects, slow
    DTensor's operations down.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    initialise()
    group, kind = dist.group.WORLD, accelerator.type if accelerator else "cpu"
    assert group is not None, "just initialised"
    last = _last_default.get(group)
    mesh = last() if last is not None else None
    if mesh is None or mesh.device_type != kind:
        mesh = init_device_mesh(kind, (dist.get_world_size(),))
        _last_default[group] = weakref.ref(mesh)
    return mesh
