"""Tests meshes made of existing process groups, and replicas that begin with different weights."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp2 import fully_shard
from helpers import assert_same, full, run_checks, shard_batch
from models import OddMLP, mean_loss

TOLERANCE = (1e-5, 1e-6)


def trains_on(mesh: DeviceMesh) -> None:
    torch.manual_seed(1)
    plain, model = OddMLP(), OddMLP()
    model.load_state_dict(plain.state_dict())
    for module in (model.wide, model):
        fully_shard(module, mesh=mesh)
    assert_trains_like(model, plain)


def assert_trains_like(model: nn.Module, plain: OddMLP) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.25, momentum=0.5, foreach=True) for each in (model, plain)]
    for step in range(2):
        batch = plain.example(rows=12, seed=step)
        mean_loss(model(shard_batch(batch, rank, size))).backward()
        mean_loss(plain(batch)).backward()
        for (name, p), q in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            assert_same(full(p.grad), q[1].grad, *TOLERANCE, f"step {step}: {name}.grad")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_same(full(p), q, *TOLERANCE, name)


def one_axis() -> None:
    trains_on(DeviceMesh.from_group(dist.group.WORLD, "cpu"))


def two_axes() -> None:
    """The groups of each axis, as a program has them that set up data parallelism by itself."""
    ranks = torch.arange(4).view(2, 2)
    groups = []
    for rows in (ranks.T, ranks):  # the first axis replicates
        made = [dist.new_group(row.tolist()) for row in rows]
        groups.append(next(g for g, row in zip(made, rows, strict=True) if dist.get_rank() in row))
    names = ("replicate", "shard")
    trains_on(DeviceMesh.from_group(groups, "cpu", mesh=ranks, mesh_dim_names=names))


def replicas_are_made_equal_by_broadcasts() -> None:
    """Of the shards, from the first replica: as users do who initialise on every rank."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(1)
    plain = OddMLP()
    torch.manual_seed(1 + mesh.get_local_rank("replicate"))
    model = OddMLP()
    fully_shard(model, mesh=mesh)
    first = dist.get_process_group_ranks(mesh.get_group("replicate"))[0]
    for p in model.parameters():
        dist.broadcast(p.to_local().detach(), first, group=mesh.get_group("replicate"))
    assert_trains_like(model, plain)


def test_meshes_from_groups_and_replicas_that_differ() -> None:
    checks = (one_axis, two_axes, replicas_are_made_equal_by_broadcasts)
    run_checks(4, [(check.__name__, check) for check in checks])
