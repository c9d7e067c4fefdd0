"""Tests that gradients of several backwards add up as on a plain model, whenever they are synchronised or cleared."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp2 import FSDPModule, MixedPrecisionPolicy, fully_shard
from helpers import assert_same, full, run_ranks, world_sizes
from scenarios import WIDTH, WRAPS, Block, Net, Run, Wrap, blocks, check, kept, leaves, loss_of, sgd, whole


class Towers(nn.Module):
    """Two towers and a head; `use` says which towers a forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Block(), Block()
        self.head = nn.Linear(WIDTH, 3)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, use: str) -> Tensor:
        if "l" in use:
            x = self.left(x)
        if "r" in use:
            x = self.right(x * self.scale)
        return self.head(x) if "h" in use else x


ZERO = {
    "optimizer, to None": lambda model, optimizer: optimizer.zero_grad(set_to_none=True),
    "optimizer, to zero": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "module, to None": lambda model, optimizer: model.zero_grad(set_to_none=True),
    "module, to zero": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "a child, to zero": lambda model, optimizer: model.left.zero_grad(set_to_none=False),
    "one by one": lambda model, optimizer: [setattr(p, "grad", None) for p in model.head.parameters()],
}


def backward(run: Run, model: nn.Module, seed: int, use: str = "lrh", sync: bool = True) -> None:
    run.set_sync(model, sync)
    loss_of(model(run.batch(seed=seed), use)).backward()


def test_every_order_of_synchronised_and_unsynchronised_backwards() -> None:
    """Three micro-batches, each synchronised or not (the last always): what waits and what is reduced add up once."""

    def scenario(run: Run, first: bool, second: bool, wrap: Wrap) -> None:
        model = run.build(Towers)
        wrap(run, model)
        optimizer = sgd(model)
        for step in range(2):
            for i, sync in enumerate((first, second, True)):
                backward(run, model, seed=10 * step + i, sync=sync)
            run.step(f"step {step}", model, optimizer)

    check(scenario, first=(False, True), second=(False, True), wrap=WRAPS)


@pytest.mark.parametrize("world_size", world_sizes(3, nightly=[2]))
def test_micro_batches_that_use_different_modules(world_size: int) -> None:
    """A gradient that waits must be reduced by the synchronised backward even if that one does not touch its module."""

    uses = ("lrh", "l", "rh", "h")

    def scenario(run: Run, first: str, last: str, wrap: Wrap) -> None:
        model = run.build(Towers)
        wrap(run, model)
        optimizer = sgd(model)
        for step in range(2):
            backward(run, model, seed=step, use=first, sync=False)
            backward(run, model, seed=step + 5, use=last, sync=True)
            run.step(f"step {step}", model, optimizer)

    check(scenario, world_size, first=uses, last=uses, wrap=(whole, blocks) if world_size == 2 else (leaves,))


@pytest.mark.parametrize("foreach", [True, False])
def test_zero_grad_at_any_point(foreach: bool) -> None:
    """What waits for synchronisation is a gradient like any other: cleared, it must not come back."""

    points = ("after the first", "after the second", "after both")

    def scenario(run: Run, zero: str, point: str, first: bool, wrap: Wrap) -> None:
        model = run.build(Towers)
        wrap(run, model)
        optimizer = sgd(model, foreach=foreach)
        for step in range(2):
            backward(run, model, seed=step, sync=first)
            if point != "after the second":
                ZERO[zero](model, optimizer)
            backward(run, model, seed=step + 3, use="lh", sync=False)
            if point != "after the first":
                ZERO[zero](model, optimizer)
            backward(run, model, seed=step + 6, use="rh", sync=True)
            run.step(f"step {step}", model, optimizer)

    check(scenario, zero=tuple(ZERO), point=points, first=(False, True), wrap=(whole,) if foreach else (blocks,))


