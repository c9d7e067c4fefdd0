"""Tests the table of phases: a group refuses other transitions, and programs make each of its entries."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fsdp2 import fully_shard
from fsdp2.engine.group import FSDPParamGroup
from fsdp2.engine.policy import COPIED, GATHERED, SHARDED, TRANSITIONS, UNSHARDED, Phase
from fsdp2.engine.state import groups_below
from helpers import fake_world

Transition = tuple[Phase, Phase]

SIZE = 8


def transitions_of(program: Callable[[], None]) -> set[Transition]:
    """Runs a program; returns the changes of phase that its groups make, each of which begins as SHARDED."""
    made: set[Transition] = set()

    def put(group: Any, phase: Phase) -> None:
        made.add((vars(group).get("phase", SHARDED), phase))
        vars(group)["phase"] = phase

    assert "phase" not in vars(FSDPParamGroup), "it is an attribute of each group"
    FSDPParamGroup.phase = property(lambda group: vars(group)["phase"], put)  # type: ignore[assignment]
    try:
        with fake_world(4):
            program()
    finally:
        del FSDPParamGroup.phase
    assert made, "the program has groups"
    return made - {(SHARDED, SHARDED)}


def build(**options: Any) -> Any:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)) for _ in range(3)])
    for block in model:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def step(model: Any) -> None:
    model(torch.randn(4, SIZE, requires_grad=True)).sum().backward()


# ---- programs: together they make each transition


def steps_and_evaluations() -> None:
    model = build()
    for _ in range(3):
        step(model)
        with torch.no_grad():
            model(torch.randn(4, SIZE))


def keeps_secondary_shards() -> None:
    """Those of a forward that no backward follows are dropped by the next forward."""
    model = build(reshard_after_forward=2)
    step(model)
    model(torch.randn(4, SIZE, requires_grad=True))
    step(model)


def gathers_in_vain() -> None:
    """A gather is dropped while it is in flight, and fails when it is begun, and when it is waited for."""
    model = build()
    step(model)
    model[2].unshard(async_op=True)
    model[2].reshard()
    for group in groups_below(model[0]):
        comm = group.comms.gathers
        for at_once in (True, False):
            group.use_comms(group.comms._replace(gathers=Failing(comm, at_once)))
            with pytest.raises(RuntimeError, match=r"gone.*while gathering"):
                group.unshard()
        group.use_comms(group.comms._replace(gathers=comm))
    step(model)


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


def copies_are_out() -> None:
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


def gathers_again() -> None:
    """A rank that joins a gather of what it has in use: conditional modules do."""
    model = build()
    group = groups_below(model[0])[0]
    for _ in range(2):
        group.unshard_again()
        model[0].unshard()
        group.unshard_again()
        model[0].reshard()
    step(model)


PROGRAMS = (steps_and_evaluations, keeps_secondary_shards, gathers_in_vain, copies_are_out, gathers_again)


def test_programs_make_each_transition_of_the_table() -> None:
    """An entry that no program needs would allow a mistake. What is not in the table raises, in any test."""
    made = set[Transition]().union(*map(transitions_of, PROGRAMS))
    assert made == {(before, after) for before, later in TRANSITIONS.items() for after in later}


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
            group._set_phase(UNSHARDED)
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
