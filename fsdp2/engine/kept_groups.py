"""Chooses which groups stay unsharded from one use to the next, within a user's budget."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from .policy import AfterForward, KeepUntil

if TYPE_CHECKING:
    from .group import FSDPParamGroup


class KeptGroups:
    """Chooses which groups stay unsharded from one use to the next, within a user's budget.

    They are gathered once for all micro-batches of a step, and for all forwards of an evaluation. What a step changes
    is gathered again, so that weights stay no longer than the last backward pass of a step. It is the one that reduces
    gradients which earlier passes have left unsynchronized. If none has, a step is expected to have as many backward
    passes as the last one. Frozen parameters stay over steps.
    """

    def __init__(self, groups: Sequence[FSDPParamGroup]) -> None:
        self._all = groups
        # They stay unsharded until a step changes them.
        self.groups: frozenset[FSDPParamGroup] = frozenset()
        # These and others stay after a backward, for the next forward, which begins with the others.
        self.after_backward: frozenset[FSDPParamGroup] = frozenset()
        # Versions of some trainable shards, when the last pass began.
        self._versions: tuple[int, ...] = ()
        # How many backward passes the root had run when the present step began, and how many the last step had.
        self._step_began, self._num_expected = 0, 1
        # Groups whose gradients an earlier backward pass of the present step has left unsynchronized.
        self._accumulating: set[FSDPParamGroup] = set()

    def begin_pass(self, order: Sequence[FSDPParamGroup], budget: int | None, num_backwards: int) -> int:
        """Chooses among the groups of `order`, and reshards those that do not stay any more. Returns the bytes of all
        that stay. `num_backwards`: how many backward passes the root has run.
        """
        before, nbytes = self.after_backward, 0
        self.groups = self.after_backward = frozenset()
        if budget:
            repeats = self._notice_step(num_backwards)
            groups = dict.fromkeys(order)
            may_stay = [group for group in groups if not group.settings.conditional]  # ranks may leave others out
            chosen, nbytes = _largest_that_fit(groups, [g for g in may_stay if repeats or is_frozen(g)], budget)
            self.groups = self.after_backward = frozenset(chosen)
            if repeats:
                self.after_backward = self.groups.union(within_at_turn(may_stay, chosen, budget - nbytes))
        for group in before - self.after_backward:
            if group.keep_until is KeepUntil.NEXT_PASS and (budget or group.settings.reshard_after_backward):
                group.reshard_if_idle()
        return nbytes

    def end_turn(self) -> None:
        """Reshards what a backward has left for the beginning of a forward: another backward follows it."""
        for group in self.after_backward - self.groups:
            if group.keep_until is KeepUntil.NEXT_PASS:
                group.reshard_if_idle()

    def _notice_step(self, num_backwards: int) -> bool:
        """Returns True if weights of the last pass are used in this one, or those of this one will be in the next."""
        trainable = next((group for group in self._all if not is_frozen(group)), None)
        versions = () if trainable is None else trainable.registration.versions()
        if versions == self._versions:
            return True
        self._versions = versions
        self._accumulating.clear()
        self._step_began, self._num_expected = num_backwards, max(1, num_backwards - self._step_began)
        return self._num_expected > 1

    def stays(self, group: FSDPParamGroup, num_backwards: int) -> bool:
        """Returns True if `group` stays after the backward that ends, behind `num_backwards` others."""
        if group not in self.after_backward:
            return False
        if group in self.groups and is_frozen(group):
            return True
        if not (group.settings.reduce_gradients and group.settings.all_reduce):
            self._accumulating.add(group)
            return True
        return group not in self._accumulating and num_backwards + 1 - self._step_began != self._num_expected


def is_frozen(group: FSDPParamGroup) -> bool:
    """Returns True if no parameter of `group` is trainable."""
    return not any(group.parameters.trainable)


def _largest_that_fit(
    groups: Collection[FSDPParamGroup], may_stay: Collection[FSDPParamGroup], budget: int
) -> tuple[set[FSDPParamGroup], int]:
    """Returns the root, and the largest others of `may_stay` that fit `budget` together with the largest of the rest,
    which is gathered ahead; and the bytes of these others. The root is in use in all of a pass, and takes none.

    Groups that stay from forward to backward anyway come last: to keep them saves half as much. Of equal ones, those in
    the middle come first: what is left of the budget keeps the others when a pass turns.
    """
    sizes = {group: group.unsharded.nbytes for group in groups if group is not group.root.group}
    chosen, nbytes = {group for group in may_stay if group not in sizes}, 0
    wanted = [group for group in may_stay if group in sizes]
    if len(wanted) == len(sizes) > 0 and sum(sizes.values()) - min(sizes.values()) <= budget:  # one of them is in use
        return chosen.union(wanted), budget
    from_ends = {group: min(i, len(sizes) - 1 - i) for i, group in enumerate(sizes)}
    by_size = sorted((g for g in sizes if sizes[g] <= budget), key=sizes.__getitem__, reverse=True)
    for group in sorted(wanted, key=lambda g: (_stays_for_backward(g), -sizes[g], -from_ends[g])):
        ahead = next((sizes[each] for each in by_size if each is not group and each not in chosen), 0)
        if sizes[group] and nbytes + sizes[group] + ahead <= budget:
            chosen.add(group)
            nbytes += sizes[group]
    return chosen, nbytes


def within_at_turn(
    groups: Iterable[FSDPParamGroup], chosen: Collection[FSDPParamGroup], budget: int
) -> Iterator[FSDPParamGroup]:
    """Yields those of `groups` that stay where a pass turns, between forward and backward: they are used again in this
    order, after they were used in the reverse one. The first one stays in any case, and the root, which all of a pass
    uses; others while `budget` has room. `chosen` stay anyway, within another budget.
    """
    previous, peak = 0, None
    for group in groups:
        nbytes, more = group.unsharded.nbytes, 0
        if group in chosen:
            nbytes, more = 0, nbytes  # while it runs, others may take its part of the other budget
        if peak is not None:
            # While it runs, those that are used again before it are there, or one of them is gathered ahead.
            peak = max(peak + nbytes, previous - more)
            if peak > budget:
                return
        elif group is not group.root.group:
            peak = 0
        yield group
        previous = 0 if peak is None else nbytes


def _stays_for_backward(group: FSDPParamGroup) -> bool:
    return group.settings.after_forward is AfterForward.KEEP
