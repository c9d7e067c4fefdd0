"""Tests an exception at every event of an iteration: if all ranks raise, the next step is exact; else none hangs.

Events are what the library does (issue or wait for a collective, allocate, copy, reduce) and the hooks that users may
register (of modules, tensors, parameters and saved tensors).
"""

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fake_gpu
import helpers
from fsdp2.engine import gather, reduce
from fsdp2.torch_private import internals
from helpers import NIGHTLY, RankError, alone, run_ranks
from hostile import hostile
from scenarios import WIDTH, Block, Run, assert_none_differ, loss_of, sgd

MOST_EVENTS = 100
"""More than an iteration has, which the test verifies."""
TIMEOUT_S = 2
EVENTS = 32
"""Of one step without hooks."""
on_each_device = pytest.mark.parametrize("device", ["cpu", fake_gpu.KIND])


class OnPurpose(RuntimeError):
    """A RuntimeError, as those of process groups and allocators are."""


class Faults:
    """Raises at one event of an iteration, numbered from 0."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.fatal: int | None = None
        self.fail: Callable[[str], None] = self._raise

    def arm(self, fatal: int | None) -> None:
        self.seen, self.fatal = [], fatal

    def event(self, name: str) -> None:
        if name == "free":
            return  # cannot fail
        self.seen.append(name)
        if len(self.seen) - 1 == self.fatal:
            self.fail(name)

    def _raise(self, name: str) -> None:
        raise OnPurpose(f"at {name}")

    @contextmanager
    def everywhere(self) -> Iterator[None]:
        """Also at what the library does beside collectives."""

        def first(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                self.event(name)
                return function(*args, **kwargs)

            return call

        with ExitStack() as stack:
            stack.enter_context(hostile(dist.get_rank(), self.event))
            for module, name in (
                (gather, "copy_all"),
                (internals, "copy_all"),
                (internals, "chunk_cat"),
                (reduce, "start"),
            ):
                stack.enter_context(mock.patch.object(module, name, first(name, getattr(module, name))))
            yield


class Hooked(nn.Module):
    """Two blocks and a scale; an event wherever a user's code may run."""

    faults: Faults

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.faults.event("forward")
        x = self.first(x)
        if x.requires_grad:
            x.register_hook(lambda _: self.faults.event("gradient of a tensor"))
        with saved_tensors_hooks(self._pack, self._unpack):
            x = self.second(x)
        return x * self.scale

    def _pack(self, tensor: Tensor) -> Tensor:
        self.faults.event("pack")
        return tensor

    def _unpack(self, tensor: Tensor) -> Tensor:
        self.faults.event("unpack")
        return tensor

    def hang_in(self) -> None:
        for module in (self, self.first, self.second.down):
            module.register_forward_pre_hook(lambda *_: self.faults.event("forward pre-hook"))
            module.register_forward_hook(lambda *_: self.faults.event("forward hook"))
        for module in (self.second, self.second.down):  # torch warns where no input needs a gradient
            module.register_full_backward_pre_hook(lambda *_: self.faults.event("backward pre-hook"))
            module.register_full_backward_hook(lambda *_: self.faults.event("backward hook"))
        for param in self.parameters():
            param.register_post_accumulate_grad_hook(lambda _: self.faults.event("accumulated"))


def build(run: Run, **options: Any) -> Hooked:
    """Three groups."""
    model: Hooked = run.build(Hooked)
    model.faults = Faults()
    for module in (model.first, model.second, model):
        run.shard(module, **options)
    return model


def train(run: Run, optimizer: torch.optim.Optimizer, model: nn.Module, number: int) -> None:
    optimizer.zero_grad()
    loss_of(model(run.batch(seed=number))).backward()
    run.grads(f"the step after a fault at event {number}", model)
    optimizer.step()


def plain() -> list[tuple[str, str, Any]]:
    run = Run()
    model = build(run)
    optimizer = sgd(model)
    for number in range(MOST_EVENTS):
        train(run, optimizer, model, number)
    return run.shown


def train_between_faults(run: Run, device: str, accumulate: bool, mesh: str, **options: Any) -> int:
    """How many events an iteration has. Each fails once, and a step follows."""
    shape = (run.world_size,) if mesh == "sharded" else (run.world_size, 1)
    names = ("shard",) if mesh == "sharded" else ("replicate", "shard")
    model = build(run, mesh=init_device_mesh(device, shape, mesh_dim_names=names), **options)
    optimizer = sgd(model)
    model.hang_in()
    with model.faults.everywhere():
        for number in range(MOST_EVENTS):
            if not fails_at(number, model, run, accumulate):
                return number
            train(run, optimizer, model, number)
    raise AssertionError(f"an iteration has more than {MOST_EVENTS} events")


def fails_at(number: int, model: Hooked, run: Run, accumulate: bool) -> bool:
    """Whether an iteration has an event of this number; it fails there."""
    try:
        if accumulate:
            run.set_sync(model, False)
            loss_of(model(run.batch(seed=1000))).backward()
            run.set_sync(model, True)
        model.faults.arm(number)
        loss_of(model(run.batch(seed=number))).backward()
    except OnPurpose:
        return True
    finally:
        model.faults.arm(None)
    return False


CASES: list[dict[str, Any]] = [
    {"reshard_after_forward": True, "accumulate": False, "mesh": "sharded"},
    {"reshard_after_forward": None, "accumulate": True, "mesh": "sharded"},
    {"reshard_after_forward": False, "accumulate": False, "mesh": "replicas"},
]


