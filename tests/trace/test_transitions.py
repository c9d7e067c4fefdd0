"""Tests the table of phases: each transition that programs make is in it, and programs make each of its entries."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, replicate
from fsdp2.engine.group import FSDPParamGroup
from fsdp2.engine.policy import COPIED, GATHERED, SHARDED, TRANSITIONS, UNSHARDED, Phase
from fsdp2.engine.state import groups_below
from helpers import fake_world
from simulated_device import simulated_device

Transition = tuple[Phase, Phase]

SIZE = 8


class Block(nn.Module):
    """`fails`: None, "forward" or "backward"."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.fails: str | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.outer(torch.relu(self.inner(x)))
        if self.fails == "forward":
            raise ValueError("planted in forward")
        if self.fails == "backward":
            x.register_hook(fail)
        return x


def fail(_: Tensor) -> None:
    raise ValueError("planted in backward")


@contextmanager
def recorded() -> Iterator[dict[int, list[Phase]]]:
    """Yields the phases that each group (by its identity) takes on, in order, without repetitions."""
    seen: dict[int, list[Phase]] = {}

    def get(self: Any) -> Phase:
        return self.__dict__["phase"]

    def put(self: Any, phase: Phase) -> None:
        self.__dict__["phase"] = phase
        phases = seen.setdefault(id(self), [])
        if not phases or phases[-1] is not phase:
            phases.append(phase)

    assert "phase" not in vars(FSDPParamGroup), "it is an attribute of each group"
    FSDPParamGroup.phase = property(get, put)  # type: ignore[assignment]
    try:
        yield seen
    finally:
        del FSDPParamGroup.phase


def transitions_of(program: Callable[[], Any]) -> set[Transition]:
    """Runs a program; returns the transitions that its groups make, each of which starts from SHARDED."""
    with fake_world(4), recorded() as seen:
        kept_alive = program()  # an identity is given to another group only after that
        assert kept_alive is not None
    assert seen, "the program has groups"
    for phases in seen.values():
        assert phases[0] is SHARDED
    return {each for phases in seen.values() for each in pairwise(phases)}


def build(wrap: Callable[..., Any] = fully_shard, shape: tuple[int, ...] = (4,), **options: Any) -> Any:
    mesh = init_device_mesh("cpu", shape)
    model = nn.Sequential(*[Block() for _ in range(3)])
    for block in model:
        wrap(block, mesh=mesh, **options)
    return wrap(model, mesh=mesh, **options)


def step(model: Any) -> None:
    model(torch.randn(4, SIZE, requires_grad=True)).sum().backward()


# ---- programs


def plain() -> Any:
    model = build()
    for _ in range(3):
        step(model)
        with torch.no_grad():
            model(torch.randn(4, SIZE))
    return model


def accumulates() -> Any:
    model = build()
    for last in (False, False, True):
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)
        step(model)
    return model


def keeps_after_forward() -> Any:
    model = build(reshard_after_forward=False)
    for _ in range(3):
        step(model)
    with torch.no_grad():
        model(torch.randn(4, SIZE))
        model(torch.randn(4, SIZE))
    return model


def keeps_secondary_shards() -> Any:
    model = build(reshard_after_forward=2)
    for _ in range(3):
        step(model)
    return model


def secondary_shards_are_dropped() -> Any:
    model = build(reshard_after_forward=2)
    model(torch.randn(4, SIZE, requires_grad=True))  # no backward follows
    step(model)
    return model


