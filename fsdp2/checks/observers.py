"""Decides in each step which checks are due, and runs those; the checks themselves are in other files.

A steady step runs four methods of the classes here, and nothing else of this folder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.compat import version_of
from ..core.events import Observer
from ..core.group import FSDPParamGroup
from ..core.inputs import HandedInputs
from ..core.mesh import DataMesh
from ..core.policy import ReduceWhen
from ..ext.collectives import choice_of
from ..ext.unsharded_versions import UnshardedVersions, refuse_written
from .check_times import Check, Comparison, ForwardCheck, RankCheck, is_capturing, is_check_time, next_check_time
from .compare_ranks import ComparedNumbers, compare, connects, widest_mesh
from .moved_data import UnshardedPlaces, put_back, refuse_lost, refuse_moved
from .reads import PassReads

_UNKNOWN = object()


class RankComparisons(Observer):
    """Has the rank checks of a root compare ranks when they are due.

    Times are gathers of one group that all ranks use: all ranks gather it equally often, whereas a rank need not begin
    a pass if parameters are unsharded already.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        # The group whose gathers are counted; None: there is no such group. It is known when all are attached.
        self._group: Any = _UNKNOWN
        # How often it has communicated, and the next time at which ranks compare.
        self._times, self._next = 0, 1
        # The next time is like the first one.
        self._begins_anew = False
        # Over which ranks compare, if it connects them; known at the first time.
        self._mesh: DataMesh | None = None

    def before_gather(self, group: FSDPParamGroup) -> None:
        if self._group is _UNKNOWN:
            self._group = group_of_all_ranks(self._root)
        if group is self._group:
            number = self._times + 1
            if number >= self._next:
                self._compare(number)
            self._times = number

    def loaded(self, group: FSDPParamGroup) -> None:
        self._begins_anew, self._next = True, 0  # all ranks have loaded

    def out_of_step(self, root: Any) -> None:
        self._times, self._next, self._begins_anew = 0, 1, False  # ranks may have counted different numbers

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
        checks = [each for each in root.events.observers if isinstance(each, RankCheck)]
        due = checks if self._begins_anew else [each for each in checks if is_check_time(number, each.always)]
        for check in due:
            check.refuse(root)
        comparison = Comparison(root, number, is_anew, self._mesh)
        by_mesh: dict[DataMesh | None, list[ComparedNumbers]] = {}
        for check in due:
            for mesh, numbers in check.numbers(comparison):
                by_mesh.setdefault(mesh, []).append(numbers)
        of_all = by_mesh.pop(self._mesh, [])
        for other, compared in by_mesh.items():
            assert other is not None, "ranks compare over meshes only"
            compare(other, compared, root)
        if self._mesh is not None:
            compare(self._mesh, of_all, root)
        # Had a check raised, ranks would compare again next time.
        self._begins_anew = False
        self._next = number + 1 if any(each.always for each in checks) else next_check_time(number)


class ReplicaComparisons(RankComparisons):
    """Counts reductions of the group as times, too: where nothing is gathered, ranks communicate there only."""

    def before_reduce(self, group: FSDPParamGroup) -> None:
        self.before_gather(group)


def make_rank_comparisons(root: Any) -> RankComparisons:
    """Returns the RankComparisons that the root's mesh needs."""
    return (ReplicaComparisons if widest_mesh(root.groups).size == 1 else RankComparisons)(root)


def group_of_all_ranks(root: Any) -> FSDPParamGroup | None:
    """Returns the first group with parameters, on the mesh of most ranks, that no rank leaves out."""
    mesh = widest_mesh(root.groups)
    for group in root.groups:
        if group.params and group.mesh == mesh and group.settings.reduce_when is not ReduceWhen.ASKED:
            return group
    return None


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
        follow_if(True, self._root, self, "inputs_returned", "forward_ended")
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
        follow_if(bool(self._running), self._root, self, "inputs_returned", "forward_ended")
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
        follow_if(bool(self._due or self._always), self._root, self, "inputs_cast", "forward_began")

    # ---- what the host reads

    def judge_at_end(self, numbers: Tensor, judge: Callable[[list[int]], None]) -> None:
        """Calls `judge` with `numbers`, a flat int64 tensor, when the pass ends. It may raise."""
        self._reads.add(numbers, judge)
        follow_if(True, self._root, self, "pass_ended")

    def pass_ended(self, root: Any) -> None:
        follow_if(False, root, self, "pass_ended")
        self._reads.judge()

    def pass_failed(self, root: Any) -> None:
        follow_if(False, root, self, "pass_ended")
        self._reads.drop()


def judge_at_end(root: Any, numbers: Tensor, judge: Callable[[list[int]], None]) -> None:
    """Calls `judge` with `numbers`, a flat int64 tensor, when the pass ends that runs under `root`. It may raise."""
    root.events.of(ForwardChecks).judge_at_end(numbers, judge)


def follow_if(wanted: bool, root: Any, observer: Observer, *names: str) -> None:
    """Has `root` tell `observer` of the events `names` from now on if `wanted`, else no more."""
    if wanted is (names[0] in observer.ignored):
        (root.events.follow if wanted else root.events.ignore)(observer, *names)


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
