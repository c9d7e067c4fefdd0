"""Tests that autograd gives a sharded model the losses, gradients and errors of a plain one.

A *scenario* is a function of a `Run` that builds a model, trains it in some unusual way, and shows values. It runs
twice: on a plain model and the whole batch, and on forked ranks, each with its rows of the batch; the shown values are
compared. fp64 is used, so that a real difference is not rounding. Most are drawn by a matrix, see matrix.py.
"""

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint

from fsdp2 import full_params, fully_shard
from fsdp2.engine.state import groups_of
from fsdp2.parameters.cut_graphs import without_graph
from helpers import assert_same, run_ranks
from matrix import TOPOLOGIES, Matrix, MatrixRun
from scenarios import (
    WIDTH,
    WRAPS,
    Block,
    MayFail,
    Net,
    Run,
    Wrap,
    blocks,
    check,
    kept,
    leaves,
    loss_of,
    sgd,
    whole,
)

matrix = Matrix()

# ---- graphs: several forwards, several backwards ---------------------------------------------------------------------


@matrix.over(wrap=WRAPS)
def backwards_in_another_order_than_the_forwards(run: MatrixRun, wrap: Wrap) -> None:
    """Interleaved forwards and backwards, the oldest first: the last forward need not be the next back."""
    model = run.build(Net)
    wrap(run, model)
    optimizer = sgd(model)
    for step in range(2):
        first = loss_of(model(run.batch(seed=1)))
        second = loss_of(model(run.batch(seed=2)))
        first.backward()
        third = loss_of(model(run.batch(seed=3)))
        third.backward()
        run.grads("before the last", model)
        run.step(f"step {step}", model, optimizer, second)


@matrix.over(wrap=WRAPS)
def retain_graph_and_backward_again(run: MatrixRun, wrap: Wrap) -> None:
    """The second backward over a graph needs freed weights once more, and its gradients are added."""
    model = run.build(Net)
    wrap(run, model)
    optimizer = sgd(model)
    for step in range(2):
        output = model(run.batch(seed=step))
        loss_of(output).backward(retain_graph=True)
        run.grads("first", model)
        output.square().mean().backward(retain_graph=True)
        run.grads("second", model)
        run.step(f"step {step}", model, optimizer, output.mean())


@matrix.over(wrap=WRAPS)
def separate_losses_over_parts_of_one_graph(run: MatrixRun, wrap: Wrap) -> None:
    """Two outputs of one forward, a backward for each: the first reaches half of the modules and half of the inputs."""

    class TwoTowers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = Block()
            self.left, self.right = Block(), Block()

        def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            both = self.trunk(x * y)
            return self.left(both + x), self.right(both + y)

    model = run.build(TwoTowers)
    wrap(run, model)
    optimizer = sgd(model)
    for step in range(2):
        x, y = (run.batch(seed=seed).requires_grad_() for seed in (step, 7 + step))
        left, right = model(x, y)
        loss_of(right).backward(retain_graph=True)
        run.grads("one", model)
        loss_of(left).backward()
        run.rows("x.grad", x.grad / run.world_size)
        run.rows("y.grad", y.grad / run.world_size)
        run.step(f"step {step}", model, optimizer)


class Recursive(nn.Module):
    """Calls itself."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.own = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, depth: int) -> Tensor:
        x = self.block(x) * self.own
        return x if depth == 0 else self(x, depth - 1) + self.block(x)


@matrix.over(outer=(False, True), wrap=WRAPS)
def a_module_that_calls_itself(run: MatrixRun, outer: bool, wrap: Wrap) -> None:
    """The inner call ends first: it must not take the parameters away from the outer one."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recursive = Recursive()

        def forward(self, x: Tensor) -> Tensor:
            return self.recursive(x, 1) * 2 + self.recursive(x, 0)

    model = run.build(Outer if outer else Recursive)
    if outer and wrap in (blocks, kept):
        run.shard(model.recursive.block)
    wrap(run, model)
    optimizer = sgd(model)
    for step in range(3):
        x = run.batch(seed=step)
        run.step(f"step {step}", model, optimizer, loss_of(model(x) if outer else model(x, 2)))


@matrix.over(wrap=(blocks, kept, leaves))
def a_child_called_alone_before_and_after_the_root(run: MatrixRun, wrap: Wrap) -> None:
    """The child runs outside any pass of the root: first of all, between forward and backward, and after a step."""
    model = run.build(Net)
    wrap(run, model)
    optimizer = sgd(model)
    child = model.blocks[1]
    run.step("child alone", model, optimizer, loss_of(child(run.batch(seed=0))))
    alone = loss_of(child(run.batch(seed=1)))
    together = loss_of(model(run.batch(seed=2)))
    run.step("child, then root", model, optimizer, alone + together)
    together = loss_of(model(run.batch(seed=3)))
    with torch.no_grad():
        run.rows("child in between", child(run.batch(seed=4)))
    alone = loss_of(child(run.batch(seed=5)))
    run.step("root, then child", model, optimizer, alone + together)
    run.step("root", model, optimizer, loss_of(model(run.batch(seed=6))))
    with torch.no_grad():
        run.rows("child last", child(run.batch(seed=7)))


@matrix.over(reshard=(None, True, False))
def one_of_a_list_of_modules_runs(run: MatrixRun, reshard: bool | None) -> None:
    """A list shares one group; a step may run only one of them, or one twice, and the rest waits for nothing."""
    model = run.build(Net)
    run.shard([model.stem, model.head], reshard_after_forward=reshard)
    run.shard(list(model.blocks), reshard_after_forward=reshard)
    run.shard(model, reshard_after_forward=reshard)
    optimizer = sgd(model)
    x = run.batch(seed=1)
    run.step("all", model, optimizer, loss_of(model.head(model.blocks[1](model.stem(x)))))
    run.step("stem only", model, optimizer, loss_of(model.stem(x)))
    run.step("head twice", model, optimizer, loss_of(model.head(model.head(x))))
    with torch.no_grad():
        run.rows("evaluation", model.blocks[2](model.stem(x)))
    run.step("root", model, optimizer, loss_of(model(x)))
    run.step("blocks", model, optimizer, loss_of(model.blocks[2](x)) + loss_of(model.blocks[0](x)))
    run.step("root again", model, optimizer, loss_of(model(x)))


