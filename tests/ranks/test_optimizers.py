"""Tests torch's optimizers and learning-rate schedulers on sharded parameters: each trains like on the plain model.

test_autograd and test_settings have optimizers in backward, test_sharded_view optimizers that are built at unusual
times, test_checkpoint checkpoints of AdamW.
"""

import copy
import gc
import weakref
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
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import lr_scheduler

from fsdp2 import fully_shard
from helpers import alone, assert_same, assert_shard_of, run_checks, run_ranks
from scenarios import TOLERANCE, Net, Run, blocks, check, loss_of

Make = Callable[..., optim.Optimizer]

STEADY = {"lr": 0.05, "eps": 1e-3}  # where a gradient is 0 but for rounding, g / |g| would blow the rounding up

OPTIMIZERS: dict[str, Make] = {
    "SGD": partial(optim.SGD, lr=0.1, momentum=0.5, nesterov=True, weight_decay=0.1),
    "SGD one by one": partial(optim.SGD, lr=0.1, momentum=0.5, dampening=0.2, foreach=False),
    "SGD fused": partial(optim.SGD, lr=0.1, fused=True),
    "SGD fused, with momentum": partial(optim.SGD, lr=0.1, momentum=0.5, weight_decay=0.1, fused=True),
    "SGD fused, rate in a tensor": lambda p: optim.SGD(p, fused=True, lr=torch.tensor(0.1)),
    "Adam": partial(optim.Adam, amsgrad=True, **STEADY),
    "Adam one by one": partial(optim.Adam, foreach=False, weight_decay=0.1, **STEADY),
    "Adam fused": partial(optim.Adam, fused=True, amsgrad=True, **STEADY),
    "AdamW": partial(optim.AdamW, foreach=True, maximize=True, **STEADY),
    "AdamW one by one": partial(optim.AdamW, foreach=False, **STEADY),
    "AdamW fused": partial(optim.AdamW, fused=True, weight_decay=0.1, **STEADY),
    "AdamW fused, rate in a tensor": lambda p: optim.AdamW(p, fused=True, lr=torch.tensor(0.05), eps=1e-3),
    "Adagrad": partial(optim.Adagrad, lr_decay=0.1, **STEADY),
    "Adagrad fused": partial(optim.Adagrad, fused=True, weight_decay=0.1, **STEADY),
    "Adagrad one by one": partial(optim.Adagrad, foreach=False, **STEADY),
    "RMSprop": partial(optim.RMSprop, momentum=0.5, centered=True, **STEADY),
    "RMSprop one by one": partial(optim.RMSprop, foreach=False, **STEADY),
    "NAdam": partial(optim.NAdam, **STEADY),
    "RAdam": partial(optim.RAdam, **STEADY),
    "Adadelta": partial(optim.Adadelta, **STEADY),
    "Adamax": partial(optim.Adamax, **STEADY),
    "ASGD": partial(optim.ASGD, lr=0.1, t0=1),
    "Rprop": partial(optim.Rprop, lr=0.01),
    "Rprop, foreach": partial(optim.Rprop, lr=0.01, foreach=True),
}


def in_two_groups(model: nn.Module, make: Make) -> optim.Optimizer:
    """As trainers do it: no decay for vectors."""
    vectors = [p for p in model.parameters() if p.dim() == 1]
    matrices = [p for p in model.parameters() if p.dim() != 1]
    return make([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}])


def test_training() -> None:
    """Rows of 5 and 3, which do not divide, and two groups of options."""

    def scenario(run: Run, name: str) -> None:
        model = run.build(Net, depth=1)
        blocks(run, model)
        decays = "weight_decay" in getattr(OPTIMIZERS[name], "keywords", {})
        optimizer = in_two_groups(model, OPTIMIZERS[name]) if decays else OPTIMIZERS[name](model.parameters())
        for step in range(2):
            run.step(f"step {step}", model, optimizer, loss_of(model(run.batch(seed=step))))

    check(scenario, name=tuple(OPTIMIZERS))


