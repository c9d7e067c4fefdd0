"""Predicts what training a model takes with each of several settings, and sorts them (`plan`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..calls.nested import tensors_in
from ..engine.policy import MixedPrecisionPolicy
from ..tools.describe import size_text
from . import table
from .outline import Outline
from .policies import WrapGroup, wrap_groups
from .prediction import PlanRow, ShardedCopy, key_of
from .recording import Recording, record, without_activations
from .settings import Setting, candidates, read_optimizer, read_ranks, read_settings
from .structure import PlannedGroup, find_groups
from .times import HOST_MEMORY, Machine

__all__ = ["Plan", "plan"]

# Its messages say how far a plan is: stages as INFO, settings as DEBUG. The command line shows them.
_progress = logging.getLogger("fsdp2.planning")
# The share by which padding must make shards larger to be noted.
_NOTICEABLE = 0.05


@dataclass(frozen=True, repr=False)
class Plan:
    """The predictions of `plan`. It prints as tables: the groups, their order, where the peak is, and all settings.

    Args:
        rows: a PlanRow for each setting, the best first.
        groups: the groups that `fully_shard` makes, the outermost first.
        notes: what the predictions leave out, and why.
    """

    rows: tuple[PlanRow, ...]
    groups: tuple[PlannedGroup, ...]
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> PlanRow:
        return self.rows[0]

    @property
    def fits(self) -> bool:
        """True if the best row fits."""
        return self.best.fits

    def __str__(self) -> str:
        return table.plan_text(self)

    __repr__ = __str__


def plan(
    model: nn.Module,
    *,
    ranks: int | Sequence[int],
    batch: Callable[[], Any] | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    policy: Any = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    optimizer: str | float | None = "adamw",
    settings: Sequence[Setting | Mapping[str, Any]] | None = None,
    machine: Machine | None = None,
) -> Plan:
    """Predicts memory, communication and time of training `model` with several settings, and sorts these.

    It needs no process group and no device, and changes neither the model nor a process group that exists. The forward
    and the backward of the plain model run once without values (FakeTensorMode), and once more with checkpointing. For
    each setting the engine itself then runs around that, on tensors without memory.

    Memory: peaks are those of the second step, in which the order of groups is known, with gradients freed before each
    forward, and the model's output alive until backward ends. They contain what kernels return, but not their scratch
    memory, nor temporary tensors of the optimizer's step. Peaks of a Llama of 1 B and of 8 B parameters, in six cases,
    are within 1 % of those that an H200 has measured. Convolutions, recurrent layers and kernels of other packages
    were not compared with a device.

    Time: the formula of `fsdp2/planning/times.py`, whose addends the text of a plan shows. It is a model: no
    collective was measured between GPUs.

    The best row is the fastest that fits; without speeds, the one that moves the fewest bytes. Rows with CPU offload
    come after all others that fit. If none fits, the best row is the one that misses least.

    Args:
        model: a plain module, on meta or any other device. Parameters may be frozen and tied.
        ranks: how many ranks train; a list compares several numbers.
        batch: returns the arguments of one rank's forward: a tensor, a tuple or list of arguments, or a dict of named
            ones. Tensors may be on meta. None: peaks are those of parameters and gradients alone.
        loss: computes a scalar of the model's output. None: its attribute `loss`, or the sum of its
            `logits`, or of all its floating-point tensors.
        policy: what gets groups of its own, see `wrap_groups`.
        mp_policy: dtypes of compute and reduction, and compression, as for `fully_shard`. Rows without replicas leave
            its `all_reduce` out.
        optimizer: "adamw", "adam" (two states in the parameter's dtype for each element), "muon", "lion", "momentum"
            (one), "sgd" or None (none), or a number of bytes for each element.
        settings: what to compare, as dicts of `ranks` (None of them: all `ranks` of the plan),
            `reshard_after_forward`, `replicas` (HSDP), `checkpointing` of the wrapped modules, and `offload` to the
            CPU. None: `reshard_after_forward` None and False, each with and without checkpointing, and on accelerators
            with and without offload; for several machines also HSDP with a replica on each, and
            `reshard_after_forward` of the ranks of a machine.
        machine: the memory and the speeds of what trains. None: a `Machine()`, of which no memory and no speeds are
            known.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: a wrong value; the policy names classes that the model does not have; the model is sharded already;
            the ranks are on several machines, of which `link` is known and `network` is not.
        NotImplementedError: a parameter is a DTensor; a codec reads values, which tensors of a plan do not have; the
            policy gives some modules an OffloadBudget.

    Example:
        ```python
        machine = fsdp2.Machine(memory="80GB", link="370GB/s", network="50GB/s", flops=5e14)
        plan = fsdp2.plan(model_on_meta, ranks=16, batch=lambda: (ids,), machine=machine)
        print(plan)
        ```
    """
    worlds, where = read_ranks(ranks), Machine() if machine is None else machine
    if not isinstance(where, Machine):
        raise TypeError(f"machine: expected a fsdp2.Machine or None, got {type(machine).__name__}")
    precision = MixedPrecisionPolicy() if mp_policy is None else mp_policy
    if not isinstance(precision, MixedPrecisionPolicy):
        raise TypeError(f"mp_policy: expected a MixedPrecisionPolicy, got {type(mp_policy).__name__}")
    for each in (batch, loss):
        if each is not None and not callable(each):
            raise TypeError(f"expected functions for batch and loss, got {type(each).__name__}")
    read_optimizer(optimizer, 1)
    chosen = (
        candidates(worlds, where.can_offload, where.ranks_per_machine)
        if settings is None
        else read_settings(settings, worlds)
    )
    _require_network(where, max(setting.ranks for setting in chosen))
    calls = wrap_groups(model, policy)
    notes = [*_notes_of_arguments(calls, policy, batch)]
    blocks = _blocks(calls) if any(setting.checkpointing for setting in chosen) else []
    recorded = _record(model, calls, precision, batch, loss or default_loss, blocks, where.device, notes)
    possible = [each for each in chosen if recorded.is_possible(each, is_users=settings is not None)]
    if not possible:
        why = " ".join(notes) or "Each wrapped module is a single layer."
        raise ValueError(f"settings: expected one without checkpointing, which nothing can have here. {why}")
    rows = sorted(_predict(model, possible, recorded, where, optimizer), key=_cost)
    return Plan(tuple(rows), tuple(recorded.groups), (*notes, *_notes_of(rows, recorded.groups)))


def _require_network(machine: Machine, num_ranks: int) -> None:
    """
    Raises:
        ValueError: so many ranks are on several machines, and it is not known what they send to each other.
    """
    if machine.has_speeds and machine.network is None and num_ranks > machine.ranks_per_machine:
        raise ValueError(
            "machine: expected network=, the bytes per second that a rank sends to other machines, since "
            f"{num_ranks} ranks are on machines of {machine.ranks_per_machine}; got link= alone. Write "
            f"Machine(network=...), or Machine(ranks_per_machine={num_ranks}) if all are on one machine"
        )


def _notes_of_arguments(calls: Sequence[WrapGroup], policy: Any, batch: Any) -> Iterator[str]:
    if not calls:
        why = "it repeats no block. Pass a policy" if policy is None else "the policy matches nothing. Pass another"
        yield f"Nothing but the model itself is wrapped: {why}."
    if batch is None:
        yield "No batch was given: peaks are those of parameters and gradients, without activations."


def _predict(
    model: nn.Module,
    settings: Sequence[Setting],
    recorded: _Recorded,
    machine: Machine,
    optimizer: str | float | None,
) -> Iterator[PlanRow]:
    """Yields a row for each setting. Settings that are sharded alike share a copy of the model."""
    _progress.info("predicting %d settings", len(settings))
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    copies: dict[Setting, ShardedCopy] = {}
    for number, setting in enumerate(settings, start=1):
        _progress.debug("setting %d: %s", number, table.setting_text(setting))
        recording = (recorded.checkpointed if setting.checkpointing else None) or recorded.plain
        key = key_of(setting)
        if key not in copies:
            copies[key] = ShardedCopy(recorded.outline, setting, machine)
        yield copies[key].predict(setting, recording, buffers, optimizer, recorded.has_activations)


def _cost(row: PlanRow) -> tuple[float, ...]:
    """Returns the key by which rows are sorted. Rows with offload come after all that fit without."""
    first = sum(row.moved.values()) if row.time is None else row.time
    return row.missing + row.host_missing, row.setting.offload, first, row.flops, row.total


def _notes_of(rows: Sequence[PlanRow], groups: Sequence[PlannedGroup]) -> Iterator[str]:
    """Yields what a reader should know of the rows."""
    best, own = rows[0], [row for row in rows if not row.setting.offload]
    missing = min((row for row in own if 0 < row.missing <= row.states), key=_cost, default=None)
    if missing is not None and not any(row.fits for row in own):
        yield (
            f"Optimizer states on the CPU would make it fit: {table.setting_text(missing.setting)} misses "
            f"{size_text(missing.missing)}, and its states take {size_text(missing.states)}. "
            "fsdp2.flatten_optimizer(optimizer, offload_states=True) keeps them there."
        )
    specs = [spec for group in groups for spec in group.specs(best.setting.num_shards)]
    numel, padded = sum(spec.numel for spec in specs), sum(spec.shard_numel for spec in specs) * best.setting.num_shards
    if padded > (1 + _NOTICEABLE) * numel:
        yield (
            f"Parameters have few rows for {best.setting.num_shards} ranks: padding makes shards and gathers "
            f"{padded / numel:.1f} times as large. shard_placement_fn of fully_shard shards along other dims, which a "
            "plan does not know."
        )
    if any(row.setting.offload for row in rows):
        yield (
            "CPU offload: such a setting is the best only if nothing else fits. In its time the optimizer's steps of "
            f"a machine's ranks read and write {size_text(HOST_MEMORY)} of the CPU's memory per second. "
            "What is there is for each rank."
        )


# ---- recordings


@dataclass(frozen=True)
class _Recorded:
    """A wrap policy's groups, and the recordings of a step with them: plain, and with checkpointing.
    `has_activations`: the forward could be recorded.
    """

    outline: Outline
    groups: list[PlannedGroup]
    plain: Recording
    checkpointed: Recording | None
    has_activations: bool

    def is_possible(self, setting: Setting, is_users: bool) -> bool:
        """Returns True if the model can have the setting. `is_users`: the user has named it."""
        can_checkpoint = self.checkpointed is not None or (is_users and not self.has_activations)
        return can_checkpoint or not setting.checkpointing


def _record(
    model: nn.Module,
    calls: Sequence[WrapGroup],
    precision: MixedPrecisionPolicy,
    batch: Callable[[], Any] | None,
    loss: Callable[[Any], Tensor],
    blocks: Sequence[nn.Module],
    device: str,
    notes: list[str],
) -> _Recorded:
    """Records a step with these calls, and if there are `blocks`, one in which these run again in backward.

    `precision`: dtypes, for calls whose options have none. `notes` gets what could not be recorded, and why.
    """
    outline, groups = find_groups(model, calls, precision)

    def step(again: Sequence[nn.Module], left_out: str) -> Recording | None:
        if batch is None:
            return None
        _progress.info("recording a step without values%s", ", with checkpointing" if again else "")
        try:
            return record(model, groups, batch, loss, again, device)
        except Exception as error:  # whatever the user's forward raises without values
            text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            notes.append(f"{left_out} step could not run without values ({text[:200]}).")
            return None

    plain = step((), "Peaks are those of parameters and gradients alone: the")
    again = step(blocks, "Checkpointing is left out: its") if plain is not None and blocks else None
    recording = plain or without_activations(model, groups)
    return _Recorded(outline, [group.on_meta() for group in groups], recording, again, plain is not None)


def _blocks(calls: Sequence[WrapGroup]) -> list[nn.Module]:
    """Returns the modules that checkpointing runs again: wrapped ones that have submodules, but none of that kind."""
    wrapped = [m for call in calls for m in call.modules if next(m.children(), None) is not None]
    return [m for m in wrapped if not any(each is not m and each in wrapped for each in m.modules())]


def default_loss(output: Any) -> Tensor:
    """Returns the loss that an output has, or a sum of its tensors."""
    found = getattr(output, "loss", None)
    if isinstance(found, Tensor):
        return found
    found = getattr(output, "logits", output)
    tensors = [t for t in tensors_in(found) if t.is_floating_point() and t.requires_grad]
    if not tensors:
        raise TypeError("loss: the output has no floating-point tensor with a gradient. Pass a function of the output")
    return torch.stack([tensor.float().sum() for tensor in tensors]).sum() if len(tensors) > 1 else tensors[0].sum()