@matrix.over(reshard=(None, True, False))
def lists_of_modules_as_roots(run: MatrixRun, reshard: bool | None) -> None:
    """No module contains a list, so nobody may be left to end its pass."""
    model = run.build(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))))
    for members in ([model[0], model[2]], [model[1], model[3]]):
        run.shard(members, reshard_after_forward=reshard)
    optimizer = sgd(model)
    for seed in range(2):
        run.step(f"all {seed}", model, optimizer, loss_of(model(run.batch(seed=seed))))
        run.step(f"one of each {seed}", model, optimizer, loss_of(model[1](model[2](run.batch(seed=seed)))))


@matrix.over(wrap=WRAPS)
def two_models_call_each_other(run: MatrixRun, wrap: Wrap) -> None:
    """Neither is a part of the other: two roots, two runtimes, one graph. As in a GAN, or with a frozen critic."""
    generator, critic = run.build(Net, depth=1), run.build(Net, depth=2, seed=2)
    for model in (generator, critic):
        wrap(run, model)
    optimizers = [sgd(generator), sgd(critic)]
    for step in range(2):
        made = generator(run.batch(seed=step))
        run.step("critic", critic, optimizers[1], loss_of(critic(made.detach())) - loss_of(critic(run.batch(seed=9))))
        critic.requires_grad_(False)
        run.step("generator", generator, optimizers[0], loss_of(critic(made)))
        run.grads("frozen critic", critic)
        critic.requires_grad_(True)
        loss_of(critic(generator(run.batch(seed=step)))).backward()
        run.grads("both", critic)
        run.step("both", generator, optimizers[0])
        optimizers[1].step()
        run.params("both", critic)
        optimizers[1].zero_grad()


