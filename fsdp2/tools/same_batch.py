"""Checks that ranks which share a batch have the same one."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..shards.ranks import bounds_over, ranks_on
from ..shards.tensors import checksum


def check_same_batch(mesh: DeviceMesh, *tensors: Tensor) -> None:
    """Checks that all ranks of `mesh` hold the same tensors: ranks that split a sequence (context parallelism) or a
    layer (tensor parallelism) need the same rows, and compute wrong gradients from different ones.

    Call it with the batch before it is cut, between steps, on every rank of `mesh`. It computes a checksum of the bits,
    and compares it over each axis of `mesh`, for which the host waits.

    Args:
        mesh: the axes along which ranks share a batch, `mesh["context"]` for example.
        tensors: the batch, of any shapes and dtypes.

    Raises:
        RuntimeError: ranks hold different values, shapes or numbers of tensors; on all ranks of `mesh`.
        TypeError: `mesh` is not a DeviceMesh, or one of `tensors` not a tensor.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: expected a DeviceMesh, got {type(mesh).__name__}")
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"tensors[{i}]: expected a tensor, got {type(tensor).__name__}")
    numbers = [len(tensors)]
    for each in tensors:
        numbers += [each.dim(), *each.shape, int(checksum(each))]
    ((least, most),) = bounds_over(ranks_on(mesh), [int(checksum(torch.tensor(numbers)))], "batches")
    if least != most:
        names = ", ".join(mesh.mesh_dim_names or ("",))
        raise RuntimeError(
            f"expected the same batch on all {mesh.size()} ranks along {names}, got different values or shapes. Choose "
            "the rows by the rank along the axes of data alone: DistributedSampler(dataset, "
            'num_replicas=mesh["data"].size(), rank=mesh["data"].get_local_rank()), for example.'
        )
