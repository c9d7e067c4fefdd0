"""Tests parameters of one call on several meshes, which `shard_placement_fn` chooses: one group for each mesh."""

import copy
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.tensor import Replicate, Shard
from torch.utils.checkpoint import checkpoint

from fsdp2 import MixedPrecisionPolicy, ShardPlacementResult, fully_shard
from helpers import assert_same, full, run_checks
from models import mean_loss
from scenarios import train_beside

WIDTH = 6


class Block(nn.Module):
    """A dense layer and two experts, of which each row of the input goes to one."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.Parameter(torch.randn(2, WIDTH, WIDTH + 1) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.dense(x))
        chosen = (x[:, :1] > 0).to(x.dtype)[..., None]
        weight = chosen * self.experts[0] + (1 - chosen) * self.experts[1]
        return x + torch.einsum("ri,rij->rj", x, weight)[:, :WIDTH]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Checkpointed(Model):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def replicas() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def batch(seed: int) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(seed))


def sharded(plain: nn.Module, mesh_info: Any, dim: int, **options: Any) -> Any:
    """A copy whose experts are sharded along `dim` on a mesh of their own, all else over all ranks."""
    model = copy.deepcopy(plain)

    def choose(param: nn.Parameter) -> Any:
        return ShardPlacementResult(Shard(dim), mesh_info) if param.dim() == 3 else None

    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, shard_placement_fn=choose, **options)
    return fully_shard(model, **{**options, "reshard_after_forward": None})


def trains(build: Callable[[], nn.Module], dim: int, describe: Callable[[DeviceMesh], Any], **options: Any) -> None:
    plain = build()
    model = sharded(plain, describe(replicas()), dim, **options)
    assert model.blocks[0].experts.placements == (Replicate(), Shard(dim))
    assert model.blocks[0].dense.weight.placements == (Shard(0),)
    train_beside(model, plain, batch)


def as_it_is(mesh: DeviceMesh) -> DeviceMesh:
    return mesh


def described(mesh: DeviceMesh) -> Any:
    return SimpleNamespace(mesh=mesh, shard_mesh_dim=1, replicate_mesh_dim=0)


def described_by_torch(mesh: DeviceMesh) -> Any:
    return HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)


def all_ranks_of_one_axis() -> None:
    """Experts on two ranks only: their gradients are means over these, which see the same data here."""
    plain, mesh = Model(), replicas()
    model = sharded(plain, FSDPMeshInfo(mesh["shard"], shard_mesh_dim=0), dim=2)
    assert model.blocks[0].experts.placements == (Shard(2),)
    whole = batch(0)
    mean_loss(model(whole)).backward()
    mean_loss(plain(whole)).backward()
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_same(full(param.grad), expected.grad, 1e-5, 1e-6, f"{name}.grad")


def by_hand() -> None:
    """`unshard`, `reshard`, prefetch lists and settings reach all groups of a module."""
    plain = Model()
    model = sharded(plain, replicas(), dim=1)
    first, second = model.blocks[0], model.blocks[1]
    first.set_modules_to_forward_prefetch([second])
    second.set_modules_to_backward_prefetch([first])
    second.set_reshard_after_backward(False)
    for handle in (first.unshard(async_op=True), second.unshard(async_op=True)):
        handle.wait()
    for block, expected in ((first, plain.blocks[0]), (second, plain.blocks[1])):
        for (name, param), whole in zip(block.named_parameters(), expected.parameters(), strict=True):
            assert_same(param, whole, 0, 0, f"{name} between unshard and reshard")
        block.reshard()
        assert all(hasattr(param, "placements") for param in block.parameters())
    train_beside(model, plain, batch)


def full_state_goes_out_and_in() -> None:
    plain, other = Model(), Model()
    model = sharded(plain, replicas(), dim=1)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name, value in plain.state_dict().items():
        assert_same(whole[name], value, 0, 0, name)
    set_model_state_dict(model, other.state_dict(), options=StateDictOptions(full_state_dict=True))
    model(batch(0))
    for name, value in model.state_dict().items():
        assert_same(full(value), other.state_dict()[name], 0, 0, f"{name} after loading")


FP64 = MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float64)
CHECKS = [
    ("rows", partial(trains, Model, 0, as_it_is)),
    ("columns, kept after forward", partial(trains, Model, 2, described, reshard_after_forward=False)),
    ("torch's description", partial(trains, Model, 1, described_by_torch)),
    ("a part kept after forward", partial(trains, Model, 1, as_it_is, reshard_after_forward=2)),
    ("mixed precision, checkpointed", partial(trains, Checkpointed, 1, as_it_is, mp_policy=FP64)),
    ("two ranks only", all_ranks_of_one_axis),
    ("by hand", by_hand),
    ("full state", full_state_goes_out_and_in),
]


def test_experts_on_a_mesh_of_their_own() -> None:
    run_checks(4, CHECKS)


def _refusals(choose: Callable[[nn.Parameter], Any], error: type[Exception], text: str, **options: Any) -> None:
    model = Model()
    before = dict(model.named_parameters())
    with pytest.raises(error, match=text):
        fully_shard(model, shard_placement_fn=choose, **options)
    assert all(param is before[name] for name, param in model.named_parameters())


def test_refusals_change_nothing() -> None:
    def refuse(mesh_info: Any, error: type[Exception], text: str, **options: Any) -> Callable[[], None]:
        result = ShardPlacementResult(None, mesh_info)
        return lambda: _refusals(lambda param: result, error, text, **options)

    def indivisible() -> None:
        pair = init_device_mesh("cpu", (2,))
        refuse(pair, ValueError, "expected a divisor of 2", reshard_after_forward=3)()

    checks = [
        ("no mesh", refuse(None, TypeError, "blocks.0.experts: mesh_info: expected a DeviceMesh")),
        ("no axis", lambda: refuse(SimpleNamespace(mesh=init_device_mesh("cpu", (2,))), TypeError, "mesh_info")()),
        ("a part that no mesh divides by", indivisible),
    ]
    run_checks(2, checks)
    assert not dist.is_initialized()
