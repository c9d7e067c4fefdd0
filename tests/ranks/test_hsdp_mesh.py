"""Tests `hsdp_mesh`, which makes replicas of machines, of what a launcher has told each process."""

import copy
import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard

import fsdp2
from helpers import run_checks
from models import OddMLP
from scenarios import train_beside


def told(local_world_size: Any, local_rank: Any) -> Any:
    """Context: what torchrun sets on this rank. None: nothing."""
    values = {"LOCAL_WORLD_SIZE": local_world_size, "LOCAL_RANK": local_rank}
    return mock.patch.dict(os.environ, {name: str(value) for name, value in values.items() if value is not None})


def two_machines() -> None:
    rank = dist.get_rank()
    with told(2, rank % 2):
        mesh = fsdp2.hsdp_mesh("cpu")
        assert fsdp2.hsdp_mesh(ranks_per_replica=1).mesh.tolist() == [[0], [1], [2], [3]]
    assert mesh.mesh_dim_names == ("replicate", "shard")
    assert mesh.mesh.tolist() == [[0, 1], [2, 3]]
    torch.manual_seed(0)
    plain = OddMLP()
    model: Any = copy.deepcopy(plain)
    fsdp2.fully_shard(model, mesh=mesh)
    assert next(p for p in model.parameters() if p.dim()).placements == (Replicate(), Shard(0))
    train_beside(model, plain, lambda seed: plain.example(rows=12, seed=seed))


def one_machine() -> None:
    with told(4, dist.get_rank()):
        assert fsdp2.hsdp_mesh().mesh.tolist() == [[0, 1, 2, 3]]
        assert fsdp2.hsdp_mesh("cpu", ranks_per_replica=2).mesh.tolist() == [[0, 1], [2, 3]]
        for count in (3, 8):
            with pytest.raises(ValueError, match="expected a divisor of the 4 ranks of a machine"):
                fsdp2.hsdp_mesh(ranks_per_replica=count)
    for count in (0, -1):  # also where no launcher has said how many ranks there are
        with pytest.raises(ValueError, match="ranks_per_replica: expected at least 1"):
            fsdp2.hsdp_mesh(ranks_per_replica=count)
    with pytest.raises(TypeError, match="ranks_per_replica"):
        fsdp2.hsdp_mesh(ranks_per_replica="2")  # type: ignore[arg-type]


def what_is_wrong_is_told_on_all_ranks() -> None:
    rank = dist.get_rank()
    with told(*((3, rank) if rank < 3 else (1, 0))), pytest.raises(RuntimeError, match="3 at rank 0, 1 at rank 3"):
        fsdp2.hsdp_mesh()
    with told(2, rank // 2), pytest.raises(RuntimeError, match="expected the ranks of a machine to follow one another"):
        fsdp2.hsdp_mesh()
    with told(*((2, rank % 2) if rank else (None, None))), pytest.raises(RuntimeError, match="rank 0 has no LOCAL_WO"):
        fsdp2.hsdp_mesh()


def test_hsdp_mesh() -> None:
    checks = (two_machines, one_machine, what_is_wrong_is_told_on_all_ranks)
    run_checks(4, [(each.__name__, each) for each in checks])
