"""What the programs of this folder are written with."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

import fsdp2
from models import TanhBlock
from outcomes import Program, Side, Situation

SITUATIONS: list[Situation] = []


def ends(
    how: str, says: str = "", *, advises: str | tuple[str, ...] = (), ways: str | tuple[str, ...] = (), **options: Any
) -> Callable[[Program], Program]:
    """Adds a program to the situations; see Situation."""

    def add(program: Program) -> Program:
        claims, names = ((each,) if isinstance(each, str) else each for each in (advises, ways))
        SITUATIONS.append(Situation(program, how, says, advises=claims, ways=names, **options))
        return program

    return add


# ---- models, and how they are trained


class Block(TanhBlock):
    def __init__(self) -> None:
        super().__init__(5, 7)


class Net(nn.Module):
    """Layers of the root's own around blocks that are sharded by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 5)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x))

    def features(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


def shard(side: Side, model: Any, **options: Any) -> Any:
    for block in model.blocks:
        side.fully_shard(block, **options)
    return side.fully_shard(model, **options)


def loss_of(output: Tensor) -> Tensor:
    return (output - 0.5).square().mean()


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.5, "momentum": 0.5, **options})


def train(side: Side, model: nn.Module, optimizer: Any = None, steps: int = 3, name: str = "trained") -> None:
    optimizer = optimizer or sgd(model)
    for step in range(steps):
        loss_of(model(side.batch(step))).backward()
        optimizer.step()
        optimizer.zero_grad()
    side.weights(name, model)


@torch.no_grad()
def follow(pairs: list[tuple[Tensor, Tensor]]) -> None:
    for old, new in pairs:
        old.lerp_(new, 0.5)


def hsdp(side: Side, shards: int) -> dict[str, Any]:
    """Options for `fully_shard`: replicas of so many shards each."""
    if not side.is_sharded:
        return {}
    mesh = init_device_mesh("cpu", (side.num_ranks // shards, shards), mesh_dim_names=("replicate", "shard"))
    return {"mesh": mesh}


# ---- tensors, and what errors advise


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def distributed(tensor: Tensor, like: Tensor) -> Tensor:
    """Returns a whole tensor, distributed like another one."""
    return distribute_tensor(tensor, like.device_mesh, like.placements) if isinstance(like, DTensor) else tensor


def full_params(side: Side, module: nn.Module, **options: Any) -> Any:
    """Context: yields the whole parameters by name, which are the module's own on the plain side."""
    return fsdp2.full_params(module, **options) if side.is_sharded else nullcontext(dict(module.named_parameters()))


def loaded(side: Side, model: Any, weights: dict[str, Tensor], **options: Any) -> Any:
    """Loads a full state dict, and returns the model."""
    if side.is_sharded:
        set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True, **options))
    else:
        model.load_state_dict(weights, strict=options.get("strict", True))
    return model


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Returns a full state dict, a copy."""
    return {name: whole(value).detach().clone() for name, value in model.state_dict().items()}


def again_from_a_checkpoint(side: Side, model: Any, training: Callable[[bool], None]) -> None:
    """Trains as it is refused, loads a checkpoint of before, and trains with all ranks alike, which `training` gets."""
    before = weights_of(model)
    if side.is_sharded:
        with pytest.raises(RuntimeError):
            training(False)
        model.zero_grad()
    loaded(side, model, before)
    training(True)
