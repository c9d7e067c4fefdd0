"""Decides in each step which checks are due, and runs those; the checks themselves are in other files.

A steady step runs four methods of the classes here, and nothing else of this folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

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
from ..engine.rank_facts import gather_by_rank
from ..engine.unsharded_versions import UnshardedVersions, refuse_written
from .check_times import Check, ForwardCheck, is_capturing, is_check_time, next_check_time
from .moved_data import UnshardedPlaces, put_back, refuse_lost, refuse_moved
from .reads import PassReads

_UNKNOWN = object()


class RankComparisons(Observer):
    """Has the rank checks of a root compare ranks when they are due.

    Times are gathers of one group that all ranks use: all ranks gather it equally often, whereas a rank need not begin
    a pass if parameters are unsharded already. The first time, and the first after loading, comes before the first
    gather of any group that all ranks use: nothing may be gathered from ranks that differ. Some checks are also due
    when the model is evaluated for the 1st, 2nd, 4th, ... time after training.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        # The group whose gathers are counted; None: there is no such group. It is known when all are attached.
        self._group: Any = _UNKNOWN
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
        if self._group is _UNKNOWN:
            self._group = group_of_all_ranks(self._root)
        is_counted = group is self._group
        if not is_counted and not (self._begins_anew and group in groups_of_all_ranks(self._root)):
            return
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

    def out_of_step(self, root: Any) -> None:
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
            due = [each for each in checks if is_check_time(number, each.always)]
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
        self._next = number + 1 if any(each.always for each in checks) else next_check_time(number)


def _compare_over(by_mesh: Mapping[DataMesh, Sequence[ComparedNumbers]], root: Any) -> RuntimeError | None:
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
    """Counts reductions of the group as times, too: where nothing is gathered, ranks communicate there only."""

    def before_reduce(self, group: FSDPParamGroup) -> None:
        self.before_gather(group)


def make_rank_comparisons(root: Any) -> RankComparisons:
    """Returns the RankComparisons that the root's mesh needs."""
    return (ReplicaComparisons if widest_mesh(root.groups).size == 1 else RankComparisons)(root)


