"""Reads from a DTensor how ranks share it. It knows no engine: mesh, placements and the local tensor say everything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..torch_private.internals import local_of
from .protocol import Cut

__all__ = ["box_of", "cut_axes", "cuts_of", "device_of", "device_of_kind", "replicas_of"]


def cut_axes(name: str, mesh: DeviceMesh, placements: Sequence[Any], ndim: int) -> list[tuple[int, int]]:
    """Returns pairs of a mesh axis and the dim that it cuts, in the order of cutting, from the outermost cut on.

    DTensor cuts by the axes of the mesh from left to right, except that a strided shard, which FSDP makes of what
    tensor parallelism has cut along the same dim, cuts behind the axes to its right.

    Raises:
        NotImplementedError: a placement is neither Shard nor Replicate; or several axes are strided.
    """
    axes = [axis for axis, each in enumerate(placements) if not each.is_replicate() and mesh.size(axis) > 1]
    last = [axis for axis in axes if hasattr(placements[axis], "split_factor")]
    if len(last) > 1 or any(getattr(placements[axis], "dim", None) is None for axis in axes):
        raise NotImplementedError(
            f"{name}: expected a DTensor that is sharded or replicated along each axis of its mesh, got placements "
            f"{tuple(placements)}. Take {name}.full_tensor() for this parameter."
        )
    return [(axis, placements[axis].dim % ndim) for axis in [axis for axis in axes if axis not in last] + last]


def cuts_of(name: str, mesh: DeviceMesh, placements: Sequence[Any], shape: Sequence[int]) -> tuple[Cut, ...]:
    """Returns how a value of that shape is cut by these placements, from the innermost cut to the outermost.

    Raises:
        NotImplementedError: see `cut_axes`.
    """
    cuts: list[Cut] = []
    now = tuple(shape)
    for axis, dim in cut_axes(name, mesh, placements, len(now)):
        cuts.append(Cut(mesh.get_group(axis), dim, now, mesh.size(axis), mesh.get_local_rank(axis)))
        now = cuts[-1].chunk_shape()
    return (*reversed(cuts),)


def box_of(cuts: Sequence[Cut], shape: Sequence[int]) -> tuple[slice, ...]:
    """Returns one slice for each dim of a value of that shape: what this rank holds of it, behind these cuts."""
    starts, sizes = [0] * len(shape), list(shape)
    for cut in reversed(cuts):
        first, end = cut.bounds()
        starts[cut.dim] += first
        sizes[cut.dim] = end - first
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def device_of(tensor: Tensor) -> torch.device:
    """Returns where the ranks of a DTensor communicate and compute; its local tensor may rest on the CPU."""
    assert isinstance(tensor, DTensor), "a sharded parameter"
    local, kind = local_of(tensor).device, tensor.device_mesh.device_type
    return local if local.type == kind else device_of_kind(kind)


def device_of_kind(kind: str) -> torch.device:
    """Returns the device of that type that this rank uses."""
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())


def replicas_of(tensor: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Returns the process groups, one for each axis of its mesh, whose ranks hold the same part of a DTensor."""
    assert isinstance(tensor, DTensor), "a sharded parameter"
    mesh, placements = tensor.device_mesh, tensor.placements
    return tuple(
        mesh.get_group(axis) for axis, each in enumerate(placements) if each.is_replicate() and mesh.size(axis) > 1
    )
