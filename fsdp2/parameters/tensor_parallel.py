"""Cuts what tensor parallelism has cut further over the data-parallel ranks: DTensors, and annotated parameters."""

from __future__ import annotations

import copy
import math
import sys
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ..collectives.meshes import check_order
from ..engine.mesh import DataMesh, Distribution
from ..engine.mesh import distribute as distribute_plain
from ..torch_private.internals import distributed_parameter, local_of, take_hooks
from ..torch_private.rare_internals import SPMD_TYPE, concatenate_meshes, cut, strided_shard
from .annotations import Annotation, is_annotated, read


@dataclass(frozen=True)
class TensorParallel(Distribution):
    """Describes how a DTensor is distributed when the ranks of `data_mesh` cut it further.

    `full_mesh`, `full_placements`: those of the unsharded parameter, which is the DTensor of tensor parallelism.
    """

    full_mesh: DeviceMesh
    full_placements: tuple[Placement, ...]
    data_mesh: DataMesh

    def is_of_full(self, tensor: DTensor) -> bool:
        """Returns True if `tensor` is distributed like the unsharded parameter."""
        return tensor.placements == self.full_placements and tensor.device_mesh == self.full_mesh

    def gathered_part(self, whole: Tensor) -> Tensor:
        if not isinstance(whole, DTensor):
            whole = cut(whole.detach(), self.full_mesh, self.full_placements, DTensor)
        return local_of(whole)

    def as_parameter(self, gathered: Tensor, shape: tuple[int, ...], requires_grad: bool) -> nn.Parameter:
        spec = self.data_mesh.dtensor_spec(self.full_mesh, self.full_placements, shape, gathered.dtype)
        return distributed_parameter(DTensor, gathered, spec, requires_grad)

    def gathered_gradient(self, gradient: Tensor) -> Tensor:
        assert isinstance(gradient, DTensor), "a gradient is distributed like its parameter"
        expected, mesh = list(self.full_placements), self.data_mesh
        if self.full_mesh == mesh.mesh:
            # Modules that compute with DTensors on these axes, too, leave the sum over them to the reduction.
            for axis in mesh.shard_axes + mesh.replicate_axes:
                if gradient.placements[axis].is_partial("sum"):
                    expected[axis] = gradient.placements[axis]
        if gradient.placements != tuple(expected):
            gradient = gradient.redistribute(placements=expected)
        return local_of(gradient)


@dataclass(frozen=True)
class Annotated(TensorParallel):
    """Describes a parameter that spmd_types has annotated: a plain tensor, this rank's part on the axes of the model.

    Modules compute with such a tensor, and its gradient says nothing of how it is distributed; `annotation` does.
    """

    is_annotated = True

    annotation: Annotation = field(compare=False)

    @property
    def attributes(self) -> dict[str, Any]:
        return {name: copy.copy(value) for name, value in self.annotation.attributes.items()}

    def whole(self, parameter: nn.Parameter) -> nn.Parameter:
        if isinstance(parameter, DTensor):
            return parameter
        shape = list(parameter.shape)
        for axis, placement in enumerate(self.full_placements):
            if isinstance(placement, Shard):
                shape[placement.dim] *= self.full_mesh.size(axis)
        spec = self.data_mesh.dtensor_spec(self.full_mesh, self.full_placements, tuple(shape), parameter.dtype)
        whole = distributed_parameter(DTensor, parameter.detach(), spec, parameter.requires_grad)
        own = self.annotation.attributes
        vars(whole).update({name: value for name, value in vars(parameter).items() if name not in own})
        take_hooks(parameter, whole)
        return whole

    def gathered_part(self, whole: Tensor) -> Tensor:
        return whole if not isinstance(whole, DTensor) and is_annotated(whole) else super().gathered_part(whole)

    def as_parameter(self, gathered: Tensor, shape: tuple[int, ...], requires_grad: bool) -> nn.Parameter:
        return nn.Parameter(gathered, requires_grad)

    def gathered_gradient(self, gradient: Tensor) -> Tensor:
        if not self.annotation.summed:
            return gradient
        placements = list(self.full_placements)
        for axis in self.annotation.summed:
            placements[axis] = Partial()
        # Its type checker, which follows backward, too, knows no DTensors.
        with sys.modules["spmd_types"].no_typecheck():
            terms = DTensor.from_local(gradient, self.full_mesh, placements, run_check=False)
            return local_of(terms.redistribute(placements=self.full_placements))