class ForwardChecks(Observer):
    """Has the forward checks of a root check forwards of its groups.

    Times are forward passes of the root, at which all groups become due. A group stays due until its next forward,
    which is checked. So its first forward is, and if it runs rarely, the first one after each such pass. At the debug
    level of a check, or of a group, each forward is checked. While no group is due, no event of a forward is followed.
    """

    ignored = frozenset({"inputs_returned", "forward_ended", "pass_ended"})

    def __init__(self, root: Any) -> None:
        self._root = root
        # How many passes have begun, and the next one at which all groups are due.
        self._passes, self._next = 0, 1
        # The groups whose next forward is checked. True: it is their first.
        self._due: dict[FSDPParamGroup, bool] = {}
        # True if some check checks each forward of all groups; the groups of which some check checks each forward.
        self._is_debug = False
        self._always: set[FSDPParamGroup] = set()
        # The checks of the groups whose forward is being checked.
        self._running: dict[FSDPParamGroup, list[ForwardCheck]] = {}
        # What the host judges when the pass ends.
        self._reads = PassReads()

    def attached(self, root: Any) -> None:
        self._due = dict.fromkeys(root.groups, True)
        self.refresh()

    def pass_began(self, root: Any) -> None:
        number = self._passes = self._passes + 1
        if number >= self._next:
            self._next = next_check_time(number)
            for group in root.groups:
                self._due.setdefault(group, False)
            self._follow_forwards()

    def inputs_cast(self, state: Any, inputs: Sequence[Tensor], dtype: torch.dtype) -> None:
        is_due = state.groups[0] in self._due
        for check in self._checks():
            if (is_due or check.always) and not is_capturing():
                check.before_cast(state, inputs, dtype)

    def forward_began(self, group: FSDPParamGroup) -> None:
        is_due = group in self._due
        if not (is_due or group in self._always) or group.state.running > 1 or is_capturing():
            return
        is_first, is_debug = self._due.get(group, False), choice_of(group).checked
        checks = [check for check in self._checks() if is_due or is_debug or check.always]
        for check in checks:
            check.before_forward(group, is_first, is_thorough=is_debug or check.always)
        self._running[group] = checks
        self._root.events.follow_if(True, self, "inputs_returned", "forward_ended")
        # Had a check raised, the group would still be due.
        self._due.pop(group, None)
        self._follow_forwards()

    def inputs_returned(self, state: Any, inputs: HandedInputs) -> None:
        for check in self._running.get(state.groups[0], ()):
            check.after_cast(state, inputs)

    def forward_ended(self, group: FSDPParamGroup) -> None:
        if group.state.running == 1:
            for check in self._end(group):
                check.after_forward(group)

    def forward_failed(self, group: FSDPParamGroup) -> None:
        self._end(group)
        for check in self._checks():
            check.after_failure(group)

    def _end(self, group: FSDPParamGroup) -> list[ForwardCheck]:
        """Returns the checks of the group's forward, which is over."""
        checks = self._running.pop(group, [])
        self._root.events.follow_if(bool(self._running), self, "inputs_returned", "forward_ended")
        return checks

    def settings_changed(self, group: FSDPParamGroup) -> None:
        (self._always.add if self._is_debug or choice_of(group).checked else self._always.discard)(group)
        self._follow_forwards()

    def refresh(self) -> None:
        """Follows the levels of the checks, which have changed."""
        self._is_debug = any(check.always for check in self._checks())
        for group in self._root.groups:
            self.settings_changed(group)

    def _checks(self) -> list[ForwardCheck]:
        return [each for each in self._root.events.observers if isinstance(each, ForwardCheck)]

    def _follow_forwards(self) -> None:
        self._root.events.follow_if(bool(self._due or self._always), self, "inputs_cast", "forward_began")

    # ---- what the host reads

    def judge_at_end(self, numbers: Tensor, judge: Callable[[list[int]], None]) -> None:
        """Calls `judge` with `numbers`, a flat int64 tensor, when the pass ends. It may raise."""
        self._reads.add(numbers, judge)
        self._root.events.follow_if(True, self, "pass_ended")

    def pass_ended(self, root: Any) -> None:
        root.events.follow_if(False, self, "pass_ended")
        self._reads.judge()

    def pass_failed(self, root: Any) -> None:
        root.events.follow_if(False, self, "pass_ended")
        self._reads.drop()


def judge_at_end(root: Any, numbers: Tensor, judge: Callable[[list[int]], None]) -> None:
    """Calls `judge` with `numbers`, a flat int64 tensor, when the pass ends that runs under `root`. It may raise."""
    root.events.of(ForwardChecks).judge_at_end(numbers, judge)


class WrittenParameters(Check):
    """Refuses in-place writes to unsharded parameters that a version counter shows: resharding would undo them."""

    def __init__(self) -> None:
        # The counters of each group that has run, until its unsharded parameters are other objects.
        self._counters: dict[FSDPParamGroup, Any] = {}

    def attached(self, root: Any) -> None:
        self._versions: UnshardedVersions = root.events.of(UnshardedVersions)

    def rebuilt(self, group: FSDPParamGroup) -> None:
        self._counters.pop(group, None)

    def forward_ended(self, group: FSDPParamGroup) -> None:
        counters = self._counters.get(group)
        if counters is None:
            counters = self._counters[group] = self._versions.of(group)
        # Each forward comes here, so this calls no function.
        expected = counters.expired if counters.is_expired else counters.valid
        if tuple(map(version_of, counters.tensors)) != expected:
            refuse_written(counters.take_written())

    def before_reshard(self, group: FSDPParamGroup) -> None:
        groups = _resharded_with(group)
        written = [name for each in groups for name in self._versions.of(each).take_written()]
        refuse_lost([*written, *(name for each in groups for name in take_moved(each))])

    def forward_failed(self, group: FSDPParamGroup) -> None:
        if group.root.backward is None:
            self._versions.of(group).take_written()  # which is lost, as all that the forward did


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

    def rebuilt(self, group: FSDPParamGroup) -> None:
        self._places.pop(group, None)

    def before_reshard(self, group: FSDPParamGroup) -> None:
        refuse_lost([name for each in _resharded_with(group) for name in self.take_moved(each)])

    def backward_failed(self, root: Any) -> None:
        for group in root.groups:
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