def test_what_is_done_to_an_optimizer_between_steps_counts() -> None:
    """Elementwise steps run on local tensors, beside the user's optimizer, whose state shows what they use."""

    def scenario(run: Run, name: str) -> None:
        model = run.build(Net, depth=1)
        blocks(run, model)
        params = list(model.parameters())
        optimizer = OPTIMIZERS[name](params[:-1])

        def step(what: str) -> None:
            run.step(what, model, optimizer, loss_of(model(run.batch(seed=len(run.shown)))))

        step("first")
        step("second")
        for entry in optimizer.state.values():
            for key, value in entry.items():
                if isinstance(value, Tensor) and value.dim():
                    value.mul_(0.5)
                    entry[key] = value * 2.0
        step("with a state of other tensors")
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] * 0.5
        step("with a loaded state and another rate")
        optimizer.add_param_group({"params": params[-1:]})
        step("with one more parameter")
        optimizer.state.pop(params[0], None)
        handle = optimizer.register_step_pre_hook(lambda *_: halve(params))
        step("with a hook that replaces gradients")
        handle.remove()
        optimizer.state.clear()
        step("without a state")
        for param in params:
            for key, value in optimizer.state.get(param, {}).items():
                if isinstance(value, Tensor) and value.dim():
                    run._show("shard", key, value)

    check(scenario, name=("AdamW one by one", "AdamW", "SGD", "RMSprop", "NAdam", "ASGD"))


def halve(params: list[Any]) -> None:
    """Puts other gradients in the place of those that there are."""
    for param in params:
        if param.grad is not None:
            param.grad = param.grad * 0.5


def test_local_steps_leave_an_optimizer_as_it_was_when_they_fail() -> None:
    run_ranks(2, failing_step)


def failing_step(rank: int, world_size: int) -> None:
    gc.disable()
    model = fully_shard(nn.Linear(3, 5))
    optimizer = optim.AdamW(model.parameters(), foreach=False)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    groups, before = optimizer.param_groups, [*optimizer.state]
    optimizer.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        optimizer.step()
    assert optimizer.param_groups is groups
    assert groups[0]["params"] == before == list(model.parameters())
    optimizer.param_groups[0]["betas"] = (0.9, 0.999)
    optimizer.step()
    assert all(type(each["exp_avg"]).__name__ == "ShardedDTensor" for each in optimizer.state.values())
    assert {int(each["step"]) for each in optimizer.state.values()} == {2}
    moments = [weakref.ref(each["exp_avg"].to_local()) for each in optimizer.state.values()]
    del optimizer, before, groups
    assert [each() for each in moments] == [None, None], "it goes without a collection of garbage"


def test_a_local_step_that_failed_leaves_nothing_to_the_next() -> None:
    """Which the optimizer does itself, as it has hooks. The first one has added a state when it fails."""

    def body(rank: int, _: int) -> None:
        model = fully_shard(nn.Linear(3, 5))
        optimizer = optim.AdamW(model.parameters(), foreach=False)
        model(torch.ones(2, 3)).sum().backward()
        optimizer.param_groups[0]["eps"] = None
        with pytest.raises(TypeError):
            optimizer.step()
        optimizer.param_groups[0]["eps"] = 1e-8
        model(torch.ones(2, 3)).sum().backward()  # adds to the gradients: they are others than in the failed step
        optimizer.register_step_pre_hook(lambda *_: None)
        optimizer.step()
        for param in model.parameters():
            entry = optimizer.state[param]
            assert entry["step"] == 1
            torch.testing.assert_close(entry["exp_avg"].to_local(), 0.1 * param.grad.to_local())

    run_ranks(2, body)


MIXED: dict[str, Make] = {
    **{name: OPTIMIZERS[name] for name in ("SGD", "Adagrad fused", "AdamW fused", "Rprop, foreach")},
    "Adam": partial(optim.Adam, foreach=True, amsgrad=True, weight_decay=0.1, maximize=True, **STEADY),
    "Adam fused": partial(optim.Adam, fused=True, **STEADY),
    "AdamW": partial(optim.AdamW, foreach=True, weight_decay=0.1, **STEADY),
    "NAdam": partial(optim.NAdam, foreach=True, weight_decay=0.1, decoupled_weight_decay=True, **STEADY),
    "RAdam": partial(optim.RAdam, foreach=True, weight_decay=0.1, **STEADY),
    "Adagrad": partial(optim.Adagrad, foreach=True, weight_decay=0.1, **STEADY),
    "RMSprop": partial(optim.RMSprop, foreach=True, momentum=0.5, centered=True, **STEADY),
    "Adadelta": partial(optim.Adadelta, foreach=True, maximize=True, **STEADY),
    "Adamax": partial(optim.Adamax, foreach=True, **STEADY),
    "ASGD": partial(optim.ASGD, foreach=True, lr=0.1, t0=1),
}


