"""Tests that a load makes the states that an optimizer does not have yet, as its own steps would have made them.

The oracle is the run that saved: its states, whole, and its next steps on the same number of ranks.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate

from fsdp2 import checkpoint, flatten_optimizer, fully_shard, muon
from helpers import run_checks, run_ranks

Made = tuple[nn.Module, torch.optim.Optimizer]


class Scaled(nn.Module):
    """A layer of odd sizes, and a parameter without dims."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.linear, self.scale = nn.Linear(5, 3), nn.Parameter(torch.tensor(1.5 + seed))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.scale


def reduced(value: Tensor) -> Tensor:
    """Returns a DTensor with sums of all ranks on each of them, where it was to be reduced."""
    if isinstance(value, DTensor) and any(each.is_partial() for each in value.placements):
        return value.redistribute(placements=[Replicate()])
    return value


class Unusual(torch.optim.Optimizer):
    """Sums of other shapes than the parameter's, a list of tensors, a number, and states of no parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "history": []})
        self.steps: list[int] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps.append(0)
        for group in self.param_groups:
            group["history"] = [*group["history"], torch.tensor(len(self.steps))]
        whole = self.state["whole"]
        whole["steps"] = whole.get("steps", 0) + 1
        whole["rates"] = whole.get("rates", torch.zeros(3)) + torch.arange(3.0)
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state, squares = self.state[p], p.grad.square()
            state.setdefault("inside", {"squares": torch.zeros_like(p, dtype=torch.float64)})["squares"].add_(squares)
            state["mask"], state["kind"] = squares > 0, "squares"
            sums = [reduced(squares.sum(dim, keepdim=True)) for dim in range(p.dim())]
            state["sums"] = [new + old for new, old in zip(sums, state.get("sums", [0.0] * len(sums)), strict=True)]
            state["count"] = state.get("count", 0) + 1
            for each in state["sums"]:
                p.sub_(p.grad / (1 + each) * whole["rates"].sum().item() / 100 * (1 + state["count"]))

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"of its own": {"steps": len(self.steps)}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.steps = [0] * state_dict["of its own"]["steps"]


KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, amsgrad=True),
    "flat": lambda params: flatten_optimizer(torch.optim.AdamW(params, lr=1e-2)),
    "ASGD": lambda params: torch.optim.ASGD(params, lr=1e-2),
    "NAdam in bf16": lambda params: torch.optim.NAdam(params, lr=1e-2),  # its product has fp32, which torch converts
    "muon": lambda params: muon([p for p in params if p.dim() == 2], lr=1e-2),
    "LBFGS": lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=2, history_size=2),
    "unusual": Unusual,
}


def make(kind: str, seed: int) -> Made:
    model = fully_shard(Scaled(seed).to(torch.bfloat16 if "bf16" in kind else None))
    return model, KINDS[kind]([*model.parameters()])


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    x = torch.linspace(-1, 1, 35, dtype=next(model.parameters()).dtype).reshape(7, 5)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        return loss

    loss = closure()
    optimizer.step(closure) if isinstance(optimizer, torch.optim.LBFGS) else optimizer.step()
    return loss.item()


def whole(value: Any) -> Any:
    """Returns a value with full tensors, as lists in which they can be compared."""
    if isinstance(value, dict):
        return {key: whole(each) for key, each in value.items()}
    if isinstance(value, list):
        return [whole(each) for each in value]
    if isinstance(value, Tensor):
        return (value.full_tensor() if isinstance(value, DTensor) else value).tolist()
    return value


def all_of(optimizer: torch.optim.Optimizer) -> Any:
    return {key: whole(each) for key, each in optimizer.state_dict().items()}


def laid_out(value: Any) -> Any:
    """Returns the dtypes and placements in a value, and the classes of others."""
    if isinstance(value, dict):
        return {key: laid_out(each) for key, each in value.items()}
    if isinstance(value, list):
        return [laid_out(each) for each in value]
    return getattr(value, "dtype", None), getattr(value, "placements", type(value))


def never(*args: Any) -> None:
    raise AssertionError("a load makes no step")


def test_every_kind_of_state(tmp_path: Path) -> None:
    """What has stepped on DTensors gets DTensors again, on any number of ranks, also from torch's folders."""

    def check(kind: str, folder: Path, is_saving: bool, size: int) -> Any:
        model, optimizer = made = make(kind, 0)
        if is_saving:
            step(*made)
            step(*made)
            checkpoint.save(folder / kind / "ours", model, optimizer)
            checkpoint.save(folder / kind / "ours by FQN", model, optimizer, flat_keys=True)
            if kind in ("AdamW", "ASGD"):
                weights, states = get_state_dict(model, optimizer)
                dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder / kind / "torch")
                states = get_optimizer_state_dict(
                    model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
                )
                dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder / kind / "torch by FQN")
        states = all_of(optimizer) if is_saving else None
        layout = laid_out(optimizer.state_dict()["state"])
        losses = [step(*made) for _ in range(2)] if is_saving else []
        for name in sorted(each.name for each in (folder / kind).iterdir() if each.is_dir() and each.name[0] != "."):
            other, fresh = again = make(kind, 1)
            if is_saving and "FQN" in name:  # not fresh: what it has is replaced
                for _ in range(3):
                    step(*again)
            handle = fresh.register_step_pre_hook(never)
            checkpoint.load(folder / kind / name, other, fresh)
            handle.remove()
            expected = states if is_saving else saved[kind][0]
            assert all_of(fresh) == expected
            if is_saving and kind != "LBFGS":
                assert laid_out(fresh.state_dict()["state"]) == layout
            new = [step(*again) for _ in range(2)]
            assert new == losses if is_saving else new == pytest.approx(saved[kind][1], rel=1e-4)
        return states, losses

    def body(is_saving: bool, rank: int, size: int) -> Any:
        return {kind: check(kind, tmp_path, is_saving, size) for kind in KINDS}

    saved = run_ranks(3, functools.partial(body, True))[0]
    for size in (1, 2):
        run_ranks(size, functools.partial(body, False))


