"""Tests that users see the same sharded parameters outside forward and backward, and never stale unsharded ones."""

import zlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fsdp2 import FSDPModule, fully_shard
from helpers import fake_world
from matrix import TOPOLOGIES, Matrix, MatrixRun
from scenarios import WRAPS, MayFail, Net, Run, Uneven, Wrap, check, kept, leaves, loss_of, sgd, whole
from weight_changes import CHANGES

matrix = Matrix()


def train(run: Run, model: nn.Module, seed: int) -> Tensor:
    loss = loss_of(model(run.batch(seed=seed)))
    loss.backward()
    return loss


def evaluate(run: Run, model: nn.Module, seed: int, mode: Any = torch.no_grad) -> Tensor:
    with mode():
        return model(run.batch(seed=seed))


# ---- who sees what ---------------------------------------------------------------------------------------------------


@matrix.over(wrap=WRAPS)
def parameters_are_the_same_sharded_objects_after_anything(run: MatrixRun, wrap: Wrap) -> None:
    """An optimizer, an EMA or a checkpoint made at any point holds what is trained; a full copy would be lost."""

    def forward_only(run: Run, model: nn.Module) -> None:
        model(run.batch(seed=1))

    def failing_forward(run: Run, model: nn.Module) -> None:
        with pytest.raises(RuntimeError):
            model(run.batch(3, seed=1))

    def child(run: Run, model: nn.Module) -> None:
        if isinstance(model.blocks[0], FSDPModule) or not run.sharded:
            evaluate(run, model.blocks[0], 1)

    def unused_backward(run: Run, model: nn.Module) -> None:
        model(run.batch(seed=2))
        (loss_of(model(run.batch(seed=1))) * 0).backward()

    def gradient_of_inputs(run: Run, model: nn.Module) -> None:
        x = run.batch(seed=1).requires_grad_()
        torch.autograd.grad(loss_of(model(x)), x)

    def gradient_with_graph(run: Run, model: nn.Module) -> None:
        x = run.batch(seed=1).requires_grad_()
        torch.autograd.grad(loss_of(model(x)), x, create_graph=True)

    def retained(run: Run, model: nn.Module) -> None:
        loss = loss_of(model(run.batch(seed=1)))
        loss.backward(retain_graph=True)
        loss.backward()

    def checkpointed(run: Run, model: nn.Module) -> None:
        for reentrant in (True, False):
            loss_of(checkpoint(model, run.batch(seed=1).requires_grad_(), use_reentrant=reentrant)).backward()

    def unsynchronised(run: Run, model: nn.Module) -> None:
        run.set_sync(model, False)
        train(run, model, 1)
        run.set_sync(model, True)

    def unsharded_by_hand(run: Run, model: nn.Module) -> None:
        if isinstance(model, FSDPModule):
            model.unshard()
            model.reshard()
            model.unshard(async_op=True)
            model.reshard()
            model.unshard(async_op=True).wait()
            evaluate(run, model, 1)
            model.reshard()

    events = (
        forward_only,
        lambda run, model: train(run, model, 1),
        lambda run, model: evaluate(run, model, 1),
        lambda run, model: evaluate(run, model, 1, torch.inference_mode),
        failing_forward,
        child,
        unused_backward,
        gradient_of_inputs,
        gradient_with_graph,
        retained,
        checkpointed,
        unsynchronised,
        unsharded_by_hand,
    )
    model = run.build(Net)
    wrap(run, model)
    params = dict(model.named_parameters())
    for number, event in enumerate(events):
        event(run, model)
        now = dict(model.named_parameters())
        assert [*now] == [*params]
        changed = [name for name in now if now[name] is not params[name]]
        run.value(f"{number} {event.__name__}: replaced", changed)
        run.params(f"{number} {event.__name__}", model)
        if run.sharded:
            assert all(isinstance(value, DTensor) for value in model.state_dict().values())
    train(run, model, 2)
    run.grads("in the end", model)


@matrix.over(when=("after evaluation", "between", "after backward"), wrap=WRAPS)
def an_optimizer_built_at_any_time_trains(run: MatrixRun, when: str, wrap: Wrap) -> None:
    """After a forward, between forward and backward, after evaluation: it is given what is updated later."""
    model = run.build(Net)
    wrap(run, model)
    if when == "after evaluation":
        evaluate(run, model, 9)
    output = model(run.batch(seed=0))
    if when == "after backward":
        loss_of(output).backward()
    optimizer = sgd(model)
    if when != "after backward":
        loss_of(output).backward()
    run.step("first", model, optimizer)
    for step in range(2):
        run.step(f"step {step}", model, optimizer, loss_of(model(run.batch(seed=step))))


