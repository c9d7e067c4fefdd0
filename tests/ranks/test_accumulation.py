"""Tests that gradients of several backwards add up as on a plain model, whenever they are synchronised or cleared.

Each scenario is drawn over topologies, ways to wrap and settings, see matrix.py. test_training.py draws accumulations
in which nothing else happens. Gradients wait unsharded ("wait"), or reduced within replicas ("scatter"): by day, that
runs where there are replicas, and at night where there are none, too.
"""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp2 import FSDPModule, MixedPrecisionPolicy, fully_shard
from helpers import assert_same, full, run_ranks, world_sizes
from matrix import MODES, TOPOLOGIES, Matrix, MatrixRun, Towers, set_mode
from scenarios import WRAPS, MayFail, Net, Run, Wrap, blocks, kept, leaves, loss_of, sgd, whole

matrix = Matrix()


ZERO: dict[str, Callable[[Any, torch.optim.Optimizer], object]] = {
    "optimizer, to None": lambda model, optimizer: optimizer.zero_grad(set_to_none=True),
    "optimizer, to zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "module, to None": lambda model, optimizer: model.zero_grad(set_to_none=True),
    "module, to zero": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "a child, to zero": lambda model, optimizer: model.left.zero_grad(set_to_none=False),
    "a child, to None": lambda model, optimizer: model.left.zero_grad(set_to_none=True),
    "one by one": lambda model, optimizer: [setattr(p, "grad", None) for p in model.head.parameters()],
}
WITH_REPLICAS = [name for name, topology in TOPOLOGIES.items() if topology.has_replicas]
TWO_MODES = (("wait", "reduce"), ("wait", "scatter"), ("scatter", "wait"), ("scatter", "reduce"))