@matrix.over(opaque=(False, True), wrap=WRAPS)
def a_model_called_inside_the_forward_of_another(run: MatrixRun, opaque: bool, wrap: Wrap) -> None:
    """One runtime inside another: the inner one's weights are saved for backward while the outer one's hooks are on."""

    class Hidden:
        """An output that nobody can look into."""

        __slots__ = ("tensor",)

        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    class Inner(nn.Module):
        def __init__(self, opaque: bool) -> None:
            super().__init__()
            self.opaque = opaque
            self.net = Block()
            self.own = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Any:
            y = torch.tanh(self.own(self.net(x)))
            return Hidden(y) if self.opaque else y

    class Outer(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = [inner]  # in a list: not a submodule
            self.block, self.last = Block(), Block()

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = self.inner[0](self.block(x))
                x = x.tensor if isinstance(x, Hidden) else x
            return self.last(x)

    inner = run.build(Inner, opaque)
    outer = run.build(Outer, inner, seed=2)
    for model in (inner, outer):
        wrap(run, model)
    optimizers = sgd(inner), sgd(outer)
    for step in range(3):
        loss_of(outer(run.batch(seed=step))).backward()
        run.step("inner", inner, optimizers[0])
        run.step("outer", outer, optimizers[1])


# ---- what takes part in the graph ------------------------------------------------------------------------------------


@matrix.over(wrap=WRAPS)
def freezing_and_unfreezing_between_steps(run: MatrixRun, wrap: Wrap) -> None:
    """What is reduced together is planned for what is trainable; the plan follows, and frozen gradients stay None."""
    model = run.build(Net)
    wrap(run, model)
    optimizer = sgd(model)
    frozen = ["", "blocks.0", "weight", "", "stem blocks head", "scale", "stem.weight"]
    for step, part in enumerate(frozen):
        for name, param in model.named_parameters():
            param.requires_grad_(not any(p in name for p in part.split()))
        run.step(f"step {step}", model, optimizer, loss_of(model(run.batch(seed=step))))
    model.requires_grad_(False)
    run.rows("all frozen", model(run.batch(seed=8)))
    model.blocks[0].requires_grad_(True)
    run.step("one", model, optimizer, loss_of(model(run.batch(seed=9))))


@matrix.over(wrap=WRAPS)
def freezing_between_forward_and_backward(run: MatrixRun, wrap: Wrap) -> None:
    """Autograd skips a leaf that needs no gradient any more; the full parameter must not take its place."""
    model = run.build(Net)
    wrap(run, model)
    optimizer = sgd(model)
    for step in range(2):
        loss = loss_of(model(run.batch(seed=step)))
        model.stem.weight.requires_grad_(False)
        model.blocks[1].requires_grad_(False)
        run.step(f"step {step}", model, optimizer, loss)
        model.requires_grad_(True)


@matrix.over(wrap=WRAPS)
def inputs_with_gradient(run: MatrixRun, wrap: Wrap) -> None:
    """Positional, keyword and nested inputs; the same leaf every step, on which nothing may be left behind."""

    class Takes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Block(), Block()

        def forward(self, x: Tensor, *, more: dict[str, list[Tensor]], unused: Tensor) -> Tensor:
            return self.a(x) + self.b(more["y"][0])

    model = run.build(Takes)
    wrap(run, model)
    optimizer = sgd(model)
    x, y, z = (run.batch(seed=seed).requires_grad_() for seed in (1, 2, 3))
    for step in range(3):
        loss_of(model(x, more={"y": [y]}, unused=z)).backward()
        run.rows("x.grad", x.grad / run.world_size)
        run.rows("y.grad", y.grad / run.world_size)
        run.value("z.grad", z.grad)
        run.step(f"step {step}", model, optimizer)
    run.value("hooks left on inputs", [len(t._backward_hooks or ()) for t in (x, y, z)])


@matrix.over(wrap=WRAPS)
def shared_modules_and_tensors_stored_on_self(run: MatrixRun, wrap: Wrap) -> None:
    """A module used twice, a loss on a tensor that no module returned: only the graph itself knows who is needed."""

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()
            self.kept: list[Tensor] = []

        def forward(self, x: Tensor) -> None:
            self.kept.append(self.block(x).sin())

    class Uses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.keeps, self.other, self.frozen = Keeps(), Block(), Block().requires_grad_(False)

        def forward(self, x: Tensor) -> None:
            self.keeps(x)
            self.keeps(self.frozen(self.keeps.kept[-1]))
            self.keeps(self.other(self.keeps.kept[-1]))
            self.keeps(self.frozen(x))

    model = run.build(Uses)
    wrap(run, model)
    optimizer = sgd(model)
    for step in range(3):
        model.keeps.kept.clear()
        run.value("nothing", model(run.batch(seed=step)))
        run.step(f"step {step}", model, optimizer, sum(loss_of(t) for t in model.keeps.kept[1:]))


@matrix.over(wrap=(whole, blocks))
def a_penalty_on_the_sharded_parameters_in_the_loss(run: MatrixRun, wrap: Wrap) -> None:
    """Autograd writes into the same `.grad` then, at times a gradient whose local part is an expanded scalar."""
    model = run.build(Net)
    wrap(run, model)
    optimizer = sgd(model)
    for step in range(2):
        loss = loss_of(model(run.batch(seed=step)))
        for param in model.parameters():
            total = 0.1 * param.square().sum() + 0.2 * param.sum()
            loss = loss + (total.full_tensor() if isinstance(total, DTensor) else total)
        run.step(f"step {step}", model, optimizer, loss)


# ---- gradients of gradients, and backward inside forward -------------------------------------------------------------


@matrix.over(wrap=WRAPS)
def gradient_penalty(run: MatrixRun, wrap: Wrap) -> None:
    """Double backward reads the weights again, after the first one is over; so the first can't be the last to free."""
    model = run.build(Net)
    wrap(run, model)
    optimizer = sgd(model)
    for step in range(3):
        x = run.batch(seed=step).requires_grad_()
        output = model(x)
        (slope,) = torch.autograd.grad(output.square().sum(), x, create_graph=True)
        run.rows("slope", slope)
        run.grads("after autograd.grad", model)
        run.params("after autograd.grad", model)
        run.step(f"step {step}", model, optimizer, loss_of(output) + slope.square().mean())


@matrix.over(wrap=WRAPS)
def parameters_are_sharded_and_fresh_after_a_gradient_with_create_graph(run: MatrixRun, wrap: Wrap) -> None:
    """Nobody comes back for that graph: full copies kept for it would be stale after the next change of the weights."""
    model = run.build(Net)
    wrap(run, model)
    params = list(model.parameters())
    for step in range(3):
        x = run.batch(seed=step).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        run.rows("slope", slope)
        with torch.no_grad():
            for param in params:
                param.mul_(0.7)
        run.rows("next", model(x))
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        run.value("the same parameters", all(a is b for a, b in zip(model.parameters(), params, strict=True)))
        run.params(f"step {step}", model)


def slopes(model: nn.Module, xs: list[Tensor]) -> list[Tensor]:
    """Of two forwards, each with a graph of its own."""
    return [torch.autograd.grad(model(x).square().sum(), x, create_graph=True)[0] for x in xs]


@matrix.over(wrap=WRAPS)
def several_backward_passes_through_graphs_of_gradients(run: MatrixRun, wrap: Wrap) -> None:
    """Each reads weights that only the graph of a backward has saved; then they are freed."""
    model = run.build(Net)
    wrap(run, model)
    optimizer = sgd(model)
    for step in range(3):
        xs = [run.batch(seed=2 * step + i).requires_grad_() for i in range(2)]
        first, second = slopes(model, xs)
        first.square().mean().backward()
        run.grads("of the first", model)
        run.step(f"step {step}", model, optimizer, second.square().mean())
        hessian = torch.autograd.functional.hessian(lambda x: model(x).square().sum(), torch.ones(2, WIDTH).double())
        run.value("hessian", hessian)


def test_a_graph_of_gradients_whose_weights_were_freed_says_so() -> None:
    def body(rank: int, _: int) -> None:
        torch.manual_seed(0)
        model = Net()
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        xs = [torch.randn(2, WIDTH, requires_grad=True) for _ in range(2)]
        first, second = slopes(model, xs)
        first.square().mean().backward()
        model(xs[0])
        loss = second.square().mean()
        for backward in (partial(loss.backward, retain_graph=True), lambda: torch.autograd.grad(loss, xs[1])):
            with pytest.raises(RuntimeError, match=r"create_graph=True.*Call backward through it before that"):
                backward()
        model(xs[0]).sum().backward()
        model.set_keep_unsharded_storage(True, recurse=True)
        first, second = slopes(model, xs)
        (expected,) = torch.autograd.grad(second.sum(), xs[1], retain_graph=True)
        first.square().mean().backward()
        model(xs[0])
        assert_same(torch.autograd.grad(second.sum(), xs[1])[0], expected, 0, 0, "kept")

    run_ranks(2, body)


class Pair(nn.Module):
    """Two that share a group, of which a forward may leave out the second."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.last = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, leave_out: bool = False) -> Tensor:
        x = self.stem(x)
        x = torch.tanh(x + self.norm(x))
        return x if leave_out else torch.tanh(x + self.last(x))


def test_a_layer_that_does_not_check_if_its_weight_has_memory() -> None:
    """Of the graph of a backward: reading it would end the process."""

    def body(rank: int, _: int) -> None:
        torch.manual_seed(0)
        model = Pair()
        fully_shard([model.norm, model.last])
        fully_shard(model)
        x = torch.randn(2, WIDTH, requires_grad=True)
        (slope,) = slopes(model, [x])
        model(x).sum().backward()
        model(x, leave_out=True)
        model(x)
        with pytest.raises(RuntimeError, match=r"create_graph=True.*Call backward through it before that"):
            slope.square().sum().backward()
        model(x).sum().backward()

    run_ranks(2, body)


def test_parameters_stay_unsharded_over_a_step_after_a_graph_of_gradients() -> None:
    """It is not gathered again."""

    def body(rank: int, _: int) -> None:
        model = fully_shard(Net(), reshard_after_forward=False)
        model.set_reshard_after_backward(False)
        x = torch.randn(2, WIDTH, requires_grad=True)
        slopes(model, [x])[0].sum().backward()
        with fails_to_gather(model):
            slopes(model, [x])[0].sum().backward()

    run_ranks(2, body)


@contextmanager
def fails_to_gather(model: nn.Module) -> Iterator[None]:
    """What gathers the group of `model` fails."""
    (group,) = groups_of(model)
    kept_comms = group.comms
    group.comms = kept_comms._replace(gathers=None)
    yield
    group.comms = kept_comms


class Potential(nn.Module):
    """Energies, and forces by autograd.grad inside forward."""

    def __init__(self, create_graph: bool = True) -> None:
        super().__init__()
        self.net, self.readout = Net(depth=2), nn.Linear(WIDTH, 1)
        self.create_graph = create_graph

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = self.readout(self.net(x).tanh())
            (force,) = torch.autograd.grad(energy.sum(), x, create_graph=self.create_graph)
        return energy, force


@matrix.over(wrap=WRAPS)
def forces_by_autograd_grad_inside_forward(run: MatrixRun, wrap: Wrap) -> None:
    """A backward pass begins and ends in the middle of a forward: it must neither free what runs nor end the pass."""
    model = run.build(Potential)
    wrap(run, model)
    optimizer = sgd(model)
    for step in range(3):
        energy, force = model(run.batch(seed=step))
        run.rows("energy", energy)
        run.rows("force", force)
        run.params("between", model)
        run.step(f"step {step}", model, optimizer, loss_of(energy) + loss_of(force))
        with torch.no_grad():
            run.rows("evaluated force", model(run.batch(seed=step))[1])
        run.params("evaluated", model)
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.9)
        run.rows("force of new weights", model(run.batch(seed=step))[1])


@matrix.over(wrap=WRAPS)
def hooks_that_call_backward_inside_forward(run: MatrixRun, wrap: Wrap) -> None:
    """Local losses by forward hooks of blocks and by a hook of the head, amid the forward, with gradients delivered."""

    def learn(block: nn.Module, args: Any, output: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            loss_of(output).backward(retain_graph=isinstance(block, nn.Linear))
        return output if isinstance(block, nn.Linear) else output.detach()

    model = run.build(Net)
    for module in (*model.blocks, model.head):
        module.register_forward_hook(learn)
    wrap(run, model)
    optimizer = sgd(model)
    for step in range(3):
        output = model(run.batch(seed=step))
        run.rows(f"output {step}", output)
        run.step(f"step {step}", model, optimizer, output.square().mean())
        with torch.no_grad():
            run.rows(f"evaluated {step}", model(run.batch(seed=step + 9)))


@matrix.over(wrap=WRAPS)
def gradients_by_parameters(run: MatrixRun, wrap: Wrap) -> None:
    """Only full parameters are in the graph: by them, inside full_params, first and second derivatives are exact."""
    model = run.build(Net)
    wrap(run, model)
    optimizer = sgd(model)
    for step in range(2):
        x = Run().batch(seed=step)  # the same rows on every rank: their gradients are those of all
        with full_params(model) if run.sharded else nullcontext(dict(model.named_parameters())) as full:
            loss = loss_of(model(x))
            slopes = torch.autograd.grad(loss, list(full.values()), create_graph=True)
            for (name, _), slope in zip(full.items(), slopes, strict=True):
                run.value(f"slope by {name}", slope)
        run.step(f"penalty {step}", model, optimizer, loss + sum(slope.square().sum() for slope in slopes))
        with full_params(model) if run.sharded else nullcontext(dict(model.named_parameters())) as full:
            chosen = [param for name, param in full.items() if "blocks" in name]
            loss_of(model(run.batch(seed=step))).backward(inputs=chosen)
        run.step(f"some {step}", model, optimizer)
        if run.sharded:
            for options in {}, {"allow_unused": True}:
                loss = loss_of(model(x)) + model.scale.square().sum().full_tensor()
                with pytest.raises(NotImplementedError, match=r"call backward\(inputs=\.\.\.\)"):
                    torch.autograd.grad(loss, list(model.parameters()), **options)
        penalty = sum(param.square().sum() for param in model.parameters())
        for (name, _), slope in zip(
            model.named_parameters(), torch.autograd.grad(penalty, list(model.parameters())), strict=True
        ):
            run.value(f"penalty by {name}", slope.full_tensor() if run.sharded else slope)
        loss_of(model(run.batch(seed=step))).backward(inputs=list(model.blocks.parameters()))
        run.step(f"some sharded {step}", model, optimizer)
        loss_of(model(run.batch(seed=step))).backward(inputs=model.scale)
        run.step(f"one sharded {step}", model, optimizer)


HAS_NO_GRAPH = (
    r"^[\w.]+: a loss is made of its \.grad, which backward\(create_graph=True\).*full_params\(model\) as full"
)
USES_OF_GRADIENTS: dict[str, Callable[[Any], Tensor]] = {
    "whole": lambda gradient: gradient.full_tensor().square().sum(),
    "shards": lambda gradient: gradient.square().sum(),
    "own rows": lambda gradient: gradient.to_local().square().sum(),
    "norm": lambda gradient: gradient.norm() * 0.5,
    "moved": lambda gradient: gradient.redistribute(placements=[Replicate()]).to_local().sum(),
}


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_gradients_without_the_graph_that_was_asked_for() -> None:
    """Their values are right, those of inputs keep their graph; and a loss of `.grad` of parameters raises."""
    accumulations = {"one": [True], "two": [True, True], "the first": [True, False], "the last": [False, True]}

    def scenario(run: Run, wrap: Wrap, parts: str, waits: bool) -> None:
        model = run.build(Net)
        wrap(run, model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=waits)
        for step in range(2):
            for part, builds in enumerate(accumulations[parts]):
                run.set_sync(model, not waits or part == len(accumulations[parts]) - 1)
                x = run.batch(seed=3 * step + part).requires_grad_()
                model(x).square().mean().backward(create_graph=builds)
                run.rows("slope", x.grad.detach() / run.world_size)
                if builds:
                    x.grad.square().sum()
            for p in model.parameters():
                assert p.grad.requires_grad
                assert p.grad.grad_fn is not None
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            run.value("norm", norm.full_tensor() if run.sharded else norm)
            run.grads("clipped", model)
            if run.sharded:
                copied = copy.deepcopy(model.head.weight.grad)
                assert torch.equal(copied.to_local(), model.head.weight.grad.to_local())
                assert not copied.requires_grad
                copy.deepcopy(model)
                for use in USES_OF_GRADIENTS.values():
                    with pytest.raises(RuntimeError, match=HAS_NO_GRAPH):
                        use(model.head.weight.grad).backward()
                    with pytest.raises(RuntimeError, match=HAS_NO_GRAPH):
                        torch.autograd.grad(use(model.head.weight.grad), x, allow_unused=True)
                both = loss_of(model(x.detach())) + model.head.weight.grad.full_tensor().sum()
                with pytest.raises(RuntimeError, match=HAS_NO_GRAPH):
                    both.backward(inputs=list(model.parameters()))
            optimizer.step()
            run.params(f"step {step}", model)
            optimizer.zero_grad(set_to_none=not waits)

    check(scenario, wrap=(whole, blocks), parts=accumulations, waits=(False, True))


def whole_of(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
def test_no_graph_is_kept_by_gradients() -> None:
    """Those of plain parameters would keep all of it until they are cleared."""

    def scenario(run: Run) -> None:
        model = run.build(Net)
        blocks(run, model)
        x = run.batch(seed=0)
        output = model(x)
        alive = weakref.ref(output)
        output.square().mean().backward(create_graph=True)
        run.value("norm", torch.stack([whole_of(p.grad.detach().norm()) for p in model.parameters()]))
        if run.sharded:
            del output
            gc.collect()
            assert alive() is None
            assert without_graph
            model.zero_grad()
            assert not without_graph

    check(scenario)


FINDS: dict[str, Callable[[Any], Any]] = {
    "expand_as": lambda param: param.expand_as(param).grad_fn.next_functions[0][0],
    "view_as": lambda param: param.view_as(param).grad_fn.next_functions[0][0],
    "get_gradient_edge": lambda param: torch.autograd.graph.get_gradient_edge(param).node,
}


@matrix.over(find=tuple(FINDS), before=(False, True), wrap=WRAPS)
def hooks_of_nodes_that_accumulate_gradients(run: MatrixRun, find: str, before: bool, wrap: Wrap) -> None:
    """Users find these nodes as DDP does: those of the unsharded parameters run."""
    model = run.build(Net)
    wrap(run, model)
    called = []
    nodes = {name: FINDS[find](param) for name, param in model.named_parameters()}
    for name, node in nodes.items():
        if before:
            node.register_prehook(lambda gradients, name=name: (called.append(name), (gradients[0] * 2,))[1])
        else:
            node.register_hook(lambda *_, name=name: called.append(name))
    optimizer = sgd(model)
    for step in range(2):
        run.step(f"step {step}", model, optimizer, loss_of(model(run.batch(seed=step))))
    run.value("called", sorted(called))
    if not before:
        weight = model.head.weight
        weight.view_as(weight).square().sum().backward()  # of the shards
        run.grads("regularised", model.head)


# ---- activation checkpointing ----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # evaluation under no_grad
def test_activation_checkpointing_by_function() -> None:
    """The forward runs again inside backward, in another order, up to the last saved tensor, with hooks of its own."""

    class Checkpointed(nn.Module):
        """`where`: which calls are checkpointed."""

        def __init__(self, where: str, use_reentrant: bool) -> None:
            super().__init__()
            self.stem = Block()
            self.blocks = nn.ModuleList(Block() for _ in range(3))
            self.scale = nn.Parameter(torch.ones(WIDTH))
            self.where, self.use_reentrant = where, use_reentrant

        def save(self, function: Callable[..., Tensor], *args: Tensor) -> Tensor:
            return checkpoint(function, *args, use_reentrant=self.use_reentrant)

        def all_blocks(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x * self.scale)
            return x

        def inside(self, block: Block, x: Tensor) -> Tensor:
            return x + self.save(lambda x: block.down(block.up(x).tanh()), x)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            if self.where == "around several":
                x = self.save(self.all_blocks, x)
            elif self.where == "around one twice":
                x = self.save(lambda x: self.blocks[1](self.blocks[0](self.blocks[1](x))), x)
            elif self.where == "nested":
                x = self.save(lambda x: self.save(self.all_blocks, x) * self.scale, x)
            else:
                for block in self.blocks:
                    x = self.save(block, x * self.scale) if self.where == "around each" else block(x)
            return self.blocks[0](x)

    def scenario(run: Run, where: str, use_reentrant: bool, wrap: Wrap) -> None:
        model = run.build(Checkpointed, where, use_reentrant)
        wrap(run, model)
        optimizer = sgd(model)
        for step in range(2):
            x = run.batch(seed=step).requires_grad_()
            output = checkpoint(model, x, use_reentrant=use_reentrant) if "root" in where else model(x)
            run.step(f"step {step}", model, optimizer, loss_of(output))
            run.rows("x.grad", x.grad / run.world_size)
            with torch.no_grad():
                run.rows("evaluated", model(x))

    where = ("around each", "around several", "around one twice", "nested", "around the root")
    check(scenario, where=where, use_reentrant=(False, True), wrap=WRAPS)


@matrix.over(where=("blocks", "inside", "root", "some"), first=(False, True), wrap=(blocks, leaves))
def composable_activation_checkpointing(run: MatrixRun, where: str, first: bool, wrap: Wrap) -> None:
    """Its hooks sit on the very modules that ours sit on, in either order."""
    model = run.build(Net)
    targets = {
        "blocks": list(model.blocks),
        "inside": [block.up for block in model.blocks],
        "root": [model],
        "some": [model.stem, model.blocks[0].down, model.blocks[1]],
    }[where]
    if not first:
        wrap(run, model)
    for module in targets:
        composable_checkpoint(module)
    if first:
        wrap(run, model)
    optimizer = sgd(model)
    for step in range(2):
        losses = [loss_of(model(run.batch(seed=step + i))) for i in range(1 + step)]
        run.step(f"step {step}", model, optimizer, sum(losses))


@matrix.over(outside=(False, True), use_reentrant=(False, True))
def activation_checkpointing_by_wrapper(run: MatrixRun, outside: bool, use_reentrant: bool) -> None:
    """A module around each block, inside or outside the sharded one; a tied first and last layer are one group."""
    model = run.build(Net)
    model.head.weight = model.stem.weight
    kind = CheckpointImpl.REENTRANT if use_reentrant else CheckpointImpl.NO_REENTRANT
    for i, block in enumerate(model.blocks):
        inner = run.shard(block) if outside else block
        wrapper = checkpoint_wrapper(inner, checkpoint_impl=kind)
        model.blocks[i] = wrapper if outside else run.shard(wrapper)
    run.shard([model.stem, model.head], reshard_after_forward=True)
    run.shard(model)
    optimizer = sgd(model)
    for step in range(2):
        run.step(f"step {step}", model, optimizer, loss_of(model(run.batch(seed=step))))


@matrix.over(root=(False, True), wrap=WRAPS)
def checkpointed_modules_called_twice_with_hidden_outputs(run: MatrixRun, root: bool, wrap: Wrap) -> None:
    """Checkpointing keeps recomputed weights itself: freed after one call, they are missing for the other."""

    class Opaque:
        __slots__ = ("tensor",)

        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Opaque:
            return Opaque(torch.tanh(self.linear(x)))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.other = Layer(), Layer()

        def twice(self, x: Tensor) -> Tensor:
            return self.layer(self.other(self.layer(x).tensor).tensor).tensor

        def forward(self, x: Tensor) -> Opaque:
            return Opaque(checkpoint(self.twice, x, use_reentrant=False))

    model = run.build(Model)
    wrap(run, model)
    optimizer = sgd(model)
    for step in range(2):
        x = run.batch(seed=step)
        output = checkpoint(lambda x: model(x).tensor, x, use_reentrant=False) if root else model(x).tensor
        run.step(f"step {step}", model, optimizer, loss_of(output))


# ---- no_grad and inference_mode --------------------------------------------------------------------------------------


@torch.inference_mode()
def built(run: Run) -> Any:
    return run.shard(run.build(Net))


@torch.inference_mode()
def cast(run: Run) -> Any:
    model = run.shard(run.build(Net))
    model(run.batch(seed=9))
    return model.float().double()


def loaded(run: Run) -> Any:
    whole = {name: 0.5 * value for name, value in run.build(Net).state_dict().items()}
    model = run.shard(run.build(Net))
    with torch.inference_mode():
        model.load_state_dict(whole, assign=True)
    return model


@matrix.over(make=(built, cast, loaded))
def parameters_made_in_inference_mode(run: MatrixRun, make: Callable[[Run], Any]) -> None:
    """They count no changes, so what was gathered of them is never taken for what they are now."""
    model = make(run)
    with torch.inference_mode():
        for step in range(3):
            run.rows(f"evaluated {step}", model(run.batch(seed=step)))
            for param in model.parameters():
                param.mul_(0.9)
    with torch.no_grad():
        run.rows("outside", model(run.batch(seed=3)))
    if run.sharded and model.head.weight.is_inference():
        with pytest.raises(RuntimeError, match="none made in torch"):
            loss_of(model(run.batch(seed=4))).backward()


@matrix.over(outer_grad=(False, True), wrap=WRAPS)
def no_grad_inside_a_forward(run: MatrixRun, outer_grad: bool, wrap: Wrap) -> None:
    """A target computed without grad by the module that is then called with grad, inside one forward of the root."""

    class Target(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Block(), Block()

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                target = self.b(self.a(x))
            with torch.enable_grad():
                return (self.a(self.b(x)) - target).square()

    model = run.build(Target)
    wrap(run, model)
    optimizer = sgd(model)
    for step in range(2):
        with torch.set_grad_enabled(outer_grad):
            output = model(run.batch(seed=step))
        run.step(f"step {step}", model, optimizer, output.mean())


# ---- errors ----------------------------------------------------------------------------------------------------------


@matrix.over(error=[ValueError, KeyboardInterrupt], wrap=WRAPS, grad=(True, False))
def a_clean_step_after_an_error_in_forward(run: MatrixRun, wrap: Wrap, grad: bool, error: Any) -> None:
    """Modules that were entered must be left, at every level; Ctrl-C in a notebook is an error like any other."""
    model = run.build(MayFail)
    wrap(run, model)
    optimizer = sgd(model)
    waiting = loss_of(model(run.batch(seed=5)))
    for step in range(2):
        model.middle[1].when, model.middle[1].error = "forward", error
        with pytest.raises(error, match="on purpose"), torch.set_grad_enabled(grad):
            model(run.batch(seed=step))
        model.middle[1].when = ""
        run.params("after the error", model)
        loss = loss_of(model(run.batch(seed=step)))
        run.step(f"step {step}", model, optimizer, loss if step else loss + waiting)


@matrix.over(error=[ValueError, KeyboardInterrupt], wrap=WRAPS, zero=("model none", "model zero"))
def a_clean_step_after_an_error_in_backward(run: MatrixRun, wrap: Wrap, zero: str, error: Any) -> None:
    """Half of the gradients have come, reductions are under way: none may turn up in the next step."""
    model = run.build(MayFail)
    wrap(run, model)
    optimizer = sgd(model)
    for step in range(3):
        model.middle[1].when, model.middle[1].error = "backward", error
        loss = loss_of(model(run.batch(seed=7)))
        model.middle[1].when = ""
        with pytest.raises(error, match="on purpose"):
            loss.backward()
        model.zero_grad(set_to_none="none" in zero)
        run.params("after the error", model)
        for param in model.parameters():
            assert param.grad is None or full_norm(param.grad) == 0
            param.grad = None
        with torch.no_grad():
            run.rows("evaluated", model(run.batch(seed=8)))
        run.step(f"step {step}", model, optimizer, loss_of(model(run.batch(seed=step))))


def full_norm(tensor: Tensor) -> float:
    norm = tensor.norm()
    return (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()


def test_a_clean_step_after_an_error_in_a_hook_of_a_sharded_parameter() -> None:
    """Such a hook runs where gradients are delivered: those behind it must not stay for the next step."""

    def scenario(run: Run, wrap: Wrap, post: bool, which: str) -> None:
        model = run.build(MayFail)
        wrap(run, model)
        optimizer = sgd(model)

        def fail(_: Tensor) -> None:
            raise ValueError("on purpose")

        for step in range(2):
            param = dict(model.named_parameters())[which]
            handle = param.register_post_accumulate_grad_hook(fail) if post else param.register_hook(fail)
            with pytest.raises(ValueError, match="on purpose"):
                loss_of(model(run.batch(seed=7))).backward()
            handle.remove()
            optimizer.zero_grad()
            run.params("after the error", model)
            run.step(f"step {step}", model, optimizer, loss_of(model(run.batch(seed=step))))

    which = ("first.up.bias", "middle.1.linear.weight", "last.down.bias")
    check(scenario, wrap=(whole, leaves), post=(False, True), which=which)


@matrix.over(wrap=WRAPS, use_reentrant=(False, True))
def an_error_while_checkpointing_recomputes(run: MatrixRun, wrap: Wrap, use_reentrant: bool) -> None:
    """An error in a forward inside backward; both are left, and the next step is clean."""

    class Recomputes(nn.Module):
        def __init__(self, use_reentrant: bool) -> None:
            super().__init__()
            self.model = MayFail()
            self.use_reentrant = use_reentrant

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.model, x, use_reentrant=self.use_reentrant)

    model = run.build(Recomputes, use_reentrant)
    wrap(run, model)
    optimizer = sgd(model)
    for step in range(2):
        loss = loss_of(model(run.batch(seed=7).requires_grad_()))
        model.model.middle[1].when = "forward"
        with pytest.raises(ValueError, match="on purpose"):
            loss.backward()
        model.model.middle[1].when = ""
        model.zero_grad()
        run.params("after the error", model)
        run.step(f"step {step}", model, optimizer, loss_of(model(run.batch(seed=step).requires_grad_())))


@matrix.over(wrap=WRAPS, outside=(False, True))
def modifying_what_backward_needs_raises(run: MatrixRun, wrap: Wrap, outside: bool) -> None:
    """Autograd's own check does not see tensors that pass through saved-tensor hooks."""

    class Modifies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.modify = False

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.linear(x).exp()
            if self.modify:
                hidden.add_(1)
            return hidden.mean(1)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.block = Modifies(), Block()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.block(x))

    model = run.build(Outer)
    wrap(run, model)
    optimizer = sgd(model)
    for step in range(2):
        model.inner.modify = not outside
        x = run.batch(seed=1)
        output = model(x)
        if outside:
            x.mul_(2)
        with pytest.raises(RuntimeError, match=r"modified by an in-?place operation"):
            output.mean().backward()
        model.inner.modify = False
        model.zero_grad()
        run.step(f"step {step}", model, optimizer, model(run.batch(seed=step)).mean())


