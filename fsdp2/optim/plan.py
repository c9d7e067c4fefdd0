"""Plans which rank updates which matrix, and which matrices travel together. All ranks compute the same plan."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from .cuts import Cut, Matrix, find_matrices


class Member(NamedTuple):
    """One parameter of the optimizer. `group`: the number of its param group. `source`: the dtype of its gradient;
    `wire`: that in which its matrices travel and are updated.
    """

    cut: Cut
    group: int
    blocks: int | Sequence[int] | None
    source: torch.dtype
    wire: torch.dtype


class Bucket(NamedTuple):
    """The matrices that travel together: `owned[rank]` are those that `rank` updates, the costliest first."""

    process_group: dist.ProcessGroup | None
    rank: int
    device: torch.device
    source: torch.dtype
    wire: torch.dtype
    owned: list[list[Matrix]]


class Plan(NamedTuple):
    """`buckets`: what travels. `local`: the matrices that this rank has as a whole. `loads`: for each process group
    (None: matrices that every rank has) the cost of what each of its ranks updates.
    """

    buckets: list[Bucket]
    local: list[Matrix]
    loads: dict[dist.ProcessGroup | None, list[float]]


def make_plan(
    members: Sequence[Member], absent: Collection[int], cost: Callable[[int, int], float], bucket_bytes: int
) -> Plan:
    """Gives each matrix to one of the ranks that hold a part of it: the costliest first, to the least loaded one.

    `absent`: the numbers of members that are left out, the same on all ranks. A rank updates what it has as a whole.
    The matrices of a bucket that one rank updates have `bucket_bytes` together, or the bytes of the largest matrix.
    """
    plan = Plan([], [], {})
    travelling: dict[tuple[dist.ProcessGroup | None, tuple[object, ...]], list[Matrix]] = {}
    for i, member in enumerate(members):
        cut = member.cut
        loads = plan.loads.setdefault(cut.process_group, [0.0] * cut.size)
        for matrix in find_matrices(i, cut, member.blocks) if i not in absent else ():
            if matrix.is_local:
                loads[matrix.holders[0]] += matrix.number * cost(matrix.rows, matrix.cols)
                if matrix.holders[0] == cut.rank:
                    plan.local.append(matrix)
            else:
                key = cut.process_group, (member.source, member.wire, cut.device)
                travelling.setdefault(key, []).append(matrix)
    for (process_group, _), matrices in travelling.items():
        loads, member = plan.loads[process_group], members[matrices[0].param]
        cut = member.cut
        matrices.sort(key=lambda each: (-cost(each.rows, each.cols), each.rows, each.cols))
        owned: list[list[Matrix]] = [[] for _ in range(cut.size)]
        for matrix in matrices:
            owner = min(matrix.holders, key=loads.__getitem__)
            loads[owner] += cost(matrix.rows, matrix.cols)
            owned[owner].append(matrix)
        limit = max(bucket_bytes // member.wire.itemsize, max(each.numel for each in matrices))
        parts = [list(cut_list(each, limit)) for each in owned]
        for i in range(max(map(len, parts))):
            here = [part[i] if i < len(part) else [] for part in parts]
            plan.buckets.append(Bucket(process_group, cut.rank, cut.device, member.source, member.wire, here))
    return plan


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
