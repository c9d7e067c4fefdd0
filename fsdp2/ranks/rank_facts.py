"""Shares small facts between ranks, or compares them, by collectives besides those of parameters and gradients."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import broadcast, gather  # by name: an extension may put others under these in `dist`

from ..collectives.choose import make_comm
from ..collectives.gather_bytes import all_gather_now
from ..collectives.sums import SUM_ALL
from ..collectives.watching import compare_first
from ..devices.streams import AllWork, Work
from ..engine.comm import CommLabel
from ..engine.mesh import DataMesh
from ..torch_private.internals import backend_name

ALL_REDUCING = "all-reducing"
_LARGEST_ALL = dist.AllreduceOptions()
_LARGEST_ALL.reduceOp = dist.ReduceOp.MAX  # type: ignore[assignment]


def all_reduce_now(tensor: Tensor, group: dist.ProcessGroup, *, largest: bool) -> None:
    """Fills `tensor` with its sum, or its largest values, over the ranks of `group`. All of them must call it."""
    work = group.allreduce([tensor], _LARGEST_ALL if largest else SUM_ALL)
    work.wait()


def start_largest(tensor: Tensor, group: dist.ProcessGroup) -> Work:
    """Begins to fill `tensor` with its largest values over the ranks of `group`. All of them must call it."""
    return group.allreduce([tensor], _LARGEST_ALL)


def all_reduce_over(
    tensor: Tensor, groups: Sequence[dist.ProcessGroup], *, largest: bool, comm_label: CommLabel | None = None
) -> None:
    """Fills `tensor` with its sum, or its largest values, over the ranks of a mesh with these groups, one for each
    axis.

    All of these ranks must call it. `comm_label`: its name, for errors and for checks that compare ranks.

    Raises:
        RuntimeError: a check finds that ranks are out of step; on all of them. Or a peer is gone.
    """
    comm_label = comm_label or CommLabel()
    for group in groups:
        compare_first(make_comm(group, tensor.device, comm_label), ALL_REDUCING, tensor)
        try:
            all_reduce_now(tensor, group, largest=largest)
        except RuntimeError as error:  # a peer is gone, for example
            comm_label.locate(error, f"{ALL_REDUCING} {comm_label.label}")
            raise


def broadcast_over(tensor: Tensor, groups: Sequence[dist.ProcessGroup], sources: Sequence[int] | None = None) -> None:
    """Fills `tensor` with the values of one rank of a mesh with these groups. All of its ranks must call it.

    `sources`: that rank's number in each group; None: it is the first in each.
    """
    for group, source in zip(groups, sources or [0] * len(groups), strict=True):
        broadcast(tensor, group=group, group_src=source)


_TO_ONE = 0x0F5D_8000
"""The tag of messages to one rank. No message of a user should have it."""


def gather_to_one(
    own: Tensor, rows: Sequence[Tensor] | None, group: dist.ProcessGroup, to: int, device: torch.device
) -> Work:
    """Begins to fill `rows` of rank `to` of `group` with `own` of all of its ranks, all of which must call it.

    `own` of that rank is its row. `rows`: None on the others.
    """
    rank, works = group.rank(), []
    if backend_name(group, device) == "gloo":  # whose own gather needs as much memory again
        if rows is None:
            works.append(group.send([own], to, _TO_ONE))
        else:
            works += [group.recv([row], i, _TO_ONE) for i, row in enumerate(rows) if i != rank]
    else:
        works.append(gather(own, None if rows is None else [*rows], group=group, group_dst=to, async_op=True))
    return AllWork(works, [own, *(rows or ())])


def gather_objects(value: Any, groups: Sequence[dist.ProcessGroup], device: torch.device) -> list[Any]:
    """Returns `value` of every rank of a mesh with these groups, one for each axis; in one order on all ranks.

    All of these ranks must call it. What can be pickled crosses as bytes on `device`; torch's own function needs numpy.
    """
    found = [value]
    for group in groups:
        data = pickle.dumps(found)
        nbytes = torch.tensor([len(data)], device=device)
        all_reduce_over(nbytes, [group], largest=True)
        # What follows a pickle is not read.
        comm = make_comm(group, device, CommLabel())
        found = [
            each for row in all_gather_now(data.ljust(int(nbytes), b"\0"), comm, device) for each in pickle.loads(row)
        ]
    return found


def gather_by_rank(value: Any, groups: Sequence[dist.ProcessGroup], device: torch.device) -> dict[int, Any]:
    """Returns rank -> `value` of that rank, in the order of ranks, over a mesh with these groups, one for each axis.

    All of these ranks must call it.
    """
    return dict(sorted(gather_objects((dist.get_rank(), value), groups, device), key=lambda each: each[0]))


def moves_data(groups: Sequence[dist.ProcessGroup], device: torch.device) -> bool:
    """Returns True if these groups connect ranks. A simulated backend returns at once, and leaves tensors unchanged."""
    return bool(groups) and all(backend_name(group, device) != "fake" for group in groups)


def is_first(mesh: DataMesh) -> bool:
    """Returns True if this rank is the first of all that shard or replicate the parameters."""
    return not any(mesh.mesh.get_local_rank(axis) for axis in mesh.replicate_axes + mesh.shard_axes)


def ranks_of(mesh: DataMesh) -> frozenset[int]:
    """Returns the ranks that shard or replicate the parameters, this one included."""
    index: list[Any] = list(mesh.mesh.get_coordinate() or ())
    for axis in mesh.shard_axes + mesh.replicate_axes:
        index[axis] = slice(None)
    return frozenset(mesh.mesh.mesh[tuple(index)].flatten().tolist())