def test_backward_after_a_change_of_the_weights_raises() -> None:
    """Plain torch refuses it. Otherwise some groups would use the old weights, which stayed, and some the new ones."""
    optimizers = {
        "SGD one by one": partial(torch.optim.SGD, lr=0.25, foreach=False),
        "SGD foreach": partial(torch.optim.SGD, lr=0.25, foreach=True),
        "AdamW fused": partial(torch.optim.AdamW, lr=0.1, eps=1e-3, fused=True),
    }

    def scenario(run: Run, optimizer: str, wrap: Wrap) -> None:
        model = run.build(Net)
        wrap(run, model)
        chosen = optimizers[optimizer](model.parameters())
        for step in range(2):
            late = loss_of(model(run.batch(seed=7)))
            run.step(f"step {step}", model, chosen, loss_of(model(run.batch(seed=step))))
            if run.sharded or "fused" not in optimizer:  # of which plain torch takes no notice
                with pytest.raises(RuntimeError, match=r"modified by an in-?place operation"):
                    late.backward()
            model.zero_grad()

    check(scenario, optimizer=tuple(optimizers), wrap=WRAPS)


@matrix.over(wrap=WRAPS)
def a_step_of_an_optimizer_for_other_parameters_is_allowed(run: MatrixRun, wrap: Wrap) -> None:
    """One without gradients here changed nothing here, foreach and fused ones included."""
    model, other = run.build(Net), run.build(Net)
    for each in (model, other):
        wrap(run, each)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.25, foreach=True)
    loss = loss_of(model(run.batch(seed=1)))
    run.step("other", other, optimizer, loss_of(other(run.batch(seed=2))))
    run.step("model", model, optimizer, loss)


