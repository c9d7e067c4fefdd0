"""`flatten_optimizer`: parameters and states get the bits that they get one by one, whatever a program does meanwhile.

The oracle is the same optimizer, as torch has it, on a second sharded model, on the same ranks.
"""

import copy
import pickle
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn, optim
from torch.amp import GradScaler
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import lr_scheduler

from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, clip_grad_norm_, flatten_optimizer, fully_shard
from fsdp2.engine.owners import sharded_owner
from helpers import NIGHTLY, Differences, run_checks, run_ranks, world_sizes
from scenarios import Net

Make = Callable[..., optim.Optimizer]

# Classes that compute element by element, in all their ways to do so.
ELEMENTWISE: dict[str, Make] = {
    "SGD": partial(optim.SGD, lr=0.1, momentum=0.5, nesterov=True, weight_decay=0.1),
    "SGD foreach, no momentum": partial(optim.SGD, lr=0.1, foreach=True, maximize=True),
    "SGD fused": partial(optim.SGD, lr=0.1, momentum=0.5, weight_decay=0.1, fused=True),
    "SGD fused, no momentum": partial(optim.SGD, lr=0.1, fused=True),
    "Adam": partial(optim.Adam, amsgrad=True, weight_decay=0.1),
    "Adam fused": partial(optim.Adam, fused=True, amsgrad=True),
    "AdamW": partial(optim.AdamW),
    "AdamW foreach": partial(optim.AdamW, foreach=True, maximize=True),
    "AdamW fused": partial(optim.AdamW, fused=True),
    "AdamW fused, rate in a tensor": lambda p: optim.AdamW(p, fused=True, lr=torch.tensor(0.01)),
    "Adagrad": partial(optim.Adagrad, lr_decay=0.1, initial_accumulator_value=0.1),
    "Adagrad fused": partial(optim.Adagrad, fused=True, weight_decay=0.1),
    "Adadelta": partial(optim.Adadelta, weight_decay=0.1),
    "Adamax foreach": partial(optim.Adamax, foreach=True),
    "ASGD": partial(optim.ASGD, lr=0.1, t0=3),
    "NAdam": partial(optim.NAdam, decoupled_weight_decay=True, weight_decay=0.1),
    "NAdam foreach": partial(optim.NAdam, foreach=True),
    "RAdam": partial(optim.RAdam, weight_decay=0.1),
    "RMSprop": partial(optim.RMSprop, momentum=0.5, centered=True),
    "Rprop": partial(optim.Rprop, lr=0.01),
    "AdamW without eps": partial(optim.AdamW, eps=0.0),  # 0 / 0 in padding
}
REFUSED: dict[str, Make] = {
    "Adafactor": optim.Adafactor,
    "LBFGS": optim.LBFGS,
    "Muon": lambda params: optim.Muon([p for p in params if p.dim() == 2]),
    "SparseAdam": lambda params: optim.SparseAdam([*params]),
}


def test_every_optimizer_of_torch_is_known() -> None:
    classes = {name for name, value in vars(optim).items() if isinstance(value, type)} - {"Optimizer"}
    assert classes == {*REFUSED, *(name.split()[0] for name in ELEMENTWISE)}


