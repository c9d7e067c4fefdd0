"""Replays a recorded step with the groups of one setting around it: memory, bytes moved, order and time.

The groups here hold numbers instead of tensors. What decides when they are gathered and reduced is the engine's own:
`Prefetcher` and `ReductionQueue` (schedule.py), the layouts (layout.py), the buckets and the pieces of large gradients
(buckets.py), all in engine/. tests/trace/test_plan.py compares the results with counted
allocations of real steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .groups import ReplayedRoot
from .ledger import Ledger, Machine
from .recording import BEGIN, END, GRADIENT, INPUTS, REACHED, Recording
from .settings import Setting
from .structure import PlannedGroup


@dataclass(frozen=True)
class Prediction:
    """Holds what one step takes on each rank, in bytes and seconds.

    Args:
        shards: bytes of the parameters' shards, on whichever device they rest.
        buffers: bytes of the model's buffers, which rest on the device.
        resting: bytes on the device between steps: shards that are not offloaded, and buffers; no optimizer states.
        forward_peak: most bytes above resting until the model's forward has returned.
        step_peak: most bytes above resting until backward ends, which includes all sharded gradients.
        peak_at: what ran when the step had its peak.
        moved: bytes of all ranks in the tensors of one step's collectives, by their kind, and under "transfer" those
            that offload copies between this rank's device and the CPU.
        sent: bytes that this rank sends in one step.
        order: names of the groups in the order of the forward.
        flops: floating-point operations of one step in matrix products, convolutions and attention.
        compute_time, time: seconds of computation alone, and of the step with the optimizer's; None without speeds.
        launched: how many collectives a step launches, by their kind.
        optimizer_time: seconds of the optimizer's step; None without speeds.
    """

    shards: int
    buffers: int
    resting: int
    forward_peak: int
    step_peak: int
    peak_at: str
    moved: dict[str, int]
    sent: float
    order: tuple[str, ...]
    flops: int
    compute_time: float | None = None
    time: float | None = None
    launched: dict[str, int] = field(default_factory=dict)
    optimizer_time: float | None = None

    @property
    def exposed_time(self) -> float | None:
        """Seconds by which communication makes the step longer; None without speeds."""
        if self.time is None or self.compute_time is None:
            return None
        return self.time - self.compute_time - (self.optimizer_time or 0.0)

    @property
    def total(self) -> int:
        """Most bytes on the device in a step, without optimizer states."""
        return self.resting + self.step_peak


def modules_of(groups: Sequence[PlannedGroup]) -> list[tuple[nn.Module, PlannedGroup]]:
    """Returns the modules of all groups, each with its group, in the order in which marks number them."""
    return [(module, group) for group in groups for module in group.modules]


def replay(
    groups: Sequence[PlannedGroup],
    recording: Recording,
    setting: Setting,
    machine: Machine,
    buffers_nbytes: int = 0,
    optimizer_traffic: float = 0.0,
) -> Prediction:
    """Returns what a step in steady state takes: the second one, in which the order is known.

    Args:
        groups: those of the model, as `find_groups` returns them.
        recording: a step of the plain model, of which marks number `modules_of(groups)` and the parameters of all
            groups, one after the other.
        setting: how parameters are sharded.
        machine: what each rank computes and communicates with.
        buffers_nbytes: bytes of the model's buffers, which rest on the device.
        optimizer_traffic: bytes of the device's memory that the optimizer's step reads and writes.
    """
    ledger = Ledger(machine)
    root = ReplayedRoot([*groups], setting, ledger)
    step = _Step(root, recording)
    for _ in range(2):
        ledger.begin_step()
        step.run()
        optimizer_time = ledger.touch(optimizer_traffic)
    shards = sum(group.shard_nbytes for group in root.groups)
    rests = sum(group.shard_nbytes for group in root.groups if not group.offloads)
    return Prediction(
        shards=shards,
        buffers=buffers_nbytes,
        resting=rests + buffers_nbytes,
        forward_peak=step.forward_peak,
        step_peak=ledger.peak,
        peak_at=ledger.peak_at,
        moved=dict(ledger.moved),
        sent=ledger.sent,
        order=tuple(dict.fromkeys(step.order)),
        flops=ledger.flops,
        compute_time=ledger.computed if machine.has_speeds else None,
        time=ledger.now - ledger.began if machine.has_speeds else None,
        launched=dict(ledger.launched),
        optimizer_time=optimizer_time if machine.has_speeds else None,
    )


class _Step:
    """Calls the groups as the marks of a recording say."""

    def __init__(self, root: ReplayedRoot, recording: Recording) -> None:
        self._root, self._ledger, self._recording = root, root.ledger, recording
        self._modules = [group for group in root.groups for _ in group.planned.modules]
        self._parameters = [(g, i) for g in root.groups for i in range(len(g.planned.parameters))]
        self._depth = 0
        self.forward_peak = 0
        self.order: list[str] = []
        self._calls: dict[str, Any] = {
            BEGIN: self._begin,
            END: self._end,
            REACHED: self._reached,
            INPUTS: self._inputs,
            GRADIENT: self._gradient,
        }

    def run(self) -> None:
        root, ledger = self._root, self._ledger
        ledger.activations = 0
        self.order.clear()
        root.begin_pass()
        for mark in self._recording.marks:
            ledger.follow(mark)
            self._calls[mark.kind](mark.subject, mark.flag)
        ledger.compute(self._recording.last_peak, self._recording.last_flops)
        root.end_backward()

    def _begin(self, module: int, in_backward: bool) -> None:
        group = self._modules[module]
        if not in_backward:
            self._ledger.doing = f"forward of {group.planned.name}"
            self.order.append(group.planned.name)
            self._depth += 1
        group.pre_forward(in_backward)

    def _end(self, module: int, differentiable: bool) -> None:
        if self._root.in_backward:
            return
        self._depth -= 1
        self._modules[module].after_forward(module, differentiable, self._depth > 0)
        if self._depth == 0:
            self._root.end_forward()
            self.forward_peak = self._ledger.peak

    def _reached(self, module: int, _: bool) -> None:
        group = self._modules[module]
        self._ledger.doing = f"backward of {group.planned.name}"
        if group.settings.unshard_in_backward:
            group.pre_backward()

    def _inputs(self, module: int, _: bool) -> None:
        self._modules[module].post_backward()

    def _gradient(self, parameter: int, _: bool) -> None:
        self._root.enter_backward()
        group, i = self._parameters[parameter]
        group.gradients.arrive(i)
