"""Tests that checkpoints keep all bits: saved on four ranks in many ways, and loaded on one to four.

The oracle is what the saving run held, whole.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp2 import CPUOffloadPolicy, checkpoint, flatten_optimizer, fully_shard, muon
from helpers import NIGHTLY, assert_same, end_of_part, one_mesh, run_checks, run_ranks
from models import FrozenMix, MixedDtypes, OddMLP, TinyGPT

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:torch")

Made = tuple[nn.Module, Sequence[torch.optim.Optimizer]]
EXTRA = {"step": 2, "none": torch.ones(0, 3), "numbers": torch.tensor([3, 4])}
SAVERS, LOADERS = ("ours", "without waiting", "torch"), ("ours", "torch")


class Normed(nn.Module):
    """Under tensor parallelism, its norm is sharded by data parallel ranks alone: ranks know different meshes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.BatchNorm1d(6), nn.Linear(8, 6)

    def example(self, rows: int, seed: int) -> Tensor:
        return torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.down(self.up(x).relu()))


class OwnRule(torch.optim.Optimizer):
    """An optimizer of a user: a sharded state, a number, and a list in the group."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "history": [1.0, 2.0]})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["history"] = [*group["history"][-3:], group["lr"]]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                state["energy"] = state.get("energy", torch.zeros_like(p)) + p.grad * p.grad
                p.sub_(p.grad * group["lr"] / (1 + state["energy"].sqrt()))


def adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)]


def sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.5)]


def flat(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [flatten_optimizer(torch.optim.Adam(model.parameters(), lr=1e-2))]


def two(model: nn.Module) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    return [muon(matrices, lr=1e-2), torch.optim.AdamW([p for p in model.parameters() if p.dim() != 2], lr=1e-2)]


def tensor_parallel(model: nn.Module) -> None:
    """Shards over a mesh of 2 x 2 where there are four ranks, else among all."""
    if dist.get_world_size() < 4:
        fully_shard(model)
        return
    mesh = one_mesh((2, 2), ("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])


def hybrid(model: nn.Module) -> None:
    fully_shard(model, mesh=one_mesh((2, 2)) if dist.get_world_size() == 4 else None)


@dataclasses.dataclass(frozen=True)
class Case:
    build: Callable[[], Any]
    shard: Callable[[nn.Module], object] = fully_shard
    optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]] = adamw
    trainable_only: bool = False

    def make(self, seed: int) -> Made:
        torch.manual_seed(seed)
        model = self.build()
        self.shard(model)
        return model, self.optimizers(model)

    @property
    def options(self) -> StateDictOptions:
        return StateDictOptions(ignore_frozen_params=self.trainable_only)


CASES = {
    "uneven": Case(OddMLP),
    "last dims": Case(OddMLP, lambda model: fully_shard(model, shard_placement_fn=lambda p: Shard(p.dim() - 1))),
    "HSDP": Case(OddMLP, hybrid),
    "TP": Case(Normed, tensor_parallel),
    "tied": Case(functools.partial(TinyGPT, tied=True, depth=1)),
    "frozen": Case(FrozenMix, optimizers=sgd),
    "trainable only": Case(FrozenMix, trainable_only=True),
    "mixed dtypes": Case(MixedDtypes, optimizers=sgd),
    "on the CPU": Case(OddMLP, lambda model: fully_shard(model, offload_policy=CPUOffloadPolicy())),
    "flat": Case(OddMLP, optimizers=flat),
    "muon": Case(OddMLP, optimizers=two),
    "own optimizer": Case(OddMLP, optimizers=lambda model: [OwnRule(model.parameters())]),
    "torch's FSDP2": Case(OddMLP, torch_fully_shard),
}


def train(model: Any, optimizers: Sequence[torch.optim.Optimizer], steps: range) -> None:
    for step in steps:
        batch = model.example(rows=4, seed=10 * step + dist.get_rank())
        output = model(batch)
        (output[0] if isinstance(output, tuple) else output).float().square().mean().backward()
        for each in optimizers:
            each.step()
            each.zero_grad()


def whole(case: Case, made: Made) -> dict[str, Any]:
    """Returns all of the state, whole. Every rank must call it."""
    model, optimizers = made
    found: dict[str, Any] = dict(get_model_state_dict(model, options=case.options))
    for each in optimizers:
        states = get_optimizer_state_dict(model, each, options=case.options)
        for fqn, state in states["state"].items():
            found |= {f"{fqn} {name}": value for name, value in state.items()}
        for group in states["param_groups"]:
            found |= {f"{group['params'][0]} {name}": value for name, value in group.items() if name != "params"}
    return {
        name: value.full_tensor() if isinstance(value, DTensor) else copy.deepcopy(value)
        for name, value in found.items()
    }


def save(folder: Path, name: str) -> dict[str, Any]:
    """Saves one training in each way. Returns what it held."""
    case = CASES[name]
    model, optimizers = made = case.make(0)
    train(model, optimizers, range(2))
    expected = whole(case, made)
    state: dict[str, Any] = {
        "model": get_model_state_dict(model, options=case.options),
        "optimizer": get_optimizer_state_dict(model, optimizers, options=case.options),
    }
    dcp.save({**state, **EXTRA}, checkpoint_id=folder / f"{name} by torch")
    options: dict[str, Any] = {"extra": EXTRA, "trainable_only": case.trainable_only}
    checkpoint.save(folder / f"{name} by ours", model, optimizers, **options).wait()
    saving = checkpoint.save(folder / f"{name} by without waiting", model, optimizers, wait=False, **options)
    train(model, optimizers, range(2, 3))  # at once
    saving.wait()
    return expected


def load(folder: Path, name: str, saved_by: str, by: str, expected: dict[str, Any]) -> None:
    case, path = CASES[name], folder / f"{name} by {saved_by}"
    model, optimizers = made = case.make(99)
    extra: dict[str, Any] = {"step": 0, "none": torch.ones(0, 3), "numbers": torch.zeros(2, dtype=torch.int64)}
    if by == "ours":
        extra = checkpoint.load(path, model, optimizers, trainable_only=case.trainable_only)
    else:
        state: dict[str, Any] = {
            "model": get_model_state_dict(model, options=case.options),
            "optimizer": get_optimizer_state_dict(model, optimizers, options=case.options),
            **extra,
        }
        dcp.load(state, checkpoint_id=path)
        extra = {name: state[name] for name in EXTRA}
        set_model_state_dict(model, state["model"], options=dataclasses.replace(case.options, strict=False))
        set_optimizer_state_dict(model, optimizers, state["optimizer"])
    assert extra["step"] == 2
    assert extra["none"].shape == (0, 3)
    assert extra["numbers"].tolist() == [3, 4]
    found = whole(case, made)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, Tensor):
            assert found[key].dtype == value.dtype, key
            assert_same(found[key], value, rtol=0, atol=0, name=key)
        else:
            assert found[key] == value, key


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]]]:
    """Returns the folder with all checkpoints, and what each case held."""
    folder = tmp_path_factory.mktemp("saved")

    def body(rank: int, _: int) -> dict[str, dict[str, Any]]:
        found = {}
        for name in CASES:
            found[name] = save(folder, name)
            end_of_part()
        return found

    return folder, run_ranks(4, body, timeout=300)[0]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_all_bits_are_loaded(world_size: int, saved: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    """By day each case is loaded on every number of ranks, each time in another of the five ways."""
    folder, expected = saved
    ways = [(saved_by, by) for saved_by in SAVERS for by in LOADERS if (saved_by, by) != ("torch", "torch")]
    checks = [
        (f"{name}, saved by {saved_by}, loaded by {by}", functools.partial(load, folder, name, saved_by, by, held))
        for i, (name, held) in enumerate(expected.items())
        for j, (saved_by, by) in enumerate(ways)
        if NIGHTLY or (i + j + world_size) % len(ways) == 0
    ]
    run_checks(world_size, checks, timeout=600)


def test_replicas_share_the_work(saved: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    """Of HSDP no byte is written twice: the files have as many bytes as those of plain sharding."""
    folder, _ = saved
    sizes = {name: sum(path.stat().st_size for path in (folder / f"{name} by ours").glob("*.distcp")) for name in CASES}
    assert sizes["HSDP"] < 1.05 * sizes["uneven"]
