"""Tests `replicate` around other modules, axes of a larger mesh given by name, and parameters that compute in their own
dtype. test_training.py has `replicate` alone.
"""

import copy
from functools import partial
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp2 import DataParallelMeshDims, MixedPrecisionPolicy, fully_shard, replicate
from fsdp2.checks.named_comm import NamedPairwiseComm
from fsdp2.devices.streams import AllWork
from fsdp2.engine import buckets
from helpers import assert_same, full, run_checks, shard_batch
from models import OddMLP, mean_loss
from scenarios import train_beside

WIDTH = 8


def sharded_in_replicated() -> None:
    plain = OddMLP()
    model = copy.deepcopy(plain)
    first = next(iter(model.children()))
    fully_shard(first)
    replicate(model)
    train_beside(model, plain, lambda seed: plain.example(rows=12, seed=seed))


class Positions(nn.Module):
    """Autograd gives `positions` a view of the gradient with which it then goes on to the layer below."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.positions = nn.Linear(WIDTH, WIDTH, bias=False), nn.Parameter(torch.randn(4, WIDTH))
        self.above = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.above(self.below(x)[None] + self.positions[None]))


def a_gradient_that_backward_goes_on_with() -> None:
    """Each is summed on its own, where it lies if that is safe, and before the rest of backward runs."""
    plain = Positions()
    model = copy.deepcopy(plain)
    all_reduce = NamedPairwiseComm.all_reduce

    def sum_at_once(comm: NamedPairwiseComm, tensor: Tensor, divisor: float, what: str = "") -> AllWork:
        all_reduce(comm, tensor, divisor).wait()
        return AllWork([])

    whole = torch.randn(4 * dist.get_world_size(), WIDTH)
    one_each = mock.patch.object(buckets, "MIN_BUCKET_BYTES", 1)
    with one_each, mock.patch.object(NamedPairwiseComm, "all_reduce", sum_at_once):
        replicate(model)
        mean_loss(model(shard_batch(whole, dist.get_rank(), dist.get_world_size()))).backward()
    for chunk in whole.chunk(dist.get_world_size()):
        (mean_loss(plain(chunk)) / dist.get_world_size()).backward()
    for (name, param), twin in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_same(full(param.grad), twin.grad, 1e-5, 1e-6, name)


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


class Dtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen = [param.dtype for param in self.parameters()]
        return self.second(torch.tanh(self.first(x)).float())


def some_keep_their_dtype() -> None:
    """The first layer computes in bf16 as its twin does, the second in fp32."""
    plain = Dtypes()
    model = copy.deepcopy(plain)
    kept = set(model.second.parameters())
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
        param_dtype_override_fn=lambda param: param.dtype if param in kept else None,
    )
    fully_shard(model, mp_policy=policy)
    batch = torch.randn(4 * dist.get_world_size(), WIDTH)
    own = shard_batch(batch, dist.get_rank(), dist.get_world_size())
    output = model(own.bfloat16())
    assert model.seen == [torch.bfloat16] * 2 + [torch.float32] * 2
    plain.first.bfloat16()
    expected = plain(own.bfloat16())
    assert torch.equal(output, expected)
    output.sum().backward()
    expected.sum().backward()
    for (name, param), twin in zip(model.named_parameters(), plain.parameters(), strict=True):
        mean = twin.grad.float()
        dist.all_reduce(mean)
        assert_same(full(param.grad), mean / dist.get_world_size(), 1e-6, 1e-6, name)


def test_replicated_and_own_dtypes_on_two_ranks() -> None:
    checks = (sharded_in_replicated, a_gradient_that_backward_goes_on_with, some_keep_their_dtype)
    run_checks(2, [(each.__name__, each) for each in checks])


def test_named_axes_on_four_ranks() -> None:
    run_checks(4, [*NAMED, *COMPUTED])
