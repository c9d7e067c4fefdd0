"""Computes the cost of padding in a group's collectives, and the dim along which a parameter needs least of it.

All ranks' chunks of a parameter are gathered and reduced at one size, that of the largest. So a parameter of few rows
(128 experts over 256 ranks) is sent in twice its size. Sending true sizes would not help: exchanged in pairs, the ranks
that hold rows send as much as before, and NCCL's uneven all-gather is a broadcast per rank. Cutting it another way for
collectives alone would take an all-to-all before each gather and after each reduction, and half of the ranks would
still hold all parameters and optimizer states. Another dim has neither disadvantage; but checkpoints and optimizers see
the placement, so the user chooses it: `cheapest_placement`.
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

from ..checks.arguments import check_mesh
from ..engine.buckets import codecs_of, find_buckets
from ..engine.comm import Comm
from ..engine.compat import local_of
from ..engine.group import FSDPParamGroup
from ..engine.layout import GatherLayout, ParamSpec, align, bucket_layout, gather_layout
from ..engine.mesh import DataMesh
from ..engine.meshes import DataParallelMeshDims, shared_data_mesh
from ..engine.policy import MixedPrecisionPolicy
from ..engine.state import groups_below
from ..module import FSDPModule

# The cost of copying a byte (read and written at 2.5 TB/s), relative to that of receiving it over NVLink. Networks are
# slower than NVLink.
COPY_COST = 0.25
# The bytes that a GPU or a CPU moves at once: a shorter run of bytes takes as long.
LINE_NBYTES = 128
# A gather with at least so much padding is logged, relative to the parameters' own bytes.
MIN_LOGGED_SHARE = 0.25
# The kinds of groups whose padding was examined already.
_examined: set[tuple[object, ...]] = set()


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
    return partial(_choose, ranks)


def _choose(ranks: DataMesh, parameter: nn.Parameter) -> Shard | None:
    data = local_of(parameter) if isinstance(parameter, DTensor) else parameter.data
    if parameter.dim() == 0 or type(data) is not Tensor:
        return None
    shape = _largest_local_shape(parameter) if isinstance(parameter, DTensor) else tuple(parameter.shape)
    dims: Sequence[int] = range(len(shape))
    if isinstance(parameter, DTensor) and len(ranks.shard_axes) > 1:  # several axes must cut it evenly
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


def padding_report(module: nn.Module) -> list[GroupPadding]:
    """Returns the exact padding of each group at and below `module`, outermost first, from shapes and dtypes.

    It does not communicate, and may be called on any rank, also for a model on meta. Parameters that define their own
    gather count in reductions only.
    """
    return [_group_padding(group) for group in groups_below(module) if group.params]


def _group_padding(group: FSDPParamGroup) -> GroupPadding:
    policy, size, comms = group.settings.policy, group.mesh.size, group.comms
    spec_of = {param: param.spec(policy) for param in group.params}
    params = sorted(group.params, key=lambda param: spec_of[param].extended)
    specs = [spec_of[param] for param in params]
    plain = tuple(spec for spec in specs if not spec.extended)
    gather = Padded(0, 0)
    if size > 1:
        payload = gathered_nbytes(gather_layout(plain, size, comms.gathers.direct_min_bytes))
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
        reduce=_reduce_padding(specs, trainable, policy, comms.reduces, group.mesh.device)
        if size > 1
        else Padded(0, 0),
        parameters=tuple(sorted(uneven, key=lambda each: -each.gather.waste)),
    )


def gathered_nbytes(layout: GatherLayout) -> int:
    """Returns the bytes that each rank contributes to a gather: its chunk of each parameter, and up to 15 bytes after
    the packed ones.

    R rows over W ranks need (-R) mod W rows of padding, so all ranks' payloads together have at most (W - 1) rows of
    each parameter and 15 * W bytes above the parameters' own.
    """
    if layout.world_size == 1:
        return 0
    return sum(layout.specs[i].compute_nbytes for i in layout.direct) + layout.packed_nbytes


def _reduce_padding(
    specs: Sequence[ParamSpec],
    trainable: Iterable[int],
    policy: MixedPrecisionPolicy,
    comm: Comm,
    device: torch.device,
) -> Padded:
    reduce_dtypes = [policy.gradient_dtype(spec.storage_dtype) for spec in specs]
    codecs = codecs_of(specs, policy, comm.sums_on_arrival)
    dtypes = [codec.packed_dtype(summed) for codec, summed in zip(codecs, reduce_dtypes, strict=True)]
    nbytes = padded_nbytes = 0
    for indices in find_buckets(specs, reduce_dtypes, dtypes, trainable, device):
        first, wire_dtype = specs[indices[0]], dtypes[indices[0]]
        codec, summed = codecs[indices[0]], reduce_dtypes[indices[0]]
        layout = bucket_layout(specs, indices, summed, comm.direct_min_bytes, wire_dtype)
        nbytes += codec.sent_nbytes(sum(specs[i].numel for i in indices), summed)
        padded_nbytes += codec.sent_nbytes(layout.shard_numel, summed) * first.world_size
    return Padded(nbytes, padded_nbytes)


def _parameter_padding(name: str, spec: ParamSpec) -> ParameterPadding:
    dim = cheapest_dim(spec.shape, spec.storage_dtype, spec.world_size)
    cheapest = ParamSpec(spec.shape, spec.storage_dtype, spec.compute_dtype, spec.world_size, dim)
    gather, cheapest_gather = (Padded(each.nbytes, each.compute_nbytes * each.world_size) for each in (spec, cheapest))
    return ParameterPadding(name, spec.shape, spec.dim, gather, dim, cheapest_gather)


# ---- the warning


def log_waste(group: FSDPParamGroup, least_nbytes: int) -> None:
    """Logs the padding of a group's gather, and what to do, if that has at least `least_nbytes`, and is a large share.

    Of groups that are alike one is logged.
    """
    if not _was_examined(group):
        report = _group_padding(group)
        if report.gather.waste >= max(least_nbytes, MIN_LOGGED_SHARE * report.gather.nbytes):
            logging.getLogger("fsdp2").warning(f"fully_shard({_class_name(group)}): {_advise(report)}")


def _class_name(group: FSDPParamGroup) -> str:
    """Returns the name that the class of the group's first module had before it was sharded."""
    cls = type(group.modules[0])
    return (cls.__bases__[0] if issubclass(cls, FSDPModule) else cls).__name__


def _was_examined(group: FSDPParamGroup) -> bool:
    """Returns True if a group of the same kind was examined before, and notes that this one was."""
    shapes = tuple((param.gathered_shape, param.dim, param.local.dtype) for param in group.params)
    kind = (_class_name(group), group.mesh.size, group.settings.policy.param_dtype, shapes)
    before = kind in _examined
    _examined.add(kind)
    return before


def _advise(report: GroupPadding) -> str:
    worst = [each for each in report.parameters if each.gather.waste > report.gather.waste / 10]
    advice = "Pass shard_placement_fn=fsdp2.cheapest_placement(mesh)"
    if all(each.dim == each.cheapest_dim for each in worst):
        advice = "No dim of these divides better: shard them over fewer ranks, on a mesh that also replicates"
    return (
        f"padding makes each gather over {report.num_ranks} ranks {report.gather}, most of it by "
        f"{'; '.join(map(str, worst))}. {advice}. fsdp2.padding_report tells more."
    )