def test_plain_and_sharded_parameters_together() -> None:
    """Ignored ones, whose gradients the user averages. All at once, in lists that hold both."""

    def scenario(run: Run, name: str) -> None:
        model = run.build(Net, depth=1)
        ignored = {model.head.weight, model.blocks[0].up.bias}
        for module in (model.blocks[0], model):
            run.shard(module, ignored_params=ignored)
        optimizer = MIXED[name](model.parameters())
        for step in range(3):
            loss_of(model(run.batch(seed=step))).backward()
            for param in ignored if run.sharded else ():
                assert param.grad is not None
                dist.all_reduce(param.grad)
                param.grad /= run.world_size
            optimizer.step()
            optimizer.zero_grad()
            for fqn, param in model.named_parameters():
                run.value(f"step {step}: {fqn}", param)

    check(scenario, name=tuple(MIXED))


def test_muon() -> None:
    """It needs whole matrices. Computes in bf16, in which sums in another order differ visibly: here in fp64."""

    def scenario(run: Run) -> None:
        model = run.build(Net, depth=1)
        for param in model.parameters():
            param.requires_grad_(param.dim() == 2)
        blocks(run, model)
        optimizer = optim.Muon([p for p in model.parameters() if p.requires_grad], lr=0.05)
        # Torch 2.15 asks for the dtype; before, it calls the method.
        with mock.patch.object(Tensor, "bfloat16", Tensor.double), mock.patch("torch.bfloat16", torch.float64):
            for step in range(3):
                run.step(f"step {step}", model, optimizer, loss_of(model(run.batch(seed=step))))

    check(scenario)


def test_one_that_cannot_step_says_so() -> None:
    def body(rank: int, _: int) -> None:
        plain = nn.Linear(3, 2)
        optim.Adafactor(plain.parameters()).step()
        model = fully_shard(nn.Linear(3, 2))
        model(torch.ones(2, 3)).sum().backward()
        with pytest.raises(NotImplementedError, match=r"Adafactor .* can't step sharded parameters\. Use another"):
            optim.Adafactor(model.parameters()).step()

    run_ranks(2, body)


class Halving(optim.SGD):
    """Of a user's own: goes on as long as the loss halves."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = closure()
        for _ in range(5):
            super().step()
            before, loss = loss, closure()
            if loss > 0.9 * before:
                break
        return loss


WITH_CLOSURES: dict[str, Make] = {
    "one's own": partial(Halving, lr=0.1),
    "LBFGS": partial(optim.LBFGS, lr=0.5, max_iter=4),
    "LBFGS, line search": partial(optim.LBFGS, lr=0.5, max_iter=4, line_search_fn="strong_wolfe"),
}


def test_a_closure_returns_the_loss_of_all_ranks() -> None:
    """By which a line search decides, on every rank alike. Sums in place of means, a number in place of a tensor."""

    def scenario(run: Run, name: str, sums: bool, as_number: bool, by_keyword: bool) -> None:
        model = run.build(lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2)))
        run.shard(model)
        optimizer = WITH_CLOSURES[name](model.parameters())
        if run.sharded and sums:
            model.set_gradient_divide_factor(1.0)

        def closure() -> Tensor | float:
            optimizer.zero_grad()
            terms = (model(run.batch(seed=0)) - 0.5).square()
            loss = terms.sum() / 12 if sums else terms.mean()
            loss.backward()
            return loss.item() if as_number else loss

        for step in range(2):
            loss = optimizer.step(closure=closure) if by_keyword else optimizer.step(closure)
            run.value(f"loss {step}", torch.as_tensor(loss, dtype=torch.float64).detach())
            run.value(f"kind {step}", isinstance(loss, Tensor))
        run.params("trained", model)

    check(scenario, name=tuple(WITH_CLOSURES), sums=(False, True), as_number=(False, True), by_keyword=(False,))
    check(scenario, name=("one's own", "LBFGS"), sums=(False,), as_number=(False,), by_keyword=(True,))


def test_an_optimizer_that_only_returns_the_loss_gets_that_of_the_rank() -> None:
    """No communication: trainers pass a closure to every optimizer."""

    def scenario(run: Run) -> None:
        model = run.build(nn.Linear, 5, 3)
        run.shard(model)
        own: list[Tensor] = []

        def closure() -> Tensor:
            own.append(loss_of(model(run.batch(seed=0))))
            own[-1].backward()
            return own[-1]

        loss = optim.SGD(model.parameters(), lr=0.1).step(closure)
        run.value("is the very same", loss is own[0])

    check(scenario)


NOT_FOR_DTENSORS: dict[str, Make] = {
    "SGD fused": partial(optim.SGD, lr=0.1, fused=True),
    "Adagrad fused": partial(optim.Adagrad, fused=True, **STEADY),
    "Adafactor": partial(optim.Adafactor, lr=0.05, foreach=False),
    "Adafactor foreach": partial(optim.Adafactor, lr=0.05, foreach=True),
    "Rprop": partial(optim.Rprop, lr=0.05, foreach=False),
    "Rprop foreach": partial(optim.Rprop, lr=0.05, foreach=True),
    "LBFGS": partial(optim.LBFGS, lr=0.1, max_iter=2),
    "Muon": partial(optim.Muon, lr=0.05, adjust_lr_fn="match_rms_adamw"),
}


class Wide(nn.Sequential):
    """Matrices of more columns than rows, which is how Muon's bf16 arithmetic is the same cut or not."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 4, bias=False))


