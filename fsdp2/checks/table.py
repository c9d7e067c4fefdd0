"""Lists the checks: what each catches, when it communicates, what it costs, and at which level it runs.

- "off": the check does nothing.
- "default": the check costs very little, or does what takes time only when it is due: at the 1st, 2nd, 4th, 8th,
  16th, 32nd, 64th, and each 128th time (see due.py).
- "debug": the check is due each time.

A check that is never due acts alike at "default" and "debug".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch

from ..dtensor import optimizer_steps
from ..engine.build import Plan
from ..engine.events import Observer, extend
from ..engine.owners import all_groups
from ..engine.root import Root
from .before_sharding import facts_of_call
from .clipping import Clipping
from .compared_buffers import Buffers
from .due import (
    AtTimes,
    Check,
    ForwardCheck,
    ForwardChecks,
    MovedData,
    RankCheck,
    RankComparisons,
    WrittenParameters,
    make_rank_comparisons,
)
from .empty_memory import BuffersOnMeta, EmptyMemory
from .entry_points import EntryPoints
from .equal_inputs import EqualInputs
from .frozen_parameters import FrozenParameters
from .initial_weights import InitialWeights, keep_sample
from .kept_memory import KeptMemory
from .levels import LEVELS, NAMES, change_levels, is_on, level_of
from .original_parameters import OriginalParameters
from .partial_settings import PartialSettings, check_settings
from .rounding import RoundedInputs
from .step_history import OptimizersOnAccumulation, StepHistory, note_end_of_step, note_step
from .structure import Structure
from .unmanaged_parameters import UnmanagedParameters, note_plain
from .unsharded_content import UnseenWrites


class Row(NamedTuple):
    """Describes one check. `cls`: the class of its observer, one for each root; None: it is no observer, and reads
    `is_on`.
    """

    name: str
    catches: str
    communicates: str
    costs: str
    cls: type[Check] | None


_WHEN_DUE = "when it is due: one all-reduce of a few integers for all such checks"
_AT_FIRST = "the first time, and the first after loading: in the same all-reduce"
_NEVER = "never"

TABLE = (
    # Order: what ranks compare first, on which all else relies, and what is refused first at the end of a forward.
    Row(
        "structure",
        "ranks whose models differ in names, order, shapes, dtypes or `requires_grad` of parameters",
        _WHEN_DUE,
        "when it is due, a walk over all parameters; a few bytes in headers",
        Structure,
    ),
    Row(
        "optimizers in backward",
        "torch's `_apply_optimizer_in_backward` on sharded parameters: it would never step",
        _NEVER,
        "when it is due, a search in a dict of torch's",
        OptimizersOnAccumulation,
    ),
    Row(
        "empty memory",
        "parameters and buffers that `to_empty` gave memory, and nobody has initialised",
        _AT_FIRST,
        "nothing but a look at them; `to_empty` fills them once, at each level",
        EmptyMemory,
    ),
    Row(
        "starting weights",
        "ranks that have built, or loaded, different weights: shards are parts of different models",
        _AT_FIRST,
        "16 values of each parameter, until ranks have compared them",
        InitialWeights,
    ),
    Row(
        "buffers",
        "buffers that ranks have built or loaded differently, or that each computes from its own rows",
        "when it is due, and before evaluation after training: in the same all-reduce",
        "when it is due, a walk over all modules and a checksum of buffers, of all of them at first; a forward that is "
        "followed, if some have come to differ",
        Buffers,
    ),
    Row(
        "equal inputs",
        "data-parallel ranks that all train on the same rows",
        "in two training steps: in the same all-reduce",
        "in two training steps, a checksum of the inputs",
        EqualInputs,
    ),
    Row(
        "step history",
        "ranks whose optimizers step more often than on others, or with other settings, or raise in a step, or divide "
        "gradients by others, or leave out `zero_grad`",
        _WHEN_DUE,
        "a checksum of an optimizer's settings in each step",
        StepHistory,
    ),
    Row(
        "clipping",
        "ranks that give `fsdp2.clip_grad_norm_` other parameters, another `max_norm` or `norm_type`",
        _WHEN_DUE,
        "an entry in a list in each call",
        Clipping,
    ),
    Row(
        "frozen parameters",
        "frozen parameters that some ranks have written to, and others not",
        _WHEN_DUE,
        "when it is due, the version counter of each parameter",
        FrozenParameters,
    ),
    Row(
        "unmanaged parameters",
        "trainable parameters that no group manages, also of a loss with an optimizer of its own, which each rank "
        "trains with its own gradient",
        _WHEN_DUE,
        "when it is due, a walk over all modules, and a checksum of each such parameter; a hook on plain parameters of "
        "other optimizers, until it is known which model they train with",
        UnmanagedParameters,
    ),
    Row(
        "cast whole numbers",
        "inputs with positions or time steps that a MixedPrecisionPolicy rounds to others",
        _WHEN_DUE,
        "when it is due, some operations on 4,096 elements of each input that is cast, and one read of the device",
        RoundedInputs,
    ),
    Row(
        "buffers on meta",
        "buffers without memory in the first forward of a module",
        _NEVER,
        "a walk over the buffers of a group in its first forward; at debug, in each",
        BuffersOnMeta,
    ),
    Row(
        "written unsharded parameters",
        "in-place writes to unsharded parameters, which are lost when they are resharded",
        _NEVER,
        "the version counter of each parameter, after each forward",
        WrittenParameters,
    ),
    Row(
        "moved data",
        "unsharded parameters whose `.data` a user has assigned: gathers and optimizers would not reach them",
        _NEVER,
        "the address of each parameter whenever a group is used: 0.2 us, or 0.07 us in backward",
        MovedData,
    ),
    Row(
        "unseen writes",
        "writes through `.data` to unsharded parameters, to shards whose unsharded parameters stay, to cast inputs",
        _NEVER,
        "when it is due, a sum over the unsharded parameters before and after a forward, another cast of the inputs, "
        "and one read of the device",
        UnseenWrites,
    ),
    Row(
        "kept memory",
        "unsharded parameters, or views of them, that something keeps after a forward: their memory is not freed",
        _NEVER,
        "when that happens first, a search among all objects of the process",
        KeptMemory,
    ),
    Row(
        "entry points",
        "methods, or modules inside, that compute with sharded parameters: errors say which line to add",
        _NEVER,
        "an entry in a dict of hooks whenever a group is unsharded or resharded",
        EntryPoints,
    ),
    Row(
        "partial settings",
        "divisors of gradients, or functions of the user's, that reach only a part of a model",
        _NEVER,
        "a walk over all groups in the first step after a setting has changed",
        PartialSettings,
    ),
    Row(
        "original parameters",
        "code that still computes with, or steps, what was a parameter before fully_shard",
        _NEVER,
        "an attribute and a hook on parameters that somebody still holds, at fully_shard",
        OriginalParameters,
    ),
    Row(
        "headers",
        "ranks that are out of step, on gloo: each message says what it is, and is compared before it is used",
        "with the messages of each collective",
        "some bytes in front of each message",
        None,
    ),
)


def set_checks(level: str | Mapping[str, str], *names: str) -> None:
    """Chooses which checks run in this process from now on. Call it on every rank alike, between steps.

    It acts on all sharded modules, and on those that are sharded later. All checks are at "default" unless the
    environment variable FSDP2_CHECKS says otherwise: a level (`off`), or names with levels (`entry points=off, unseen
    writes=debug`). `python -m fsdp2 checks` prints what each catches, when it communicates and what it costs.

    Args:
        level: "off", "default" (checks that take time are due rarely) or "debug" (each time). Or a dict, name -> level.
        names: of the checks; none: all of them.

    Raises:
        ValueError: there is no level, or no check, of that name.
        TypeError: names besides a dict.
    """
    if isinstance(level, Mapping):
        if names:
            raise TypeError(f"names: expected none besides a dict of names and levels, got {', '.join(names)}")
        wanted = dict(level)
    else:
        wanted = dict.fromkeys(names or NAMES, level)
    unknown = [name for name in wanted if name not in NAMES]
    if unknown:
        raise ValueError(f"names: expected some of {', '.join(NAMES)}; got {', '.join(map(str, unknown))}")
    for name, each in wanted.items():
        if each not in LEVELS:
            raise ValueError(f"level: expected one of {', '.join(LEVELS)}, got {each!r} for {name}")
    change_levels(wanted)
    for root in dict.fromkeys([group.root for group in all_groups()]):
        _follow_levels(root)


def describe_checks() -> str:
    """Returns the table as Markdown: a line for each check, with its level in this environment."""
    lines = ["| check | level | catches | communicates | costs |", "|---|---|---|---|---|"]
    lines += [
        f"| {row.name} | {level_of(row.name)} | {row.catches} | {row.communicates} | {row.costs} |" for row in TABLE
    ]
    return "\n".join(lines)


# ---- observers


def _make(row: Row, root: Root) -> Check | None:
    level = level_of(row.name)
    if row.cls is None or level == "off":
        return None
    check = row.cls()
    check.always = level == "debug"
    return check


def _is_any_on(*kinds: type[Check]) -> bool:
    return any(is_on(row.name) for row in TABLE if row.cls is not None and issubclass(row.cls, kinds))


def _rank_comparisons(root: Root) -> Observer | None:
    return make_rank_comparisons(root) if _is_any_on(RankCheck) else None


def _forward_checks(root: Root) -> Observer | None:
    return ForwardChecks(root) if _is_any_on(ForwardCheck) else None


def _follow_levels(root: Root) -> None:
    """Has a root that is there already observed as the levels say now. Checks that stay keep what they know."""
    before, is_ours = root.events.observers, (Check, RankComparisons, ForwardChecks, AtTimes)
    present = {type(each): each for each in before}
    now: list[Observer] = []
    for made in filter(None, (make(root) for make in CHECKS)):
        kept = present.get(type(made), made)
        if isinstance(made, Check) and isinstance(kept, Check):
            kept.always = made.always
        now.append(kept)
    first = next((i for i, each in enumerate(before) if isinstance(each, is_ours)), len(before))
    root.observe([*before[:first], *now, *(each for each in before[first:] if not isinstance(each, is_ours))])
    for each in now:
        if isinstance(each, (RankComparisons, ForwardChecks)):
            each.refresh()


def _remember(plan: Plan) -> None:
    """Keeps what checks need of the parameters of a call, before they are cut."""
    facts, has_samples = facts_of_call(plan), is_on("starting weights")
    with torch.no_grad():
        for each in plan.parameters.values() if has_samples else ():
            keep_sample(facts.samples, each, each.slots[0].get())


CHECKS: tuple[Callable[[Root], Observer | None], ...] = (
    *(partial(_make, row) for row in TABLE if row.cls is not None),
    _rank_comparisons,
    _forward_checks,
)
"""All checks that are observers. They stand behind the observers of install.py and of dtensor/."""


def install() -> None:
    """Puts the checks in force.

    `check_plan` of plan.py, which comes before other extensions get a plan, is not among them.
    """
    extend(plan=(_remember,), observers=CHECKS)
    optimizer_steps.before_step += [check_settings, note_step]
    optimizer_steps.after_step.append(note_end_of_step)
    optimizer_steps.stepped_beside.append(note_plain)