@matrix.over(wrap=WRAPS)
def a_change_of_weights_that_backward_does_not_need_is_allowed(run: MatrixRun, wrap: Wrap) -> None:
    """Autograd's check is per tensor: a bias may change before backward, whoever shares a group with it."""
    model = run.build(Net)
    wrap(run, model)
    optimizer = sgd(model)
    for step in range(2):
        loss = loss_of(model(run.batch(seed=step)))
        with torch.no_grad():
            for name, param in model.named_parameters():
                if "bias" in name:
                    param.mul_(0.5)
        run.step(f"step {step}", model, optimizer, loss)


# ---- hooks -----------------------------------------------------------------------------------------------------------


@matrix.over(wrap=WRAPS)
def hooks_of_parameters_set_before_and_after_sharding(run: MatrixRun, wrap: Wrap) -> None:
    """They belong to the parameter that users see: on the reduced gradient, once per backward, removable."""
    model = run.build(Net)
    calls: list[str] = []

    def on_gradient(name: str, factor: float) -> Callable[[Tensor], Tensor]:
        def hook(grad: Tensor) -> Tensor:
            calls.append(name)
            return grad * factor

        return hook

    early = model.blocks[0].up.weight.register_hook(on_gradient("before", 2.0))
    model.stem.bias.register_post_accumulate_grad_hook(lambda p: calls.append(f"accumulated {p.grad is not None}"))
    model.scale.note = "kept"
    wrap(run, model)
    optimizer = sgd(model)
    late = model.head.weight.register_hook(on_gradient("after", 3.0))
    for step in range(2):
        run.step(f"step {step}", model, optimizer, loss_of(model(run.batch(seed=step))))
        run.value("calls", sorted(calls))
    early.remove()
    late.remove()
    run.step("removed", model, optimizer, loss_of(model(run.batch(seed=9))))
    run.value("calls after", sorted(calls))
    run.value("attribute", model.scale.note)