def test_inside_a_forward_modules_have_unsharded_parameters() -> None:
    """Their shapes, their values and `requires_grad` are those of the plain model; hooks of users see them as well."""

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(7, 3))
            self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
            self.seen: list[Any] = []

        def forward(self, x: Tensor) -> Tensor:
            for p in self.parameters():
                self.seen.append((type(p).__name__, tuple(p.shape), p.requires_grad, p.is_leaf, p.is_contiguous()))
                self.seen.append(p.detach().clone())
            return x @ self.weight * self.frozen.sum()

    def scenario(run: Run) -> None:
        model = run.build(Looks)
        run.shard(model)
        model.register_forward_pre_hook(lambda module, args: module.seen.append(tuple(module.weight.shape)))
        for step in range(2):
            evaluate(run, model, step) if step else loss_of(model(run.batch(7, seed=step))).backward()
            for i, seen in enumerate(model.seen):
                run.value(f"seen {i}", seen)
            model.seen.clear()
            if step == 0:
                model.zero_grad()

    def with_batches_of_seven(run: Run) -> None:
        batch = run.batch
        run.batch = lambda *shape, seed: batch(7, seed=seed)  # type: ignore[method-assign]
        scenario(run)

    check(with_batches_of_seven)


def test_parameters_are_unsharded_again_after_a_zero_grad_that_raises() -> None:
    class Raises(nn.Linear):
        def zero_grad(self, set_to_none: bool = True) -> None:
            raise ValueError("on purpose")

    with fake_world(1):
        model = fully_shard(Raises(2, 2))
        model.unshard()  # type: ignore[attr-defined]
        full = model.weight
        with pytest.raises(ValueError, match="on purpose"):
            model.zero_grad()
        assert model.weight is full


# ---- stale weights ---------------------------------------------------------------------------------------------------


@matrix.over(change=tuple(CHANGES))
def every_change_of_the_weights_shows_in_the_next_forward(run: MatrixRun, change: str) -> None:
    """Full parameters are left behind in each way there is: by backward, by a forward alone, by evaluation.

    Ways to wrap are dealt to the changes.
    """
    model = run.build(Uneven)
    (whole, kept, leaves)[zlib.crc32(change.encode()) % 3](run, model)
    if isinstance(model, FSDPModule):
        model.set_reshard_after_backward(False)
    train(run, model, 1)
    for seed, mode in enumerate((torch.no_grad, torch.inference_mode, torch.enable_grad)):
        CHANGES[change](model)
        run.rows(f"evaluated {seed}", evaluate(run, model, seed, mode))
    CHANGES[change](model)
    train(run, model, 3)
    run.grads("trained", model)
    CHANGES[change](model)
    model(run.batch(seed=4))
    CHANGES[change](model)
    train(run, model, 5)
    run.grads("after a forward alone", model)
    run.params("last", model)


@matrix.over(wrap=WRAPS)
def steps_between_evaluations_and_forwards_without_backward(run: MatrixRun, wrap: Wrap) -> None:
    """A forward with grad whose backward never comes leaves full copies; the next forward must not use them."""
    model = run.build(Net)
    wrap(run, model)
    optimizer = sgd(model)
    train(run, model, 0)
    for step in range(3):
        run.rows("with grad, no backward", model(run.batch(seed=1)))
        optimizer.step()
        run.rows("evaluated", evaluate(run, model, 1))
        optimizer.step()
        run.rows("evaluated again", evaluate(run, model, 1))
        if wrap is not whole:  # a child that is not sharded itself can't be called alone
            run.rows("child", evaluate(run, model.blocks[0], 1))
            optimizer.step()
            run.rows("child again", evaluate(run, model.blocks[0], 1))
        optimizer.zero_grad()
        loss = loss_of(model(run.batch(seed=step)))
        run.rows("between", evaluate(run, model, 1))
        loss.backward()


@matrix.over(wrap=WRAPS)
def a_change_of_the_weights_between_forward_and_backward_of_another(run: MatrixRun, wrap: Wrap) -> None:
    """Two models: stepping one of them between the forward and the backward of the other changes nothing there."""
    models = run.build(Net), run.build(Net, seed=2)
    for model in models:
        wrap(run, model)
    optimizers = [sgd(model) for model in models]
    waiting = loss_of(models[0](run.batch(seed=0)))
    for step in range(3):
        first, second = models[step % 2], models[1 - step % 2]
        following = loss_of(second(run.batch(seed=step)))
        run.step(f"step {step}", first, optimizers[step % 2], waiting)
        run.rows("evaluated", evaluate(run, first, 1))
        waiting = following


