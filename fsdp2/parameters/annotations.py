"""Reads what the package spmd_types says of a plain parameter: what each axis of a mesh holds of it.

Such a parameter is this rank's part of a larger one, where tensor parallelism by DTensors has a DTensor. Modules
compute with plain tensors, and call collectives themselves. torch's FSDP2 takes such parameters since torch 2.15.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import Placement, Replicate, Shard

from ..engine.mesh import DataMesh
from ..torch_private.rare_internals import SPMD_TYPE


class Annotation(NamedTuple):
    """Says how the ranks of a mesh hold an annotated parameter.

    `placements`: one for each axis of the mesh. `summed`: the axes of the model whose ranks hold the same, and compute
    different parts of its gradient (R), in contrast to those that compute all of it (I). `attributes`: those by which
    the package knows the type of a tensor; the type has every axis on which modules compute.
    """

    placements: tuple[Placement, ...]
    summed: tuple[int, ...]
    attributes: dict[str, Any]


def is_annotated(parameter: Tensor) -> bool:
    """Returns True if the package has annotated `parameter`. An empty annotation says nothing."""
    return SPMD_TYPE in vars(parameter) and "spmd_types" in sys.modules and bool(vars(parameter)[SPMD_TYPE])


def read(parameter: Tensor, mesh: DataMesh) -> Annotation:
    """Reads the annotation of `parameter`, which the data-parallel axes of `mesh` are about to cut.

    Raises:
        ValueError: it does not say what each axis of the model holds; its axes are others than those of the mesh; it
            is not R along data-parallel axes; or it says that ranks hold parts without an order, or terms of a sum.
    """
    spmd: Any = sys.modules["spmd_types"]
    axes = [spmd.MeshAxis.of(mesh.mesh.get_group(axis)) for axis in range(mesh.mesh.ndim)]
    spec = spmd.get_partition_spec(parameter)
    types, dims = {**spmd.get_local_type(parameter)}, _dims_of(spec, axes)
    computes_on = _compute_axes(spmd, types, axes, mesh)
    data = {*mesh.shard_axes, *mesh.replicate_axes}
    placements: list[Placement] = [Replicate()] * len(axes)
    summed = []
    for axis in sorted(set(range(len(axes))) - data):
        of_rank = axes[axis]
        if of_rank.size() == 1:
            continue
        kind = types.pop(of_rank, None)
        if kind is None:
            raise ValueError(
                f"expected a type on each axis of the model, got none on {of_rank} of {mesh.mesh}. Annotate the "
                "parameter by spmd_types.assert_type, or name that axis in dp_mesh_dims."
            )
        if kind is spmd.P or (kind is spmd.V and of_rank not in dims):
            raise ValueError(
                f"expected R, I or S(dim) on {of_rank}, got {kind!r}: the parameter must be a part of one tensor. "
                "Annotate it by S(dim) of the dim along which ranks cut it."
            )
        if kind is spmd.V:
            placements[axis] = Shard(dims[of_rank])
        elif kind is spmd.R:
            summed.append(axis)
    for of_rank, kind in types.items():  # within the data-parallel axes: all have the ranks of the mesh, each once
        if kind is not spmd.R:
            raise ValueError(
                f"expected R on {of_rank}, which is data-parallel, got {kind!r}: fully_shard cuts the parameter there, "
                "and sums its gradient. Annotate it by R, or leave the axis out of dp_mesh_dims."
            )
    known = spmd.get_local_type(parameter)
    like = torch.empty((0,) * parameter.dim(), device="cpu")
    spmd.assert_type(like, {axis: known.get(axis, spmd.R) for axis in computes_on}, partition_spec=spec)
    return Annotation(tuple(placements), tuple(summed), vars(like))


def _dims_of(spec: Any, axes: list[Any]) -> dict[Any, int]:
    """Returns the dim that each axis cuts.

    Raises:
        ValueError: several axes cut a dim in another order than that of the mesh, in which DTensors have it.
    """
    dims: dict[Any, int] = {}
    for dim, entry in enumerate(spec or ()):
        cutting = entry if isinstance(entry, tuple) else () if entry is None else (entry,)
        order = [axes.index(axis) for axis in cutting if axis in axes]
        if order != sorted(order):
            raise ValueError(
                f"expected the axes that cut dim {dim} in the order of the mesh, got {entry}. Build the mesh in that "
                "order: the sharded parameter is a DTensor, which cuts so."
            )
        dims.update(dict.fromkeys(cutting, dim))
    return dims


def _compute_axes(spmd: Any, types: dict[Any, Any], axes: list[Any], mesh: DataMesh) -> tuple[Any, ...]:
    """Returns the axes on which modules compute: those of the annotation, if their ranks are those of the mesh; else
    those of the mesh that is current in the package.
    """
    if _ranks_of(spmd, types) == _ranks_of(spmd, axes):
        return tuple(types)
    current = spmd.current_mesh()
    if current is None or _ranks_of(spmd, current) != _ranks_of(spmd, axes) or not types.keys() <= {*current}:
        raise ValueError(
            f"expected annotations on the axes of {mesh.mesh}, got {[*types]}. Pass the mesh of all axes, and "
            "dp_mesh_dims; and annotate the parameter on each of them, or call fully_shard inside of "
            "spmd_types.set_current_mesh, whose mesh says on which axes modules compute."
        )
    return tuple(current)


def _ranks_of(spmd: Any, axes: Any) -> Any:
    """Returns a value that is equal for axes that have the same ranks together."""
    several = spmd.normalize_mesh(frozenset(axes))
    # torch itself takes the function from there.
    return sys.modules["spmd_types._mesh_axis"].flatten_axes(tuple(several)) if several else None
