"""Finds further settings that may pay where the usual ones are too slow or do not fit, and says what they cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import nn

from ..features.large_submodules import MIN_BYTES
from ..tools.describe import size_text
from .policies import tables_of
from .settings import Setting

if TYPE_CHECKING:
    from .plan import PlanRow

# Seconds that the host may wait in each forward for the numbers of ids, with nothing for the device to do: up to 1 ms
# in a simulation. An embedding by rows must gain more than that.
ROWS_COST = 1e-3
_TRIES = 3


def large_tables(model: nn.Module) -> tuple[str, ...]:
    """Returns the FQNs of embeddings that may be looked up by rows, and are large enough."""
    return tuple(name for name, module in tables_of(model).items() if module.weight.nbytes >= MIN_BYTES)


class Adviser:
    """Adds rows to those of a plan.

    Args:
        row: predicts a setting.
        cost: of a row, by which rows are sorted.
        tables: FQNs of embeddings that may be looked up by rows.
        late: steps beside the next forward may be advised.
    """

    def __init__(
        self,
        row: Callable[[Setting], PlanRow],
        cost: Callable[[PlanRow], tuple[float, ...]],
        tables: tuple[str, ...],
        late: bool,
    ) -> None:
        self._row, self._cost, self._tables, self._late = row, cost, tables, late

    def more(self, rows: Sequence[PlanRow]) -> list[PlanRow]:
        """Returns further rows. `rows`: of one number of ranks, and one wrap policy."""
        found = self._sharing_at_rest(rows)
        if not any(row.fits and not row.setting.offload for row in (*rows, *found)):
            found += self._with_states_at_rest([*rows, *found])
            found += self._with_a_budget(rows)
        best = min((*rows, *found), key=self._cost)
        found += self._faster(best)
        return found + self._along_dim_0(min((*rows, *found), key=self._cost))

    def _first(self, rows: Sequence[PlanRow]) -> PlanRow | None:
        """Returns the best of `rows`, however much memory they take."""
        return min(rows, key=lambda row: self._cost(row)[1:], default=None)

    def _sharing_at_rest(self, rows: Sequence[PlanRow]) -> list[PlanRow]:
        found = self._first(
            [row for row in rows if row.setting.replicas > 1 and not row.setting.offload and not row.fits]
        )
        if found is None or found.setting.num_shards == 1:
            return []
        return [self._row(replace(found.setting, shard_at_rest=True))]

    def _with_states_at_rest(self, rows: Sequence[PlanRow]) -> list[PlanRow]:
        found = self._first(
            [row for row in rows if not row.setting.offload and 0 < row.missing <= row.prediction.states]
        )
        return [] if found is None else [self._row(replace(found.setting, offload_states=True))]

    def _with_a_budget(self, rows: Sequence[PlanRow]) -> list[PlanRow]:
        """Keeps as many bytes of shards on the device as fit there, with their gradients and optimizer states."""
        found = self._first([row for row in rows if row.setting.offload and row.fits and row.memory is not None])
        if found is None or found.memory is None:
            return []
        shards = found.prediction.shards
        room = int(found.memory - found.headroom) - found.total
        budget = int(room * shards / max(1, found.host_nbytes))
        for _ in range(_TRIES):
            if not 0 < budget < shards:
                break
            row = self._row(replace(found.setting, offload_budget=budget))
            if row.fits:
                return [row] if row.host_nbytes < found.host_nbytes else []
            budget -= row.missing
        return []

    def _faster(self, best: PlanRow) -> list[PlanRow]:
        """Returns rows that are faster than the best by settings beside its own."""
        found: list[PlanRow] = []
        if self._tables and best.has_activations and _time(best) is not None:
            row = self._row(replace(best.setting, by_rows=self._tables))
            if _gain(row, best) > ROWS_COST * len(self._tables) and row.fits == best.fits:
                found.append(row)
                best = row
        is_usual = not (best.setting.offload or best.setting.offload_states)
        if self._late and is_usual and _time(best) is not None:
            row = self._row(replace(best.setting, beside_forward=True))
            if _gain(row, best) > 0 and row.fits == best.fits:
                found.append(row)
        return found

    def _along_dim_0(self, best: PlanRow) -> list[PlanRow]:
        """Returns the row to compare the best with, whose parameters of few rows are padded."""
        return [self._row(replace(best.setting, cheapest_dims=False))] if best.setting.cheapest_dims else []


def _time(row: PlanRow) -> float | None:
    return row.prediction.time


def _gain(row: PlanRow, other: PlanRow) -> float:
    return (other.prediction.time or 0.0) - (row.prediction.time or 0.0)


# ---- what is said


def line_of_optimizer(setting: Setting) -> str | None:
    """Returns the line of a program that a setting needs besides a sharded model; None if it needs none."""
    if setting.offload_states:
        return "optimizer = fsdp2.flatten_optimizer(optimizer, offload_states=True)"
    if setting.beside_forward:
        return "optimizer = fsdp2.flatten_optimizer(optimizer, beside_forward=True)"
    return None


def texts(row: PlanRow, rows: Sequence[PlanRow]) -> list[str]:
    """Returns what the settings of a row gain and cost that plans add by themselves, and what nobody has measured."""
    setting, found = row.setting, []
    if setting.by_rows:
        found.append(
            f"rows of {', '.join(setting.by_rows)} (embed_by_rows): {_beside(row, rows, by_rows=())}. The table is "
            "neither gathered nor reduced. It costs one wait of the host in each forward, up to 1 ms, which is not in "
            "the time; gradients of repeated ids are summed at the owner; accumulate and others refuse it. "
            "Simulated, as many ids from each rank to each"
        )
    if setting.cheapest_dims:
        found.append(
            f"cheapest dims: {_beside(row, rows, cheapest_dims=False)}. Few rows are padded along dim 0. "
            "Along another dim each gather copies them once more, which is not in the time, but in the choice. In a "
            "program it is shard_placement_fn=fsdp2.cheapest_placement(mesh)"
        )
    if setting.shard_at_rest:
        found.append(
            f"shards at rest: {_beside(row, rows, shard_at_rest=False)}. The first forward after each step gathers "
            "over all ranks, and each rank keeps its part of the replica's parameters. Simulated"
        )
    if setting.offload_states:
        found.append(
            f"states on the CPU: {_beside(row, rows, offload_states=False)}. Each step copies them once in each "
            f"direction, which nothing hides. Simulated. Write {line_of_optimizer(setting)}"
        )
    if setting.offload_budget is not None:
        found.append(
            f"a budget of {size_text(setting.offload_budget)} (OffloadBudget): "
            f"{_beside(row, rows, offload_budget=None)}. Simulated"
        )
    if setting.beside_forward:
        found.append(
            f"steps beside the next forward: {_beside(row, rows, beside_forward=False)}. Gradients stay until the next "
            "forward has come to their group; a program that reads parameters after each step gains nothing. Beside "
            f"what is computed, AdamW costs beside_price of its time. Write {line_of_optimizer(setting)}"
        )
    return found


def _beside(row: PlanRow, rows: Sequence[PlanRow], **usual: object) -> str:
    """Returns what a row takes beside the one without a setting, if there is that row."""
    setting = replace(row.setting, **usual)  # type: ignore[arg-type]
    other = next((each for each in rows if each.setting == setting), None)
    if other is None:
        return "there is no row without it to compare"
    parts = []
    gain = _gain(row, other)
    if row.prediction.time is not None and other.prediction.time is not None:
        parts.append(f"{abs(gain) * 1e3:.1f} ms {'less' if gain >= 0 else 'more'}")
    saved = other.total - row.total
    parts.append(f"{size_text(abs(saved))} {'less' if saved >= 0 else 'more'} on each device")
    return f"{', '.join(parts)} than without"