def test_zero_grad_to_zero_and_no_further_backward() -> None:
    """What was cleared is known to be zero: an optimizer step with momentum needs no synchronisation to go on."""

    def scenario(run: Run, zero: str, sync: bool) -> None:
        model = run.build(Towers)
        blocks(run, model)
        optimizer = sgd(model, momentum=0.5, weight_decay=0.1)
        backward(run, model, seed=1)
        run.step("first", model, optimizer)
        backward(run, model, seed=2, sync=sync)
        ZERO[zero](model, optimizer)
        run.step("of zeros", model, optimizer)
        backward(run, model, seed=3)
        run.step("last", model, optimizer)

    check(scenario, zero=("optimizer, to zero", "module, to zero", "optimizer, to None"), sync=(True, False))


def test_zero_grad_to_zero_then_unused() -> None:
    """`set_to_none=False` leaves zeros where a later backward brings nothing; where nothing was, None stays."""

    def scenario(run: Run, sync: bool, wrap: Wrap) -> None:
        model = run.build(Towers)
        wrap(run, model)
        optimizer = sgd(model)
        backward(run, model, seed=1, use="lh", sync=sync)
        optimizer.zero_grad(set_to_none=False)
        backward(run, model, seed=2, use="h", sync=True)
        run.grads("zeros", model)
        backward(run, model, seed=3, use="l", sync=sync)
        backward(run, model, seed=4, use="rh", sync=True)
        run.step("after", model, optimizer)

    check(scenario, sync=(False, True), wrap=WRAPS)


def test_an_outer_module_is_sharded_while_gradients_are_unsynchronized() -> None:
    """Its root replaces that of the module inside: what was left to it is reduced, or was cleared, all the same."""

    def scenario(run: Run, zero: str, sync: bool) -> None:
        model = run.build(Towers)
        run.shard(model.left)
        run.set_sync(model.left, False)
        loss_of(model.left(run.batch(seed=1))).backward()
        if zero:
            ZERO[zero](model, sgd(model))
        run.set_sync(model.left, sync)
        blocks_around(run, model)
        backward(run, model, seed=2, sync=sync)
        backward(run, model, seed=3)
        run.step("both", model, sgd(model))

    check(scenario, zero=("", "module, to None", "module, to zero"), sync=(False, True))


def blocks_around(run: Run, model: Any) -> None:
    for module in (model.right, model.head, model):
        run.shard(module)


def test_no_way_to_step_takes_an_unsynchronized_gradient() -> None:
    """Where all gradients are unsynchronized, too, and in place: torch before 2.13 asks the parameter's class first."""

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


def test_unsynchronized_gradients_are_visible_and_refuse_other_uses() -> None:
    """A clipping or a step before synchronisation would silently use other numbers on each rank, or none."""

    def scenario(run: Run) -> None:
        model = run.build(Towers)
        blocks(run, model)
        optimizer = sgd(model)
        backward(run, model, seed=1, use="lh", sync=False)
        run.value("present", {name: p.grad is not None for name, p in model.named_parameters()})
        if run.sharded:
            waiting = model.head.weight.grad
            clip = lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # noqa: E731
            for use in (optimizer.step, clip, waiting.to_local, waiting.full_tensor, waiting.clone, waiting.norm):
                with pytest.raises(RuntimeError, match="not synchronised"):
                    use()
            for text in (repr(waiting), f"{waiting}", str(waiting)):
                assert (
                    "is not synchronised between ranks yet: the next backward after set_requires_gradient_sync(True)"
                    in text
                )
        run.params("unchanged", model)
        backward(run, model, seed=2, sync=True)
        run.step("then", model, optimizer)

    check(scenario)


