"""Tests scalars, and parameters that are not contiguous, in models that are compared with plain copies."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp2 import MixedPrecisionPolicy, fully_shard
from helpers import assert_same, full, run_checks
from models import mean_loss
from scenarios import train_beside


class Strided(nn.Module):
    """A transposed matrix, images with channels last, and a part of a larger tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last)
        self.matrix = nn.Parameter(torch.randn(4, 5).T)
        self.part = nn.Parameter(torch.randn(8, 4)[::2])

    def forward(self, x: Tensor) -> Tensor:
        images = x.view(-1, 3, 4, 4).contiguous(memory_format=torch.channels_last)
        return torch.tanh(self.conv(images)).mean((2, 3)) @ self.matrix @ self.part

    def batch(self, seed: int) -> Tensor:
        return torch.randn(12, 48, generator=torch.Generator().manual_seed(seed))


def trains(dim: int, policy: MixedPrecisionPolicy, **options: Any) -> None:
    plain = Strided()
    assert not any(param.is_contiguous() for name, param in plain.named_parameters() if name != "conv.bias")
    model = copy.deepcopy(plain)
    fully_shard(model, shard_placement_fn=lambda p: Shard(dim % p.dim()), mp_policy=policy, **options)
    for (name, param), whole in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert param.to_local().is_contiguous()  # type: ignore[attr-defined]
        assert_same(full(param), whole, 0, 0, name)
    train_beside(model, plain, plain.batch)


FP64 = MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float64)
CHECKS = [
    ("rows", partial(trains, 0, MixedPrecisionPolicy())),
    ("columns", partial(trains, 1, MixedPrecisionPolicy(), reshard_after_forward=False)),
    ("cast", partial(trains, 0, FP64)),
]


def test_parameters_of_any_strides_on_one_rank() -> None:
    run_checks(1, CHECKS)


def test_parameters_of_any_strides_on_three_ranks() -> None:
    run_checks(3, CHECKS)


class Scaled(nn.Module):
    """As in CLIP: a scalar that is trained, beside others, one of which is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)
        self.logit_scale = nn.Parameter(torch.tensor(2.0))
        self.shift = nn.Parameter(torch.tensor(0.5))
        self.fixed = nn.Parameter(torch.tensor(3.0), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.logit_scale.exp() * torch.tanh(self.layer(x)) / self.fixed + self.shift

    def batch(self, seed: int) -> Tensor:
        return torch.randn(12, 5, generator=torch.Generator().manual_seed(seed))


def scalars_train(build_mesh: Callable[[], Any] = lambda: None, **options: Any) -> None:
    plain = nn.Sequential(Scaled(), Scaled())
    model = copy.deepcopy(plain)
    mesh = build_mesh()
    for module in (*model, model):
        fully_shard(module, mesh=mesh, **options)
    assert model[0].logit_scale.shape == ()
    assert all(placement.is_replicate() for placement in model[0].logit_scale.placements)  # type: ignore[union-attr]
    train_beside(model, plain, plain[0].batch)  # type: ignore[arg-type]
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    other = fully_shard(nn.Sequential(Scaled(), Scaled()), mesh=mesh)
    set_model_state_dict(other, state, options=StateDictOptions(full_state_dict=True))
    assert_same(other[0].logit_scale, plain[0].logit_scale, 1e-5, 1e-6, "loaded")
    twin = copy.deepcopy(model)
    assert_same(twin(plain[0].batch(7)).float(), plain(plain[0].batch(7)), 1e-5, 1e-5, "output of a copy")  # type: ignore[operator]


class Nothing(nn.Module):
    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, 5), trained)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x @ self.weight.T], 1)


class WithNothing(nn.Module):
    """A group that has no elements, trained or frozen, in front of one that has."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.empty = Nothing(trained)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.empty(x))


def groups_of_nothing() -> None:
    for trained in (True, False):
        torch.manual_seed(0)
        plain = WithNothing(trained)
        torch.manual_seed(0)
        model = WithNothing(trained)
        fully_shard(model.empty)
        fully_shard(model)
        x = torch.randn(6, 5)
        mean_loss(plain(x)).backward()
        mean_loss(model(x)).backward()
        for (name, param), twin in zip(model.named_parameters(), plain.parameters(), strict=True):
            if twin.requires_grad:
                assert_same(param.grad, twin.grad, 1e-5, 1e-6, name)


def scalar_of_tensor_parallelism() -> None:
    """A DTensor that another axis replicates."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plain = Scaled()
    model: Any = copy.deepcopy(plain)
    for name, param in plain.named_parameters():
        target, _, leaf = name.rpartition(".")
        whole = nn.Parameter(distribute_tensor(param.detach(), mesh["tp"], [Replicate()]), param.requires_grad)
        setattr(model.get_submodule(target), leaf, whole)
    fully_shard(model, mesh=mesh["dp"])
    assert model.logit_scale.placements == (Replicate(), Replicate())
    whole = plain.batch(0)
    own = DTensor.from_local(whole.chunk(2)[mesh.get_local_rank("dp")], mesh["tp"], [Replicate()])
    mean_loss(model(own).to_local()).backward()
    mean_loss(plain(whole)).backward()
    for (name, param), twin in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_same(param.grad, twin.grad, 1e-5, 1e-6, name)


def replicas() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def test_scalars() -> None:
    cast = partial(scalars_train, mp_policy=FP64)
    run_checks(1, [("one rank", scalars_train), ("one rank, cast", cast), ("groups of nothing", groups_of_nothing)])
    run_checks(3, [("three ranks", scalars_train), ("cast", cast), ("groups of nothing", groups_of_nothing)])
    parts = partial(scalars_train, reshard_after_forward=2)
    checks = [("replicas", partial(scalars_train, replicas)), ("a part stays", parts)]
    run_checks(4, [*checks, ("tensor parallelism", scalar_of_tensor_parallelism)])