def test_hooks_that_a_forward_puts_on_its_parameters() -> None:
    """On the full ones, that compute; and on what was a parameter before, with which nothing computes."""

    class Watching(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            kinds = (self.weight.register_hook, self.weight.register_post_accumulate_grad_hook)
            self.handles = [register(lambda t: calls.append(tuple(t.shape))) for register in kinds]
            return super().forward(x)

    calls: list[tuple[int, ...]] = []

    def body(rank: int, _: int) -> None:
        model = Watching(4, 3)
        before = model.weight
        fully_shard(model)
        unused = [before.register_hook(print), before.register_post_accumulate_grad_hook(print)]
        for expected in ([(3, 4), (3, 4)], [(3, 4)] * 4):
            model(torch.ones(2, 4)).sum().backward()
            assert calls == expected
            for handle in (*model.handles, *unused):
                handle.remove()
        assert model.weight.grad is not None

    run_ranks(2, body)


def steps_in_backward(run: MatrixRun, model: Any, requires_grad: bool = False) -> None:
    """Trains, with an optimizer for each parameter that steps as soon as its gradient is there. `requires_grad`: of the
    input.
    """
    optimizers = {param: torch.optim.SGD([param], lr=0.25, momentum=0.5) for param in model.parameters()}

    def step_now(param: Tensor) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step_now)
    for step in range(3):
        loss = loss_of(model(run.batch(seed=step).requires_grad_(requires_grad)))
        loss.backward()
        run.mean("loss", loss)
        run.grads("cleared", model)
        run.params(f"step {step}", model)


