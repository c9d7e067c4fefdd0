"""Tests checkpoints of what ranks do not hold alike: experts, pipeline stages, matrices that ranks divide, and in
torchtitan's folders. The oracle is what the saving run held, whole, by name.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp2 import checkpoint, fully_shard, muon, split_matrices
from helpers import one_mesh, run_checks, run_ranks
from models import OddMLP

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:torch")

Made = tuple[nn.Module, list[torch.optim.Optimizer]]
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def whole(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    """Returns all that this rank takes part in, whole. Every rank of a mesh must call it."""
    found: dict[str, Any] = dict(get_model_state_dict(model))
    for each in optimizers:
        found |= get_optimizer_state_dict(model, each, options=FLAT)
    return {key: value.full_tensor() if isinstance(value, DTensor) else value for key, value in found.items()}


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() <= expected.keys()
    for key, value in found.items():
        is_same = torch.equal(value, expected[key]) if isinstance(value, Tensor) else value == expected[key]
        assert is_same, f"{key}: {value} and {expected[key]}"


def step(model: nn.Module, optimizers: list[torch.optim.Optimizer], seed: int) -> None:
    """Steps on gradients that depend on names and elements alone."""
    for name, param in model.named_parameters():
        generator = torch.Generator().manual_seed(seed + sum(map(ord, name)))
        gradient: Tensor = torch.randn(param.shape, generator=generator)
        if isinstance(param, DTensor):
            gradient = distribute_tensor(gradient, param.device_mesh, param.placements, src_data_rank=None)
        param.grad = gradient
    for each in optimizers:
        each.step()
        each.zero_grad()


def adamw(model: nn.Module, lr: float = 1e-2) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=lr)]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, 6, 5)), nn.Parameter(torch.randn(4, 5, 6))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.up @ self.down).sum(0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.experts = nn.LayerNorm(6), Experts()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts(self.norm(x))


def experts(seed: int) -> Made:
    """On four ranks, pairs have two of four experts each, which the two pairs shard; all ranks shard the rest."""
    torch.manual_seed(seed)
    model = nn.Sequential(Block(), Block())
    if dist.get_world_size() == 4:
        mesh = one_mesh((2, 2), ("dp", "ep"))
        for block in model:
            for name, param in [*block.experts.named_parameters()]:
                setattr(block.experts, name, nn.Parameter(distribute_tensor(param, mesh["ep"], [Shard(0)])))
            fully_shard(block.experts, mesh=mesh["dp"])
    fully_shard(model)
    return model, adamw(model)


class Stage(nn.Module):
    def __init__(self, blocks: dict[str, nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks.values():
            x = block(x)
        return x


def stage(seed: int) -> Made:
    """On four ranks, two have the first stage, and two the second, each with an optimizer of its own."""
    torch.manual_seed(seed)
    blocks: dict[str, nn.Module] = {str(i): nn.Linear(3 + i, 4 + i) for i in range(4)}
    is_staged = dist.get_world_size() == 4
    if is_staged:
        kept = ("0", "1") if dist.get_rank() < 2 else ("2", "3")
        blocks = {name: block for name, block in blocks.items() if name in kept}
    model = Stage(blocks)
    fully_shard(model, mesh=one_mesh((2, 2), ("pp", "dp"))["dp"] if is_staged else None)
    groups = [{"params": [p for p in model.parameters() if p.dim() == d], "lr": 1e-2 * d} for d in (1, 2)]
    return model, [torch.optim.AdamW(groups)]


def split(seed: int) -> Made:
    torch.manual_seed(seed)
    model = fully_shard(OddMLP())
    parts = split_matrices(model)
    return model, [muon(parts.matrices, lr=1e-2), torch.optim.AdamW(parts.others, lr=1e-2)]


CASES: dict[str, Callable[[int], Made]] = {"experts": experts, "stages": stage, "split": split}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("saved")

    def body(rank: int, _: int) -> dict[str, dict[str, Any]]:
        found = {}
        for name, make in CASES.items():
            model, optimizers = made = make(0)
            step(*made, 1)
            checkpoint.save(folder / name, model, optimizers, extra={"step": 1}, flat_keys=name == "stages")
            found[name] = whole(*made)
        return found

    of_ranks = run_ranks(4, body)
    return folder, {name: {k: v for held in of_ranks for k, v in held[name].items()} for name in CASES}


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_what_ranks_hold_differently(world_size: int, saved: tuple[Path, dict[str, dict[str, Any]]]) -> None:
    folder, expected = saved

    def check(name: str) -> None:
        model, optimizers = made = CASES[name](9)
        assert checkpoint.load(folder / name, model, optimizers) == {"step": 1}
        assert_equal(whole(*made), expected[name])
        if world_size < 4:
            assert whole(*made).keys() == expected[name].keys(), "nothing is lost"

    run_checks(world_size, [(name, functools.partial(check, name)) for name in CASES])


def test_stages_that_share_names(tmp_path: Path) -> None:
    def body(rank: int, _: int) -> None:
        model, optimizers = stage(0)
        with pytest.raises(ValueError, match=r"param_groups\.1\.params: expected one value .* flat_keys=True"):
            checkpoint.save(tmp_path / "a", model, optimizers)
        checkpoint.save(tmp_path / "a", model, optimizers, flat_keys=True)

    run_ranks(4, body)


# ---- optimizers that are made otherwise


@pytest.mark.parametrize("flat_keys", [False, True])
def test_options_follow_parameters(flat_keys: bool, tmp_path: Path) -> None:
    """Param groups in another order, and twice as many; gradients stay. In one process, without process groups."""

    def make(seed: int, *dims: tuple[int, ...]) -> Made:
        torch.manual_seed(seed)
        model = OddMLP()
        groups = [[p for p in model.parameters() if p.dim() in each] for each in dims]
        return model, [torch.optim.AdamW([{"params": ps, "lr": (i + 1) / 8 + seed} for i, ps in enumerate(groups)])]

    for saved, *loaded in ([(1,), (2,)], [(2,), (1,)]), ([(1, 2)], [(2,), (1,)], [(1, 2)]):
        model, optimizers = made = make(0, *saved)
        step(*made, 1)
        checkpoint.save(tmp_path / "a", model, optimizers, flat_keys=flat_keys)
        for dims in loaded:
            other, others = made_again = make(1, *dims)
            gradients = [torch.full_like(p, float("nan")) for p in other.parameters()]
            for param, gradient in zip(other.parameters(), gradients, strict=True):
                param.grad = gradient
            checkpoint.load(tmp_path / "a", other, others)
            assert_equal(whole(*made_again), whole(*made))
            assert all(p.grad is gradient for p, gradient in zip(other.parameters(), gradients, strict=True))


class WithExtraState(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear, self.own = nn.Linear(2, 2), {"scale": seed, "history": torch.full((2,), float(seed))}

    def get_extra_state(self) -> dict[str, Any]:
        return self.own

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.own = state


def test_models_in_wrappers(tmp_path: Path) -> None:
    """torch.compile and activation checkpointing add names, which are not saved. An extra state may be a dict."""
    ways: tuple[Callable[[nn.Module], Any], ...] = (lambda module: module, torch.compile, checkpoint_wrapper)
    for saved in ways:
        plain = WithExtraState(1)
        checkpoint.save(tmp_path / "a", saved(plain), adamw(plain))
        for loaded in ways:
            other = WithExtraState(2)
            checkpoint.load(tmp_path / "a", loaded(other), adamw(other))
            assert torch.equal(other.linear.weight, plain.linear.weight)
            assert other.own["scale"] == 1
            assert torch.equal(other.own["history"], torch.ones(2))


# ---- other libraries' folders


def titan_state(model: nn.Module, optimizers: list[torch.optim.Optimizer], step: int) -> dict[str, Any]:
    """Returns what torchtitan gives to `dcp.save`: the model's keys at the root, and the optimizer's with FQNs."""
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizers[0], lambda _: 1.0).state_dict()
    optimizer = {k: v for each in optimizers for k, v in get_optimizer_state_dict(model, each, options=FLAT).items()}
    train_state = {"step": torch.tensor(step, dtype=torch.int32), "ntokens_seen": torch.tensor(7 * step)}
    loader = {"world_size": 2, "dp_rank_0": b"rows", "dp_rank_1": b"others"}
    rest = {"optimizer": optimizer, "lr_scheduler": schedule, "dataloader": loader, "train_state": train_state}
    return {**get_model_state_dict(model), **rest}


def test_torchtitan(tmp_path: Path) -> None:
    def make(seed: int) -> Made:
        torch.manual_seed(seed)
        model = fully_shard(OddMLP())
        return model, adamw(model, lr=0.1 / (1 + seed))

    def save(rank: int, _: int) -> dict[str, Any]:
        model, optimizers = made = make(0)
        step(*made, 1)
        state = titan_state(*made, 5)
        dcp.save(state, checkpoint_id=tmp_path / "titan")
        extra = {key: state[key] for key in ("lr_scheduler", "dataloader", "train_state")}
        checkpoint.save(tmp_path / "ours", model, optimizers, extra=extra, flat_keys=True)
        return whole(*made)

    def load(rank: int, _: int) -> None:
        for name in ("titan", "ours"):
            model, optimizers = made = make(3)
            extra = checkpoint.load(tmp_path / name, model, optimizers)
            assert_equal(whole(*made), expected)
            assert extra["train_state"]["step"] == 5
            assert extra["dataloader"]["dp_rank_1"] == b"others"
            model, optimizers = made = make(3)  # as torchtitan resumes
            state = titan_state(*made, 0)
            dcp.load(state, checkpoint_id=tmp_path / name)
            set_model_state_dict(model, {key: state[key] for key in get_model_state_dict(model)})
            set_optimizer_state_dict(model, optimizers, state["optimizer"], options=FLAT)
            assert_equal(whole(*made), expected)
            assert state["train_state"]["step"] == 5

    expected = run_ranks(2, save)[0]
    run_ranks(3, load)
