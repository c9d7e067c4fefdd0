"""What checks do in each step: they decide whether it is time to look, and leave the look to the other files.

A steady step runs nothing of this folder but a few methods of the classes here, and of unsynchronized.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..core.events import Observer
from ..core.group import FSDPParamGroup
from ..core.mesh import DataMesh
from ..core.policy import ReduceWhen
from ..ext.collectives import choice_of
from ..ext.unsharded_versions import UnshardedVersions, refuse_written
from .looks import Check, ForwardCheck, Look, RankCheck, is_time_to_look, next_look
from .moved_data import UnshardedPlaces, put_back, refuse_lost, refuse_moved
from .questions import Question, ask, connects, widest_mesh
from .reads import PassReads

_UNKNOWN = object()


class RankLooks(Observer):
    """Has the rank checks of a root compare ranks, at the times of looks.py.

    They do when one of the groups that all ranks use is gathered. Ranks need not all begin a pass, if parameters are
    unsharded already; each gathers that group as often.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        # The group at whose collectives ranks look; None: there is no such group. It is known when all are attached.
        self._group: Any = _UNKNOWN
        # How often it has communicated, and the next time at which ranks look.
        self._times, self._next = 0, 1
        self._is_asked = False
        # Over which ranks compare, if it connects them; known at the first time.
        self._mesh: DataMesh | None = None

    def before_gather(self, group: FSDPParamGroup) -> None:
        if self._group is _UNKNOWN:
            self._group = group_of_all_ranks(self._root)
        if group is self._group:
            number = self._times + 1
            if number >= self._next:
                self._look(number)
            self._times = number

    def loaded(self, group: FSDPParamGroup) -> None:
        self.ask()

    def out_of_step(self, root: Any) -> None:
        self._times, self._next, self._is_asked = 0, 1, False  # ranks may have looked different numbers of times

    def ask(self) -> None:
        """Looks, as at the first time, when ranks communicate next. All ranks must call it."""
        self._is_asked, self._next = True, 0

    def refresh(self) -> None:
        """Follows the levels of the checks, which have changed."""
        self._next = 0

    def _look(self, number: int) -> None:
        """
        Raises:
            RuntimeError: ranks differ in what they must have in common; on every rank.
        """
        root, is_anew = self._root, number == 1 or self._is_asked
        if is_anew:
            widest = widest_mesh(root.groups)
            self._mesh = widest if connects(widest) else None
        checks = [each for each in root.events.observers if isinstance(each, RankCheck)]
        due = checks if self._is_asked else [each for each in checks if is_time_to_look(number, each.always)]
        for check in due:
            check.refuse(root)
        look = Look(root, number, is_anew, self._mesh)
        asked: dict[DataMesh | None, list[Question]] = {}
        for check in due:
            for mesh, question in check.questions(look):
                asked.setdefault(mesh, []).append(question)
        of_all = asked.pop(self._mesh, [])
        for other, questions in asked.items():
            assert other is not None, "checks ask over meshes only"
            ask(other, questions, root)
        if self._mesh is not None:
            ask(self._mesh, of_all, root)
        # If that has raised, ranks look again next time.
        self._is_asked = False
        self._next = number + 1 if any(each.always for each in checks) else next_look(number)


class RankLooksOnReplicas(RankLooks):
    """Has ranks look when the group is reduced, too: where nothing is gathered, that is where they communicate."""

    def before_reduce(self, group: FSDPParamGroup) -> None:
        self.before_gather(group)


def make_rank_looks(root: Any) -> RankLooks:
    """Returns the RankLooks that the root's mesh needs."""
    return (RankLooksOnReplicas if widest_mesh(root.groups).size == 1 else RankLooks)(root)


def group_of_all_ranks(root: Any) -> FSDPParamGroup | None:
    """Returns the first group with parameters, on the mesh of most ranks, that no rank leaves out."""
    mesh = widest_mesh(root.groups)
    for group in root.groups:
        if group.params and group.mesh == mesh and group.settings.reduce_when is not ReduceWhen.ASKED:
            return group
    return None


@dataclass(slots=True)
class _Forwards:
    """How many forwards of a group have begun, and the next one at which checks look."""

    number: int = 0
    next: int = 1


class ForwardLooks(Observer):
    """Has the forward checks of a root look at forwards of its groups, each group by itself, at the times of looks.py;
    at the debug level of a group, at each. `reads`: what the host judges when the pass ends.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._forwards: dict[FSDPParamGroup, _Forwards] = {}
        # The checks that look at the forward of a group that runs.
        self._looking: dict[FSDPParamGroup, list[ForwardCheck]] = {}
        self.reads = PassReads()

    def forward_began(self, group: FSDPParamGroup) -> None:
        forwards = self._forwards.get(group)
        if forwards is None:
            forwards = self._forwards[group] = _Forwards()
        if group.state.running == 1:
            number = forwards.number + 1
            if number >= forwards.next:
                self._look(group, number)
            forwards.number = number

    def forward_ended(self, group: FSDPParamGroup) -> None:
        if self._looking and group.state.running == 1:
            for check in self._looking.pop(group, ()):
                check.looked_at(group)

    def pass_ended(self, root: Any) -> None:
        if self.reads.waiting:
            self.reads.judge()

    def forward_failed(self, group: FSDPParamGroup) -> None:
        self._looking.pop(group, None)
        for check in self._checks():
            check.failed(group)

    def pass_failed(self, root: Any) -> None:
        self.reads.drop()

    def settings_changed(self, group: FSDPParamGroup) -> None:
        if group in self._forwards:
            self._forwards[group].next = 0

    def refresh(self) -> None:
        """Follows the levels of the checks, which have changed."""
        for forwards in self._forwards.values():
            forwards.next = 0

    def _checks(self) -> list[ForwardCheck]:
        return [each for each in self._root.events.observers if isinstance(each, ForwardCheck)]

    def _look(self, group: FSDPParamGroup, number: int) -> None:
        checks, is_checked = self._checks(), choice_of(group).checked
        always = [check for check in checks if check.always or is_checked]
        due = [check for check in checks if is_time_to_look(number, check in always)]
        for check in due:
            check.looks_at(group, number, check in always)
        if due:
            self._looking[group] = due
        self._forwards[group].next = number + 1 if always else next_look(number)


def reads_of(root: Any) -> PassReads:
    """Returns what the host judges when the pass ends that runs under `root`."""
    reads: PassReads = root.events.of(ForwardLooks).reads
    return reads


class WrittenParameters(Check):
    """Refuses in-place writes to unsharded parameters that a version counter shows: resharding would undo them."""

    def attached(self, root: Any) -> None:
        self._versions: UnshardedVersions = root.events.of(UnshardedVersions)

    def forward_ended(self, group: FSDPParamGroup) -> None:
        if written := self._versions.of(group).take_written():
            refuse_written(written)

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

    def looked_at(self, group: FSDPParamGroup) -> None:
        refuse_written(self.take_moved(group))

    def failed(self, group: FSDPParamGroup) -> None:
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