@matrix.over(use_reentrant=(False, True), wrap=WRAPS)
def optimizer_in_backward_with_checkpointing(run: MatrixRun, use_reentrant: bool, wrap: Wrap) -> None:
    """A weight changes as soon as its gradient is there; what is recomputed after it is neither refused nor stale."""

    class Saves(nn.Module):
        def __init__(self, use_reentrant: bool) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))
            self.head = nn.Linear(WIDTH, WIDTH)
            self.use_reentrant = use_reentrant

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=self.use_reentrant)
            return self.head(x)

    model = run.build(Saves, use_reentrant)
    wrap(run, model)
    steps_in_backward(run, model, requires_grad=True)


@matrix.over(wrap=WRAPS, early=(False, True))
def module_hooks_see_the_same_as_on_a_plain_model(run: MatrixRun, wrap: Wrap, early: bool) -> None:
    """Full backward hooks put nodes around a module's inputs and outputs; forward hooks may change either."""
    model = run.build(Net)
    if not early:
        wrap(run, model)
    seen: list[Tensor] = []
    for block in model.blocks:
        block.register_full_backward_hook(lambda m, i, o: seen.append(i[0]) or (i[0] * 1.5,))
        block.register_full_backward_pre_hook(lambda m, o: (o[0] * 0.5,))
        block.register_forward_hook(lambda m, i, o: o + i[0])
        block.register_forward_pre_hook(lambda m, i: (i[0] * 2,))
    if early:
        wrap(run, model)
    optimizer = sgd(model)
    for step in range(2):
        loss = loss_of(model(run.batch(seed=step)))
        run.step(f"step {step}", model, optimizer, loss)
        for i, grad in enumerate(seen):
            run.rows(f"seen {i}", grad / run.world_size)
        seen.clear()


