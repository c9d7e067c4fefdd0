"""Finds the dim along which a parameter is cheapest to gather, for `shard_placement_fn`.

All ranks' chunks of a parameter are gathered and reduced at one size, that of the largest. So a parameter of few rows
(128 experts over 256 ranks) is sent in twice its size. Sending true sizes would not help: exchanged in pairs, the ranks
that hold rows send as much as before, and NCCL's uneven all-gather is a broadcast per rank. Cutting it another way for
collectives alone would take an all-to-all before each gather and after each reduction, and half of the ranks would
still hold all parameters and optimizer states. Another dim has neither disadvantage; but checkpoints and optimizers see
the placement, so the user chooses it: `cheapest_placement`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ..shards.ranks import DataMesh, DataParallelMeshDims, check_mesh, shared_data_mesh
from ..shards.tensors import ParamSpec, align, local_of

# The cost of copying a byte (read and written at 2.5 TB/s), relative to that of receiving it over NVLink. Networks are
# slower than NVLink.
COPY_COST = 0.25
# The bytes that a GPU or a CPU moves at once: a shorter run of bytes takes as long.
LINE_NBYTES = 128


def gather_cost(spec: ParamSpec) -> float:
    """Returns the cost of gathering one parameter, in bytes on the wire.

    Every rank's padded chunk is sent. Chunks along another dim than 0 interleave in the parameter, and are copied in
    runs, each of which touches whole cache lines.
    """
    wire = float(spec.compute_nbytes * spec.world_size)
    if spec.dim == 0:
        return wire
    run = spec.chunk_rows * math.prod(spec.shape[spec.dim + 1 :]) * spec.compute_dtype.itemsize
    num_runs = spec.num_holders * math.prod(spec.shape[: spec.dim])
    return wire + COPY_COST * num_runs * align(run, LINE_NBYTES)


def cheapest_dim(shape: tuple[int, ...], dtype: torch.dtype, world_size: int, dims: Iterable[int] | None = None) -> int:
    """Returns the dim among `dims` (None: all dims) along which a parameter is cheapest to gather, the first of equal
    ones.
    """
    dims = range(len(shape)) if dims is None else dims
    specs = [ParamSpec(shape, dtype, dtype, world_size, dim) for dim in dims]
    return min(specs, key=gather_cost).dim


def cheapest_placement(
    mesh: DeviceMesh | None = None, dp_mesh_dims: DataParallelMeshDims | None = None
) -> Callable[[nn.Parameter], Shard | None]:
    """Returns a `shard_placement_fn` that shards each parameter along the dim that is cheapest to gather: mostly dim 0.

    It chooses another dim where the size of dim 0 is far from a multiple of the number of ranks: for example for
    experts, if there are fewer experts than ranks. That saves at least a quarter of the parameter's bytes in each
    gather, and distributes it and its optimizer states more evenly; it costs a copy per gather, and the memory of the
    copy. The choice depends on shapes and dtypes alone, so all ranks make the same choice. It may change with the
    number of ranks, which distributed checkpoints allow. Tensor subclasses that define their own gather stay at dim 0.

    Args:
        mesh, dp_mesh_dims: the arguments that `fully_shard` is given.

    Raises:
        TypeError, ValueError: the errors that `fully_shard` raises about them.
    """
    check_mesh(mesh, dp_mesh_dims)
    ranks = shared_data_mesh(mesh, dp_mesh_dims)
    return partial(_choose_placement, ranks)


def _choose_placement(ranks: DataMesh, parameter: nn.Parameter) -> Shard | None:
    """Returns how these ranks shard a parameter. None, also for scalars and tensor subclasses: along dim 0."""
    data = local_of(parameter) if isinstance(parameter, DTensor) else parameter.data
    if parameter.dim() == 0 or type(data) is not Tensor:
        return None
    shape: tuple[int, ...] = tuple(parameter.shape)
    dims: Sequence[int] = range(len(shape))
    if isinstance(parameter, DTensor):
        shape = _largest_local_shape(parameter)
        if len(ranks.shard_axes) > 1:  # several axes must cut it evenly
            dims = [dim for dim in dims if shape[dim] % ranks.size == 0] or [0]
    dim = cheapest_dim(shape, parameter.dtype, ranks.size, dims)
    return Shard(dim) if dim else None


def _largest_local_shape(parameter: DTensor) -> tuple[int, ...]:
    """Returns the shape of the largest shard of a DTensor, with which ranks of uneven shards make the same choice."""
    shape = list(parameter.shape)
    for axis, placement in enumerate(parameter.placements):
        dim = getattr(placement, "dim", None)
        if dim is not None:
            shape[dim] = -(-shape[dim] // parameter.device_mesh.size(axis))
    return tuple(shape)