def test_an_optimizer_that_dtensor_does_not_know_raises() -> None:
    """Which ones those are depends on torch. One that steps must step as on the plain model, never otherwise."""

    def train_by_closure(run: Run, name: str) -> dict[str, Tensor]:
        model = run.build(Wide)
        run.shard(model)
        optimizer = NOT_FOR_DTENSORS[name](model.parameters())

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model(run.batch(6, seed=1)))
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
        return {fqn: p.detach() for fqn, p in model.named_parameters()}

    plain = alone(lambda: {name: train_by_closure(Run(), name) for name in NOT_FOR_DTENSORS})

    def trains_or_raises(name: str) -> None:
        try:
            trained = train_by_closure(Run(dist.get_rank(), 2, []), name)
        except (RuntimeError, NotImplementedError) as error:
            assert "placement" in str(error) or "shard" in str(error), error  # noqa: PT017
            return
        for fqn, value in trained.items():  # a hundredth of a step
            assert_shard_of(value, plain[name][fqn], rtol=0, atol=5e-4, name=fqn)

    run_checks(2, [(name, partial(trains_or_raises, name)) for name in NOT_FOR_DTENSORS])


Schedule = Callable[[optim.Optimizer], Any]

SCHEDULES: dict[str, Schedule] = {
    "warm-up, then cosine": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(o, 4)], milestones=[2]
    ),
    "one cycle, momentum too": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.5, total_steps=6),
    "by the loss": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=0.5),
    "a function for each group": lambda o: lr_scheduler.LambdaLR(o, [lambda n: 0.9**n, lambda n: 0.5**n]),
}


def test_learning_rate_schedules() -> None:
    """Interrupted in the middle: a new optimizer and schedule go on from the state of the old ones."""

    def start(model: nn.Module, name: str) -> tuple[optim.Optimizer, Any]:
        optimizer = in_two_groups(model, partial(optim.SGD, lr=0.2, momentum=0.5))
        return optimizer, SCHEDULES[name](optimizer)

    def scenario(run: Run, name: str) -> None:
        model = run.build(Net)
        blocks(run, model)
        optimizer, schedule = start(model, name)
        for step in range(6):
            if step == 3:
                states = optimizer.state_dict(), schedule.state_dict()
                optimizer, schedule = start(model, name)
                optimizer.load_state_dict(states[0])
                schedule.load_state_dict(states[1])
            run.step(f"step {step}", model, optimizer, loss_of(model(run.batch(seed=step))))
            metric = [torch.tensor(float(2 - step % 2))] if name == "by the loss" else []
            schedule.step(*metric)
            run.value("rates", [(group["lr"], group["momentum"]) for group in optimizer.param_groups])

    check(scenario, name=tuple(SCHEDULES))


# ---- checkpoints -----------------------------------------------------------------------------------------------------

SAVED = ("Adam fused", "RMSprop", "NAdam")


def train(run: Run, model: nn.Module, optimizer: optim.Optimizer, steps: range) -> None:
    for step in steps:
        loss_of(model(run.batch(seed=step))).backward()
        optimizer.step()
        optimizer.zero_grad()


def build(run: Run, name: str, seed: int = 1) -> tuple[nn.Module, optim.Optimizer]:
    model = run.build(Net, depth=1, seed=seed)
    blocks(run, model)
    return model, in_two_groups(model, partial(OPTIMIZERS[name], weight_decay=0.1))


