"""Tests passes after a failed backward, as in "catch out of memory, retry".

Autograd frees the graph of a failed backward at any time: on CUDA, a device's thread may do so in the middle of the
next forward or backward. Nothing may depend on that moment; a new pass drops what an older one has left.
"""

import copy
import threading
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fake_gpu
import fsdp2
from fsdp2.engine.state import groups_below
from fsdp2.torch_private import internals
from helpers import NIGHTLY, assert_same, full, raises_in_backward, run_checks, shard_batch

WIDTH, BLOCKS, ROWS = 5, 3, 6


class Net(nn.Module):
    """`fails_before`: the block whose input's gradient can't be computed."""

    def __init__(self, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.is_checkpointed, self.fails_before = is_checkpointed, -1

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = raises_in_backward(x, MemoryError("on purpose")) if i == self.fails_before else x
            x = torch.tanh(checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x))
        return self.head(x)


def build(is_one_group: bool = False, **options: Any) -> tuple[Any, Net]:
    """`is_one_group`: a failed backward leaves some gradients of a group."""
    torch.manual_seed(0)
    plain = Net(**options).double()
    model: Any = copy.deepcopy(plain)
    for block in () if is_one_group else model.blocks:
        fsdp2.fully_shard(block)
    return fsdp2.fully_shard(model), plain


def loss_of(model: nn.Module, step: int, rank: int, world_size: int) -> Tensor:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step)).double()
    return model(x if world_size == 1 else shard_batch(x, rank, world_size)).square().mean()


class Held:
    """Holds what autograd would drop with a failed backward, until `drop` is called, on another thread."""

    def __init__(self) -> None:
        self._callbacks: list[Any] = []
        plain = internals.on_backward_end

        def keep(callback: Callable[[], None]) -> None:
            self._callbacks.append(callback)
            plain(callback)

        self.patch = mock.patch.object(internals, "on_backward_end", keep)

    def drop(self, *_: Any) -> None:
        thread = threading.Thread(target=self._callbacks.clear)
        thread.start()
        thread.join()


def run_plainly(loss: Tensor) -> None:
    """A backward that fsdp2 does not hear about: by a function of torch that somebody has imported before."""
    entry: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    with mock.patch.object(torch.autograd, "_engine_run_backward", entry.__wrapped__):
        loss.backward()


# When autograd drops it. Each returns what undoes it.
Moment = Callable[[Any, Held], Callable[[], object]]


def at_once(model: Any, held: Held) -> Callable[[], object]:
    held.drop()
    return lambda: None


def in_the_next_forward(model: Any, held: Held) -> Callable[[], object]:
    return model.blocks[1].register_forward_pre_hook(held.drop).remove


def in_the_next_backward(model: Any, held: Held) -> Callable[[], object]:
    return model.blocks[1].register_full_backward_hook(held.drop).remove


def with_a_gradient(model: Any, held: Held) -> Callable[[], object]:
    return model.blocks[2].weight.register_hook(held.drop).remove


def never(model: Any, held: Held) -> Callable[[], object]:
    return lambda: None


MOMENTS: tuple[Moment, ...] = (at_once, in_the_next_forward, in_the_next_backward, with_a_gradient, never)


# What a program does next, before it trains on.


def nothing(model: Any, optimizer: Any) -> None:
    pass


def unshards(model: Any, optimizer: Any) -> None:
    model.blocks[0].unshard()
    assert model.blocks[0].weight.abs().sum() > 0
    model.blocks[0].reshard()


def reads_full_params(model: Any, optimizer: Any) -> None:
    with fsdp2.full_params(model) as weights:
        assert all(weight.abs().sum() > 0 for weight in weights.values())


def evaluates(model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        model(torch.ones(1, WIDTH).double())


def loads(model: Any, optimizer: Any) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})


def copies(model: Any, optimizer: Any) -> None:
    copy.deepcopy(model)(torch.ones(1, WIDTH).double())


