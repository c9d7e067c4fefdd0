"""Computes the cost of padding in a group's collectives, and the dim along which a parameter needs least of it.

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
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ..shards.protocol import ShardGroup
from ..shards.ranks import DataMesh, DataParallelMeshDims, check_mesh, shared_data_mesh
from ..shards.tensors import ParamSpec, align, local_of

# The cost of copying a byte (read and written at 2.5 TB/s), relative to that of receiving it over NVLink. Networks are
# slower than NVLink.
COPY_COST = 0.25
# The bytes that a GPU or a CPU moves at once: a shorter run of bytes takes as long.
LINE_NBYTES = 128


# ---- the cheapest dim


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
    return partial(choose_placement, ranks)


def cheapest_dim_of(parameter: Tensor, world_size: int) -> int:
    """Returns the cheapest dim of a parameter that is no DTensor; 0 for scalars, and for tensor subclasses."""
    if parameter.dim() == 0 or type(parameter.data) is not Tensor:
        return 0
    return cheapest_dim(tuple(parameter.shape), parameter.dtype, world_size)


def choose_placement(ranks: DataMesh, parameter: nn.Parameter) -> Shard | None:
    """Returns what `cheapest_placement` says of a parameter that these ranks shard. None: dim 0."""
    if not isinstance(parameter, DTensor):
        dim = cheapest_dim_of(parameter, ranks.size)
        return Shard(dim) if dim else None
    if parameter.dim() == 0 or type(local_of(parameter)) is not Tensor:
        return None
    shape = _largest_local_shape(parameter)
    dims: Sequence[int] = range(len(shape))
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


# ---- the report


# Units of sizes in a report. It uses the largest one in which a size does not print as 0.0.
_UNITS = (("MiB", 2**20), ("KiB", 2**10), ("bytes", 1))


class Padded(NamedTuple):
    """Holds the bytes of unsharded parameters or gradients, and the bytes that all ranks' chunks take on the wire."""

    nbytes: int
    padded_nbytes: int

    @property
    def waste(self) -> int:
        """The bytes of padding."""
        return self.padded_nbytes - self.nbytes

    @property
    def ratio(self) -> float:
        """The bytes on the wire, divided by those without padding."""
        return self.padded_nbytes / self.nbytes if self.nbytes else 1.0

    def __str__(self) -> str:
        unit, size = next(((u, s) for u, s in _UNITS if round(self.nbytes / s, 1)), _UNITS[-1])
        return f"{self.ratio:.2f}x ({self.padded_nbytes / size:.1f} of {self.nbytes / size:.1f} {unit})"


@dataclass(frozen=True)
class ParameterPadding:
    """Describes the padding of one parameter whose shards have different sizes. Print it for a readable text.

    Args:
        name: FQN of the parameter.
        shape: the shape that fully_shard cuts. Under tensor parallelism it is that of the local tensor.
        dim: the dim along which it is cut.
        gather: its bytes in a gather.
        cheapest_dim: the dim along which `cheapest_placement` would cut it.
        cheapest_gather: its bytes in a gather if it were cut along that dim.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    gather: Padded
    cheapest_dim: int
    cheapest_gather: Padded

    def __str__(self) -> str:
        text = f"{self.name} {self.shape}: {self.gather} along dim {self.dim}"
        if self.cheapest_dim != self.dim:
            text += f", {self.cheapest_gather} along dim {self.cheapest_dim}"
        return text


@dataclass(frozen=True)
class GroupPadding:
    """Describes the padding of one group. Print it for a readable text.

    Args:
        name: FQN of the module.
        num_ranks: the number of ranks that share the parameters.
        gather: the bytes of one gather among all of these ranks, in compute dtypes. One rank gathers nothing.
        reduce: the bytes of one reduction of all gradients, in the dtypes in which they travel.
        parameters: the parameters that are padded to whole rows, those with most padding first.
    """

    name: str
    num_ranks: int
    gather: Padded
    reduce: Padded
    parameters: tuple[ParameterPadding, ...]

    def __str__(self) -> str:
        lines = [f"{self.name} over {self.num_ranks} ranks: gathers {self.gather}, reduces {self.reduce}"]
        return "\n  ".join([*lines, *map(str, self.parameters)])


def group_padding(group: ShardGroup) -> GroupPadding:
    """Returns the padding of one group."""
    padding = group.padding()
    return GroupPadding(
        name=group.name,
        num_ranks=group.ranks.num_shards,
        gather=Padded(*padding.gather),
        reduce=Padded(*padding.reduce),
        parameters=tuple(
            sorted((_parameter_padding(*each) for each in padding.uneven), key=lambda each: -each.gather.waste)
        ),
    )


def _parameter_padding(
    name: str, shape: tuple[int, ...], dim: int, world_size: int, stored: torch.dtype, computed: torch.dtype
) -> ParameterPadding:
    best = cheapest_dim(shape, stored, world_size)
    specs = [ParamSpec(shape, stored, computed, world_size, each) for each in (dim, best)]
    gather, cheapest_gather = (Padded(each.nbytes, each.compute_nbytes * each.world_size) for each in specs)
    return ParameterPadding(name, shape, dim, gather, best, cheapest_gather)
