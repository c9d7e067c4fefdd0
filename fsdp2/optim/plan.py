"""Plans which rank updates which matrix, and which matrices travel together. All ranks compute the same plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from .cuts import Cut, Matrix, find_matrices


class Member(NamedTuple):
    """Describes one parameter of the optimizer.

    `group`: the number of its param group. `blocks`: that group's entry. `source`: the dtype of its gradient. `wire`:
    the dtype in which its matrices travel and are updated.
    """

    cut: Cut
    group: int
    blocks: int | Sequence[int] | None
    source: torch.dtype
    wire: torch.dtype


class Bucket(NamedTuple):
    """Holds the matrices that travel together: `owned[rank]` are those that `rank` updates, the costliest first.

    `process_group`: None if this rank, `rank`, has them as a whole, and nothing travels.
    """

    process_group: dist.ProcessGroup | None
    rank: int
    device: torch.device
    source: torch.dtype
    wire: torch.dtype
    owned: list[list[Matrix]]


class Plan(NamedTuple):
    """Says who updates what. `buckets`: first those that do not travel. `loads`: for each process group (None: matrices
    that every rank has) the costs of what its ranks update.
    """

    buckets: list[Bucket]
    loads: dict[dist.ProcessGroup | None, list[float]]


def make_plan(
    members: Sequence[Member], absent: Collection[int], cost: Callable[[int, int], float], bucket_bytes: int
) -> Plan:
    """Gives each matrix to one of the ranks that hold a part of it: the costliest first, to the least loaded one.

    `absent`: the numbers of members that are left out, the same on all ranks. A rank updates what it has as a whole.
    The matrices of a bucket that one rank updates have `bucket_bytes` together, or the bytes of the largest matrix.
    """
    loads: dict[dist.ProcessGroup | None, list[float]] = {}
    alike: dict[Any, list[Matrix]] = {}
    for i, member in enumerate(members):
        cut = member.cut
        load = loads.setdefault(cut.process_group, [0.0] * cut.size)
        for matrix in find_matrices(i, cut, member.blocks) if i not in absent else ():
            if matrix.is_local:
                load[matrix.holders[0]] += len(matrix.stack) * cost(matrix.rows, matrix.cols)
            if not matrix.is_local or cut.rank in matrix.holders:
                process_group = None if matrix.is_local else cut.process_group
                key = process_group, cut.rank, cut.device, member.source, member.wire
                alike.setdefault(key, []).append(matrix)
    buckets: list[Bucket] = []
    for key in sorted(alike, key=lambda each: each[0] is not None):
        matrices = sorted(alike[key], key=lambda each: (-cost(each.rows, each.cols), each.rows, each.cols))
        cut, wire = members[matrices[0].param].cut, key[-1]
        load = loads[cut.process_group]
        owned: list[list[Matrix]] = [[] for _ in range(cut.size)]
        for matrix in matrices:
            owner = min(matrix.holders, key=load.__getitem__)
            load[owner] += 0.0 if matrix.is_local else cost(matrix.rows, matrix.cols)
            owned[owner].append(matrix)
        largest = 0 if key[0] is None else max(each.numel for each in matrices)
        runs = [[*cut_list(each, max(bucket_bytes // wire.itemsize, largest))] for each in owned]
        for i in range(max(map(len, runs))):
            buckets.append(Bucket._make((*key, [run[i] if i < len(run) else [] for run in runs])))
    return Plan(buckets, loads)


def cut_list(matrices: Iterable[Matrix], limit: int) -> Iterator[list[Matrix]]:
    """Yields runs of `matrices` of at most `limit` elements together; a larger matrix is a run of its own."""
    run: list[Matrix] = []
    for matrix in matrices:
        if run and sum(each.numel for each in run) + matrix.numel > limit:
            yield run
            run = []
        run.append(matrix)
    if run:
        yield run
