"""Tests that a mesh which lists its ranks in another order than their process groups is exact, or is refused alike."""

import copy
import tempfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from fsdp2 import DataParallelMeshDims, ShardPlacementResult, fully_shard, replicate
from helpers import assert_same, full, run_checks

FULL = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def mesh_of(ranks: list[Any], *names: str) -> DeviceMesh:
    return DeviceMesh("cpu", ranks, mesh_dim_names=names or None)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def same(sharded: nn.Module, plain: nn.Module, what: str) -> None:
    for (name, one), other in zip(sharded.named_parameters(), plain.parameters(), strict=True):
        assert_same(full(one.detach()), other.detach(), 1e-5, 1e-6, f"{what}: {name}")


# ---- refused


def one_parameter(mesh: DeviceMesh) -> Callable[[nn.Parameter], Any]:
    return lambda p: ShardPlacementResult(Shard(0), mesh) if p.shape == (3, 7) else None


def tensor_parallel(model: nn.Module) -> nn.Module:
    mesh = mesh_of([[1, 0], [3, 2]], "dp", "tp")
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    return fully_shard(model, mesh=mesh["dp"])


SHARD = {
    "backwards": lambda model: fully_shard(model, mesh=mesh_of([3, 2, 1, 0])),
    "two exchanged": lambda model: fully_shard(model, mesh=mesh_of([0, 2, 1, 3])),
    "HSDP": lambda model: fully_shard(model, mesh=mesh_of([[1, 0], [3, 2]])),
    "one replica of two": lambda model: fully_shard(model, mesh=mesh_of([[0, 1], [3, 2]])),
    "a slice, of two ranks": lambda model: fully_shard(model, mesh=mesh_of([[0, 1], [3, 2]], "a", "b")["b"]),
    "axes that shard together": lambda model: fully_shard(
        model, mesh=mesh_of([[0, 2], [1, 3]], "a", "b")["a", "b"]._flatten("ab")
    ),
    "a parameter's mesh": lambda model: fully_shard(
        model, mesh=init_device_mesh("cpu", (4,)), shard_placement_fn=one_parameter(mesh_of([3, 2, 1, 0]))
    ),
    "kept after forward": lambda model: fully_shard(model, mesh=mesh_of([1, 0, 3, 2]), reshard_after_forward=2),
    "tensor parallelism": tensor_parallel,
    "named axes": lambda model: fully_shard(
        model,
        mesh=mesh_of([[[1, 0], [3, 2]]], "r", "s", "t"),
        dp_mesh_dims=DataParallelMeshDims(shard=("s", "t"), replicate="r"),
    ),
}


def refused(shard: Callable[[nn.Module], Any]) -> None:
    """All ranks refuse it, also those whose own row is in order, and nothing has been changed."""
    model = net()
    with pytest.raises(ValueError, match="mesh: expected ranks in ascending order") as caught:
        shard(model)
    texts: list[Any] = [None] * 4
    dist.all_gather_object(texts, str(caught.value))
    assert type(model) is nn.Sequential
    assert "init_device_mesh" in texts[0]


# ---- exact


def exact(model: Any, plain: nn.Module) -> None:
    """Initialises, reads and writes rows, loads from one rank, trains, saves and loads."""
    for each in (model, plain):
        torch.manual_seed(1)
        nn.init.normal_(each[0].weight)
        with torch.no_grad():
            each[2].weight[1] = 3
            each[2].bias[2:].zero_()
    same(model, plain, "initialised")
    other = net()
    whole = {name: value * 2 for name, value in other.state_dict().items()}
    set_model_state_dict(model, copy.deepcopy(whole) if dist.get_rank() == 0 else {}, options=FULL)
    plain.load_state_dict(whole)
    same(model, plain, "loaded")
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, plain)]
    for step in range(2):
        batch = torch.randn(8, 5, generator=torch.Generator().manual_seed(step))
        for each, optimizer, rows in zip((model, plain), optimizers, (rows_of(batch), batch), strict=True):
            each(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    same(model, plain, "trained")
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    for name, value in state.items():
        assert_same(value, plain.state_dict()[name], 1e-5, 1e-6, name)
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    dcp.save(get_model_state_dict(model), checkpoint_id=folders[0])
    usual = fully_shard(net(), mesh=init_device_mesh("cpu", (4,)))
    loaded = get_model_state_dict(usual)
    dcp.load(loaded, checkpoint_id=folders[0])
    set_model_state_dict(usual, loaded)
    same(usual, plain, "saved")


def rows_of(batch: Tensor) -> Tensor:
    return batch.chunk(4)[dist.get_rank()]


EXACT = {
    "as the error advises": lambda model: fully_shard(model, mesh=mesh_of([0, 1, 2, 3])),
    "replicas in another order": lambda model: fully_shard(model, mesh=mesh_of([[2, 3], [0, 1]])),
    "across": lambda model: fully_shard(model, mesh=mesh_of([[0, 2], [1, 3]])),
    "replicas across, in another order": lambda model: fully_shard(model, mesh=mesh_of([[1, 3], [0, 2]])),
    "replicate": lambda model: replicate(model, mesh=mesh_of([3, 1, 2, 0])),
    "axes exchanged": lambda model: fully_shard(
        model,
        mesh=mesh_of([[0, 2], [1, 3]], "a", "b"),
        dp_mesh_dims=DataParallelMeshDims(shard="b", replicate="a"),
    ),
}


def trains(shard: Callable[[nn.Module], Any]) -> None:
    exact(shard(net()), net())


def test_each_order_is_exact_or_refused_on_all_ranks() -> None:
    run_checks(
        4,
        [
            *((name, lambda shard=shard: refused(shard)) for name, shard in SHARD.items()),
            *((name, lambda shard=shard: trains(shard)) for name, shard in EXACT.items()),
        ],
    )