def begin(run: Run, wrap: Wrap, build: Any = Towers, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = run.build(build)
    wrap(run, model)
    return model, sgd(model, **options)


def backward(run: Run, model: nn.Module, seed: int, mode: str = "reduce", use: str | None = None) -> None:
    set_mode(model, mode)
    loss_of(model(run.batch(seed=seed), *([use] if use else []))).backward()


def fail(_: Tensor) -> None:
    raise ValueError("on purpose")


# ---- accumulation ----------------------------------------------------------------------------------------------------


@matrix.over(modes=(("wait",), ("scatter", "wait"), ("reduce", "wait", "scatter")), last=("lrh", "rh", "h"), wrap=WRAPS)
def micro_batches_that_use_different_modules(run: MatrixRun, modes: tuple[str, ...], last: str, wrap: Wrap) -> None:
    """A gradient that waits must be reduced by the synchronised backward even if that one does not touch its module."""
    model, optimizer = begin(run, wrap)
    for step, first in enumerate(("lrh", "l")):
        for i, mode in enumerate(modes):
            backward(run, model, 10 * step + i, mode, first)
        backward(run, model, 10 * step + 5, "reduce", last)
        run.step(f"step {step}", model, optimizer)


@matrix.over(
    zero=tuple(ZERO),
    points=((1,), (2,), (1, 2)),
    modes=(("wait", "wait"), ("scatter", "wait"), ("reduce", "scatter")),
    wrap=(whole, blocks),
)
def zero_grad_at_any_point(
    run: MatrixRun, zero: str, points: tuple[int, ...], modes: tuple[str, str], wrap: Wrap
) -> None:
    """What waits is a gradient like any other: cleared, it must not come back; None is not zero."""
    model, optimizer = begin(run, wrap, foreach=len(points) == 1)
    for step, last in enumerate(("rh", "h")):
        for i, (mode, use) in enumerate(zip((*modes, "reduce"), ("lrh", "lh", last), strict=True)):
            if i in points:
                ZERO[zero](model, optimizer)
            backward(run, model, 10 * step + i, mode, use)
        run.step(f"step {step}", model, optimizer)


@matrix.over(zero=("optimizer, to zero", "module, to zero", "optimizer, to None"), mode=MODES, wrap=(blocks,))
def zero_grad_and_no_further_backward(run: MatrixRun, zero: str, mode: str, wrap: Wrap) -> None:
    """What was cleared is known to be zero: an optimizer step with momentum needs no synchronisation to go on."""
    model, optimizer = begin(run, wrap, momentum=0.5, weight_decay=0.1)
    backward(run, model, 1)
    run.step("first", model, optimizer)
    backward(run, model, 2, mode)
    ZERO[zero](model, optimizer)
    run.step("of zeros", model, optimizer)
    backward(run, model, 3)
    run.step("last", model, optimizer)


@matrix.over(zero=("", "module, to None", "module, to zero"), mode=("wait", "reduce"))
def an_outer_module_is_sharded_while_gradients_are_unsynchronized(run: MatrixRun, zero: str, mode: str) -> None:
    """Its root replaces that of the module inside: what was left to it is reduced, or was cleared, all the same."""
    model = run.build(Towers)
    run.shard(model.left)
    set_mode(model.left, "wait")
    loss_of(model.left(run.batch(seed=1))).backward()
    if zero:
        ZERO[zero](model, sgd(model))
    set_mode(model.left, mode)
    for module in (model.right, model.head, model):
        run.shard(module)
    backward(run, model, 2, mode)
    backward(run, model, 3)
    run.step("both", model, sgd(model))


@matrix.over(mode=("wait", "scatter"), wrap=(blocks,))
def unsynchronized_gradients_are_visible_and_refuse_other_uses(run: MatrixRun, mode: str, wrap: Wrap) -> None:
    """A clipping or a step before synchronisation would silently use other numbers on each rank, or none."""
    model, optimizer = begin(run, wrap)
    backward(run, model, 1, mode, "lh")
    run.value("present", {name: p.grad is not None for name, p in model.named_parameters()})
    if run.sharded and run.waits(mode):
        waiting = model.head.weight.grad
        clip = lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # noqa: E731
        for use in (optimizer.step, clip, waiting.to_local, waiting.full_tensor, waiting.clone, waiting.norm):
            with pytest.raises(RuntimeError, match="not synchronised"):
                use()
        said = "is not synchronised between ranks yet: the next backward after set_requires_"
        for text in (repr(waiting), f"{waiting}", str(waiting)):
            assert said in text
    run.params("unchanged", model)
    backward(run, model, 2)
    run.step("then", model, optimizer)


@matrix.over(wrap=(blocks, kept))
def synchronisation_of_some_modules_only(run: MatrixRun, wrap: Wrap) -> None:
    """`recurse=False` and calls on children: each group waits or reduces by itself."""
    model, optimizer = begin(run, wrap)
    for step in range(2):
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(True)
            model.set_requires_gradient_sync(False, recurse=False)
            model.left.set_requires_gradient_sync(False)
        loss_of(model(run.batch(seed=step))).backward()
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(False)
            model.right.set_requires_gradient_sync(True)
        loss_of(model(run.batch(seed=step + 3))).backward()
        backward(run, model, step + 6)
        run.step(f"step {step}", model, optimizer)


@matrix.over(topologies=WITH_REPLICAS, wrap=(blocks,))
def sums_between_replicas_of_some_modules_only(run: MatrixRun, wrap: Wrap) -> None:
    model, optimizer = begin(run, wrap)
    for step in range(2):
        set_mode(model, "reduce")
        if isinstance(model, FSDPModule):
            model.left.set_requires_all_reduce(False)
            model.set_requires_all_reduce(False, recurse=False)
            model.right.set_requires_gradient_sync(False)
        loss_of(model(run.batch(seed=step))).backward()
        if run.sharded:
            model.head.weight.grad.full_tensor()  # reduced: it refuses nothing
            for tower in (model.left, model.right):
                with pytest.raises(RuntimeError, match="not synchronised"):
                    tower.up.weight.grad.full_tensor()
        backward(run, model, step + 3)
        run.step(f"step {step}", model, optimizer)


@matrix.over(what=("left", "bias"), mode=("wait", "scatter"), wrap=(whole, blocks))
def frozen_amid_an_accumulation(run: MatrixRun, what: str, mode: str, wrap: Wrap) -> None:
    """Frozen parameters keep what they had, as in plain training; thawed ones go on from there."""
    model, optimizer = begin(run, wrap)
    chosen = [p for name, p in model.named_parameters() if what in name]
    chosen[0].requires_grad_(False)
    backward(run, model, 0, mode)
    for p in chosen:
        p.requires_grad_(p is chosen[0])
    backward(run, model, 1, mode)
    run.value("present", {name: p.grad is not None for name, p in model.named_parameters()})
    for p in chosen:
        p.requires_grad_(False)
    backward(run, model, 2)
    run.grads("frozen", model)
    for p in chosen:
        p.requires_grad_(True)
    backward(run, model, 3)
    run.step("thawed", model, optimizer)


@matrix.over(what=("left", "bias"), trains=((0, 1), (1, 0), (1, 1)), wrap=(whole, blocks))
def frozen_for_one_forward_of_a_backward(run: MatrixRun, what: str, trains: tuple[int, int], wrap: Wrap) -> None:
    """A gradient goes to what requires one while backward runs, through the forwards in which it required one."""
    model, optimizer = begin(run, wrap)
    chosen = [p for name, p in model.named_parameters() if what in name]
    for step, at_backward in enumerate((1, 0, 1)):
        losses = []
        for i, trained in enumerate((*trains, at_backward)):
            for p in chosen:
                p.requires_grad_(bool(trained))
            if i < len(trains):
                losses.append(loss_of(model(run.batch(seed=10 * step + i))))
        sum(losses).backward()  # type: ignore[union-attr]
        run.step(f"step {step}", model, optimizer)


@matrix.over(how=("retain_graph", "two forwards", "reentrant", "non-reentrant"), mode=("wait", "scatter"), wrap=WRAPS)
def gradients_that_come_more_than_once(run: MatrixRun, how: str, mode: str, wrap: Wrap) -> None:
    """In one backward (checkpointing), or through one forward again, while gradients wait."""
    model, optimizer = begin(run, wrap)
    for step in range(2):
        set_mode(model, mode)
        x = run.batch(seed=step).requires_grad_()
        if how == "retain_graph":
            loss = loss_of(model(x))
            loss.backward(retain_graph=True)
            loss.backward(retain_graph=True)
        elif how == "two forwards":
            loss = loss_of(model(x)) + loss_of(model(model(x, "l"), "rh"))
        else:
            inner = checkpoint(model, x, "lr", use_reentrant=how == "reentrant")
            loss = loss_of(checkpoint(model, inner, "lrh", use_reentrant=how == "reentrant"))
        if step:
            loss.backward()
            loss = loss_of(model(x, "h"))
        set_mode(model, "reduce")
        loss.backward()
        run.step(f"step {step}", model, optimizer)


@matrix.over(stays=("", "after backward", "budget"), reentrant=(True, False), wrap=(whole, blocks, kept))
def weights_change_between_a_checkpointed_forward_and_its_backward(
    run: MatrixRun, stays: str, reentrant: bool, wrap: Wrap
) -> None:
    """It computes again with the new weights, also with those that have stayed unsharded."""
    model, optimizer = begin(run, wrap)
    if run.sharded and stays == "after backward":
        model.set_reshard_after_backward(False)
    elif run.sharded and stays:
        model.set_unsharded_budget(10**9)
    for step in range(2):
        x = run.batch(seed=step).requires_grad_()
        loss = loss_of(checkpoint(model, x, use_reentrant=reentrant))
        backward(run, model, 10 + step)
        run.step(f"between {step}", model, optimizer)
        loss.backward()
        run.step(f"step {step}", model, optimizer)


@matrix.over(reentrant=(True, False), stays=("", "after backward"), wrap=(blocks, leaves))
def a_hook_writes_to_weights_that_backward_computes_with_later(
    run: MatrixRun, reentrant: bool, stays: str, wrap: Wrap
) -> None:
    """Of a checkpointed module, whose gather may have begun ahead."""
    model, optimizer = begin(run, wrap)
    if run.sharded and stays:
        model.set_reshard_after_backward(False)

    def halve(_: Tensor) -> None:
        with torch.no_grad():
            for param in model.left.parameters():
                param.mul_(0.5)

    for step in range(2):
        x = run.batch(seed=step).requires_grad_()
        hidden = checkpoint(model, x, "l", use_reentrant=reentrant)
        hidden.register_hook(halve)
        run.step(f"step {step}", model, optimizer, loss_of(model(hidden, "rh")))


@matrix.over(without_grad=(torch.no_grad, torch.inference_mode), mode=("wait", "scatter"), wrap=(whole, blocks))
def evaluation_with_unsynchronized_gradients(run: MatrixRun, without_grad: Any, mode: str, wrap: Wrap) -> None:
    """Evaluation, gathering and resharding between micro-batches leave what waits alone."""
    model, optimizer = begin(run, wrap)
    for step in range(2):
        backward(run, model, step, mode)
        with without_grad():
            run.rows("evaluated", model(run.batch(seed=9)))
        backward(run, model, step + 3, mode, "lh")
        if isinstance(model, FSDPModule):
            model.unshard()
            model.reshard()
        backward(run, model, step + 6, "reduce", "h")
        run.step(f"step {step}", model, optimizer)


# ---- errors ----------------------------------------------------------------------------------------------------------


@matrix.over(modes=TWO_MODES, wrap=(whole, blocks))
def an_error_amid_an_accumulation(run: MatrixRun, modes: tuple[str, str], wrap: Wrap) -> None:
    """The backward that failed leaves nothing behind; the micro-batches before it still count."""
    model, optimizer = begin(run, wrap)
    backward(run, model, 1, modes[0])
    # It fails before any gradient of a parameter is there: plain torch keeps those that have come, too.
    set_mode(model, modes[1])
    output = model(run.batch(seed=2))
    output.register_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        loss_of(output).backward()
    if modes[1] == "wait":
        with torch.no_grad():
            model(run.batch(seed=3), "l")
    run.value("present", all(p.grad is not None for p in model.parameters()))
    backward(run, model, 4, "reduce", "h")
    run.step("after", model, optimizer)


@matrix.over(modes=TWO_MODES, zero=tuple(ZERO)[:4:3], wrap=(whole, blocks))
def an_error_and_zero_grad(run: MatrixRun, modes: tuple[str, str], zero: str, wrap: Wrap) -> None:
    """After zero_grad, none of what had come, had waited or was on its way turns up again."""
    model, optimizer = begin(run, wrap)
    for step in range(1):
        backward(run, model, 1, modes[0])
        set_mode(model, modes[1])
        hidden = model(run.batch(seed=2), "l")
        hidden.register_hook(fail)
        with pytest.raises(ValueError, match="on purpose"):
            loss_of(model(hidden, "rh")).backward()
        ZERO[zero](model, optimizer)
        for i, mode in itertools.product(range(2), (modes[0], "reduce")):
            backward(run, model, 3 + i, mode)
        run.step(f"step {step}", model, optimizer)


@matrix.over(mode=("wait", "scatter"), wrap=(blocks,))
def an_error_behind_some_gradients(run: MatrixRun, mode: str, wrap: Wrap) -> None:
    """The backward that failed has added to what had waited: that is lost, and no one may take the rest for all."""
    model, optimizer = begin(run, wrap)
    if run.sharded and run.waits(mode):
        backward(run, model, 0, mode)
        set_mode(model, "reduce")
        hidden = model(run.batch(seed=1), "l")
        hidden.register_hook(fail)
        with pytest.raises(ValueError, match="on purpose"):
            loss_of(model(hidden, "rh")).backward()
        with pytest.raises(RuntimeError, match=r"(scale|right\.).*were lost in a backward pass that failed.*zero_grad"):
            backward(run, model, 2, "reduce", "h")
        optimizer.zero_grad()
    backward(run, model, 3, mode)
    backward(run, model, 4, "reduce", "h")
    run.step("after", model, optimizer)


# ---- the end of backward by hand, and reset --------------------------------------------------------------------------


def by_hand(model: Any) -> None:
    """Lets all reductions be in flight until they are finished by hand."""
    if isinstance(model, FSDPModule):
        model.set_reduce_scatter_max_input_buffers(9)
        model.set_manual_backward_finalization(True)


def finalize(model: Any, async_op: bool = False) -> None:
    if isinstance(model, FSDPModule):
        handle = model.finalize_backward(async_op=async_op)
        assert (handle is not None) == async_op
        for _ in range(2) if handle is not None else ():
            handle.wait()


@matrix.over(
    modes=(("reduce", "reduce"), ("scatter", "wait", "reduce"), ("reduce", "scatter", "reduce")),
    each=(False, True),
    wrap=(whole, blocks),
)
def finalised_by_hand(run: MatrixRun, modes: tuple[str, ...], each: bool, wrap: Wrap) -> None:
    """No gradient before, all after; reductions are left in flight over several backwards."""
    model, optimizer = begin(run, wrap)
    by_hand(model)
    for step in range(2):
        for i, mode in enumerate(modes):
            backward(run, model, 10 * step + i, mode, "lrh" if i == 0 else "rh")
            if run.sharded and i == 0 and not run.waits(mode):
                assert all(p.grad is None for p in model.parameters()), "gradients before finalize_backward"
            if each or i == len(modes) - 1:
                finalize(model, async_op=step == 1)
        run.step(f"step {step}", model, optimizer)
    if isinstance(model, FSDPModule):
        model.set_manual_backward_finalization(False)
    backward(run, model, 99)
    run.step("by itself", model, optimizer)


@matrix.over(wrap=(whole, blocks))
def finalised_after_a_backward_that_fails(run: MatrixRun, wrap: Wrap) -> None:
    """The backward that failed leaves nothing; what complete ones have left in flight still arrives."""
    model, optimizer = begin(run, wrap, MayFail)
    by_hand(model)
    backward(run, model, 1)
    output = model(run.batch(seed=2))
    output.register_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        loss_of(output).backward()
    backward(run, model, 3)
    finalize(model)
    run.step("after", model, optimizer)


@matrix.over(when=("forward", "backward"), times=(1, 2), wrap=(whole, leaves))
def reset_after_an_error(run: MatrixRun, when: str, times: int, wrap: Wrap) -> None:
    """The next step is exact: nothing of the failed pass turns up, no module is left with its unsharded parameters."""
    model, optimizer = begin(run, wrap, MayFail)
    run.step("before", model, optimizer, loss_of(model(run.batch(seed=1))))
    model.middle[1].when = when
    with pytest.raises(ValueError, match="on purpose"):
        loss_of(model(run.batch(seed=2))).backward()
    model.middle[1].when = ""
    for _ in range(times) if run.sharded else ():
        model.reset_iter_state()
    optimizer.zero_grad()
    run.params("reset", model)
    for step in range(2):
        run.step(f"step {step}", model, optimizer, loss_of(model(run.batch(seed=3 + step))))


@matrix.over(failed=("", "forward", "backward"), mode=("wait", "scatter"), wrap=(whole, blocks))
def reset_drops_unsynchronized_gradients(run: MatrixRun, failed: str, mode: str, wrap: Wrap) -> None:
    """In an accumulation: gradients that wait are gone, those reduced before it stay."""
    model, optimizer = begin(run, wrap, MayFail)
    backward(run, model, 1)
    if run.sharded and run.waits(mode):
        for i in range(2):
            backward(run, model, 2 + i, mode)
        model.middle[1].when = failed
        if failed:
            with pytest.raises(ValueError, match="on purpose"):
                backward(run, model, 4, mode)
        model.middle[1].when = ""
        model.reset_iter_state()
    run.grads("reset", model)
    backward(run, model, 5, mode)
    backward(run, model, 6)
    run.step("after", model, optimizer)


@matrix.over(reverse=(False, True), wrap=(blocks, leaves))
def further_backwards_through_forwards_that_have_run(run: MatrixRun, reverse: bool, wrap: Wrap) -> None:
    """set_is_last_backward(False): several forwards, then their backwards, in either order."""
    model, optimizer = begin(run, wrap, Net)
    for step in range(2):
        losses = [loss_of(model(run.batch(seed=10 * step + i))) for i in range(3)]
        for i, loss in enumerate(losses[::-1] if reverse else losses):
            if run.sharded:
                model.set_is_last_backward(i == 2)
            loss.backward()
        run.step(f"step {step}", model, optimizer)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_scenarios_match_the_plain_model(topology: str) -> None:
    matrix.check_on(topology)


# ---- what the matrix leaves out --------------------------------------------------------------------------------------


def test_no_way_to_step_takes_an_unsynchronized_gradient() -> None:
    """Where all gradients are unsynchronized, too, and in place."""

    def body(rank: int, _: int) -> None:
        model = fully_shard(nn.Linear(4, 3))
        model.set_requires_gradient_sync(False)
        model(torch.ones(2, 4)).sum().backward()
        params = list(model.parameters())
        before = [full(param).clone() for param in params]
        steps = [torch.optim.SGD(params, lr=0.1, foreach=foreach).step for foreach in (None, True, False)]
        steps += [torch.optim.Adam(params, lr=0.1).step, lambda: params[0].add_(params[0].grad)]
        steps.append(lambda: torch._foreach_add_(params, [param.grad for param in params]))
        for step in steps:
            with pytest.raises(RuntimeError, match="not synchronised"), torch.no_grad():
                step()
        for param, value in zip(params, before, strict=True):
            assert_same(full(param), value, 0, 0, "a weight")

    run_ranks(2, body)


class Sum(nn.Module):
    """Autograd gives both parameters views of one gradient; plain torch accumulates into that memory twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(6, 4)), nn.Parameter(torch.zeros(3, 8))

    def forward(self, x: Tensor) -> Tensor:
        return (self.a.view(-1) + self.b.view(-1)) @ x


@pytest.mark.parametrize("world_size", world_sizes(2, nightly=[1]))
def test_parameters_that_share_the_memory_of_their_gradient(world_size: int) -> None:
    def body(rank: int, _: int) -> None:
        for syncs in itertools.product((False, True), repeat=2):
            model = fully_shard(Sum())
            total = torch.zeros(24)
            for i, sync in enumerate((*syncs, True)):
                model.set_requires_gradient_sync(sync)
                x = torch.arange(24.0) + i
                model(x).backward()
                total += x
            assert torch.equal(model.a.grad.full_tensor(), total.view(6, 4)), syncs
            assert torch.equal(model.b.grad.full_tensor(), total.view(3, 8)), syncs

    run_ranks(world_size, body)


class Halves(nn.Module):
    """Uses both parameters, or the first one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor, both: bool) -> Tensor:
        return self.a @ x + self.b @ x if both else self.a @ x


def test_sums_that_the_last_backward_does_not_touch_are_sent_in_the_reduce_dtype() -> None:
    """Each gradient is exact in bfloat16, 256 and 1; their sum is not: 257."""

    def body(rank: int, _: int) -> None:
        model = fully_shard(Halves(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        for value, is_last in ((256.0, False), (1.0, False), (0.0, True)):
            model.set_requires_gradient_sync(is_last)
            model(torch.full((8,), value), both=not is_last).backward()
        for parameter in (model.a, model.b):
            assert torch.equal(parameter.grad.full_tensor(), torch.full((8,), 257.0))

    run_ranks(2, body)
