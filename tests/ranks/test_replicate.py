"""Tests `replicate` around other modules, and axes of a larger mesh given by name.

test_training.py has `replicate` alone.
"""

import copy
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp2 import DataParallelMeshDims, fully_shard, replicate
from helpers import assert_same, full, run_checks, shard_batch
from models import OddMLP
from scenarios import train_beside

WIDTH = 8


def sharded_in_replicated() -> None:
    plain = OddMLP()
    model = copy.deepcopy(plain)
    first = next(iter(model.children()))
    fully_shard(first)
    replicate(model)
    train_beside(model, plain, lambda seed: plain.example(rows=12, seed=seed))


class OnMesh(nn.Module):
    """Its parameters are DTensors on the whole mesh, as a model that is parallel on other axes has them."""

    def __init__(self, mesh: DeviceMesh | None) -> None:
        super().__init__()
        values = torch.linspace(-1, 1, WIDTH * WIDTH).view(WIDTH, WIDTH)
        if mesh is not None:
            values = distribute_tensor(values, mesh, [Replicate()] * mesh.ndim)
        self.weight = nn.Parameter(values)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight if type(self.weight) is nn.Parameter else self.weight.to_local()  # type: ignore[attr-defined]
        return torch.tanh(x @ weight.T)


def named_axes_train(dims: DataParallelMeshDims, placements: tuple[Shard | Replicate, ...]) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    model, plain = (nn.Sequential(OnMesh(each), OnMesh(each)) for each in (mesh, None))
    for module in (model[0], model):
        fully_shard(module, mesh=mesh, dp_mesh_dims=dims, reshard_after_forward=True)
    assert {param.placements for param in model.parameters()} == {placements}

    def batch(seed: int) -> Tensor:
        return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))

    train_beside(model, plain, batch)


def computes_with_dtensors(replicates: bool) -> None:
    """Inputs are DTensors on the same mesh: gradients arrive as partial sums over the axes that share the data."""
    axes = ("a", "b") if replicates else ("b",)
    mesh = init_device_mesh("cpu", (2, 2) if replicates else (4,), mesh_dim_names=axes)
    plain = nn.Linear(WIDTH, WIDTH)
    model = copy.deepcopy(plain)
    for name, param in plain.named_parameters():
        setattr(model, name, nn.Parameter(distribute_tensor(param.detach(), mesh, [Replicate()] * mesh.ndim)))
    fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="b", replicate="a" if replicates else None))
    whole = torch.randn(8, WIDTH)
    own = DTensor.from_local(shard_batch(whole, dist.get_rank(), 4), mesh, [Shard(0)] * mesh.ndim)
    model(own).to_local().square().mean().backward()
    plain(whole).square().mean().backward()
    for (name, param), twin in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_same(full(param.grad), twin.grad, 1e-5, 1e-6, name)


NAMED = [
    (str(dims), lambda dims=dims, placements=placements: named_axes_train(dims, placements))
    for dims, placements in (
        (DataParallelMeshDims(shard="b", replicate="a"), (Replicate(), Shard(0))),
        (DataParallelMeshDims(shard="a", replicate="b"), (Shard(0), Replicate())),
        (DataParallelMeshDims(shard=("a", "b")), (Shard(0), Shard(0))),
        (DataParallelMeshDims(replicate=("a", "b")), (Replicate(), Replicate())),
    )
]


COMPUTED = [
    ("DTensors in and out", partial(computes_with_dtensors, False)),
    ("DTensors in and out, replicas", partial(computes_with_dtensors, True)),
]


def test_sharded_in_replicated() -> None:
    run_checks(2, [("sharded in replicated", sharded_in_replicated)])


def test_named_axes_on_four_ranks() -> None:
    run_checks(4, [*NAMED, *COMPUTED])
