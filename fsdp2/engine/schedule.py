"""Chooses which groups to all-gather ahead of use, and limits the reductions in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from itertools import chain, islice, takewhile
from operator import attrgetter, is_not
from statistics import median_low
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from .kept_groups import KeptGroups, within_at_turn
from .policy import KeepUntil, Phase, RootSettings
from .reduce import Pending

if TYPE_CHECKING:
    from .gradients import GroupGradients
    from .group import FSDPParamGroup

Item = TypeVar("Item")

# Forwards without a backward (evaluation with grad enabled) must not make the record grow for ever.
_MAX_HISTORY = 4096
# So many reduced buckets may be on their way to the CPU, or be stepped on there, before the host waits for the oldest:
# what one group has at most, or two. That bounds what they take on the device, and in page-locked memory.
MAX_RETURNING = 8
# The window of a ReductionQueue is the gradient bytes of a typical group divided by this number: on CPU about one
# bucket, see buckets.py.
PARTS_OF_WINDOW = 4

# The last groups that stay unsharded after forward have at most so many bytes together, unless the user has chosen a
# budget: the peak of a step is often at the loss, while they rest. The last one alone may have more.
MAX_KEPT_BYTES = 1024 * 1024 * 1024

# ---- gathers ahead


class Cursor(Generic[Item]):
    """Walks along a recorded order, and says what is expected next.

    Where the run departs from the record, the cursor goes on to the next place that agrees with it. An item that is not
    in the rest of the record leaves it where it was, since what was expected is likely to follow.
    """

    def __init__(self, recorded: Sequence[Item]) -> None:
        self.recorded = recorded
        self._position = 0

    def visit(self, item: Item) -> int | None:
        """Moves behind the next `item`, and returns how many items follow. Returns None, unmoved, if there is none."""
        for position in range(self._position, len(self.recorded)):
            if self.recorded[position] is item:
                self._position = position + 1
                return len(self.recorded) - self._position
        return None

    def ahead(self) -> Iterator[Item]:
        """Returns an iterator of what the record says will run after the item visited last, in order."""
        return islice(self.recorded, self._position, None)


def within_budget(
    items: Iterable[Item],
    size: Callable[[Item], int],
    budget: int,
    at_least_one: bool = True,
    apart: Collection[Item] = frozenset(),
    budget_apart: int = 0,
) -> Iterator[Item]:
    """Yields items in order while their sizes fit `budget` together. `at_least_one`: the first one in any case.

    Items of size 0 are skipped. Those in `apart` have a budget of their own, and the first of them fits in any case.
    """
    spent = spent_apart = 0
    for item in items:
        cost = size(item)
        if cost == 0:
            continue
        if item in apart:
            if spent_apart and spent_apart + cost > budget_apart:
                return
            spent_apart += cost
        else:
            if (spent or not at_least_one) and spent + cost > budget:
                return
            spent += cost
        yield item


def _on_all_ranks(group: FSDPParamGroup, chosen: Iterable[FSDPParamGroup]) -> Iterable[FSDPParamGroup]:
    """Returns those of a user's `chosen` groups that all ranks gather when `group` runs.

    If ranks may leave `group` out (a conditional module), the ranks that do so join gathers of conditional groups only:
    others of `chosen` are left out.
    """
    consensus = group.root.consensus
    if consensus is None or not consensus.is_conditional(group):
        return chosen
    return filter(consensus.is_conditional, chosen)


class Prefetcher:
    """Chooses which groups to gather ahead of use, for the caller to gather: in forward those that followed in the last
    pass, in backward those whose forwards came before.

    Root, and the hooks around forward and backward, call it. `prefetched`: groups that are gathered, or being gathered,
    in advance only. `first_in_backward`: the last groups of the expected order, which backward needs first; without a
    user's choice they stay unsharded after forward. `ran`: groups whose forward has ended and may get a backward, in
    order; `after_forward` appends to it, Root clears it.
    """

    def __init__(self, groups: Sequence[FSDPParamGroup], cursor: type[Cursor[FSDPParamGroup]] = Cursor) -> None:
        self._groups, self._cursor = groups, cursor
        self.settings = RootSettings()
        # Which groups stay unsharded from one use to the next.
        self.kept = KeptGroups(groups)
        # How many bytes may be gathered ahead; and whether one group may be, of any size.
        self._budget = (0, True)
        # Bytes of a typical group. So many may be gathered ahead of those that stay unsharded from one use to the next,
        # for which the user's budget has room.
        self._typical = 0
        # A forward pass has begun since the last backward.
        self._follows_forward = False
        self._order: list[FSDPParamGroup] = []
        self._order_now: list[FSDPParamGroup] = []
        # Groups that ran without a gather -> how many others had run before them, in the pass that ran last.
        self._ran_alone: dict[FSDPParamGroup, int] = {}
        # How many groups, at the end of that order, backward needs at once.
        self._num_last = 0
        # How many groups of this pass had to be gathered. If none had, one rank may run it alone: the next pass then
        # does not adopt the order that this one has recorded.
        self._num_gathered = 0
        self._forward = self._backward = cursor(())
        self.ran: deque[FSDPParamGroup] = deque(maxlen=_MAX_HISTORY)
        self.prefetched: set[FSDPParamGroup] = set()
        self.first_in_backward: set[FSDPParamGroup] = set()
        # Those that the backward pass has reached so far.
        self._reached: set[FSDPParamGroup] = set()

    def begin_pass(self, num_backwards: int) -> None:
        """Expects the order of the last recorded pass from now on, and reshards groups gathered ahead but not used.

        `num_backwards`: how many backward passes the root has run.
        """
        if self._num_gathered:
            self._order = self._order_now
        budget, sizes = self.settings.unsharded_budget, [group.unsharded.nbytes for group in self._groups]
        kept = 0
        if budget or self.kept.after_backward:
            kept = self.kept.begin_pass(self._order, budget, num_backwards)
        self._typical = median_low(sizes)
        self._budget = (self._typical, True) if budget is None else (budget - kept, False)
        self._forward, self._follows_forward = self._cursor(self._order), True
        self._num_last = self._count_last(self._forward.recorded)
        self._order_now, self._num_gathered = [], 0
        self._ran_alone.clear()
        self.first_in_backward.clear()
        self.drop()

    @property
    def has_begun(self) -> bool:
        """True if some group has run in the forward pass that runs, or ran last."""
        return bool(self._order_now)

    @property
    def last_order(self) -> Sequence[FSDPParamGroup]:
        """The groups in the order of the forward pass that ran last, those among them that ran without a gather."""
        order = [*(self._order_now or self._order)]
        for group, position in reversed(self._ran_alone.items()):  # positions grow
            order.insert(position, group)
        return order

    def ran_alone(self, group: FSDPParamGroup) -> None:
        """Records that `group` runs in a forward pass without a gather. Nothing is gathered ahead for it."""
        self._ran_alone.setdefault(group, len(self._order_now))

    def in_forward(self, group: FSDPParamGroup) -> Iterator[FSDPParamGroup]:
        """Records that `group` runs, and returns an iterator of the groups to all-gather ahead: those that followed it
        in the pass before, or that the user chose. Call it once in each forward. Start each group before you ask for
        the next one: the iterator looks at phases, and then counts the group among `prefetched`.
        """
        self._order_now.append(group)
        self._num_gathered += group.keep_until < KeepUntil.NEXT_PASS
        num_left = self._forward.visit(group)
        if num_left is not None and num_left < self._num_last:
            self.first_in_backward.add(group)
        else:
            self.first_in_backward.discard(group)  # its last forward in a pass decides
        chosen: Iterable[FSDPParamGroup] | None = group.settings.forward_prefetch
        if chosen is None:
            kept = self.kept.groups, self._typical
            chosen = within_budget(self._forward.ahead(), _bytes_to_gather, *self._budget, *kept)
        else:
            chosen = _on_all_ranks(group, chosen)
        return self._sharded(chosen)

    def begin_backward(self) -> None:
        """Expects the groups of `ran` in reverse order from now on."""
        self._backward = self._cursor([*reversed(self.ran)])
        self._reached.clear()
        if not self._follows_forward and self.kept.after_backward:
            self.kept.end_turn()
        self._follows_forward = False

    def in_backward(self, group: FSDPParamGroup) -> Iterator[FSDPParamGroup]:
        """Records that backward has reached `group`, and returns an iterator of the groups to all-gather ahead: those
        that ran before it, or that the user chose, unless backward is done with them. Start each of them before you ask
        for the next one, as in forward.
        """
        self._backward.visit(group)
        self._reached.add(group)
        chosen: Iterable[FSDPParamGroup] | None = group.settings.backward_prefetch
        if chosen is None:
            kept = self.kept.groups, self._typical
            # Modules of one call have one group. It is in use until backward has reached all of them.
            others = filter(partial(is_not, group), self._backward.ahead())
            chosen = within_budget(others, self._bytes_in_backward, *self._budget, *kept)
        else:
            chosen = [each for each in _on_all_ranks(group, chosen) if not self._is_done(each)]
        return self._sharded(chosen)

    def _is_done(self, group: FSDPParamGroup) -> bool:
        """Returns True if backward has reached `group`, and is not expected to need it again.

        Whether such a group is resharded yet differs between ranks, if they have used other parameters. An optimizer
        that steps in backward may write to it.
        """
        return group in self._reached and group not in self._backward.ahead()

    def forget_order(self) -> None:
        """Forgets the orders that forward and backward expect: ranks may have recorded different ones."""
        self._order, self._num_gathered = [], 0
        self.ran.clear()

    def drop(self) -> None:
        """Reshards what was gathered ahead and not used."""
        for group in self.prefetched:
            group.reshard_if_idle()
        self.prefetched.clear()

    def _count_last(self, recorded: Sequence[FSDPParamGroup]) -> int:
        """Returns how many groups at the end of the order stay unsharded after forward: the last one, and those that
        backward would gather ahead together with it, if they are not too large.
        """
        if not recorded or recorded[-1].settings.backward_prefetch is not None:
            return min(1, len(recorded))
        last, *others = dict.fromkeys(reversed(recorded))  # modules of one call have one group, and run one by one
        expected = takewhile(attrgetter("settings.unshard_in_backward"), others)
        if self.settings.unsharded_budget is not None:
            kept = within_at_turn((last, *expected), self.kept.groups, self._budget[0])
        else:
            kept = within_budget(expected, _bytes_of, *self._budget)
            kept = chain((last,), within_budget(kept, _bytes_of, MAX_KEPT_BYTES - _bytes_of(last), at_least_one=False))
        return len([*takewhile({*kept}.__contains__, reversed(recorded))])

    def _sharded(self, chosen: Iterable[FSDPParamGroup]) -> Iterator[FSDPParamGroup]:
        for group in chosen:
            if group.phase in _RESTING:
                yield group
                if group.root.prefetcher is self:  # what is under another root stays until that runs
                    self.prefetched.add(group)

    def _bytes_in_backward(self, group: FSDPParamGroup) -> int:
        """Returns the bytes of `group` that count against the budget of gathers ahead in backward; 0 skips it."""
        if not group.settings.unshard_in_backward:
            return 0
        return group.unsharded.nbytes if group in self.first_in_backward else _bytes_to_gather(group)


_RESTING = (Phase.SHARDED, Phase.SECONDARY)
_NOT_GATHERED = (*_RESTING, Phase.GATHERING)


def _bytes_to_gather(group: FSDPParamGroup) -> int:
    """Returns the bytes of `group` that count against the budget in forward. It is 0 if the data is there already, and
    stays there.
    """
    if group.phase not in _NOT_GATHERED:
        kept = group.root.prefetcher.kept
        if group in kept.groups or group not in kept.after_backward:
            return 0
    return group.unsharded.nbytes


def _bytes_of(group: FSDPParamGroup) -> int:
    return max(1, group.unsharded.nbytes)  # a group without parameters counts, too


# ---- reductions


class _Entry(NamedTuple):
    """A reduction in flight."""

    gradients: GroupGradients
    pending: Pending
    of_pass: object
    """Identity of the backward pass that began it."""
    delivery: Future[None] | None = None
    """Its delivery, if another thread has begun that."""


_nbytes = attrgetter("pending.nbytes")


class ReductionQueue:
    """The reductions in flight of one root, or of roots that share the queue, oldest first.

    GroupGradients calls `make_room` before it begins a reduction. That finishes the oldest while both limits are
    exceeded. Compute then waits in the middle of a group only if gathering and reducing a group take longer than its
    backward.
    """

    def __init__(self) -> None:
        self.max_running = 1
        """How many buckets may be in flight, whatever their size."""
        self.window = 0
        """How many bytes of inputs may be in flight, in any number of buckets: a quarter of a typical group, and one
        group more for each further `max_running`."""
        self.running: deque[_Entry] = deque()
        """Reductions that are not delivered. Replicas may be summing what a reduce-scatter has left."""
        self.returning: deque[_Entry] = deque()
        """Reductions whose gradients are being copied to the CPU, or stepped on there."""

    def make_room(self) -> None:
        """Finishes the oldest reductions while both limits are exceeded. Of the others, it waits for the collective in
        flight if a sum between replicas follows, and begins that.
        """
        running = self.running
        while len(running) > self.max_running and sum(map(_nbytes, running)) > self.window:
            self._finish_oldest()
        for entry in running:
            if entry.pending.is_summing:
                entry.pending.advance()

    def set_limits(self, max_running: int, group_nbytes: Iterable[int]) -> None:
        """Sets `max_running` and `window`. `group_nbytes`: bytes of each group's gradients as they are sent."""
        typical = median_low([nbytes for nbytes in group_nbytes if nbytes] or [0])
        self.max_running, self.window = max_running, typical // PARTS_OF_WINDOW + (max_running - 1) * typical

    def add(self, gradients: GroupGradients, pending: Pending) -> None:
        """Adds a reduction that has begun."""
        self.running.append(_Entry(gradients, pending, gradients.backward_pass))

    def take_over(self, other: ReductionQueue) -> None:
        """Takes the reductions in flight of another queue, behind its own."""
        self.running.extend(other.running)
        self.returning.extend(other.returning)

    def has(self, gradients: GroupGradients) -> bool:
        """Returns True if some of these gradients are in flight."""
        return any(entry.gradients is gradients for entry in (*self.running, *self.returning))

    def finish_all(self) -> None:
        """Finishes all reductions, and delivers their gradients."""
        if self.running and self.running[-1].pending.is_summing:
            self.running[-1].pending.mark_last()
        while self.running:
            self._finish_oldest()
        if self.returning:
            self._finish_returning(all_but=0)

    def finish_partial(self) -> None:
        """Finishes reductions whose all-reduce between replicas is left to a later pass, and all older ones."""
        while any(entry.pending.is_partial for entry in self.running):
            self._finish_oldest()

    def abandon(self, backward_pass: object | None) -> None:
        """Waits, after an error, for all; drops results of one pass (None: of all), and delivers the others. What
        another thread has begun to deliver is waited for, not dropped.
        """
        entries, deliveries = [*self.returning, *self.running], []
        self.returning.clear()
        self.running.clear()
        for gradients, pending, of_pass, delivery in entries:
            with suppress(RuntimeError):  # a peer is gone: then nothing writes to the buffers any more
                if delivery is not None:
                    deliveries.append(delivery)
                elif backward_pass is None or of_pass is backward_pass:
                    gradients.abandon(pending)
                else:
                    gradients.receive(pending, of_pass)
        wait(deliveries)

    def _finish_oldest(self) -> None:
        entry = self.running.popleft()
        gradients, pending, of_pass, _ = entry
        if gradients.reduction.transfers is None or not gradients.start_return(pending):
            gradients.receive(pending, of_pass)
            return
        steps = gradients.group.root.stepper
        delivery = None if steps is None else steps.deliver(gradients, pending, of_pass)
        self.returning.append(entry._replace(delivery=delivery))
        self._finish_returning(MAX_RETURNING)

    def _finish_returning(self, all_but: int) -> None:
        while len(self.returning) > all_but:
            gradients, pending, of_pass, delivery = self.returning.popleft()
            if delivery is None:
                gradients.receive(pending, of_pass)
            else:
                delivery.result()
