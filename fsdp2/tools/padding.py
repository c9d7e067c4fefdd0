"""What padding costs a group on the wire, and along which dim a parameter has least of it.

All ranks' chunks of a parameter are gathered and reduced at one size, that of the largest. So a parameter of few rows
(128 experts over 256 ranks) crosses the wire in twice its size. Sending true sizes would not help: exchanged in pairs,
the ranks that hold rows send as much as before, and NCCL's uneven all-gather is a broadcast per rank. Cutting it anew
for the wire alone takes an all-to-all before each gather and behind each reduction, and half of the ranks still hold
all parameters and optimizer states. Another dim has neither fault; but checkpoints and optimizers see the placement, so
it is the user's choice: `cheapest_placement`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from . import checks, dtensor_compat
from ..core.buckets import find_buckets, wire_dtypes
from ..core.comm import Comm
from ..core.layout import ParamSpec, align, bucket_layout, gather_layout
from ..core.mesh import DataMesh, DataParallelMeshDims, data_mesh, default_mesh, named_data_mesh
from ..core.policy import MixedPrecisionPolicy
from ..core.state import FSDPState, states_below

# Of copying a byte (read and written at 2.5 TB/s, say) beside receiving it over NVLink; networks are slower than that.
COPY_COST = 0.25
# What a GPU or a CPU moves at once: a shorter run of bytes takes as long.
LINE_NBYTES = 128
# A gather that brings so much padding, absolutely and beside the parameters' own bytes, is logged.
MIN_LOGGED_NBYTES = 16 * 1024 * 1024
MIN_LOGGED_SHARE = 0.25
_WIDEST = torch.float64.itemsize
# Kinds of groups that were judged.
_looked_at: set[tuple[object, ...]] = set()


# ---- the cheapest dim


def gather_cost(spec: ParamSpec) -> float:
    """What it takes to gather one parameter, in bytes on the wire.

    Every rank's padded chunk crosses the wire. Chunks along another dim than 0 interleave in the parameter, and are
    copied into place run by run, each of which touches whole cache lines.
    """
    wire = float(spec.compute_nbytes * spec.world_size)
    if spec.dim == 0:
        return wire
    run = spec.chunk_rows * math.prod(spec.shape[spec.dim + 1 :]) * spec.compute_dtype.itemsize
    num_runs = spec.num_holders * math.prod(spec.shape[: spec.dim])
    return wire + COPY_COST * num_runs * align(run, LINE_NBYTES)


def cheapest_dim(shape: tuple[int, ...], dtype: torch.dtype, world_size: int, dims: Iterable[int] | None = None) -> int:
    """The one of `dims` (None: of all) along which it costs least to gather such a parameter; of equals the first."""
    dims = range(len(shape)) if dims is None else dims
    specs = [ParamSpec(shape, dtype, dtype, world_size, dim) for dim in dims]
    return min(specs, key=gather_cost).dim


def cheapest_placement(
    mesh: DeviceMesh | None = None, dp_mesh_dims: DataParallelMeshDims | None = None
) -> Callable[[nn.Parameter], Shard | None]:
    """A `shard_placement_fn` that shards each parameter along the dim that is cheapest to gather, mostly dim 0.

    Another dim is taken where dim 0 is far from a multiple of the number of ranks: experts, say, of which there are
    fewer than ranks. That saves at least a quarter of the parameter's bytes in each gather, and spreads it and its
    optimizer states more evenly; it costs a copy per gather, and the memory of what is copied. The choice depends on
    shapes and dtypes alone, so all ranks agree; it may change with their number, which distributed checkpoints allow.
    Tensor subclasses that say themselves how they are gathered stay at dim 0.

    Args:
        mesh, dp_mesh_dims: what `fully_shard` is given.

    Raises:
        TypeError, ValueError: those of `fully_shard` about them.
    """
    checks.check_mesh(mesh, dp_mesh_dims)
    mesh = default_mesh() if mesh is None else mesh
    ranks = data_mesh(mesh) if dp_mesh_dims is None else named_data_mesh(mesh, dp_mesh_dims)
    return partial(_choose, ranks)


def _choose(ranks: DataMesh, parameter: nn.Parameter) -> Shard | None:
    data = dtensor_compat.local_of(parameter) if isinstance(parameter, DTensor) else parameter.data
    if parameter.dim() == 0 or type(data) is not Tensor:
        return None
    shape = _largest_local_shape(parameter) if isinstance(parameter, DTensor) else tuple(parameter.shape)
    dims: Sequence[int] = range(len(shape))
    if isinstance(parameter, DTensor) and len(ranks.shard_axes) > 1:  # which must cut it evenly
        dims = [dim for dim in dims if shape[dim] % ranks.size == 0] or [0]
    dim = cheapest_dim(shape, parameter.dtype, ranks.size, dims)
    return Shard(dim) if dim else None


def _largest_local_shape(parameter: DTensor) -> tuple[int, ...]:
    """Its own axes may cut unevenly: by this, ranks with other parts choose alike."""
    shape = list(parameter.shape)
    for axis, placement in enumerate(parameter.placements):
        dim = getattr(placement, "dim", None)
        if dim is not None:
            shape[dim] = -(-shape[dim] // parameter.device_mesh.size(axis))
    return tuple(shape)


# ---- the report


class Padded(NamedTuple):
    """Bytes of full parameters or gradients, and what all ranks' chunks of them take on the wire."""

    nbytes: int
    padded_nbytes: int

    @property
    def waste(self) -> int:
        return self.padded_nbytes - self.nbytes

    @property
    def ratio(self) -> float:
        return self.padded_nbytes / self.nbytes if self.nbytes else 1.0

    def __str__(self) -> str:
        return f"{self.ratio:.2f}x ({self.padded_nbytes / 2**20:.1f} of {self.nbytes / 2**20:.1f} MiB)"