class Pair:
    """Two models with equal weights, and an optimizer of each; the second is flat."""

    def __init__(
        self, make: Make, dtype: torch.dtype = torch.float32, shard: Callable[[nn.Module], Any] = fully_shard
    ) -> None:
        self.models = [self._model(dtype, shard) for _ in range(2)]
        self._make = make
        self.optimizers = [self.optimizer(model) for model in self.models]
        flatten_optimizer(self.optimizers[1])
        self.names = [name for name, _ in self.models[0].named_parameters()]

    @staticmethod
    def _model(dtype: torch.dtype, shard: Callable[[nn.Module], Any]) -> Any:
        torch.manual_seed(1)
        model = Net(depth=1).to(dtype)
        for block in model.blocks:
            shard(block)
        return shard(model)

    def optimizer(self, model: nn.Module) -> optim.Optimizer:
        """No decay for vectors, as trainers do it, where the class has any."""
        if "weight_decay" not in getattr(self._make, "keywords", {}):
            return self._make(model.parameters())
        vectors = [p for p in model.parameters() if p.dim() == 1]
        others = [p for p in model.parameters() if p.dim() != 1]
        return self._make([{"params": others}, {"params": vectors, "weight_decay": 0.0}])

    def each(self, do: Callable[[Any, Any], None]) -> None:
        """Calls `do(model, optimizer)` for both."""
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            do(model, optimizer)

    def backward(self, seed: int) -> None:
        batch = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed * 10 + dist.get_rank()))
        for model in self.models:
            model(batch.to(next(model.parameters()).dtype)).square().mean().backward()

    def draw_gradients(self, seed: int) -> None:
        """Gradients of parts of parameters that nothing has computed: they cost no forward and no communication."""
        for model in self.models:
            draw = torch.Generator("cpu").manual_seed(seed * 10 + dist.get_rank())
            for param in model.parameters():
                if param.requires_grad:
                    gradient = torch.zeros_like(param.detach())
                    local = gradient.to_local()
                    local.copy_(torch.randn(local.shape, generator=draw, device="cpu"))
                    param.grad = gradient

    def step(self, *args: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.step(*args)
            optimizer.zero_grad()

    def compare(self, when: str) -> None:
        first, second = (dict(model.named_parameters()) for model in self.models)
        for name in self.names:
            assert same(first[name], second[name]), f"{when}: {name}"

    def compare_states(self, when: str) -> None:
        """Names, kinds and bits of the state dicts."""
        first, second = (optimizer.state_dict() for optimizer in self.optimizers)
        assert first["param_groups"] == second["param_groups"]
        assert first["state"].keys() == second["state"].keys()
        for i, state in first["state"].items():
            assert state.keys() == second["state"][i].keys(), (when, i)
            for name, value in state.items():
                assert same(value, second["state"][i][name]), f"{when}: {name} of {self.names[i]}"


def same(one: Any, other: Any) -> bool:
    """True of equal bits, and equal distribution."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return bool(one == other)
    if type(one) is not type(other) or one.shape != other.shape or one.dtype != other.dtype:
        return False
    if isinstance(one, DTensor) and isinstance(other, DTensor):
        return one.placements == other.placements and same(one.to_local(), other.to_local())
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def take_steps(pair: Pair, steps: int, prepare: Callable[[int], object]) -> None:
    """Compares after each step, before which `prepare(step)` makes the gradients.

    What differs on one rank is raised at the end: others would wait for it.
    """
    differences = Differences()
    for step in range(steps):
        prepare(step)
        pair.step()
        with differences.noted():
            pair.compare(f"step {step}")
    with differences.noted():
        pair.compare_states("at the end")
    differences.raise_first()


def train_at_random(pair: Pair, steps: int, seed: int, begin: int = 0) -> None:
    """Freezes and thaws, leaves gradients out, accumulates, changes rates, and exchanges states; from step `begin` on.

    Ranks draw alike.
    """
    draw = random.Random(seed)

    def set_frozen(names: set[str]) -> None:
        for model in pair.models:
            for name, param in model.named_parameters():
                param.requires_grad_(name not in names)

    def prepare(step: int) -> None:
        if draw.random() < 0.2 and step >= begin:
            set_frozen({name for name in pair.names[1:] if draw.random() < 0.3})
        elif draw.random() < 0.2:
            set_frozen(set())
        if step % 3:
            pair.draw_gradients(step)
        elif draw.random() < 0.5:
            pair.each(lambda model, _: model.set_requires_gradient_sync(False))
            pair.backward(100 + step)
            pair.each(lambda model, _: model.set_requires_gradient_sync(True))
        if not step % 3:
            pair.backward(step)
        if draw.random() < 0.1:
            pair.backward(200 + step)
        leaves_out = step >= begin and draw.random() < 0.4
        left_out = {name for name in pair.names if draw.random() < 0.3} if leaves_out else set()
        for model in pair.models:
            for name, param in model.named_parameters():
                if name in left_out:
                    param.grad = None
        if draw.random() < 0.2:
            factor = draw.choice([0.5, 2.0])
            for optimizer in pair.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = group["lr"] * factor
        if draw.random() < 0.15:  # each goes on from what the other has saved
            saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in pair.optimizers]
            for optimizer, state in zip(pair.optimizers, reversed(saved), strict=True):
                optimizer.load_state_dict(state)

    take_steps(pair, steps, prepare)


@pytest.mark.parametrize("ranks", world_sizes(2, nightly=(1, 3, 4)))
def test_training_at_random(ranks: int) -> None:
    """Shards have other lengths, and some are empty. Other numbers of ranks run at night."""

    def train(name: str) -> None:
        # torch's own can't step with momentum on some parameters that have one and others that have none yet.
        begin = 1 if name == "SGD fused" else 0
        train_at_random(Pair(ELEMENTWISE[name]), 40 if NIGHTLY else 7, seed=ranks, begin=begin)

    run_checks(ranks, [(name, partial(train, name)) for name in ELEMENTWISE], timeout=120)


# ---- ways to train ---------------------------------------------------------------------------------------------------


def hsdp(module: nn.Module) -> Any:
    return fully_shard(module, mesh=init_device_mesh("cpu", (2, dist.get_world_size() // 2)))


def offloaded(module: nn.Module) -> Any:
    return fully_shard(module, offload_policy=CPUOffloadPolicy(pin_memory=False))


def mixed(module: nn.Module) -> Any:
    return fully_shard(module, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


def train(pair: Pair, steps: int = 3, change: Callable[[int], object] = lambda _: None) -> None:
    """`change(step)` comes between the backward of a step and the step."""

    def prepare(step: int) -> None:
        pair.backward(step)
        change(step)

    take_steps(pair, steps, prepare)


adamw, sgd = partial(optim.AdamW, weight_decay=0.1), partial(optim.SGD, lr=0.1, momentum=0.5)


def check_ways() -> None:
    for shard in (hsdp, offloaded, mixed):
        train(Pair(adamw, shard=shard))
    train(Pair(sgd, torch.bfloat16))
    train(Pair(partial(optim.AdamW, fused=True), torch.bfloat16))


def check_clipping() -> None:
    """A norm, then a step: the same function has clipped both."""
    pair = Pair(adamw)
    for step in range(3):
        pair.backward(step)
        norms = [clip_grad_norm_(model.parameters(), 0.01) for model in pair.models]
        assert torch.equal(norms[0], norms[1])
        pair.step()
    pair.compare("clipped")


def check_schedules_and_hooks() -> None:
    pair = Pair(adamw)
    schedules = [lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5) for optimizer in pair.optimizers]
    seen: list[str] = []
    flat = pair.optimizers[1]
    assert type(flat).__name__ == "AdamW"
    assert isinstance(flat, optim.AdamW)
    assert flatten_optimizer(flat) is flat
    flat.register_step_pre_hook(lambda o, *_: seen.append("before") if o is flat else None)
    flat.register_step_post_hook(lambda o, *_: seen.append("after") if o is flat else None)
    for step in range(4):
        pair.backward(step)
        pair.step()
        for schedule in schedules:
            schedule.step()
    assert seen == ["before", "after"] * 4
    pair.compare("scheduled")


def check_schedule_before_flattening() -> None:
    """A schedule has wrapped the step of the class before."""
    pair = Pair(sgd)
    optimizer = sgd(pair.models[1].parameters())
    schedule = lr_scheduler.ExponentialLR(optimizer, 0.5)
    pair.optimizers = [sgd(pair.models[0].parameters()), flatten_optimizer(optimizer)]
    for step in range(3):
        pair.backward(step)
        pair.step()
        schedule.step()
        for group in pair.optimizers[0].param_groups:
            group["lr"] *= 0.5
    pair.compare("scheduled")
    assert any(isinstance(key, nn.Parameter) and not isinstance(key, DTensor) for key in steps_of(optimizer)._live)


def steps_of(optimizer: Any) -> Any:
    return optimizer._fsdp2_flat_steps


def check_closures() -> None:
    """It is called once, with gradients cleared inside."""
    pair = Pair(adamw)
    for step in range(3):
        for model, optimizer in zip(pair.models, pair.optimizers, strict=True):

            def closure(model: Any = model, optimizer: Any = optimizer, step: int = step) -> Tensor:
                optimizer.zero_grad()
                loss = model(torch.full((2, 5), 0.1 * step + dist.get_rank())).square().mean()
                loss.backward()
                return loss

            assert isinstance(optimizer.step(closure), Tensor)
    pair.compare("closures")


def check_scaler() -> None:
    """Fused optimizers unscale by themselves, others get unscaled gradients; a step with an infinity is left out."""
    for make in (adamw, partial(optim.AdamW, fused=True), partial(optim.SGD, lr=0.1, momentum=0.5, fused=True)):
        pair = Pair(make)
        scalers = [GradScaler("cpu", init_scale=4.0, growth_interval=2) for _ in range(2)]
        for step in range(4):
            batch = torch.full((2, 5), float("inf") if step == 2 else 0.1 * step)
            for model, optimizer, scaler in zip(pair.models, pair.optimizers, scalers, strict=True):
                scaler.scale(model(batch).square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
            first, second = ([p.grad for p in model.parameters()] for model in pair.models)
            assert all(map(same, first, second)), "gradients are left unscaled"
            for optimizer in pair.optimizers:
                optimizer.zero_grad()
            pair.compare(f"scaled {step}")


def check_groups_that_come_later() -> None:
    pair = Pair(lambda params: adamw([*params][:3]))
    for step in range(4):
        if step == 2:
            pair.each(lambda model, o: o.add_param_group({"params": [*model.parameters()][3:], "lr": 0.1}))
        pair.backward(step)
        pair.step()
    pair.compare("later")
    pair.compare_states("later")


def check_plain_parameters_beside() -> None:
    """Ignored ones, stepped on one by one."""

    def shard(module: nn.Module) -> Any:
        return fully_shard(module, ignored_params={p for n, p in module.named_parameters() if n.endswith("head.bias")})

    pair = Pair(adamw, shard=shard)
    train(pair, change=lambda _: pair.each(lambda model, _: dist.all_reduce(model.head.bias.grad)))


def check_step_in_backward() -> None:
    """A few parameters at a time; then all at once; and the other way round."""
    for make in (adamw, partial(optim.AdamW, fused=True)):
        pair = Pair(make)
        for step in range(6):
            pair.each(lambda model, o, step=step: model.set_optimizer_in_backward(None if step in (2, 3) else o))
            pair.backward(step)
            if step in (2, 3):
                pair.step()
            pair.each(lambda _, o: o.zero_grad())
            pair.compare(f"step {step}")
        pair.compare_states("in backward")


def check_replaced_parameters() -> None:
    """Local tensors and dtypes are changed between steps, and between backward and step."""
    pair = Pair(sgd)
    for step in range(8):
        if step == 2:
            pair.each(lambda model, _: setattr(model.head.weight, "data", model.head.weight.data * 2))
        if step == 4:
            pair.each(lambda model, _: model.double())
            pair.optimizers = [sgd(pair.models[0].parameters()), flatten_optimizer(sgd(pair.models[1].parameters()))]
        pair.backward(step)
        if step == 6:
            pair.each(lambda model, _: setattr(model.stem.bias, "data", model.stem.bias.data + 1))
        pair.step()
        pair.compare(f"step {step}")
    pair.compare_states("replaced")


def check_gradients_of_users() -> None:
    """Placed otherwise, or of no reduction."""
    pair = Pair(partial(optim.AdamW, foreach=False))

    def change(step: int) -> None:
        for model in pair.models:
            model.stem.weight.grad = model.stem.weight.grad * 2
            if step % 2:
                model.head.weight.grad = model.head.weight.grad.redistribute(placements=[dist.tensor.Replicate()])

    train(pair, 5, change)


def check_states_that_users_change() -> None:
    pair = Pair(adamw)

    def change(step: int) -> None:
        for model, optimizer in zip(pair.models, pair.optimizers, strict=True):
            weight = model.head.weight
            if step == 1:
                optimizer.state[weight]["exp_avg"].mul_(2)
            if step == 2:
                optimizer.state[weight]["step"].fill_(7)
            if step == 3:
                optimizer.state[weight]["exp_avg_sq"] = optimizer.state[weight]["exp_avg_sq"] * 3
            if step == 4:
                optimizer.state.pop(weight)
                other = optimizer.state[model.stem.weight]["exp_avg"]
                other.data = other.data * 2
            if step == 5:
                optimizer.state.clear()

    train(pair, 6, change)


def check_options_that_change() -> None:
    pair = Pair(adamw)

    def change(step: int) -> None:
        for optimizer in pair.optimizers:
            optimizer.param_groups[0]["maximize"] = step == 1
            for group in optimizer.param_groups:
                group["fused"], group["betas"] = step in (2, 3), (0.5, 0.9 + 0.01 * step)

    train(pair, 6, change)


def check_large_and_small_spans() -> None:
    """As with millions of elements: runs that are not copied, also none of whose gradients are copied."""
    for small, large in ((0, 1 << 20), (0, 0)):
        with mock.patch.multiple("fsdp2.optim.steps", SMALL_NUMEL=small, _LARGE_NUMEL=large):
            train_at_random(pair := Pair(partial(optim.AdamW, eps=0.0)), 6, seed=7)
            train_at_random(Pair(ELEMENTWISE["SGD"]), 6, seed=8)
            for group in {owned.group for p in pair.models[1].parameters() if (owned := sharded_owner(p))}:
                values = group.parameters.buffers.shards.view(torch.float32).clone()
                for param, offset in zip(group.params, group.parameters.buffers.layout.shard_offsets, strict=True):
                    values[offset // 4 : offset // 4 + param.local.numel()] = 0
                assert not values.count_nonzero(), "padding is zero"


def check_modes() -> None:
    """A default device, a default dtype and modes of a user's own are in force."""
    pair = Pair(adamw)
    pair.optimizers[1] = pair.optimizer(pair.models[1])
    with torch.device("meta"):
        flatten_optimizer(pair.optimizers[1])
    torch.set_default_dtype(torch.float64)
    try:
        for step in range(2):
            pair.draw_gradients(step)
            pair.step()
    finally:
        torch.set_default_dtype(torch.float32)
    pair.compare("modes")


def check_copies() -> None:
    pair = Pair(adamw)
    pair.backward(0)
    pair.step()
    copied = copy.deepcopy((pair.models[1], pair.optimizers[1]))
    assert steps_of(copied[1]) is not steps_of(pair.optimizers[1])
    pair.models[1], pair.optimizers[1] = copied
    pair.backward(1)
    pair.step()
    pair.compare("copied")
    pair.compare_states("copied")


def check_pickled() -> None:
    """What comes back has torch's own class: a program that reads the file need not have fsdp2."""
    ways: tuple[dict[str, bool], ...] = ({}, {"offload_states": True}, {"overlap_with_forward": True})
    for options in ways:
        pair = Pair(adamw)
        pair.optimizers[0] = optim.AdamW(pair.models[0].parameters())
        pair.optimizers[1] = flatten_optimizer(optim.AdamW(pair.models[1].parameters()), **options)
        pair.backward(0)
        pair.step()
        for protocol in (2, pickle.HIGHEST_PROTOCOL):
            loaded = pickle.loads(pickle.dumps((pair.models[1], pair.optimizers[1]), protocol))
            assert type(loaded[1]) is optim.AdamW
            pair.models[1], pair.optimizers[1] = loaded[0], flatten_optimizer(loaded[1], **options)
            pair.backward(1)
            pair.step()
            pair.compare("pickled")
            pair.compare_states("pickled")


def check_evaluation_ahead() -> None:
    """What was gathered before a step is not used behind it: steps count in the parameters' versions."""
    pair = Pair(adamw)
    for step in range(3):
        with torch.no_grad():
            first, second = (model(torch.ones(2, 5)) for model in pair.models)
        assert torch.equal(first, second)
        pair.backward(step)
        before = [p._version for p in pair.models[1].parameters()]
        pair.step()
        after = [p._version for p in pair.models[1].parameters()]
        assert all(new > old for new, old in zip(after, before, strict=True))


def check_unsynchronized_gradients() -> None:
    pair = Pair(adamw)
    pair.models[1].set_requires_gradient_sync(False)
    pair.backward(0)
    with pytest.raises(RuntimeError, match="not synchronised between ranks yet"):
        pair.optimizers[1].step()


CHECKS = {name: value for name, value in vars().items() if name.startswith("check_")}


def test_ways_to_train() -> None:
    run_checks(2, [*CHECKS.items()], timeout=120)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def test_checkpoints(tmp_path: Path) -> None:
    """Saved flat by three ranks, loaded plain by two; and the other way round. All go on with equal bits."""

    def options(pair: Pair, i: int) -> Any:
        return get_optimizer_state_dict(pair.models[i], pair.optimizers[i])

    def save(*_: Any) -> None:
        for name in ("AdamW", "AdamW fused", "SGD"):
            pair = Pair(ELEMENTWISE[name])
            for step in range(2):
                pair.draw_gradients(step)
                pair.step()
            for i in range(2):
                saved = {"model": pair.models[i].state_dict(), "optimizer": options(pair, i)}
                dcp.save(saved, checkpoint_id=tmp_path / f"{name} {i}")

    def load(*_: Any) -> None:
        for name in ("AdamW", "AdamW fused", "SGD"):
            pair = Pair(ELEMENTWISE[name])
            for i in range(2):
                state = {"model": pair.models[i].state_dict(), "optimizer": options(pair, i)}
                dcp.load(state, checkpoint_id=tmp_path / f"{name} {1 - i}")
                pair.models[i].load_state_dict(state["model"])
                set_optimizer_state_dict(pair.models[i], pair.optimizers[i], state["optimizer"])
            pair.compare_states(f"{name} loaded")
            for step in range(2):
                pair.draw_gradients(step)
                pair.step()
                pair.compare(f"{name} {step}")
            pair.compare_states(f"{name} trained")

    run_ranks(3, save)
    run_ranks(2, load)