@pytest.mark.parametrize(
    ("world_size", "cases", "device"),
    [(2, CASES[:2], "cpu"), (3, CASES[2:], fake_gpu.KIND)]
    if not NIGHTLY
    else [(ranks, CASES, device) for ranks in (2, 3) for device in ("cpu", fake_gpu.KIND)],
)
def test_the_step_after_a_fault_at_any_event_is_exact(
    world_size: int, cases: list[dict[str, Any]], device: str
) -> None:
    """Half of an iteration has happened: what was gathered, saved, reduced or delivered must not reach the next one."""
    expected = alone(plain)

    def body(rank: int, _: int) -> list[str]:
        different = []
        for case in cases:
            print(f"rank {rank}: {case}", file=sys.stderr, flush=True)  # for the report of a hang
            run = Run(rank, world_size, expected)
            count = train_between_faults(run, device, **case)
            assert count > 30, f"expected an iteration's events, got {count}"
            different += [f"{case}: {text}" for text in run.different]
        return different

    assert_none_differ(run_ranks(world_size, body, device=device))


# ---- on one rank only ------------------------------------------------------------------------------------------------


def alone_at_fault(
    device: str, expected: Any, size: int, fatal_events: Sequence[int], fail: Callable[[str], None]
) -> str:
    """How a step ends on this rank. Its world, one of as many as there are events, has `size` ranks, and a process
    group that gives up soon; on its last rank, `fail` is called at an event.
    """
    timeout = timedelta(seconds=TIMEOUT_S)
    groups = [dist.new_group([size * i + j for j in range(size)], timeout=timeout) for i in range(len(fatal_events))]
    world, rank = divmod(dist.get_rank(), size)
    run = Run(rank, size, expected)
    model = build(run, mesh=DeviceMesh.from_group(groups[world], device), reshard_after_forward=True)
    model.faults.fail = fail
    dist.barrier()  # nobody shall give up on one that has not begun
    with hostile(rank, model.faults.event) if rank == size - 1 else nullcontext():
        model.faults.arm(fatal_events[world])
        try:
            loss_of(model(run.batch(seed=0))).backward()
        except RuntimeError as error:
            model.zero_grad()
            return str(error)
    run.grads("the step after a fault at event 0", model)
    assert not run.different, run.different[0]  # it may finish if it has got all that it needs
    return "finished"


@on_each_device
def test_no_rank_waits_for_ever_for_one_that_has_left_a_step(device: str) -> None:
    """It raised in the middle, and sits in a debugger."""
    expected, fatal = alone(plain), range(1, EVENTS, 3 if NIGHTLY else 6)

    def fail(name: str) -> None:
        raise OnPurpose(f"at {name}")

    def body(rank: int, _: int) -> str:
        return alone_at_fault(device, expected, 2, fatal, fail)

    ended = run_ranks(2 * len(fatal), body, timeout=60, device=device)
    assert all(text.startswith("at ") for text in ended[1::2]), ended[1::2]
    # Over gloo, the others are told at once.
    expected_text = "raised OnPurpose|finished" if device == "cpu" else "Timed out|timeout|closed|finished"
    for text in ended[::2]:
        assert re.search(expected_text, text), text


@on_each_device
def test_no_rank_waits_for_ever_for_one_that_has_died(device: str) -> None:
    expected, fatal = alone(plain), range(1, EVENTS, 3 if NIGHTLY else 9)
    size = 3

    def body(rank: int, _: int) -> str:
        return alone_at_fault(device, expected, size, fatal, lambda name: os._exit(1))

    with mock.patch.object(helpers, "GRACE_S", 60), pytest.raises(RankError) as caught:
        run_ranks(size * len(fatal), body, timeout=60, device=device)
    dead = ", ".join(str(size * world + size - 1) for world in range(len(fatal)))
    assert re.match(rf"rank {dead} of {size * len(fatal)} failed\n", str(caught.value)), str(caught.value)


# ---- errors that users catch, and read -------------------------------------------------------------------------------


@on_each_device
def test_a_gather_by_hand_that_failed_can_be_repeated(device: str) -> None:
    """It found no memory, or no peer in time; what it left must not be taken for full parameters."""

    def body(rank: int, size: int) -> None:
        model = build(Run(rank, size, []))
        with hostile(rank, model.faults.event):
            for number, name in enumerate(("allocate", "issue all_gather", "wait all_gather")):
                model.faults.arm(number)
                with pytest.raises(OnPurpose, match=rf"at {name} \(while gathering root, \d+ bytes; by hand, step 0\)"):
                    model.unshard()
                model.faults.arm(None)
                model.unshard()
                assert torch.equal(model.scale.cpu(), torch.ones(WIDTH, dtype=torch.float64)), (name, model.scale)
                model.reshard()

    run_ranks(2, body, device=device)


@on_each_device
def test_a_reduction_that_finds_no_memory_names_its_parameters(device: str) -> None:
    def fail_to_allocate(*_: Any) -> None:
        raise torch.OutOfMemoryError("out of memory")

    def body(rank: int, size: int) -> None:
        run = Run(rank, size, [])
        model = build(run)
        text = r"out of memory \(while reducing the gradients of scale; backward, step 0\)"
        with mock.patch.object(reduce, "start", fail_to_allocate), pytest.raises(torch.OutOfMemoryError, match=text):
            loss_of(model(run.batch(seed=0))).backward()

    run_ranks(2, body, device=device)
