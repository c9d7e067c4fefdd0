"""Checks that ranks which share a batch have the same one."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..shards.ranks import bounds_over, ranks_on
from ..shards.tensors import checksum


def check_same_batch(mesh: DeviceMesh, along: str | tuple[str, ...], *tensors: Tensor) -> None:
    """Checks that ranks along some axes of `mesh` hold the same tensors: ranks that split a sequence (context
    parallelism) or a layer (tensor parallelism) need the same rows, and compute wrong gradients from different ones.

    Call it with the batch before it is cut, between steps, on every rank of `mesh`. It computes a checksum of the bits,
    and compares it over the axes, for which the host waits.

    Args:
        mesh: the ranks that train together, all of which raise if some hold different tensors.
        along: the axis of `mesh` along which ranks share a batch, "context" for example, or several.
        tensors: the batch, of any shapes and dtypes.

    Raises:
        RuntimeError: ranks along these axes hold different values, shapes or numbers of tensors; on all ranks of
            `mesh`.
        TypeError: `mesh` is not a DeviceMesh, `along` no text, or one of `tensors` not a tensor.
        ValueError: `along` does not name axes of `mesh`.

    Example:
        `check_same_batch(mesh, "context", inputs, targets)`, of a mesh with the axes "data" and "context".
    """
    axes = (along,) if isinstance(along, str) else along
    if not isinstance(axes, tuple):
        raise TypeError(f"along: expected a str or a tuple of them, got {along!r}")
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: expected a DeviceMesh, got {type(mesh).__name__}")
    if not axes or not {*axes} <= {*(mesh.mesh_dim_names or ())}:
        raise ValueError(f"along: expected axes of the mesh, of {mesh.mesh_dim_names}, got {along!r}")
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"tensors[{i}]: expected a tensor, got {type(tensor).__name__}")
    numbers = [len(tensors)]
    for each in tensors:
        numbers += [each.dim(), *each.shape, int(checksum(each))]
    ((least, most),) = bounds_over(ranks_on(mesh[axes]), [int(checksum(torch.tensor(numbers)))], "batches")
    if bounds_over(ranks_on(mesh), [int(least != most)], "batches") != [(0, 0)]:
        whose = "got different values or shapes" if least != most else "which others along them do not hold"
        raise RuntimeError(
            f"expected the same batch on all {mesh[axes].size()} ranks along {', '.join(axes)}, {whose}. Choose "
            "the rows by the rank along the axes of data alone: DistributedSampler(dataset, "
            'num_replicas=mesh["data"].size(), rank=mesh["data"].get_local_rank()), for example.'
        )