def test_synchronisation_of_some_modules_only() -> None:
    """`recurse=False` and calls on children: each group waits or reduces by itself."""

    def scenario(run: Run, wrap: Wrap) -> None:
        model = run.build(Towers)
        wrap(run, model)
        optimizer = sgd(model)
        for step in range(2):
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(True)
                model.set_requires_gradient_sync(False, recurse=False)
                model.left.set_requires_gradient_sync(False)
            loss_of(model(run.batch(seed=step), "lrh")).backward()
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(False)
                model.right.set_requires_gradient_sync(True)
            loss_of(model(run.batch(seed=step + 3), "lrh")).backward()
            backward(run, model, seed=step + 6, sync=True)
            run.step(f"step {step}", model, optimizer)

    check(scenario, wrap=(blocks, kept))


def test_freezing_a_parameter_with_an_unsynchronized_gradient() -> None:
    """The plan of what is reduced together follows what is trainable; what waits for it must not be left out of it."""

    def scenario(run: Run, what: str, wrap: Wrap) -> None:
        model = run.build(Towers)
        wrap(run, model)
        optimizer = sgd(model)
        backward(run, model, seed=1, sync=False)
        frozen = [p for name, p in model.named_parameters() if what in name]
        for param in frozen:
            param.requires_grad_(False)
        backward(run, model, seed=2, sync=True)
        run.grads("frozen", model)
        for param in frozen:
            param.requires_grad_(True)
        backward(run, model, seed=3, sync=True)
        run.step("thawed", model, optimizer)

    check(scenario, what=("left.up.weight", "left", "bias"), wrap=(whole, blocks))


def test_several_forwards_and_backwards_without_synchronisation() -> None:
    """One backward for several forwards, retain_graph, shared modules and checkpointing while gradients wait."""

    def scenario(run: Run, mode: str, wrap: Wrap) -> None:
        model = run.build(Towers)
        wrap(run, model)
        optimizer = sgd(model)
        for step in range(2):
            run.set_sync(model, False)
            x = run.batch(seed=step).requires_grad_()
            if mode == "retain_graph":
                loss = loss_of(model(x, "lrh"))
                loss.backward(retain_graph=True)
                loss.backward(retain_graph=True)
            elif mode == "two forwards":
                loss = loss_of(model(x, "lrh")) + loss_of(model(model(x, "l"), "rh"))
            else:
                reentrant = mode == "reentrant"
                loss = loss_of(
                    checkpoint(
                        model, checkpoint(model, x, "lr", use_reentrant=reentrant), "lrh", use_reentrant=reentrant
                    )
                )
            if step:
                loss.backward()
                loss = loss_of(model(x, "h"))
            run.set_sync(model, True)
            loss.backward()
            run.step(f"step {step}", model, optimizer)

    check(scenario, mode=("retain_graph", "two forwards", "reentrant", "non-reentrant"), wrap=WRAPS)


def test_evaluation_with_unsynchronized_gradients() -> None:
    """Evaluation, gathering and resharding between micro-batches leave what waits alone."""

    def scenario(run: Run, mode: Any, wrap: Wrap) -> None:
        model = run.build(Towers)
        wrap(run, model)
        optimizer = sgd(model)
        for step in range(2):
            backward(run, model, seed=step, sync=False)
            with mode():
                run.rows("evaluated", model(run.batch(seed=9), "lrh"))
            backward(run, model, seed=step + 3, use="lh", sync=False)
            if isinstance(model, FSDPModule):
                model.unshard()
                model.reshard()
            backward(run, model, seed=step + 6, use="h", sync=True)
            run.step(f"step {step}", model, optimizer)

    check(scenario, mode=(torch.no_grad, torch.inference_mode), wrap=(whole, blocks))