def mixed_precision_on_two_axes() -> Any:
    model = build(shape=(2, 2), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    for _ in range(3):
        step(model)
    return model


def replicates() -> Any:
    model = build(replicate)
    for _ in range(3):
        step(model)
    return model


def offloads() -> Any:
    with simulated_device():
        model = build(offload_policy=CPUOffloadPolicy(pin_memory=False))
        for _ in range(3):
            step(model)
    return model


def checkpoints() -> Any:
    model = build()
    for use_reentrant in (False, True):
        x = torch.randn(4, SIZE, requires_grad=True)
        for block in model:
            x = checkpoint(block, x, use_reentrant=use_reentrant)
        x.sum().backward()
    return model


def by_hand() -> Any:
    model = build()
    model.unshard()
    model[0].unshard()
    model[0].unshard()
    step(model)
    model[0].reshard()
    handle = model[1].unshard(async_op=True)
    handle.wait()
    model[1].reshard()
    model[2].unshard(async_op=True)
    model[2].reshard()
    return model


def changes_between_passes() -> Any:
    """A weight is written to, and one is replaced, while the unsharded parameters are kept."""
    model = build()
    model.set_reshard_after_backward(False)
    for _ in range(2):
        step(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
    step(model)
    model.to(torch.float64)
    model(torch.randn(4, SIZE, dtype=torch.float64)).sum().backward()
    return model


def departs_from_the_order() -> Any:
    """A group that was gathered ahead in vain."""
    model = build()
    step(model)
    step(model)
    with suppress(ValueError):
        model[0].fails = "forward"
        model(torch.randn(4, SIZE))
    model[0].fails = None
    step(model)
    return model


def fails_in_forward() -> Any:
    model = build()
    for block in model:
        step(model)
        block.fails = "forward"
        with pytest.raises(ValueError, match="planted in forward"):
            step(model)
        block.fails = None
    return model


def fails_in_backward() -> Any:
    model = build()
    for block in model:
        step(model)
        block.fails = "backward"
        with pytest.raises(ValueError, match="planted in backward"):
            step(model)
        block.fails = None
    step(model)
    return model


def gather_fails() -> Any:
    """A peer is gone when a gather is begun, or when it is waited for."""
    model = build()
    step(model)
    for group in groups_below(model[0]):
        comm = group.comms.gathers
        group.use_comms(group.comms._replace(gathers=Failing(comm, at_once=True)))
        with pytest.raises(RuntimeError, match=r"gone.*while gathering"):
            group.unshard()
        group.use_comms(group.comms._replace(gathers=Failing(comm, at_once=False)))
        with pytest.raises(RuntimeError, match=r"gone.*while gathering"):
            group.unshard()
        group.use_comms(group.comms._replace(gathers=comm))
    step(model)
    return model


class Failing:
    """A Comm whose all-gather fails, at once or when it is waited for."""

    def __init__(self, comm: Any, at_once: bool) -> None:
        self._comm, self._at_once = comm, at_once

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)

    def all_gather(self, outputs: Any, inputs: Any) -> Any:
        if self._at_once:
            raise RuntimeError("a peer is gone")
        return self

    def wait(self) -> None:
        raise RuntimeError("a peer is gone")


def copies_are_out() -> Any:
    """Makes and ends copies, as full_params does, from each phase in which it can find a group."""
    model = build()
    step(model)
    first, second, *_ = groups_below(model[0]) + groups_below(model[1])
    first.begin_copies()
    first.end_copies()
    model[0].unshard()
    first.begin_copies()
    first.begin_copies()
    first.reshard()  # copies stay
    assert first.phase is COPIED
    with pytest.raises(RuntimeError, match="full_params has made"):
        model[0](torch.randn(4, SIZE))
    first.end_copies()
    first.end_copies()
    second.start_unshard()
    second.begin_copies()
    second.end_copies()
    step(model)
    return model


def gathers_again() -> Any:
    """A rank that joins a gather of what it has in use: conditional modules do."""
    model = build()
    group = groups_below(model[0])[0]
    for _ in range(2):
        group.unshard_again()
        model[0].unshard()
        group.unshard_again()
        model[0].reshard()
    step(model)
    return model


def resets() -> Any:
    model = build()
    loss = model(torch.randn(4, SIZE)).sum()
    model.reset_iter_state()
    del loss
    model[0].unshard(async_op=True)
    model.reset_iter_state()
    step(model)
    return model


PROGRAMS = (
    plain,
    accumulates,
    keeps_after_forward,
    keeps_secondary_shards,
    secondary_shards_are_dropped,
    mixed_precision_on_two_axes,
    replicates,
    offloads,
    checkpoints,
    by_hand,
    changes_between_passes,
    departs_from_the_order,
    fails_in_forward,
    fails_in_backward,
    gather_fails,
    copies_are_out,
    gathers_again,
    resets,
)


def made_up() -> set[Transition]:
    return {(before, after) for before, later in TRANSITIONS.items() for after in later}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_programs_make_transitions_of_the_table_only(program: Callable[[], Any]) -> None:
    extra = transitions_of(program) - made_up()
    assert not extra, f"not in TRANSITIONS: {', '.join(f'{a.name} -> {b.name}' for a, b in extra)}"


def test_each_entry_of_the_table_is_made_by_a_program() -> None:
    missing = made_up().difference(*map(transitions_of, PROGRAMS))
    assert not missing, f"no program makes {', '.join(f'{a.name} -> {b.name}' for a, b in missing)}"


def test_the_table_names_each_phase() -> None:
    """From each phase another one may follow, none follows itself, and SHARDED is reached from each, at once or by
    GATHERED.
    """
    assert set(TRANSITIONS) == set(Phase)
    for phase, later in TRANSITIONS.items():
        assert later, phase
        assert phase not in later
        assert len(set(later)) == len(later)
        assert phase is SHARDED or {SHARDED, GATHERED} & {*later}


def test_a_group_refuses_a_phase_that_may_not_follow() -> None:
    with fake_world(4):
        group = groups_below(build()[0])[0]
        with pytest.raises(RuntimeError, match="SHARDED cannot become UNSHARDED"):
            group._become(UNSHARDED)
        assert group.phase is SHARDED


@pytest.mark.parametrize("at_once", [True, False])
def test_modules_have_sharded_parameters_when_a_second_gather_fails(at_once: bool) -> None:
    with fake_world(4):
        model = build()
        step(model)
        model[0].unshard()
        group = groups_below(model[0])[0]
        assert group.phase is UNSHARDED
        comm = group.comms.gathers
        group.use_comms(group.comms._replace(gathers=Failing(comm, at_once)))
        with pytest.raises(RuntimeError, match=r"gone.*while gathering"):
            group.unshard_again()
        assert group.phase is (GATHERED if at_once else SHARDED), "one that has not begun leaves what was gathered"
        for param in group.params:
            assert all(slot.get() is param.sharded for slot in param.slots)
        group.use_comms(group.comms._replace(gathers=comm))
        step(model)