def by_name(model: nn.Module, optimizer: optim.Optimizer) -> dict[str, Any]:
    return {fqn: dict(optimizer.state[p]) for fqn, p in model.named_parameters()}


def test_checkpoints(tmp_path: Path) -> None:
    """Saved by two ranks, loaded by three: moments, sums and counts must cross, and training must go on."""

    def whole(name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
        run = Run()
        model, optimizer = build(run, name)
        train(run, model, optimizer, range(2))
        states = copy.deepcopy(by_name(model, optimizer))
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # casts some of it, as any loading does
        train(run, model, optimizer, range(2, 4))
        return states, {name: p.detach() for name, p in model.named_parameters()}

    plain = alone(lambda: {name: whole(name) for name in SAVED})

    def save(name: str) -> None:
        run = Run(dist.get_rank(), 2, [])
        model, optimizer = build(run, name)
        train(run, model, optimizer, range(2))
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_optimizer_state_dict(model, optimizer, options=options)
        if run.rank == 0:
            for fqn, expected in plain[name][0].items():
                assert set(state["state"][fqn]) == set(expected)
                for key, value in expected.items():
                    assert_same(state["state"][fqn][key], value, **TOLERANCE, name=f"{fqn} {key}")
        model_state, optimizer_state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=tmp_path / name)

    def load(name: str) -> None:
        run = Run(dist.get_rank(), 3, [])
        model, optimizer = build(run, name, seed=99)
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(states, checkpoint_id=tmp_path / name)
        set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
        train(run, model, optimizer, range(2, 4))
        for fqn, param in model.named_parameters():
            assert_shard_of(param, plain[name][1][fqn], **TOLERANCE, name=fqn)

    for world_size, step in ((2, save), (3, load)):
        run_checks(world_size, [(f"{step.__name__} {name}", partial(step, name)) for name in SAVED])


class Scaled(nn.Linear):
    """With a scalar, whose state torch leaves plain."""

    def __init__(self) -> None:
        super().__init__(5, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


WAYS: dict[str, Callable[[nn.Module, optim.Optimizer, dict[str, Any]], None]] = {
    "by the optimizer": lambda model, optimizer, state: optimizer.load_state_dict(state),
    "by torch.distributed": set_optimizer_state_dict,
    "by torch.distributed, cut": partial(set_optimizer_state_dict, options=StateDictOptions(full_state_dict=True)),
    "by torch.distributed, sent": partial(
        set_optimizer_state_dict, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    ),
}


def test_a_whole_state_is_cut() -> None:
    """Of training in one process, given to a new optimizer of sharded parameters, which goes on with it."""

    def scenario(run: Run, name: str, way: str) -> None:
        model, plain = run.build(Scaled), run.build(Scaled)
        make = OPTIMIZERS[name]
        before = make(plain.parameters())
        train(Run(), plain, before, range(2))
        state = before.state_dict() if way == "by the optimizer" else get_optimizer_state_dict(plain, before)
        model.load_state_dict(plain.state_dict())
        run.shard(model)
        optimizer = make(model.parameters())
        WAYS[way](model, optimizer, copy.deepcopy(state))
        train(run, model, optimizer, range(2, 4))
        for fqn, param in model.named_parameters():
            run.value(fqn, param)
            local = [each.to_local() for each in optimizer.state[param].values() if isinstance(each, DTensor)]
            assert all(each.untyped_storage().nbytes() == 8 * each.numel() for each in local), fqn

    check(scenario, world_size=2, name=tuple(OPTIMIZERS), way=("by the optimizer",))
    check(scenario, world_size=3, name=("AdamW", "SGD one by one", "ASGD"), way=tuple(WAYS))


def test_a_state_that_is_distributed_stays_as_it_is() -> None:
    """With a number in it for each parameter, of a user's own optimizer."""

    def body(rank: int, _: int) -> None:
        model = fully_shard(Scaled().double())
        optimizer = optim.AdamW(model.parameters())
        train(Run(rank, 2, []), model, optimizer, range(1))
        for state in optimizer.state.values():
            state["count"] = torch.tensor(2.0, dtype=torch.float64)
        optimizer.load_state_dict(optimizer.state_dict())
        assert all(type(state["count"]) is Tensor for state in optimizer.state.values())

    run_ranks(2, body)