def test_an_error_with_unsynchronized_gradients() -> None:
    """The backward that failed leaves nothing behind; the micro-batches before it still count."""

    def scenario(run: Run, where: str, sync: bool, wrap: Wrap) -> None:
        model = run.build(Towers)
        wrap(run, model)
        optimizer = sgd(model)
        backward(run, model, seed=1, sync=False)

        def fail(_: Tensor) -> None:
            raise ValueError("on purpose")

        # It fails before any gradient of a parameter is there: plain torch keeps those that have come, too.
        run.set_sync(model, sync)
        output = model(run.batch(seed=2), "lrh")
        output.register_hook(fail)
        with pytest.raises(ValueError, match="on purpose"):
            loss_of(output).backward()
        if where == "evaluate":
            with torch.no_grad():
                model(run.batch(seed=3), "l")
        run.value("present", all(p.grad is not None for p in model.parameters()))
        backward(run, model, seed=4, use="h", sync=True)
        run.step("after", model, optimizer)

    check(scenario, where=("train", "evaluate"), sync=(False, True), wrap=(whole, blocks))


def test_an_error_in_backward_with_unsynchronized_gradients() -> None:
    """After zero_grad, none of what had come, had waited or was on its way turns up again."""

    def scenario(run: Run, sync: bool, zero: str, wrap: Wrap) -> None:
        model = run.build(Towers)
        wrap(run, model)
        optimizer = sgd(model)
        for step in range(2):
            backward(run, model, seed=1, sync=False)

            def fail(_: Tensor) -> None:
                raise ValueError("on purpose")

            run.set_sync(model, sync)
            hidden = model(run.batch(seed=2), "l")
            hidden.register_hook(fail)
            with pytest.raises(ValueError, match="on purpose"):
                loss_of(model(hidden, "rh")).backward()
            ZERO[zero](model, optimizer)
            for i, sync_now in itertools.product(range(2), (False, True)):
                backward(run, model, seed=3 + i, sync=sync_now)
            run.step(f"step {step}", model, optimizer)

    check(scenario, sync=(False, True), zero=tuple(ZERO)[:4], wrap=(whole, blocks))


def test_low_precision_gradients_accumulate_in_the_reduce_dtype() -> None:
    """bf16 gradients of equal micro-batches, added in fp32: n times one of them, which bf16 sums could not hold."""
    n = 7

    def scenario(run: Run, wrap: Wrap, sync: bool) -> None:
        model = run.build(Towers).float()
        for module in (model.left, model.right) if wrap is blocks else ():
            run.shard(module, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        run.shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        low = model if run.sharded else run.build(Towers).bfloat16()
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))  # the same rows on every rank
        for i in range(n if run.sharded else 1):
            run.set_sync(model, sync or i == n - 1)
            loss_of(low(x if run.sharded else x.bfloat16(), "lrh")).backward()
        for (name, param), (_, own) in zip(low.named_parameters(), model.named_parameters(), strict=True):
            run._show("shard", f"{name}.grad", own.grad if run.sharded else param.grad.float() * n)

    tolerance = {"rtol": 1e-6, "atol": 1e-9}
    check(scenario, tolerance=tolerance, wrap=(whole, blocks), sync=(False, True))


def test_clip_grad_norm_over_accumulated_gradients() -> None:
    """The norm over all shards of all groups is that of the plain gradients, and so is what is left after clipping."""

    def scenario(run: Run, norm_type: float, foreach: bool, wrap: Wrap) -> None:
        model = run.build(Net)
        wrap(run, model)
        optimizer = sgd(model)
        for step in range(2):
            for i in range(2):
                run.set_sync(model, i == 1)
                loss_of(model(run.batch(seed=10 * step + i))).backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type=norm_type, foreach=foreach)
            run.value("norm", norm.full_tensor() if run.sharded else norm)
            run.step(f"step {step}", model, optimizer)

    check(scenario, norm_type=(2.0, float("inf")), foreach=(True, False), wrap=(whole, blocks))


class Sum(nn.Module):
    """Autograd gives both parameters views of one gradient; plain torch accumulates into that memory twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(6, 4)), nn.Parameter(torch.zeros(3, 8))

    def forward(self, x: Tensor) -> Tensor:
        return (self.a.view(-1) + self.b.view(-1)) @ x


@pytest.mark.parametrize("world_size", [1, 2])
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