# ---- other parts of torch --------------------------------------------------------------------------------------------


@matrix.over(how=("weight_norm", "spectral_norm", "spectral_norm by hooks"), wrap=(whole, blocks))
def weights_that_are_computed_from_parameters(run: MatrixRun, how: str, wrap: Wrap) -> None:
    """Parametrizations and norms make the weight anew in each forward, from full parameters, as a graph."""
    model = run.build(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)))
    torch.manual_seed(2)
    for module in (model[0], model[2]):
        nn.init.normal_(module.weight)
        apply = {
            "weight_norm": nn.utils.parametrizations.weight_norm,
            "spectral_norm": nn.utils.parametrizations.spectral_norm,
            "spectral_norm by hooks": nn.utils.spectral_norm,
        }[how]
        apply(module)
    model.double()
    wrap(run, model)
    optimizer = sgd(model)
    for step in range(2):
        run.step(f"step {step}", model, optimizer, loss_of(model(run.batch(seed=step))))


def test_autocast() -> None:
    """It caches the low-precision copies of weights, by object: also for as long as one context lasts over steps."""

    def scenario(run: Run, wrap: Wrap) -> None:
        model = run.build(Net).float()
        wrap(run, model)
        optimizer = sgd(model)
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))  # the same rows on every rank
        for step in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model(x).float()) + loss_of(model(2 * x).float())
                with torch.no_grad():
                    run.value("evaluated", model(x))
            run.step(f"step {step}", model, optimizer, loss)

    check(scenario, tolerance={"rtol": 1e-5, "atol": 1e-6}, wrap=WRAPS)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch uses its own torch.jit.script for forward mode
def test_forward_mode_differentiation() -> None:
    """Dual numbers run through the same forward; jvp with a graph is a double backward of another shape."""

    def scenario(run: Run, wrap: Wrap) -> None:
        model = run.build(Net)
        wrap(run, model)
        optimizer = sgd(model)
        for step in range(2):
            x = run.batch(seed=step)
            with forward_ad.dual_level():
                output = model(forward_ad.make_dual(x, torch.ones_like(x)))
                run.rows("tangent", forward_ad.unpack_dual(output).tangent)
            _, slope = torch.autograd.functional.jvp(model, (x,), (torch.ones_like(x),), create_graph=True)
            run.rows("slope", slope)
            run.step(f"step {step}", model, optimizer, loss_of(model(x)) + slope.square().mean())

    check(scenario, wrap=WRAPS)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_scenarios_match_the_plain_model(topology: str) -> None:
    matrix.check_on(topology)