def chooses(model: Any, optimizer: Any) -> None:
    model.set_manual_backward_finalization(False)


def finalizes(model: Any, optimizer: Any) -> None:
    model.finalize_backward()


NEXT = (nothing, unshards, reads_full_params, evaluates, loads, copies, chooses, finalizes)


@pytest.mark.parametrize(
    ("world_size", "device"), [(1, "cpu"), (2, "cpu"), (2, fake_gpu.KIND), *([(3, "cpu")] if NIGHTLY else [])]
)
def test_a_step_after_a_failed_backward_is_exact(world_size: int, device: str) -> None:
    def check(moment: Moment, go_on: Callable[[Any, Any], None], backward: Any, **options: Any) -> None:
        rank = torch.distributed.get_rank()
        model, plain = build(**options)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.5) for each in (model, plain)]
        for step, where in enumerate((BLOCKS - 1, 1)):
            held = Held()
            model.fails_before = where
            with held.patch, pytest.raises(MemoryError):
                backward(loss_of(model, 100 + step, rank, world_size))
            model.fails_before = -1
            undo = moment(model, held)
            go_on(model, optimizers[0])
            optimizers[0].zero_grad()
            for each, ranks in ((model, world_size), (plain, 1)):
                loss_of(each, step, rank, ranks).backward()
            undo()
            for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
                assert_same(full(mine.grad), theirs.grad, 1e-9, 1e-10, f"step {step}, gradient of {name}")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert_same(full(mine), theirs.detach(), 1e-9, 1e-10, name)

    unheard = [(moment, go_on, run_plainly) for moment in MOMENTS for go_on in (nothing, unshards)]
    unheard += [(never, go_on, run_plainly) for go_on in NEXT]
    cases = [(*case, {}) for case in [*unheard, (in_the_next_forward, nothing, torch.autograd.backward)]]
    options = ({"is_checkpointed": True}, {"is_one_group": True})
    cases += [(moment, nothing, run_plainly, each) for each in options for moment in MOMENTS]
    chosen = cases if device != "cpu" else cases[::3]  # of a device's threads, the moments are real
    run_checks(
        world_size,
        [
            (f"{moment.__name__} {go_on.__name__} {options}", partial(check, moment, go_on, backward, **options))
            for moment, go_on, backward, options in chosen
        ],
        device=device,
    )


@pytest.mark.parametrize("device", ["cpu", fake_gpu.KIND])
def test_a_failed_backward_frees_its_memory_before_anything_else_runs(device: str) -> None:
    """By `loss.backward()`: a program that catches it may need that memory at once."""

    def check() -> None:
        model, _ = build()
        model.fails_before = 1
        held = Held()
        with held.patch, pytest.raises(MemoryError):
            loss_of(model, 0, torch.distributed.get_rank(), 2).backward()
        groups = groups_below(model)
        assert not any(group.is_unsharded for group in groups)

    run_checks(2, [("freed", check)], device=device)


@pytest.mark.parametrize("device", ["cpu", fake_gpu.KIND])
def test_a_second_backward_through_a_graph_that_stayed_is_exact(device: str) -> None:
    """No forward, at which a pass begins, is between the one that failed and the next."""

    def check() -> None:
        rank = torch.distributed.get_rank()
        model, plain = build()
        loss = loss_of(model, 0, rank, 2)
        node: Any = loss.grad_fn
        while "Tanh" not in type(node).__name__:  # behind the head: gradients of a group have come by then
            node = node.next_functions[-1][0] if len(node.next_functions) == 1 else node.next_functions[1][0]

        def fail(*_: Any) -> None:
            raise MemoryError("on purpose")

        handle = node.register_hook(fail)
        with pytest.raises(MemoryError):
            loss.backward(retain_graph=True)
        handle.remove()
        model.zero_grad()
        loss.backward()
        loss_of(plain, 0, rank, 1).backward()
        for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert_same(full(mine.grad), theirs.grad, 1e-9, 1e-10, name)

    run_checks(2, [("retained", check)], device=device)
