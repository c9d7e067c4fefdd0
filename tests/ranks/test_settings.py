"""Tests settings of FSDPModule against plain training.

tests/trace/test_every_setting.py tests that each setting has an effect, without ranks; test_training.py draws them, one
and several at once, in whatever way a model trains. Here are settings that change between steps, or the numbers.
"""

import copy
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fsdp2 import FSDPModule, register_fsdp_forward_method, share_comm_ctx
from fsdp2.engine import reduce
from helpers import run_checks
from scenarios import (
    ROWS,
    WIDTH,
    MayFail,
    Net,
    Run,
    Uneven,
    Wrap,
    blocks,
    check,
    kept,
    loss_of,
    sgd,
    whole,
)
from training import SETTINGS


def sharded_modules(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def apply(run: Run, model: nn.Module, *settings: str) -> None:
    for setting in settings if run.sharded else ():
        SETTINGS[setting](model)


def test_a_setting_is_taken_back() -> None:
    """What was set for a step holds for that step."""
    back: dict[str, Callable[[Any], object]] = {
        "no reshard_after_backward": lambda model: model.set_reshard_after_backward(True),
        "no unshard_in_backward": lambda model: model.set_unshard_in_backward(True, recurse=True),
        "separate group": lambda model: model.set_separate_reduce_scatter_group(False),
        "further backwards": lambda model: model.set_is_last_backward(True),
        "keep storage": lambda model: model.set_keep_unsharded_storage(False),
        "divide factor": lambda model: model.set_gradient_divide_factor(dist.get_world_size(), recurse=True),
        "hook": lambda model: model.set_all_reduce_hook(None, recurse=True),
    }

    def scenario(run: Run, setting: str, wrap: Wrap) -> None:
        model = run.build(Uneven)
        wrap(run, model)
        optimizer = sgd(model)
        for step in range(4):
            if run.sharded:
                (SETTINGS if step % 2 == 0 else back)[setting](model)
            loss = loss_of(model(run.batch(seed=step)))
            if run.sharded and setting == "divide factor" and step % 2 == 0:
                loss.register_hook(lambda gradient: 2 * gradient)  # the factor is twice the number of ranks
            run.step(f"step {step}", model, optimizer, loss)

    check(scenario, setting=tuple(back), wrap=(kept,))


# ---- gathers ---------------------------------------------------------------------------------------------------------


class Shift(nn.Module):
    """Its backward reads no parameter, so plain training, too, lets these change between forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WIDTH + 1, WIDTH)
        self.shift = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.embed((x > 0).sum(1)) + self.shift


def test_unsharded_parameters_changed_between_forward_and_backward_are_stale() -> None:
    """The versions of what was gathered are those at the gather, not those at the backward that found it kept."""

    def scenario(run: Run, when: str, wrap: Wrap) -> None:
        model = run.build(Shift)
        wrap(run, model)
        apply(run, model, "no reshard_after_backward")
        optimizer = sgd(model)
        loss = loss_of(model(run.batch(seed=1)))
        if when == "between two backwards":
            loss.backward(retain_graph=True)
        if when == "before backward":
            with torch.no_grad():
                torch._foreach_mul_([*model.parameters()], 0.9)
        else:
            later = loss_of(model(run.batch(seed=2)))
            later.backward(retain_graph=True)
            optimizer.step()
        loss.backward()
        run.grads("gradients", model)
        with torch.no_grad():
            run.rows("evaluated", model(run.batch(seed=99)))
        run.step("after", model, optimizer, loss_of(model(run.batch(seed=3))))

    whens = ("before backward", "between two backwards", "between two forwards' backwards")
    check(scenario, when=whens, wrap=(kept, blocks))


# ---- reductions: see also test_hsdp.py -------------------------------------------------------------------------------


# ---- the end of backward: see also test_accumulation.py --------------------------------------------------------------


def in_flight(run: Run, model: Any, buffers: int = 9) -> None:
    """Let all reductions be in flight until they are finished by hand."""
    if run.sharded:
        model.set_reduce_scatter_max_input_buffers(buffers)
        model.set_manual_backward_finalization(True)


def finalize(run: Run, model: Any, async_op: bool = False) -> None:
    if run.sharded:
        handle = model.finalize_backward(async_op=async_op)
        assert (handle is not None) == async_op
        if handle is not None:
            handle.wait()
            handle.wait()


def expect_no_gradients(run: Run, model: nn.Module) -> None:
    if run.sharded:
        early = [name for name, param in model.named_parameters() if param.grad is not None]
        assert not early, f"gradients before finalize_backward: {early}"


def test_a_finalisation_that_fails() -> None:
    """The next one delivers nothing of what this one has left: an optimizer would step on a part of the gradients."""

    def scenario(run: Run) -> None:
        model = run.build(Uneven)
        blocks(run, model)
        in_flight(run, model)
        optimizer = sgd(model)
        hook = mock.Mock()
        if run.sharded:
            model.twice.set_all_reduce_hook(hook)
        loss_of(model(run.batch(seed=1))).backward()
        if run.sharded:
            hook.assert_not_called()
            hook.side_effect = ValueError("on purpose")
            with pytest.raises(ValueError, match="on purpose"):
                model.finalize_backward()
            model.twice.set_all_reduce_hook(None)
            delivered = {name for name, param in model.named_parameters() if param.grad is not None}
            model.finalize_backward()
            assert {name for name, param in model.named_parameters() if param.grad is not None} == delivered
            assert 0 < len(delivered) < 5, "of the head"
        optimizer.zero_grad()
        loss_of(model(run.batch(seed=2))).backward()
        finalize(run, model)
        run.step("after", model, optimizer)

    check(scenario)


def test_manual_finalisation_is_the_roots() -> None:
    """Refused on a child and during backward; a handle from before reset_iter_state is refused, too."""

    def refusals() -> None:
        run = Run(dist.get_rank(), 2, [])
        model = run.build(Net)
        blocks(run, model)
        for call in (
            lambda: model.blocks[0].set_manual_backward_finalization(True),
            lambda: model.blocks[0].finalize_backward(),
            lambda: model.blocks[0].finalize_backward(async_op=True),
            lambda: model.blocks[0].reset_iter_state(),
        ):
            with pytest.raises(RuntimeError, match="expected the root"):
                call()
        output = model(run.batch(seed=1))
        refused = []

        def amid_backward(_: Tensor) -> None:
            with pytest.raises(RuntimeError, match="between backward passes"):
                model.set_manual_backward_finalization(True)
            refused.append(True)

        model.blocks[0].up.weight.register_hook(amid_backward)
        loss_of(output).backward()
        assert refused
        assert model.scale.grad is not None
        in_flight(run, model)
        model.zero_grad()
        model.blocks[0].up.weight._backward_hooks.clear()
        loss_of(model(run.batch(seed=1))).backward()
        handle = model.finalize_backward(async_op=True)
        assert model.scale.grad is None
        model.reset_iter_state()
        with pytest.raises(RuntimeError, match="dropped by reset_iter_state"):
            handle.wait()
        model.finalize_backward()
        assert model.scale.grad is None, "dropped"

    run_checks(2, [("refusals", refusals)])


# ---- other methods than forward, other roots -------------------------------------------------------------------------


class Coder(nn.Module):
    """Methods of its own beside forward, which call each other."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = Net(depth=1), Net(depth=1)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))

    def encode(self, x: Tensor, shift: float = 0.0) -> Tensor:
        return self.encoder(x * self.scale) + shift

    def decode(self, x: Tensor) -> Tensor:
        return self.decoder(x) + self.scale

    def through(self, x: Tensor) -> Tensor:
        return self(x) * self.scale


def scaled(self: Coder, x: Tensor) -> Tensor:
    return self.decode(x) * self.scale


def test_a_registered_method_gathers_like_forward() -> None:
    """Methods of the class, an attribute of the object, one that calls forward; registered once or twice; mixed."""

    def scenario(run: Run, times: int, wrap: Wrap, settings: tuple[str, ...]) -> None:
        model = run.build(Coder)
        model.attached = types.MethodType(scaled, model)
        model.function = lambda x: scaled(model, x)
        wrap(run, model)
        apply(run, model, *settings)
        for _ in range(times):
            for name in ("encode", "decode", "through", "attached", "function"):
                register_fsdp_forward_method(model, name)
        optimizer = sgd(model)
        for step in range(2):
            for i, name in enumerate(("encode", "decode", "through", "attached", "function")):
                output = getattr(model, name)(run.batch(seed=10 * step + i))
                run.rows(name, output)
                loss_of(output).backward()
                run.grads(name, model)
            loss_of(model.decode(model.encode(run.batch(seed=step), shift=1.0))).backward()
            run.step(f"step {step}", model, optimizer, loss_of(model(run.batch(seed=9 + step))))
            with torch.no_grad():
                run.rows("without grad", model.encode(run.batch(seed=99), shift=0.5))

    check(scenario, times=(1, 2), wrap=(blocks,), settings=(("no reshard_after_backward",),))


def test_a_method_that_is_not_registered_works_on_shards() -> None:
    """So the test above needs the registration; a plain module and its methods stay as they are."""

    def checks() -> None:
        run = Run(dist.get_rank(), 2, [])
        model = run.build(Coder)
        whole(run, model)
        with pytest.raises(RuntimeError, match="scale: each rank holds a shard of it"):
            model.encode(run.batch(seed=1))
        register_fsdp_forward_method(model, "encode")
        assert model.encode(run.batch(seed=1)).shape == (ROWS // 2, WIDTH)
        assert all(isinstance(p, DTensor) for p in model.parameters())
        for wrong in ("missing", "training"):
            with pytest.raises(ValueError, match="method_name: expected a method of"):
                register_fsdp_forward_method(model, wrong)
        plain = Coder()
        with pytest.raises(ValueError, match="method_name"):
            register_fsdp_forward_method(plain, "missing")
        before = dict(vars(plain))
        register_fsdp_forward_method(plain, "encode")
        assert vars(plain) == before
        register_fsdp_forward_method(copy.copy(plain), "decode")

    run_checks(2, [("checks", checks)])


def test_roots_that_share_the_bound_of_their_reductions() -> None:
    """Two stages of a pipeline, each a root: their backwards take turns, and the gradients of both are exact."""

    def scenario(run: Run, when: str, wrap: Wrap, settings: tuple[str, ...]) -> None:
        first, second = run.build(Net), run.build(Net, seed=2)
        for stage in (first, second):
            wrap(run, stage)
            apply(run, stage, *settings)
        optimizer = sgd(nn.ModuleList([first, second]))
        if run.sharded and when == "at first":
            share_comm_ctx([first, second])
        for step in range(3):
            hidden = first(run.batch(seed=step))
            cut = hidden.detach().requires_grad_()
            loss = loss_of(second(cut))
            loss.backward()
            if run.sharded and when == "between backwards" and step == 1:
                share_comm_ctx([second, first, first])
            hidden.backward(cut.grad)
            run.step(f"step {step}", nn.ModuleList([first, second]), optimizer)

    check(scenario, when=("at first", "between backwards"), wrap=(blocks,), settings=((), ("many reductions",)))


def prefetch_across(first: nn.Module, second: nn.Module) -> None:
    """Each module gathers all of the other root ahead, and the next one of its own."""
    for one, other in ((first, second), (second, first)):
        for module in sharded_modules(one):
            module.set_modules_to_forward_prefetch([*sharded_modules(other), module])
            module.set_modules_to_backward_prefetch([*sharded_modules(other), module])


def test_modules_under_another_root_are_prefetched() -> None:
    """Also if that does not run, if it has changed before it runs, or if the pass fails."""

    def scenario(run: Run, wrap: Wrap, settings: tuple[str, ...]) -> None:
        first, second = run.build(Net), run.build(Net, seed=2)
        for model in (first, second):
            wrap(run, model)
            apply(run, model, *settings)
        if run.sharded:
            prefetch_across(first, second)
        both = nn.ModuleList([first, second])
        optimizer = sgd(both)
        for step in range(2):
            with torch.no_grad():
                run.rows(f"evaluated {step}", first(run.batch(seed=9)))
            with pytest.raises(RuntimeError, match="shape"):
                first(run.batch(seed=9)[:, 1:])
            loss_of(first(run.batch(seed=step))).backward()  # twice, before the other runs
            loss_of(second(first(run.batch(seed=step)))).backward()
            run.step(f"step {step}", both, optimizer)
        loss_of(second(run.batch(seed=9))).backward()
        run.grads("the second alone", second)

    check(scenario, wrap=(blocks,), settings=((), ("keep storage",)))


def test_reductions_in_flight_when_roots_begin_to_share() -> None:
    """Both have some: none is lost, each arrives where it belongs, also if the other root finishes it."""

    def scenario(run: Run, order: str, finalizes: str) -> None:
        first, second = run.build(Net), run.build(Net, seed=2)
        for stage in (first, second):
            blocks(run, stage)
            in_flight(run, stage)
        both = nn.ModuleList([first, second])
        optimizer = sgd(both)
        loss_of(first(run.batch(seed=1))).backward()
        loss_of(second(run.batch(seed=2))).backward()
        expect_no_gradients(run, both)
        if run.sharded:
            share_comm_ctx([first, second] if order == "12" else [second, first])
        expect_no_gradients(run, both)
        loss_of(first(run.batch(seed=3))).backward()
        for stage in (first, second) if finalizes == "12" else (second, first):
            finalize(run, stage)
        run.step("after", both, optimizer)

    check(scenario, order=("12", "21"), finalizes=("12", "21"))


def test_a_failed_backward_leaves_reductions_of_another_root_in_flight() -> None:
    def scenario(run: Run, shares: bool) -> None:
        first, second = run.build(MayFail), run.build(MayFail, seed=2)
        for stage in (first, second):
            blocks(run, stage)
        in_flight(run, first)
        if run.sharded and shares:
            share_comm_ctx([first, second])
        loss_of(first(run.batch(seed=1))).backward()
        second.middle[1].when = "backward"
        with pytest.raises(ValueError, match="on purpose"):
            loss_of(second(run.batch(seed=2))).backward()
        finalize(run, first)
        run.grads("first", first)

    check(scenario, shares=(False, True))


def test_a_failing_reduction_of_unsynchronized_gradients() -> None:
    """Half begun, it leaves nothing that another finalisation would deliver as if it were all."""

    def scenario(run: Run) -> None:
        model = run.build(Uneven)
        blocks(run, model)
        optimizer = sgd(model)
        if run.sharded:
            model.set_requires_gradient_sync(False)
            loss_of(model(run.batch(seed=1))).backward()
            model.set_requires_gradient_sync(True)
            fails_second = [mock.DEFAULT, torch.OutOfMemoryError("on purpose")]
            with (
                mock.patch.object(reduce, "start", wraps=reduce.start, side_effect=fails_second),
                pytest.raises(RuntimeError, match="purpose"),
            ):
                model.finalize_backward()
            with pytest.raises(RuntimeError, match="unsynchronized gradients were lost"):
                model.finalize_backward()
            with pytest.raises(RuntimeError, match="is not synchronised between ranks"):
                optimizer.step()
            with pytest.raises(RuntimeError, match="unsynchronized gradients were lost"):
                loss_of(model(run.batch(seed=2))).backward()
            optimizer.zero_grad()
        run.step("after", model, optimizer, loss_of(model(run.batch(seed=3))))

    check(scenario)
