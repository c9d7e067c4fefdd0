"""Decides when checks are due, has them check, and compares ranks for all of them in one all-reduce.

**Times.** A check that takes time is due at the times 1, 2, 4, ..., 64, and each 128th: often at first, when a program
is written, and then now and again; at the debug level each time. What is counted as a time is:

- for a `RankCheck`, which compares ranks, a gather of one group that all ranks use (`RankComparisons`): they gather it
  equally often, whereas a rank need not begin a pass if parameters are unsharded already. Some are also
  due when the model is evaluated for the 1st, 2nd, 4th, ... time after training.
- for a `ForwardCheck`, which checks forwards of groups, a forward pass of the root (`ForwardChecks`). All groups become
  due then, and each stays due until its next forward. So its first forward is checked, and if it runs rarely, the first
  one after each such pass.

**One all-reduce.** When rank checks are due, each declares what to compare (`numbers`). All integers of all checks
travel in one all-reduce, by which all ranks know the least and the greatest of each, and each check judges its own, in
the order of observers.py. All ranks raise alike. Groups on other meshes have all-reduces of their own before it.

**One read.** What forward checks have computed on a device, the host reads when the pass ends, all at once
(`judge_at_end`). Each read makes the host wait until the device has done all that it was given before.

A check is a class of another file, which says what it compares or computes; nothing there decides when. In a steady
step, checks count a pass, and the gathers of one group, and two that are due each time, WrittenParameters and MovedData
(lost_writes.py), notice at once what is lost otherwise. The observer that follows forwards is there only while some
group is due.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..calls.inputs import HandedInputs
from ..calls.nested import tensors_in
from ..engine.events import Change, Observer
from ..engine.group import FSDPParamGroup
from ..engine.mesh import DataMesh
from ..ranks.compare_ranks import (
    ComparedNumbers,
    Comparison,
    RankObserver,
    compare,
    compare_now,
    connects,
    group_of_all_ranks,
    groups_of_all_ranks,
    widest_mesh,
)
from ..ranks.rank_facts import gather_by_rank
from .level import is_debug

if TYPE_CHECKING:
    from ..engine.parameter import FSDPParam
    from ..engine.root import Root
    from ..engine.state import FSDPState

_PERIOD = 128


def is_check_time(number: int) -> bool:
    """Returns True if a check is due at time `number`; never while a CUDA graph is recorded: the host would wait for
    the device.
    """
    return (is_debug() or not (number % _PERIOD and number & (number - 1))) and not is_capturing()


def is_capturing() -> bool:
    """Returns True while a CUDA graph is recorded."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def next_check_time(number: int) -> int:
    """Returns the first time after `number` at which `is_check_time` may be True."""
    if is_debug():
        return number + 1
    return 1 << number.bit_length() if number < _PERIOD else (number // _PERIOD + 1) * _PERIOD


# ---- what a check declares


class Check(Observer):
    """The base class of the observers that follow a root unless checks are off."""


class RankCheck(Check, RankObserver):
    """Compares something between ranks."""


class ForwardCheck(Check):
    """Checks some forwards of each group. What it computes on a device, the host reads when the pass ends."""

    def before_cast(self, state: FSDPState, inputs: Sequence[Tensor], dtype: torch.dtype) -> None:
        """Called before a forward of `state` casts floating-point `inputs` to `dtype`, if its first group is due."""

    def after_cast(self, state: FSDPState, inputs: HandedInputs) -> None:
        """Called when a forward of `state` has returned that got such inputs, if its first group was due."""

    def before_forward(self, group: FSDPParamGroup) -> None:
        """Called when a forward of `group` begins, if the group is due."""

    def after_forward(self, group: FSDPParamGroup) -> None:
        """Called when that forward has returned."""

    def after_failure(self, group: FSDPParamGroup) -> None:
        """Called when a forward of `group` has raised, also if the group was not due."""


def alike(
    name: str,
    mesh: DataMesh,
    tell: Callable[[], Any],
    explain: Callable[[Mapping[int, Any]], str],
    numbers: Sequence[Tensor | int] | None = None,
    settle: Callable[[bool], None] = lambda differs: None,
) -> tuple[DataMesh, ComparedNumbers]:
    """Returns numbers that must be alike on all ranks of `mesh`, with a function that explains what differs.

    Args:
        tell: returns what a rank tells the others if numbers differ.
        explain: gets what each rank has told (rank -> that), and returns the text of an error; "" if nothing is wrong.
        numbers: None: a checksum of what `tell` returns now.
        settle: called with True if numbers differ, when nothing is wrong.
    """

    def judge(bounds: Sequence[tuple[int, int]]) -> None:
        differs = any(least != most for least, most in bounds)
        text = explain(gather_by_rank(tell(), mesh.axis_groups, mesh.device)) if differs else ""
        if text:
            raise RuntimeError(text)
        settle(differs)

    if numbers is None:
        numbers = [zlib.crc32(repr(tell()).encode())]
    return mesh, ComparedNumbers(name, numbers, judge)


def found(name: str, mesh: DataMesh, text: str) -> tuple[DataMesh, ComparedNumbers]:
    """Returns a number by which all ranks of `mesh` raise what one of them has found. `text`: of the error, or ""."""

    def judge(bounds: Sequence[tuple[int, int]]) -> None:
        if bounds[0][1]:
            raise RuntimeError(next(filter(None, gather_by_rank(text, mesh.axis_groups, mesh.device).values())))

    return mesh, ComparedNumbers(name, [int(text != "")], judge)


# ---- ranks


class RankComparisons(Observer):
    """Has the rank checks of a root compare ranks when they are due.

    The first time, and the first after loading, comes before the first gather of any group that all ranks use: nothing
    may be gathered from ranks that differ.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        # The group whose gathers are counted; None: there is no such group. It is known when all are attached.
        self._group: FSDPParamGroup | None = None
        self._knows_group = False
        # How often it has communicated, and the next time at which ranks compare.
        self._times, self._next = 0, 1
        # The next time is the first one, or the first after loading.
        self._begins_anew = True
        # Over which ranks compare, if it connects them; known at the first time.
        self._mesh: DataMesh | None = None
        # Some check is due at evaluations; the model trained at the last gather; how many evaluations have followed.
        self._at_evaluation = self._was_training = False
        self._evaluations = 0

    def before_gather(self, group: FSDPParamGroup) -> None:
        if not self._knows_group:
            self._group, self._knows_group = group_of_all_ranks(self._root), True
        is_counted = group is self._group
        if not is_counted and not (self._begins_anew and group in groups_of_all_ranks(self._root)):
            return
        if self._root.backward is not None and not group.settings.unshard_in_backward:
            return  # which ranks read its weights in backward depends on what each of them computes
        number, is_due = self._times + 1, self._begins_anew or self._times + 1 >= self._next
        if self._at_evaluation and self._root.state.modules[0].training != self._was_training:
            self._was_training = not self._was_training
            is_due = is_due or (not self._was_training and self._is_evaluation_due())
        if is_due:
            self._compare(number)
        if is_counted:
            self._times = number

    def _is_evaluation_due(self) -> bool:
        """Returns True if ranks compare before this evaluation, the first after training."""
        self._evaluations += 1
        return is_check_time(self._evaluations)

    def changed(self, group: FSDPParamGroup, change: Change, replaced: Mapping[FSDPParam, nn.Parameter]) -> None:
        self._begins_anew = self._begins_anew or change is Change.LOADED  # all ranks have loaded

    def out_of_step(self, root: Root) -> None:
        # Ranks may have counted different numbers, and compare from the beginning, but not what they began with.
        self._times, self._next, self._begins_anew, self._evaluations = 0, 1, False, 0

    def refresh(self) -> None:
        """Follows the level of checks, which has changed."""
        self._next = 0

    def _compare(self, number: int) -> None:
        """Has the checks compare ranks at time `number`.

        Raises:
            RuntimeError: ranks differ in what they must have in common; on every rank.
        """
        root, is_anew = self._root, number == 1 or self._begins_anew
        if is_anew:
            widest = widest_mesh(root.groups)
            self._mesh = widest if connects(widest) else None
        due = [] if is_capturing() else [each for each in root.events.observers if isinstance(each, RankObserver)]
        comparison = Comparison(root, number, is_anew, self._mesh)
        by_mesh: dict[DataMesh, list[ComparedNumbers]] = {}
        for check in due:
            for mesh, numbers in check.numbers(comparison):
                by_mesh.setdefault(mesh, []).append(numbers)
        of_all = by_mesh.pop(self._mesh, []) if self._mesh is not None else []
        problem = _compare_over(by_mesh, root)
        if self._mesh is not None and due:
            _, of_others = found("other meshes", self._mesh, str(problem or ""))
            compare(self._mesh, [*of_all, of_others], root)
        elif problem is not None:
            raise problem
        # Had a check raised, ranks would compare again next time.
        is_next = any(each.compares_next for each in due)
        self._begins_anew, self._next = False, number + 1 if is_next else next_check_time(number)
        self._at_evaluation, self._was_training = (
            any(each.at_evaluation for each in due),
            root.state.modules[0].training,
        )


def _compare_over(by_mesh: Mapping[DataMesh, Sequence[ComparedNumbers]], root: Root) -> RuntimeError | None:
    """Compares numbers over several meshes; returns the first error, of which ranks of other meshes know nothing.

    Raises:
        RuntimeError: ranks are out of step, which those of all meshes are told.
    """
    problem = None
    for mesh, compared in by_mesh.items():
        judge = compare_now(mesh, compared, root)
        try:
            judge()
        except RuntimeError as error:
            problem = problem or error
    return problem


class ReplicaComparisons(RankComparisons):
    """Counts reductions of the group as times, too, and in backward nothing else: where each rank has the parameters
    whole, ranks meet at reductions only. Before its gather, others may be at the reduction of a conditional module.
    """

    def before_gather(self, group: FSDPParamGroup) -> None:
        if self._root.backward is None:
            super().before_gather(group)

    def before_reduce(self, group: FSDPParamGroup) -> None:
        super().before_gather(group)


def make_rank_comparisons(root: Root) -> RankComparisons:
    """Returns the RankComparisons that the root's mesh needs."""
    return (ReplicaComparisons if widest_mesh(root.groups).size == 1 else RankComparisons)(root)


# ---- forwards


class ForwardChecks(Observer):
    """Counts the forward passes of a root, and has those of its groups checked that are due."""

    def __init__(self, root: Root) -> None:
        self._root = root
        # How many passes have begun, and the next one at which all groups are due.
        self._passes, self._next = 0, 1
        self.due: set[FSDPParamGroup] = set()
        self.forwards = _Forwards(self)

    def detached(self, root: Root) -> None:
        root.remove(self.forwards)

    def pass_began(self, root: Root) -> None:
        number = self._passes = self._passes + 1
        if number >= self._next:
            self._next = next_check_time(number)
            self.due.update(root.groups)
            self.follow()

    def forward_failed(self, group: FSDPParamGroup) -> None:
        self.forwards.end(group)
        for check in self.checks():
            check.after_failure(group)

    def pass_failed(self, root: Root, in_backward: bool) -> None:
        if not in_backward:
            self.forwards.drop_numbers()

    def refresh(self) -> None:
        """Follows the level of checks, which has changed."""
        self._next = 0

    def checks(self) -> Iterator[ForwardCheck]:
        """Yields the checks of forwards."""
        return (each for each in self._root.events.observers if isinstance(each, ForwardCheck))

    def follow(self) -> None:
        """Has what follows forwards among the observers while it is needed."""
        forwards = self.forwards
        is_needed, is_there = bool(self.due or forwards.running or forwards.waiting), forwards.is_there
        if is_needed and not is_there:
            self._root.add(forwards, behind=self)
        elif is_there and not is_needed:
            self._root.remove(forwards)


class _Forwards(Observer):
    """Follows the forwards that are checked, and holds what the host is to judge when the pass ends."""

    is_there = False

    def __init__(self, checks: ForwardChecks) -> None:
        self._checks = checks
        # The groups whose forward is being checked.
        self.running: set[FSDPParamGroup] = set()
        self.waiting: list[tuple[Tensor, Callable[[list[int]], None]]] = []

    def attached(self, root: Root) -> None:
        self.is_there = True

    def detached(self, root: Root) -> None:
        self.is_there = False

    def inputs_given(self, state: FSDPState, args: Any, kwargs: Any) -> None:
        dtype = state.input_dtype
        if dtype is None or state.groups[0] not in self._checks.due or is_capturing():
            return
        cast = [each for each in tensors_in(args, kwargs) if each.dtype != dtype and each.is_floating_point()]
        for check in self._checks.checks() if cast else ():
            check.before_cast(state, cast, dtype)

    def forward_began(self, group: FSDPParamGroup) -> None:
        due = self._checks.due
        if group not in due or group.num_running > 1 or is_capturing():
            return
        for check in self._checks.checks():
            check.before_forward(group)
        # Had a check raised, the group would still be due.
        self.running.add(group)
        if not is_debug():
            due.discard(group)

    def forward_ended(self, group: FSDPParamGroup, inputs: Sequence[HandedInputs]) -> None:
        if group not in self.running:
            return
        state = group.root.running[-1]
        if group is state.groups[0]:
            for each in reversed(inputs):
                for check in self._checks.checks():
                    check.after_cast(state, each)
        if group.num_running == 1:
            self.end(group)
            for check in self._checks.checks():
                check.after_forward(group)

    def end(self, group: FSDPParamGroup) -> None:
        """Notes that the forward of `group` is over."""
        self.running.discard(group)
        self._checks.follow()

    def pass_ended(self, root: Root) -> None:
        """Has the host judge all numbers; then raises what the first judge has raised, if any has."""
        waiting = self.drop_numbers()
        errors = []
        for (_, judge), numbers in zip(waiting, read_all([numbers for numbers, _ in waiting]), strict=True):
            try:
                judge(numbers)
            except RuntimeError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def drop_numbers(self) -> list[tuple[Tensor, Callable[[list[int]], None]]]:
        """Returns the numbers that were to be judged, with their judges, and holds none from now on."""
        waiting, self.waiting = self.waiting, []
        self._checks.follow()
        return waiting


NO_NUMBERS = torch.zeros(0, dtype=torch.int64, device="cpu")


def judge_at_end(root: Root, numbers: Tensor, judge: Callable[[list[int]], None]) -> None:
    """Calls `judge` with `numbers`, a flat int64 tensor, when the pass ends that runs under `root`. It may raise."""
    checks = root.events.of(ForwardChecks)
    assert checks is not None, "they have called a check"
    checks.forwards.waiting.append((numbers, judge))
    checks.follow()


def read_all(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Returns what flat int64 tensors hold. The host waits once for each device on which some of them lie."""
    values = {}
    for device in dict.fromkeys(tensor.device for tensor in tensors if tensor.numel()):
        values[device] = iter(torch.cat([tensor for tensor in tensors if tensor.device == device]).tolist())
    return [[next(values[tensor.device]) for _ in range(tensor.numel())] for tensor in tensors]