def states_end(folder: Path) -> None:
    """An optimizer that has stepped has no states behind the load of one that has not."""
    model, optimizer = make("AdamW", 0)
    checkpoint.save(folder / "a", model, optimizer)
    other, stepped = again = make("AdamW", 1)
    step(*again)
    checkpoint.load(folder / "a", other, stepped)
    assert not stepped.state
    assert step(*again) == step(model, optimizer)
    model, optimizer = make("unusual", 0)
    checkpoint.save(folder / "b", model, optimizer)
    other, stepped = again = make("unusual", 1)
    step(*again)
    step(*again)
    empty = {"state": {}, "param_groups": [{"params": ["linear.weight", "linear.bias"], "lr": 0.5}]}
    dcp.save({"model": get_model_state_dict(model), "optimizer": empty}, checkpoint_id=folder / "torch")
    checkpoint.load(folder / "torch", other, stepped, strict=False)
    assert [*stepped.state] == [other.scale], "the saved run had no such parameter"
    assert stepped.param_groups[0]["lr"] == 0.5
    step(*again)
    checkpoint.load(folder / "b", other, stepped)
    assert not stepped.state
    assert step(*again) == step(model, optimizer)


def frozen_again(folder: Path) -> None:
    """Parameters that are frozen when their states are loaded."""
    model, optimizer = made = make("AdamW", 0)
    step(*made)
    checkpoint.save(folder / "a", model, optimizer)
    other, fresh = make("AdamW", 1)
    other.linear.requires_grad_(False)
    checkpoint.load(folder / "a", other, fresh)
    assert whole(fresh.state_dict()["state"]) == whole(optimizer.state_dict()["state"])


def weights_stay(folder: Path) -> None:
    """The decay of some optimizers does not depend on the learning rate."""
    model, optimizer = made = make("AdamW", 0)
    step(*made)
    checkpoint.save(folder / "a", model, optimizer)
    other, fresh = make("AdamW", 1)
    before = whole(other.state_dict())
    fresh.register_step_post_hook(never)
    checkpoint.load(folder / "a", other, fresh, weights=False)
    assert whole(other.state_dict()) == before
    assert len(fresh.state) == 3


def other_optimizers_are_refused(folder: Path) -> None:
    model, optimizer = made = make("AdamW", 0)
    step(*made)
    checkpoint.save(folder / "a", model, optimizer)
    other, _ = make("AdamW", 1)
    fresh = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    with pytest.raises(ValueError, match=r"expected optimizer\.param_groups\.0\.momentum"):
        checkpoint.load(folder / "a", other, fresh)
    assert not fresh.state
    larger = Scaled(1)
    larger.linear = nn.Linear(5, 4)
    fully_shard(larger)
    fresh = torch.optim.AdamW(larger.parameters(), lr=1e-2)
    with pytest.raises(ValueError, match=r"linear\.weight\.\w+: expected a state of a parameter of shape \[4, 5\]"):
        checkpoint.load(folder / "a", larger, fresh, weights=False)
    assert not fresh.state


def options_of_others(folder: Path) -> None:
    """A group gets the options that its first parameter had, or keeps its own. Groups do not share tensors."""
    model = fully_shard(Scaled(0))
    weight, bias = model.linear.weight, model.linear.bias

    def load(*groups: tuple[list[Any], Any], **options: Any) -> list[Any]:
        optimizer = torch.optim.SGD([{"params": params, "lr": lr} for params, lr in groups])
        checkpoint.load(folder / "a", model, optimizer, **options)
        return [group["lr"] for group in optimizer.param_groups]

    saved = torch.optim.SGD([{"params": [weight, bias], "lr": torch.tensor(0.25)}], foreach=True)
    for flat_keys in (False, True):
        checkpoint.save(folder / "a", model, saved, flat_keys=flat_keys)
        assert load(([], 7.0), ([bias], 6.0), ([weight], 5.0)) == [7.0, 0.25, 0.25]
        assert load(([weight, bias], 6.0)) == [0.25]
        assert load(([model.scale], 6.0), ([bias], 6.0), strict=False) == [6.0, 0.25]
        first, second = load(([weight], 6.0), ([bias], 6.0))
        assert first is not second
        with pytest.raises(ValueError, match=r"expected optimizer\.param_groups\.new 0\.lr"):
            load(([model.scale], 6.0), ([weight, bias], 6.0))


CHECKS = {
    each.__name__: each
    for each in (options_of_others, states_end, frozen_again, weights_stay, other_optimizers_are_refused)
}


def test_what_is_loaded(tmp_path: Path) -> None:
    for name in CHECKS:
        (tmp_path / name).mkdir()
    run_checks(2, [(name, functools.partial(check, tmp_path / name)) for name, check in CHECKS.items()])