@dataclass(frozen=True)
class ParameterPadding:
    """A parameter of which ranks hold unequal parts.

    Args:
        name: its FQN.
        shape: as the ranks that shard it share it.
        dim: along which it is cut.
        gather: its part of a gather.
        cheapest_dim: along which `cheapest_placement` would cut it, and
        cheapest_gather: what its part would be then.
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
    """What padding costs one group. `str` of it is for people.

    Args:
        name: FQN of the module.
        num_ranks: how many share the parameters.
        gather: of one gather among all of them, in compute dtypes. One rank gathers nothing.
        reduce: of one reduction of all gradients, in the dtypes in which they travel.
        parameters: those that are padded to whole rows, the worst first.
    """

    name: str
    num_ranks: int
    gather: Padded
    reduce: Padded
    parameters: tuple[ParameterPadding, ...]

    def __str__(self) -> str:
        lines = [f"{self.name} over {self.num_ranks} ranks: gathers {self.gather}, reduces {self.reduce}"]
        return "\n  ".join([*lines, *map(str, self.parameters)])


def padding_report(module: nn.Module) -> list[GroupPadding]:
    """What padding costs each group at and below `module`, outermost first; exact, computed from shapes and dtypes.

    Communicates nothing, may be called on any rank, and on the meta device, too. Parameters that say themselves how
    they are gathered count in reductions only.
    """
    states = dict.fromkeys(states_below(module))
    return [_group_padding(state) for state in states if state.group.params]


def _group_padding(state: FSDPState) -> GroupPadding:
    group, policy = state.group, state.policy
    size, (gather_min_bytes, _), reduces = group.mesh.size, group.direct_min_bytes, group.gradients.reduction.shards
    params = sorted(group.params, key=lambda param: param.is_extended)
    specs = [param.spec(policy) for param in params]
    plain = tuple(spec for spec in specs if not spec.extended)
    gather = Padded(0, 0)
    if size > 1:
        payload = gather_layout(plain, size, gather_min_bytes).payload_nbytes
        gather = Padded(sum(spec.nbytes for spec in plain), size * payload)
    trainable = [i for i, param in enumerate(params) if param.sharded.requires_grad]
    uneven = [
        _parameter_padding(param.name, spec)
        for param, spec in zip(params, specs, strict=True)
        if not spec.is_even and not spec.extended
    ]
    return GroupPadding(
        name=group.name,
        num_ranks=size,
        gather=gather,
        reduce=_reduce_padding(specs, trainable, policy, reduces, group.mesh.device) if size > 1 else Padded(0, 0),
        parameters=tuple(sorted(uneven, key=lambda each: -each.gather.waste)),
    )


def _reduce_padding(
    specs: Sequence[ParamSpec],
    trainable: Iterable[int],
    policy: MixedPrecisionPolicy,
    comm: Comm,
    device: torch.device,
) -> Padded:
    reduce_dtypes = [policy.gradient_dtype(spec.storage_dtype) for spec in specs]
    dtypes = wire_dtypes(specs, policy, comm.sums_on_arrival)
    nbytes = padded_nbytes = 0
    for indices in find_buckets(specs, reduce_dtypes, dtypes, trainable, device):
        first, wire_dtype = specs[indices[0]], dtypes[indices[0]]
        layout = bucket_layout(specs, indices, reduce_dtypes[indices[0]], comm.direct_min_bytes, wire_dtype)
        nbytes += sum(specs[i].numel for i in indices) * wire_dtype.itemsize
        padded_nbytes += layout.payload_nbytes * first.world_size
    return Padded(nbytes, padded_nbytes)


def _parameter_padding(name: str, spec: ParamSpec) -> ParameterPadding:
    dim = cheapest_dim(spec.shape, spec.storage_dtype, spec.world_size)
    cheapest = ParamSpec(spec.shape, spec.storage_dtype, spec.compute_dtype, spec.world_size, dim)
    here, there = (Padded(each.nbytes, each.compute_nbytes * each.world_size) for each in (spec, cheapest))
    return ParameterPadding(name, spec.shape, spec.dim, here, dim, there)


# ---- the warning


def log_waste(states: Iterable[FSDPState]) -> None:
    """Have the first rank of each mesh say, of equal groups once, which gathers bring much padding, and what to do.

    Logged, not warned: turned into an error, a warning would end one rank, or be heard from every rank.
    """
    for state in states:
        is_first = not any(state.group.mesh.mesh.get_coordinate() or ())
        if is_first and _padding_numel(state) * _WIDEST >= MIN_LOGGED_NBYTES and not _was_looked_at(state):
            report = _group_padding(state)
            if report.gather.waste >= max(MIN_LOGGED_NBYTES, MIN_LOGGED_SHARE * report.gather.nbytes):
                logging.getLogger("fsdp2").warning(f"fully_shard({type(state.modules[0]).__name__}): {_advise(report)}")


def _was_looked_at(state: FSDPState) -> bool:
    shapes = tuple((param.gathered_shape, param.dim, param.local.dtype) for param in state.group.params)
    kind = (type(state.modules[0]).__name__, state.group.mesh.size, state.policy.param_dtype, shapes)
    before = kind in _looked_at
    _looked_at.add(kind)
    return before


def _padding_numel(state: FSDPState) -> int:
    """Elements in the rows that pad; looked at for every group, so quickly."""
    size, numel = state.group.mesh.size, 0
    for param in state.group.params:
        rows = param.gathered_shape[param.dim]
        if rows % size:
            numel += -rows % size * (math.prod(param.gathered_shape) // rows)
    return numel


def _advise(report: GroupPadding) -> str:
    worst = [each for each in report.parameters if each.gather.waste > report.gather.waste / 10]
    advice = "Pass shard_placement_fn=fsdp2.cheapest_placement(mesh)"
    if all(each.dim == each.cheapest_dim for each in worst):
        advice = "No dim of these divides better: shard them over fewer ranks, on a mesh that replicates, too, say"
    return (
        f"padding makes each gather over {report.num_ranks} ranks {report.gather}, most of it by "
        f"{'; '.join(map(str, worst))}. {advice}. fsdp2.padding_report tells more."
    )
