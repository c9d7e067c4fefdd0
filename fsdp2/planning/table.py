"""Writes plans as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..tools.columns import ruled, wrapped
from ..tools.describe import dtypes_text, size_text
from .settings import Setting

if TYPE_CHECKING:
    from .plan import Plan
    from .prediction import PlanRow
    from .structure import PlannedGroup
    from .times import Times

_GROUP_HEADS = ("groups", "class", "elements", "stored/computed/reduced", "shard", "gathered", "reduced")
_ROW_HEADS = ("", "setting", "resting", "forward peak", "step peak", "total", "sent", "time", "exposed", "fits")
# Terminals of fewer columns are too narrow for all columns of the rows: these (forward peak, sent, exposed) go first.
_NARROW, _LESS = 110, {3, 6, 8}


def plan_text(plan: Plan, width: int | None = None) -> str:
    """Returns the table of groups, their order, the table of settings, and the notes.

    `width`: how many columns a terminal has, to which all is wrapped.
    """
    best = plan.best
    order = best.order
    text = [
        f"order in forward: {', '.join(_short(order))}; backward in reverse, each gather one group ahead",
        f"step peak: {size_text(best.step_peak)} above resting, at the {best.peak_at}",
        _verdict(plan),
        *([] if best.times is None else [_times_text(best.times)]),
        *(f"note: {note}" for note in plan.notes),
    ]
    if width is not None:
        text = ["\n".join(wrapped(line, width)) for line in text]
    rows = [_ROW_HEADS, *(_cells(row, row is best, [each.setting for each in plan.rows]) for row in plan.rows)]
    if width is not None and width < _NARROW:
        rows = [tuple(cell for i, cell in enumerate(row) if i not in _LESS) for row in rows]
    lines = [
        *ruled([_GROUP_HEADS, *_group_rows(plan)], {2, 4, 5, 6}, width),
        "",
        *text[:2],
        "",
        *ruled(rows, {*range(2, len(rows[0]) - 1)}, width),
        "",
        *text[2:],
    ]
    return "\n".join(lines)


def setting_text(setting: Setting, among: Sequence[Setting] = ()) -> str:
    """Returns what a setting chooses. `among`: the number of ranks is named if these differ in it."""
    parts = []
    if len({each.ranks for each in among}) > 1 or not among:
        parts.append(f"{setting.ranks} ranks")
    parts.append(f"reshard_after_forward={setting.reshard_after_forward}")
    if setting.replicas > 1:
        parts.append(f"{setting.replicas} replicas of {setting.num_shards}")
    if setting.checkpointing:
        parts.append("checkpointing")
    if setting.offload:
        parts.append("CPU offload")
    return ", ".join(parts)


# ---- rows


def _group_rows(plan: Plan) -> list[tuple[str, ...]]:
    """Returns a row for each group; equal ones share one."""
    setting, alike = plan.best.setting, Counter[tuple[str, ...]]()
    names: dict[tuple[str, ...], list[str]] = {}
    for group in plan.groups:
        cells = _group_cells(group, setting)
        alike[cells] += 1
        names.setdefault(cells, []).append(group.name)
    rows = []
    for cells, own in names.items():
        name = own[0] if len(own) == 1 else f"{own[0]} ... {own[-1]} ({len(own)})"
        rows.append((name, *cells))
    return rows


def _group_cells(group: PlannedGroup, setting: Setting) -> tuple[str, ...]:
    specs, policy = group.specs(setting.num_shards), group.policy
    trainable = [s for s, p in zip(specs, group.parameters, strict=True) if p.requires_grad]
    dtypes = [
        dict.fromkeys(s.storage_dtype for s in specs),
        dict.fromkeys(s.compute_dtype for s in specs),
        dict.fromkeys(policy.gradient_dtype(s.delivered_dtype) for s in trainable),
    ]
    gathered = sum(s.unsharded_nbytes for s in specs)
    reduced = sum(s.numel * policy.gradient_dtype(s.delivered_dtype).itemsize for s in trainable)
    more = f" and {len(group.modules) - 1} more" if len(group.modules) > 1 else ""
    return (
        type(group.modules[0]).__name__ + more,
        f"{group.numel:,}",
        dtypes_text(dtypes),
        *map(size_text, (sum(s.storage_nbytes for s in specs), gathered, reduced)),
    )


def _cells(row: PlanRow, is_best: bool, among: Sequence[Setting]) -> tuple[str, ...]:
    exposed, time = ("-", "-") if row.times is None else (_seconds(row.times.exposed), _seconds(row.times.total))
    sizes = (row.resting, row.forward_peak, row.step_peak, row.total, row.sent)
    memory = row.machine.memory
    is_at_rest = memory is not None and row.resting > float(memory)
    where = "of which shards and states alone take too much" if is_at_rest else f"at the {row.peak_at}"
    on_host = f", and {size_text(row.on_host)} of the CPU's memory" if row.on_host else ""
    why = f"yes{on_host}" if row.fits else f"no: {size_text(row.missing)} more, {where}"
    if row.host_missing and not row.missing:
        why = f"no: {size_text(row.host_missing)} more of the CPU's memory"
    star = "*" if is_best else ""
    return (
        star,
        setting_text(row.setting, among),
        *map(size_text, sizes),
        time,
        exposed,
        "-" if memory is None else why,
    )


def _verdict(plan: Plan) -> str:
    best, machine = plan.best, plan.best.machine
    text = setting_text(best.setting)
    if machine.memory is None or machine.room is None:
        return f"* {text}: {size_text(best.total)} on each device"
    memory = size_text(float(machine.memory))
    kept = float(machine.memory) - machine.room
    headroom = f"{size_text(kept)} kept for what is not counted"
    if best.fits:
        return f"* {text}: {size_text(best.total)}{f', and {headroom},' if kept else ''} of {memory} on each device"
    if best.host_missing and not best.missing:
        return f"nothing fits. * {text} misses least: {size_text(best.host_missing)} more of the CPU's memory"
    missing = f"{size_text(best.missing)} more are needed on each device"
    return f"nothing fits into {memory}{f' with {headroom}' if kept else ''}. * {text} misses least: {missing}"


def _times_text(times: Times) -> str:
    """Returns the formula of a step's time with its numbers."""
    total, first, last, optimizer = map(_seconds, (times.total, times.first, times.last, times.optimizer))
    forward, backward = (
        f"{_seconds(max(each))} of {name} (computation {_seconds(each.compute)}, communication during it "
        f"{_seconds(each.communication)})"
        for name, each in (("forward", times.forward), ("backward", times.backward))
    )
    return (
        f"time: {total} = {first} until the first computation + {forward} + {backward} + {last} after the last one + "
        f"{optimizer} of the optimizer"
    )


def _seconds(seconds: float) -> str:
    if not seconds:
        return "0"
    unit, size = next(((unit, size) for unit, size in (("s", 1.0), ("ms", 1e-3)) if seconds >= size), ("us", 1e-6))
    return f"{seconds / size:.2f} {unit}"


def _short(names: Sequence[str]) -> list[str]:
    return [*names] if len(names) <= 8 else [*names[:4], "...", *names[-3:]]


__all__ = ["plan_text", "setting_text"]
