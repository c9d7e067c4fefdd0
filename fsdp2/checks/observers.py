"""Adds the checks to the engine, and changes their level while models train."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from ..collectives.choose import choice_of, choose
from ..dtensor import optimizer_steps
from ..engine.events import Observer, extend
from ..engine.group import FSDPParamGroup
from ..engine.owners import outermost_of_thread
from ..engine.root import Root
from ..engine.state import FSDPState
from .buffers import Buffers
from .clipping import Clipping
from .digests import Replicas
from .due import Check, ForwardChecks, RankComparisons, make_rank_comparisons
from .entry_points import stop_watching_calls, watch_calls_inside
from .equal_inputs import EqualInputs
from .level import choose_level, is_debug, is_on, require_level
from .lost_writes import MovedData, UnseenWrites, WrittenParameters, refuse_originals
from .model_facts import (
    BuffersOnMeta,
    EmptyMemory,
    FrozenParameters,
    InitialWeights,
    Structure,
    keep_initial_values,
    keep_samples,
)
from .rounding import RoundedInputs
from .step_history import Divisors, OptimizersOnAccumulation, StepHistory, note_end_of_step, note_step
from .unmanaged_parameters import UnmanagedParameters, note_plain


def _make(cls: type[Check], root: Root) -> Check:
    return cls()


# Order: what ranks compare first, on which all else relies, causes before what follows from them (Replicas), and what
# is refused first at the end of a forward.
_CHECKS: tuple[type[Check], ...] = (
    Structure,
    OptimizersOnAccumulation,
    Divisors,
    EmptyMemory,
    InitialWeights,
    Buffers,
    EqualInputs,
    StepHistory,
    Clipping,
    FrozenParameters,
    UnmanagedParameters,
    Replicas,
    RoundedInputs,
    BuffersOnMeta,
    WrittenParameters,
    MovedData,
    UnseenWrites,
)
_OBSERVERS: tuple[Callable[[Root], Observer], ...] = (
    *(partial(_make, each) for each in _CHECKS),
    make_rank_comparisons,
    ForwardChecks,
)
_KINDS = (Check, RankComparisons, ForwardChecks)


def _if_on(make: Callable[[Root], Observer]) -> Callable[[Root], Observer | None]:
    return lambda root: make(root) if is_on() else None


def install() -> None:
    """Puts the checks in force.

    `check_plan` of plan.py, which comes before other extensions get a plan, is not among them.
    """
    extend(plan=(keep_samples,), after_sharding=(_follow_sharding,), observers=tuple(map(_if_on, _OBSERVERS)))
    optimizer_steps.before_step.append(note_step)
    optimizer_steps.after_step.append(note_end_of_step)
    optimizer_steps.stepped_beside.append(note_plain)


def set_checks(level: str) -> None:
    """Chooses which checks run in this process from now on. Call it on every rank alike, between steps.

    It acts on all sharded modules, and on those that are sharded later. Where ranks are threads, each calls it.

    Args:
        level: "off": none. "default": those that cost very little run always, and those that take time run in the
            steps 1, 2, 4, 8, 16, 32, 64, and each 128th. "debug": all of them run in each step. Then ranks also compare
            before each collective, on any backend, which group it is for, what is done with it, and the sizes of its
            tensors. If they differ, all raise before anything is sent; if a rank does not answer in time, or has died,
            the errors of the others list where each process was. The level is that of the environment variable
            FSDP2_CHECKS until this is called, and "default" if there is none.

    Raises:
        ValueError: another level.
        RuntimeError: a forward or backward runs.
    """
    require_level(level, "level")
    outermost = outermost_of_thread()
    built = [root for root in [state.built_root for state in outermost] if root is not None]
    if any(root.running or root.is_in_backward() for root in built):
        raise RuntimeError("set_checks: call it between steps, not during a forward or backward")
    choose_level(level)
    for state in [each for outer in outermost for each in (outer, *outer.inside)]:
        _compare_collectives(state.groups, is_debug())
        if is_on():
            _watch_parameters(state)
        else:
            stop_watching_calls(state)
    for root in built:  # others get the checks of the level when they are built
        _observe(root)


def _follow_sharding(state: FSDPState) -> None:
    """Has checks follow what a call has sharded, before there is a root; at the debug level, has ranks compare what
    they do before each collective.
    """
    if is_debug():
        _compare_collectives([group for each in (state, *state.inside) for group in each.groups], True)
    if is_on():
        keep_initial_values(state)
        _watch_parameters(state)


def _watch_parameters(state: FSDPState) -> None:
    watch_calls_inside(state)
    refuse_originals(state)


def _compare_collectives(groups: Iterable[FSDPParamGroup], wanted: bool) -> None:
    for group in groups:
        if choice_of(group).checked != wanted:
            choose(group, checked=wanted)


def _observe(root: Root) -> None:
    """Has the checks follow a root that is built already, or not, as the level says. Those that stay keep what they
    know.
    """
    before, present = root.events.observers, {type(each): each for each in root.events.observers}
    made = [make(root) for make in _OBSERVERS] if is_on() else []
    now = [present.get(type(each), each) for each in made]
    first = next((i for i, each in enumerate(before) if isinstance(each, _KINDS)), len(before))
    root.observe([*before[:first], *now, *(each for each in before[first:] if not isinstance(each, _KINDS))])
    for each in now:
        if isinstance(each, (RankComparisons, ForwardChecks)):
            each.refresh()
