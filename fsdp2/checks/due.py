"""Decides when checks are due, has them check, and compares ranks for all of them in one all-reduce.

**Times.** A check that takes time is due at the times 1, 2, 4, ..., 64, and each 128th: often at first, when a program
is written, and then now and again; at the level "debug" each time (`always`). What is counted as a time is:

- for a `RankCheck`, which compares ranks, a gather of one group that all ranks use (`RankComparisons`): they gather it
  equally often, whereas a rank need not begin a pass if parameters are unsharded already. Some are also due when the
  model is evaluated for the 1st, 2nd, 4th, ... time after training.
- for a `ForwardCheck`, which checks forwards of groups, a forward pass of the root (`ForwardChecks`). All groups become
  due then, and each stays due until its next forward. So its first forward is checked, and if it runs rarely, the first
  one after each such pass.

**One all-reduce.** When rank checks are due, each declares what to compare (`numbers`). All integers of all checks
travel in one all-reduce, by which all ranks know the least and the greatest of each, and each check judges its own, in
the order of table.py. All ranks raise alike. Groups on other meshes have all-reduces of their own before it.

**One read.** What forward checks have computed on a device, the host reads when the pass ends, all at once
(`judge_at_end`). Each read makes the host wait until the device has done all that it was given before.

A check is a class of another file, which says what it compares or computes; nothing there decides when. A steady step
runs four methods of the classes here, and nothing else of this folder: it counts a pass, and the gathers of one group,
and two checks that are due each time, WrittenParameters and MovedData, notice at once what is lost otherwise. Observers
that follow forwards are there only while some group is due.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ..engine.collectives import choice_of
from ..engine.compare_ranks import (
    ComparedNumbers,
    Comparison,
    RankObserver,
    compare,
    connects,
    group_of_all_ranks,
    groups_of_all_ranks,
    widest_mesh,
)
from ..engine.compat import version_of
from ..engine.events import Observer
from ..engine.group import FSDPParamGroup
from ..engine.inputs import HandedInputs
from ..engine.mesh import DataMesh
from ..engine.parameter import FSDPParam
from ..engine.rank_facts import gather_by_rank
from ..engine.unsharded_versions import refuse_written
from .moved_data import UnshardedPlaces, put_back, refuse_lost, refuse_moved

if TYPE_CHECKING:
    from ..engine.root import Root
    from ..engine.state import FSDPState

_PERIOD = 128


def is_check_time(number: int, always: bool = False) -> bool:
    """Returns True if a check is due at time `number`, or if `always`; never while a CUDA graph is recorded: the host
    would wait for the device.
    """
    return (always or not (number % _PERIOD and number & (number - 1))) and not is_capturing()


def is_capturing() -> bool:
    """Returns True while a CUDA graph is recorded."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def next_check_time(number: int) -> int:
    """Returns the first time after `number` at which `is_check_time` may be True."""
    return 1 << number.bit_length() if number < _PERIOD else (number // _PERIOD + 1) * _PERIOD


# ---- what a check declares


class Check(Observer):
    """Is the base class of checks that have a switch, see table.py. `always`: due each time (the level "debug")."""

    always = False


class RankCheck(Check, RankObserver):
    """Is the base class of checks that compare something between ranks."""


class ForwardCheck(Check):
    """Checks some forwards of each group. What it computes on a device, the host reads when the pass ends."""

    def before_cast(self, state: FSDPState, inputs: Sequence[Tensor], dtype: torch.dtype) -> None:
        """Is called before a forward of `state` casts floating-point `inputs` to `dtype`, if its first group is due."""

    def after_cast(self, state: FSDPState, inputs: HandedInputs) -> None:
        """Is called when a forward of `state` has returned that got such inputs, if its first group was due."""

    def before_forward(self, group: FSDPParamGroup, is_first: bool, is_thorough: bool) -> None:
        """Is called when a forward of `group` begins, if the group is due.

        `is_first`: it is the group's first. `is_thorough`: each forward is checked, at the debug level.
        """

    def after_forward(self, group: FSDPParamGroup) -> None:
        """Is called when that forward has returned."""

    def after_failure(self, group: FSDPParamGroup) -> None:
        """Is called when a forward of `group` has raised, also if the group was not due."""


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
        # True if some check is due at evaluations; whether the model has trained since the last one, and their number.
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

    def loaded(self, group: FSDPParamGroup) -> None:
        self._begins_anew = True  # all ranks have loaded

    def out_of_step(self, root: Root) -> None:
        # Ranks may have counted different numbers, and compare from the beginning, but not what they began with.
        self._times, self._next, self._begins_anew, self._evaluations = 0, 1, False, 0

    def refresh(self) -> None:
        """Follows the levels of the checks, which have changed."""
        self._next = 0

    def _compare(self, number: int) -> None:
        """Has the checks compare ranks that are due at time `number`.

        Raises:
            RuntimeError: ranks differ in what they must have in common; on every rank.
        """
        root, is_anew = self._root, number == 1 or self._begins_anew
        if is_anew:
            widest = widest_mesh(root.groups)
            self._mesh = widest if connects(widest) else None
        checks = [each for each in root.events.observers if isinstance(each, RankObserver)]
        if self._begins_anew or number < self._next:
            due = [] if is_capturing() else checks
        else:
            due = [each for each in checks if is_check_time(number, each.always or each.compares_next)]
        for check in due:
            check.refuse(root)
        comparison = Comparison(root, number, is_anew, self._mesh)
        by_mesh: dict[DataMesh, list[ComparedNumbers]] = {}
        for check in due:
            for mesh, numbers in check.numbers(comparison):
                by_mesh.setdefault(mesh, []).append(numbers)
        of_all = by_mesh.pop(self._mesh, []) if self._mesh is not None else []
        problem = _compare_over(by_mesh, root)
        if self._mesh is not None and due:
            compare(self._mesh, [*of_all, _problems(self._mesh, problem)], root)
        elif problem is not None:
            raise problem
        # Had a check raised, ranks would compare again next time.
        self._begins_anew = False
        self._at_evaluation = any(each.at_evaluation for each in checks)
        self._was_training = root.state.modules[0].training
        is_next = any(each.always or each.compares_next for each in checks)
        self._next = number + 1 if is_next else next_check_time(number)


def _compare_over(by_mesh: Mapping[DataMesh, Sequence[ComparedNumbers]], root: Root) -> RuntimeError | None:
    """Compares numbers over several meshes; returns the first error, of which ranks of other meshes know nothing."""
    problem = None
    for mesh, compared in by_mesh.items():
        try:
            compare(mesh, compared, root)
        except RuntimeError as error:
            problem = problem or error
    return problem


def _problems(mesh: DataMesh, problem: RuntimeError | None) -> ComparedNumbers:
    """Returns a number by which all ranks of `mesh` raise the error of one."""

    def judge(bounds: Sequence[tuple[int, int]]) -> None:
        if bounds[0][1]:
            texts = gather_by_rank(str(problem or ""), mesh.axis_groups, mesh.device)
            raise problem or RuntimeError(next(f"rank {rank}: {text}" for rank, text in texts.items() if text))

    return ComparedNumbers("other meshes", [int(problem is not None)], judge)


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
    """Counts the forward passes of a root, and knows which of its groups are due.

    `due`: the groups whose next forward is checked; True: it is their first. `always`: those of which some check checks
    each forward: it has the debug level, or the group has.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        # How many passes have begun, and the next one at which all groups are due.
        self._passes, self._next = 0, 1
        self.due: dict[FSDPParamGroup, bool] = {}
        self.always: set[FSDPParamGroup] = set()
        # True if some check checks each forward of all groups.
        self._is_debug = False
        self._beginnings, self.checked = _Beginnings(self), _CheckedForwards(self)

    def attached(self, root: Root) -> None:
        self.due = dict.fromkeys(root.groups, True)
        self.refresh()

    def detached(self, root: Root) -> None:
        root.remove(self._beginnings)
        root.remove(self.checked)

    def pass_began(self, root: Root) -> None:
        number = self._passes = self._passes + 1
        if number >= self._next:
            self._next = next_check_time(number)
            for group in root.groups:
                self.due.setdefault(group, False)
            self.follow()

    def settings_changed(self, group: FSDPParamGroup) -> None:
        (self.always.add if self._is_debug or choice_of(group).checked else self.always.discard)(group)
        self.follow()

    def forward_failed(self, group: FSDPParamGroup) -> None:
        self.checked.end(group)
        for check in self.checks():
            check.after_failure(group)

    def pass_failed(self, root: Root, in_backward: bool) -> None:
        if not in_backward:
            self.checked.drop_numbers()

    def refresh(self) -> None:
        """Follows the levels of the checks, which have changed."""
        self._is_debug = any(check.always for check in self.checks())
        for group in self._root.groups:
            self.settings_changed(group)

    def checks(self) -> list[ForwardCheck]:
        """Returns the checks that are on."""
        return [each for each in self._root.events.observers if isinstance(each, ForwardCheck)]

    def follow(self) -> None:
        """Has what follows forwards among the observers while it is needed."""
        checked = self.checked
        needed = bool(self.due or self.always), bool(checked.running or checked.waiting)
        for each, is_needed in zip((self._beginnings, checked), needed, strict=True):
            if is_needed and not each.is_there:
                self._root.add(each, behind=self)
            elif each.is_there and not is_needed:
                self._root.remove(each)


class AtTimes(Observer):
    """Is the base class of the observers by which ForwardChecks follow forwards. They are among those of a root only
    while some group is due, or is being checked.
    """

    is_there = False

    def __init__(self, checks: ForwardChecks) -> None:
        self._checks = checks

    def attached(self, root: Root) -> None:
        self.is_there = True

    def detached(self, root: Root) -> None:
        self.is_there = False


class _Beginnings(AtTimes):
    """Begins to check forwards of groups that are due."""

    def inputs_cast(self, state: FSDPState, inputs: Sequence[Tensor], dtype: torch.dtype) -> None:
        is_due = state.groups[0] in self._checks.due
        for check in self._checks.checks():
            if (is_due or check.always) and not is_capturing():
                check.before_cast(state, inputs, dtype)

    def forward_began(self, group: FSDPParamGroup) -> None:
        due = self._checks.due
        is_due = group in due
        if not (is_due or group in self._checks.always) or group.num_running > 1 or is_capturing():
            return
        is_first, is_debug = due.get(group, False), choice_of(group).checked
        checks = [check for check in self._checks.checks() if is_due or is_debug or check.always]
        for check in checks:
            check.before_forward(group, is_first, is_thorough=is_debug or check.always)
        self._checks.checked.running[group] = checks
        # Had a check raised, the group would still be due.
        due.pop(group, None)
        self._checks.follow()


class _CheckedForwards(AtTimes):
    """Holds the forwards that are being checked, and what the host is to judge when the pass ends."""

    def __init__(self, checks: ForwardChecks) -> None:
        super().__init__(checks)
        # The checks of each group whose forward is being checked.
        self.running: dict[FSDPParamGroup, list[ForwardCheck]] = {}
        self.waiting: list[tuple[Tensor, Callable[[list[int]], None]]] = []

    def end(self, group: FSDPParamGroup) -> list[ForwardCheck]:
        """Returns the checks of the group's forward, which is over."""
        checks = self.running.pop(group, [])
        self._checks.follow()
        return checks

    def forward_ended(self, group: FSDPParamGroup, inputs: Sequence[HandedInputs]) -> None:
        state = group.root.running[-1]
        if group is state.groups[0]:
            for each in reversed(inputs):
                for check in self.running.get(group, ()):
                    check.after_cast(state, each)
        if group.num_running == 1:
            for check in self.end(group):
                check.after_forward(group)

    def judge_at_end(self, numbers: Tensor, judge: Callable[[list[int]], None]) -> None:
        """Does what the function `judge_at_end` does."""
        self.waiting.append((numbers, judge))
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
    checks.checked.judge_at_end(numbers, judge)


def read_all(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Returns what flat int64 tensors hold. The host waits once for each device on which some of them lie."""
    values = {}
    for device in dict.fromkeys(tensor.device for tensor in tensors if tensor.numel()):
        values[device] = iter(torch.cat([tensor for tensor in tensors if tensor.device == device]).tolist())
    return [[next(values[tensor.device]) for _ in range(tensor.numel())] for tensor in tensors]


# ---- checks that are due each time


class WrittenParameters(Check):
    """Refuses in-place writes to unsharded parameters that a version counter shows: resharding would undo them."""

    def forward_ended(self, group: FSDPParamGroup, inputs: Sequence[HandedInputs]) -> None:
        # Each forward comes here, so this calls no function.
        counters = group.parameters.unsharded_versions
        expected = counters.expired if counters.is_expired else counters.valid
        if tuple(map(version_of, counters.tensors)) != expected:
            refuse_written(counters.take_written())

    def before_reshard(self, group: FSDPParamGroup) -> None:
        groups = _resharded_with(group)
        written = [name for each in groups for name in each.parameters.unsharded_versions.take_written()]
        refuse_lost([*written, *(name for each in groups for name in take_moved(each))])

    def forward_failed(self, group: FSDPParamGroup) -> None:
        if group.root.backward is None:
            group.parameters.unsharded_versions.take_written()  # which is lost, as all that the forward did


class MovedData(ForwardCheck):
    """Refuses unsharded parameters that do not lie in their group's memory any more: a user has assigned `.data`."""

    def __init__(self) -> None:
        self._places: dict[FSDPParamGroup, UnshardedPlaces] = {}

    def unsharded(self, group: FSDPParamGroup) -> None:
        places = self._places.get(group)
        if places is None:
            places = self._places[group] = UnshardedPlaces(group)
        # It takes 0.2 us for each parameter, or 0.07 us in backward. The storage has another address after each gather.
        base = places.storage.data_ptr()
        if base != places.base:
            places.base, places.pointers = base, [*map(base.__add__, places.offsets)]
        tensors = places.find_tensors() if places.are_distributed else places.tensors
        if [*map(Tensor.data_ptr, tensors)] == places.pointers:
            if group.root.backward is not None:
                return
            # Another shape over the same elements shows by that of its gradient.
            if [*map(Tensor.numel, tensors)] == places.numels and all(map(Tensor.is_contiguous, tensors)):
                return
        refuse_moved(put_back(group, places))

    def rebuilt(self, group: FSDPParamGroup, replaced: Mapping[FSDPParam, nn.Parameter]) -> None:
        self._places.pop(group, None)

    def before_reshard(self, group: FSDPParamGroup) -> None:
        refuse_lost([name for each in _resharded_with(group) for name in self.take_moved(each)])

    def pass_failed(self, root: Root, in_backward: bool) -> None:
        for group in root.groups if in_backward else ():
            self.take_moved(group)

    def after_forward(self, group: FSDPParamGroup) -> None:
        refuse_written(self.take_moved(group))

    def after_failure(self, group: FSDPParamGroup) -> None:
        self.take_moved(group)

    def take_moved(self, group: FSDPParamGroup) -> list[str]:
        """Puts unsharded parameters that lie elsewhere back into the group's memory, in their shapes; returns their
        names, and shapes that were wrong.
        """
        places = self._places.get(group)
        return put_back(group, places) if places is not None and group.is_unsharded else []


def take_moved(group: FSDPParamGroup) -> list[str]:
    """Returns what `MovedData.take_moved` does; nothing if that check is off."""
    observer = group.root.events.of(MovedData)
    return [] if observer is None else observer.take_moved(group)


def _resharded_with(group: FSDPParamGroup) -> list[FSDPParamGroup]:
    """Returns the groups that a user's call of `reshard` reaches with `group`: nothing of any may be left for later."""
    return [each for state in (group.state, *group.state.parts) for each in state.groups]
