"""Follows the advice of errors of simulated ranks."""

import os

import torch
import torch.distributed as dist
from torch import Tensor

from advised.registry import follows, refused, same
from fsdp2 import testing


@follows("Call contiguous() before, and copy the result back", ranks=0)
def column_of_a_matrix() -> None:
    def matrix(rank: int) -> Tensor:
        return torch.arange(6.0).view(2, 3) * (rank + 1)

    def reduced(rank: int) -> Tensor:
        whole = matrix(rank)
        column = whole[:, 1].contiguous()
        dist.all_reduce(column)
        whole[:, 1].copy_(column)
        return whole

    refused(lambda: testing.run(lambda rank: dist.all_reduce(matrix(rank)[:, 1]), 2))
    for rank, found in enumerate(testing.run(reduced, 2)):
        expected = matrix(rank)
        expected[:, 1] *= 3 / (rank + 1)
        same(found, expected)


@follows("All ranks must call new_group for each group", "or pass use_local_synchronization=True", ranks=0)
def groups_of_two() -> None:
    halves = [[0, 3], [1, 2]]

    def total(rank: int, group: dist.ProcessGroup) -> Tensor:
        value = torch.tensor([float(rank + 1)])
        dist.all_reduce(value, group=group)
        return value

    def own(rank: int, local: bool) -> Tensor:
        ranks = halves[rank in halves[1]]
        return total(rank, dist.new_group(ranks, use_local_synchronization=local))

    def all_groups(rank: int) -> Tensor:
        return total(rank, [dist.new_group(ranks) for ranks in halves][rank in halves[1]])

    refused(lambda: testing.run(lambda rank: own(rank, local=False), 4))
    for found in (testing.run(all_groups, 4), testing.run(lambda rank: own(rank, local=True), 4)):
        same(torch.cat(found), torch.full((4,), 5.0))


@follows("Leave rank and world_size out, or read them from RANK and WORLD_SIZE", ranks=0)
def numbers_of_ranks() -> None:
    def join(**numbers: int) -> Tensor:
        dist.destroy_process_group()
        dist.init_process_group("gloo", **numbers)  # type: ignore[arg-type]
        value = torch.ones(1)
        dist.all_reduce(value)
        return value

    refused(lambda: testing.run(lambda _: join(rank=0, world_size=1), 2))
    read = testing.run(lambda _: join(rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])), 2)
    for found in (read, testing.run(lambda _: join(), 2)):
        same(torch.cat(found), torch.full((2,), 2.0))