@matrix.over(wrap=WRAPS)
def reshard_after_forward_changed_between_steps(run: MatrixRun, wrap: Wrap) -> None:
    """What a group leaves behind may change from one forward to the next."""
    model = run.build(Net)
    wrap(run, model)
    optimizer = sgd(model)
    for step, reshard in enumerate((False, True, False, False, True)):
        loss = loss_of(model(run.batch(seed=step)))
        if isinstance(model, FSDPModule):
            model.set_reshard_after_forward(reshard, recurse=step != 2)
        run.rows("evaluated", evaluate(run, model, 1))
        run.step(f"step {step}", model, optimizer, loss + loss_of(model(run.batch(seed=step + 9))))


# ---- what is kept ----------------------------------------------------------------------------------------------------


@matrix.over(wrap=WRAPS)
def attributes_of_parameters_before_sharding_are_preserved(run: MatrixRun, wrap: Wrap) -> None:
    """Attributes, `requires_grad`, hooks; on the object that `parameters()` gives, through steps and evaluation."""
    model = run.build(Net)
    calls: list[str] = []
    for name, param in model.named_parameters():
        param.label = f"label of {name}"
        if "blocks.1" in name:
            param.requires_grad_(False)
        else:
            param.register_hook(lambda grad, name=name: calls.append(f"hook {name} {tuple(grad.shape)}"))
            param.register_post_accumulate_grad_hook(lambda p, name=name: calls.append(f"{name} {p.label}"))
    wrap(run, model)
    optimizer = sgd(model)
    for step in range(2):
        run.step(f"step {step}", model, optimizer, loss_of(model(run.batch(seed=step))))
        evaluate(run, model, 1)
        run.value("calls", sorted(calls))
        calls.clear()
        run.value("labels", [p.label for p in model.parameters()])
        run.value("trainable", [p.requires_grad for p in model.parameters()])


@matrix.over()
def buffers_and_modes_are_left_alone(run: MatrixRun) -> None:
    """Buffers that forward changes, train and eval mode, plain attributes: a class swap must not disturb them."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 5)
            self.register_buffer("count", torch.zeros(1, dtype=torch.float64))
            self.register_buffer("hidden", torch.ones(5, dtype=torch.float64), persistent=False)
            self.note = ["kept"]

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            if self.training:
                x = x * self.hidden
            return self.linear(x) * self.count

    model = run.build(lambda: nn.Sequential(Counts(), Counts()))
    for child in model:
        run.shard(child)
    run.shard(model)
    optimizer = sgd(model)
    for step in range(2):
        run.step(f"step {step}", model.train(), optimizer, loss_of(model(run.batch(seed=step))))
        run.rows("evaluated", evaluate(run, model.eval(), 1))
        run.value("buffers", {name: b.item() for name, b in model.named_buffers() if b.numel() == 1})
        run.value("state", sorted(model.state_dict()))
        run.value("note", model[0].note)


@matrix.over(wrap=WRAPS)
def state_dict_and_loading_at_any_point(run: MatrixRun, wrap: Wrap) -> None:
    """Between forward and backward, after evaluation or an error: it is the sharded values, and they load."""
    model = run.build(MayFail)
    wrap(run, model)
    optimizer = sgd(model)
    saved: dict[str, Any] = {}

    def save(name: str) -> None:
        saved[name] = {key: value.detach().clone() for key, value in model.state_dict().items()}
        for key, value in saved[name].items():
            run._show("shard", f"{name}: {key}", value)

    save("first")
    loss = loss_of(model(run.batch(seed=0)))
    save("between")
    run.step("step", model, optimizer, loss)
    evaluate(run, model, 1)
    save("after evaluation")
    model.middle[1].when = "forward"
    with pytest.raises(ValueError, match="on purpose"):
        model(run.batch(seed=1))
    save("after an error in forward")
    model.middle[1].when = "backward"
    loss = loss_of(model(run.batch(seed=1)))
    model.middle[1].when = ""
    with pytest.raises(ValueError, match="on purpose"):
        loss.backward()
    save("after an error in backward")
    model.zero_grad()
    model.load_state_dict(saved["first"])
    run.rows("loaded", evaluate(run, model, 1))
    run.step("loaded", model, optimizer, loss_of(model(run.batch(seed=2))))


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_scenarios_match_the_plain_model(topology: str) -> None:
    matrix.check_on(topology)
