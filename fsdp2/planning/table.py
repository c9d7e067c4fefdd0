"""Writes plans, and their comparison with measured steps, as tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..shards.tensors import dtype_text
from ..tools.columns import ruled, wrapped
from ..tools.describe import dtypes_text, size_text
from .advice import texts
from .settings import Setting

if TYPE_CHECKING:
    from .check import PlanCheck
    from .plan import Plan, PlanRow
    from .prediction import Prediction
    from .structure import PlannedGroup

_GROUP_HEADS = ("groups", "class", "elements", "stored/computed/reduced", "shard", "gathered", "reduced")
_ROW_HEADS = ("", "setting", "resting", "forward peak", "step peak", "total", "sent", "time", "exposed", "fits")
# Terminals of fewer columns are too narrow for all columns of the rows: these (forward peak, sent, exposed) go first.
_NARROW, _LESS = 110, {3, 6, 8}


def plan_text(plan: Plan, width: int | None = None) -> str:
    """Returns the table of groups, their order, the table of settings, and the notes.

    `width`: how many columns a terminal has, to which all is wrapped.
    """
    best = plan.best
    order = best.prediction.order
    text = [
        f"order in forward: {', '.join(_short(order))}; backward in reverse, each gather one group ahead",
        f"step peak: {size_text(best.prediction.step_peak)} above resting, at the {best.prediction.peak_at}",
        _verdict(plan),
        *texts(plan.best, plan.rows),
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
    """Returns what a setting chooses. `among`: the number of ranks, and the policy, are named if these differ in it."""
    parts = []
    if len({each.policy for each in among}) > 1:
        parts.append(setting.policy)
    if len({each.ranks for each in among}) > 1 or not among:
        parts.append(f"{setting.ranks} ranks")
    parts.append(f"reshard_after_forward={setting.reshard_after_forward}")
    if setting.replicas > 1:
        parts.append(f"{setting.replicas} replicas of {setting.num_shards}")
    if setting.shard_at_rest:
        parts.append("shards at rest over both")
    if setting.by_rows:
        parts.append(f"rows of {', '.join(setting.by_rows)}")
    if setting.cheapest_dims:
        parts.append("cheapest dims")
    if setting.checkpointing:
        parts.append("checkpointing")
    if setting.offload_budget is not None:
        parts.append(f"CPU offload but for {size_text(setting.offload_budget)} of shards")
    elif setting.offload:
        parts.append("CPU offload")
    if setting.offload_states:
        parts.append("states on the CPU")
    if setting.beside_forward:
        parts.append("steps beside forward")
    if setting.blocks_per_call > 1:
        parts.append(f"{setting.blocks_per_call} blocks a call")
    if setting.wire_dtype is not None:
        parts.append(f"wire_dtype={dtype_text(setting.wire_dtype)}")
    return ", ".join(parts)


def prediction_text(row: PlanRow, taken: Prediction) -> str:
    """Returns what a plan has predicted, for an error of memory that ran out. `taken`: for the mesh in use."""
    total = row.resting - row.prediction.resting + taken.total
    peak = f"{size_text(taken.peak)} above that, at the {taken.peak_at}"
    return (
        f"The plan that was applied ({setting_text(row.setting)}) predicted {size_text(total)}: "
        f"{size_text(total - taken.peak)} at rest, and {peak}. What the plan does not count comes on top; "
        "plan.check() compares."
    )


def check_text(check: PlanCheck, tolerance: float) -> str:
    """Returns the table of predicted and measured bytes."""
    rows = [("", "predicted", "measured", "off by")]
    for each in check.values:
        measured = "-" if each.measured is None else size_text(each.measured)
        off = "-" if each.error is None else f"{100 * each.error:+.2f} %"
        more = "  more than 3 %" if each.error is not None and abs(each.error) > tolerance else ""
        rows.append((each.name, size_text(each.predicted), measured, off + more))
    return "\n".join([*ruled(rows, {1, 2}), *(f"note: {note}" for note in check.notes)])


# ---- rows


def _group_rows(plan: Plan) -> list[tuple[str, ...]]:
    """Returns a row for each group; equal ones share one."""
    setting, alike = plan.best.setting, Counter[tuple[str, ...]]()
    names: dict[tuple[str, ...], list[str]] = {}
    for group in plan.groups():
        cells = _group_cells(group, setting)
        alike[cells] += 1
        names.setdefault(cells, []).append(group.name)
    rows = []
    for cells, own in names.items():
        name = own[0] if len(own) == 1 else f"{own[0]} ... {own[-1]} ({len(own)})"
        rows.append((name, *cells))
    return rows


def _group_cells(group: PlannedGroup, setting: Setting) -> tuple[str, ...]:
    specs, policy = group.specs(setting.num_at_rest, setting.cheapest_dims), group.policy
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
    taken = row.prediction
    exposed = "-" if taken.exposed_time is None else _seconds(taken.exposed_time)
    time = "-" if taken.time is None else _seconds(taken.time)
    sizes = (row.resting, taken.forward_peak, taken.step_peak, row.total, taken.sent)
    is_at_rest = row.memory is not None and row.resting > row.memory
    where = "of which shards and states alone take too much" if is_at_rest else f"at the {taken.peak_at}"
    on_host = f", and {size_text(row.host_nbytes)} of the CPU's memory" if row.host_nbytes else ""
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
        "-" if row.memory is None else why,
    )


def _verdict(plan: Plan) -> str:
    best = plan.best
    text = setting_text(best.setting)
    if best.memory is None:
        return f"* {text}: {size_text(best.total)} on each device"
    memory = size_text(best.memory)
    kept = f", and {size_text(best.headroom)} kept for what is not counted," if best.headroom else ""
    if best.fits:
        return f"* {text}: {size_text(best.total)}{kept} of {memory} on each device"
    if best.host_missing and not best.missing:
        return f"nothing fits. * {text} misses least: {size_text(best.host_missing)} more of the CPU's memory"
    beside = f" beside {size_text(best.headroom)} kept for what is not counted" if best.headroom else ""
    missing = f"{size_text(best.missing)} more are needed on each device"
    return f"nothing fits into {memory}{beside}. * {text} misses least: {missing}"


def _seconds(seconds: float) -> str:
    unit, size = next(((unit, size) for unit, size in (("s", 1.0), ("ms", 1e-3)) if seconds >= size), ("us", 1e-6))
    return f"{seconds / size:.2f} {unit}"


def _short(names: Sequence[str]) -> list[str]:
    return [*names] if len(names) <= 8 else [*names[:4], "...", *names[-3:]]


__all__ = ["check_text", "plan_text", "prediction_text", "setting_text"]