def distribute(parameter: Any, mesh: DataMesh, dim: int) -> Distribution:
    """Returns how `parameter` is distributed when `mesh` shards it along `dim`.

    Raises:
        ValueError: a DTensor on a mesh that has no root in common with `mesh`, or with a placement it can't keep.
    """
    if not isinstance(parameter, DTensor):
        if SPMD_TYPE in vars(parameter) and is_annotated(parameter):
            return _annotated(parameter, mesh, dim)
        return distribute_plain(parameter, mesh, dim)
    is_scalar = parameter.dim() == 0
    inner, placements = parameter.device_mesh, parameter.placements
    for axis, placement in enumerate(placements):
        if not placement.is_replicate():
            check_order(inner, (axis,), inner.get_group(axis))
    if inner == mesh.mesh:
        _check_data_axes(placements, mesh)
        _check_rows(local_of(parameter), mesh, dim)
        return TensorParallel(inner, _cut(inner, placements, mesh, dim, is_scalar), dim, inner, placements, mesh)
    if mesh.has_other_axes:
        raise ValueError(f"dp_mesh_dims: expected a DTensor on {mesh.mesh}, got a {type(parameter).__name__}")
    if any(placement.is_partial() for placement in placements):
        raise ValueError(f"expected a DTensor that is sharded or replicated, got placements {placements}")
    try:
        whole = concatenate_meshes(mesh.mesh, inner)
    except NotImplementedError:  # torch has no such function any more
        raise
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"expected a DTensor on axes of the same device mesh as {mesh.mesh}, got one on {inner}. Build one mesh of "
            "all axes by init_device_mesh, and slice it by name."
        ) from error
    gathered = (Replicate(),) * mesh.mesh.ndim + placements
    return TensorParallel(whole, _cut(whole, gathered, mesh, dim, is_scalar), dim, inner, placements, mesh)


def _annotated(parameter: Tensor, mesh: DataMesh, dim: int) -> Annotated:
    """Returns how a parameter with an annotation of spmd_types is distributed."""
    annotation, inner, is_scalar = read(parameter, mesh), mesh.mesh, parameter.dim() == 0
    placements = annotation.placements
    for axis, placement in enumerate(placements):
        if not placement.is_replicate():
            check_order(inner, (axis,), inner.get_group(axis))
    _check_rows(parameter, mesh, dim)
    at_rest = _cut(inner, placements, mesh, dim, is_scalar)
    return Annotated(inner, at_rest, dim, inner, placements, mesh, annotation)


def _check_data_axes(placements: tuple[Placement, ...], mesh: DataMesh) -> None:
    """Checks a parameter whose own axes include the data-parallel ones."""
    data_axes = mesh.shard_axes + mesh.replicate_axes
    if any(placement.is_partial() for placement in placements) or any(
        not placements[axis].is_replicate() for axis in data_axes
    ):
        raise ValueError(
            f"expected Replicate on the data-parallel axes of {mesh.mesh}, got placements {placements}. If fully_shard "
            "has sharded it already, with a module around this one or beside it: apply it to inner modules first, and "
            "to a module that both have in common before them, by itself."
        )


def _check_rows(gathered: Tensor, mesh: DataMesh, dim: int) -> None:
    """Checks that the rows of what the data-parallel ranks share divide, if several axes shard."""
    rows = gathered.shape[dim] if gathered.dim() else 0
    if len(mesh.shard_axes) > 1 and rows % mesh.size:
        raise ValueError(
            f"expected dim {dim}, of {rows} rows, to divide by {mesh.size}: a DTensor that several axes cut unevenly "
            "lies otherwise than one that one axis cuts"
        )


def _cut(
    whole: DeviceMesh, placements: tuple[Placement, ...], mesh: DataMesh, dim: int, is_scalar: bool
) -> tuple[Placement, ...]:
    """Returns `placements` on `whole`, cut along `dim` on the data-parallel axes.

    These cut last, though they may be left of other axes: a plain Shard would cut before the axes to its right.
    """
    if is_scalar:
        return placements
    cut = list(placements)
    for axis in mesh.shard_axes:
        later = range(axis + 1, whole.ndim)
        parts = math.prod(whole.size(other) for other in later if placements[other].is_shard(dim))
        cut[axis] = strided_shard(dim, parts) if parts > 1 else Shard(dim)
    return tuple(cut)
