"""Measures the second step of a sharded model, and compares it with its plan (`Plan.check`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..engine.compat import local_if_any
from ..engine.events import Observer
from ..engine.group import FSDPParamGroup
from ..engine.root import Root
from ..engine.state import groups_below, require_state
from ..tools.watched_comms import Collective, watch
from .advice import line_of_optimizer
from .prediction import Prediction

if TYPE_CHECKING:
    from .plan import PlanRow

__all__ = ["CheckedValue", "PlanCheck"]
TOLERANCE = 0.03
_FORWARD, _STEP = "fsdp2::forward has returned", "fsdp2::backward has ended"


@dataclass(frozen=True)
class CheckedValue:
    """Holds one number of a plan beside what was measured, in bytes.

    Args:
        name: what it is.
        predicted: by the plan.
        measured: in the second step; None if it could not be measured.
    """

    name: str
    predicted: float
    measured: float | None

    @property
    def error(self) -> float | None:
        """How far the prediction is off, as a share of what was measured: 0.02 is 2 % too much. None: unknown."""
        if self.measured is None:
            return None
        if not self.measured:
            return 0.0 if not self.predicted else float("inf")
        return self.predicted / self.measured - 1


@dataclass(frozen=True, repr=False)
class PlanCheck:
    """Compares a plan with a measured step. It prints as a table; rows that are off by more than 3 % say so.

    Args:
        values: what was compared.
        notes: what was not, and why.
    """

    values: tuple[CheckedValue, ...]
    notes: tuple[str, ...] = ()

    @property
    def largest_error(self) -> float:
        """The largest absolute value of the errors, of those that are known."""
        return max((abs(each.error) for each in self.values if each.error is not None), default=0.0)

    def __getitem__(self, name: str) -> CheckedValue:
        """Returns the value of this name."""
        return next(each for each in self.values if each.name == name)

    def __str__(self) -> str:
        from .table import check_text

        return check_text(self, TOLERANCE)

    __repr__ = __str__


class SecondStep(Observer):
    """Measures the second step after it was made: peaks of memory above what rests, and bytes of collectives.

    On CUDA it reads torch's statistics. Elsewhere torch's profiler reports each allocation of the CPU.
    """

    def __init__(self, model: nn.Module) -> None:
        root = require_state(model).root
        self._device = root.group.mesh.device
        self._cuda = self._device if self._device.type == "cuda" else None
        self._first = root.num_backwards
        self._unwatch: Callable[[], object] | None = None
        self._allocations: _Allocations | None = None
        self.moved: Counter[str] = Counter()
        self.forward_peak: float | None = None
        self.step_peak: float | None = None
        self.num_steps = 0
        self.problem = ""
        root.add(self)

    @property
    def device_type(self) -> str:
        return self._device.type

    # ---- events

    def pass_began(self, root: Root) -> None:
        self._end()
        if root.num_backwards - self._first > 1:
            root.remove(self)
        if root.num_backwards - self._first != 1:
            return
        self.moved.clear()
        self._unwatch = watch(root.groups, self)
        if self._cuda is not None:
            torch.cuda.reset_peak_memory_stats(self._cuda)
            self._before = torch.cuda.memory_allocated(self._cuda)
        elif self._device.type != "cpu":
            self.problem = f"nothing reads the statistics of {self._device.type}."
        else:
            self._allocations = _Allocations()
            self.problem = self._allocations.problem
            self._step_hook = register_optimizer_step_pre_hook(self._end)

    def pass_ended(self, root: Root) -> None:
        if self._unwatch is not None and root.num_backwards - self._first == 1 and root.backward is None:
            if self._cuda is not None:
                self.forward_peak = torch.cuda.max_memory_allocated(self._cuda) - self._before
            elif self._allocations is not None:
                self._allocations.mark(_FORWARD)

    def pass_failed(self, root: Root, in_backward: bool) -> None:
        self._end()

    def backward_ended(self, root: Root) -> None:
        self.num_steps = root.num_backwards + 1 - self._first
        if self._unwatch is None:
            return
        if self._cuda is not None:
            self.step_peak = torch.cuda.max_memory_allocated(self._cuda) - self._before
        elif self._allocations is not None:
            self._allocations.mark(_STEP)  # autograd would turn the profiler on again behind this event
        self._unwatch()
        self._unwatch = None

    def _end(self, *in_step: object) -> None:
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None
        allocations, self._allocations = self._allocations, None
        if allocations is not None and not allocations.problem:
            allocations.end()
            self.forward_peak, self.step_peak = allocations.peak_until(_FORWARD), allocations.peak_until(_STEP)
            if not in_step:
                self._step_hook.remove()
                return
            # torch goes through the hooks before a step, and none of them may be removed meanwhile.
            handles = [self._step_hook]

            def remove(*_: Any) -> None:
                for each in handles:
                    each.remove()

            handles.append(register_optimizer_step_post_hook(remove))

    # ---- collectives

    def launching(self, collective: Collective) -> AbstractContextManager[Any]:
        self.moved[collective.kind] += collective.nbytes
        return nullcontext()

    def waiting(self, collective: Collective) -> AbstractContextManager[Any]:
        return nullcontext()

    # ---- comparison

    def compare(
        self, model: nn.Module, row: PlanRow, predicted: Prediction, optimizer: torch.optim.Optimizer | None
    ) -> PlanCheck:
        """Returns what `predicted` says beside what was measured.

        Raises:
            RuntimeError: fewer than two steps have run.
            TypeError: `optimizer` is no optimizer.
            ValueError: it does not step as the row says.
        """
        _require_planned(row, optimizer)
        self._end()
        if self.num_steps < 2:
            raise RuntimeError(f"plan.check: expected two steps after plan.apply, got {self.num_steps}")
        buffers = sum(each.nbytes for each in model.buffers())
        shards = sum(_shard_nbytes(group) for group in groups_below(model))
        values = [CheckedValue("resting: shards and buffers", predicted.shards + predicted.buffers, shards + buffers)]
        if optimizer is not None:
            values.append(CheckedValue("optimizer states", row.optimizer_nbytes, _state_nbytes(optimizer)))
        notes = [f"Peaks were not measured: {self.problem}"] if self.problem else []
        if optimizer is None and (line := line_of_optimizer(row.setting)) is not None:
            notes.append(f"The plan also says how the optimizer steps, which plan.check(optimizer) compares: {line}")
        if row.has_activations:
            values.append(CheckedValue("forward peak", predicted.forward_peak, self.forward_peak))
            values.append(CheckedValue("step peak", predicted.step_peak, self.step_peak))
        else:
            notes.append("The plan has no activations: its peaks are not compared.")
        for kind in ("all_gather", "reduce_scatter", "all_reduce"):
            if predicted.moved.get(kind) or self.moved[kind]:
                values.append(CheckedValue(f"{kind} bytes", predicted.moved.get(kind, 0), self.moved[kind]))
        return PlanCheck(tuple(values), tuple(notes))


def _require_planned(row: PlanRow, optimizer: torch.optim.Optimizer | None) -> None:
    """Raises ValueError if an optimizer lacks a setting that the row has, TypeError if it is no optimizer."""
    if optimizer is None:
        return
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"plan.check: optimizer: expected a torch.optim.Optimizer, got {type(optimizer).__name__}")
    setting, line = row.setting, line_of_optimizer(row.setting)
    # Attributes of the optimizers of fsdp2: flat ones, and those of whole matrices.
    has_states_at_rest = getattr(optimizer, "states_rest_on_cpu", getattr(optimizer, "offload_states", False))
    lacks = {
        "offload_states": setting.offload_states and not has_states_at_rest,
        "beside_forward": setting.beside_forward and not getattr(optimizer, "steps_beside_forward", False),
    }
    for name in (name for name, is_lacking in lacks.items() if is_lacking):
        raise ValueError(
            f"plan.check: optimizer: the plan has {name}=True, which this {type(optimizer).__name__} lacks: its "
            f"numbers are those of another step than the planned one. Where the program builds it, write {line}"
        )


def _shard_nbytes(group: FSDPParamGroup) -> int:
    buffers = group.parameters.buffers
    return buffers.shards.nbytes if buffers is not None and group.params else 0


def _state_nbytes(optimizer: torch.optim.Optimizer) -> int:
    tensors = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, Tensor) and v.dim()]
    return sum(local_if_any(tensor).nbytes for tensor in tensors)


class _Allocations:
    """Records each allocation of the CPU, from now on.

    `problem`: why nothing is recorded, if another profiler runs.
    """

    def __init__(self) -> None:
        from torch.profiler import ProfilerActivity, profile, record_function

        self._profile, self._mark = profile(activities=[ProfilerActivity.CPU], profile_memory=True), record_function
        self.problem, self._runs = "", True
        try:
            self._profile.__enter__()
        except RuntimeError as error:
            self.problem, self._runs = f"another profiler runs ({str(error).splitlines()[0]})", False

    def mark(self, name: str) -> None:
        """Notes a moment."""
        with self._mark(name):
            pass

    def end(self) -> None:
        if self._runs:
            self._runs = False
            self._profile.__exit__(None, None, None)

    def peak_until(self, name: str) -> int | None:
        """Returns the most bytes alive above the first moment until this mark; None if it never came."""
        total = peak = 0
        profiler: Any = self._profile.profiler
        for event in sorted(profiler.kineto_results.events(), key=lambda event: event.start_ns()):
            if event.name() == "[memory]":
                total += event.nbytes()
                peak = max(peak, total)
            elif event.name() == name:
                return peak
        return None
