"""Gathers ahead of use: in forward what ran next in the pass before, in backward what ran before, within bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
from statistics import median_low
from typing import Any

from .order import Cursor, within_budget
from .param_group import SHARDED, UNSHARDED
from .state import FSDPState

# Forwards without a backward (evaluation with grad enabled) must not make the record grow for ever.
_MAX_HISTORY = 4096


class Prefetcher:
    """The order in which the groups under one root run, and those of them that are being gathered ahead.

    What lies in a conditional module has an order of its own, and is gathered ahead inside that module only: ranks that
    run it, and ranks that don't, must expect the same of what they all run.
    """

    def __init__(self, states: Sequence[FSDPState]) -> None:
        self._states = states
        # Bytes that may be gathered ahead. None: one group of any size, or several that are small beside a typical one.
        self.budget: int | None = None
        self._typical_nbytes = 0
        self._gates = {state.gate for state in states}
        self._has_optional = self._gates != {None}
        self._order: list[FSDPState] = []
        self._order_now: list[FSDPState] = []
        # How many groups, at the end of that order, backward needs at once.
        self._num_last = 0
        # Whether the pass that runs may be one of all ranks: one may run alone what all have gathered by hand.
        self._is_common = False
        # By the conditional module that states lie in; None: in none.
        self._forward: dict[FSDPState | None, Cursor[FSDPState]] = {}
        self._ran: deque[FSDPState] = deque(maxlen=_MAX_HISTORY)
        self._backward: dict[FSDPState | None, Cursor[FSDPState]] = {}
        # Those that are unsharded, or about to be, in advance only.
        self.prefetched: set[FSDPState] = set()

    def settings(self) -> dict[str, Any]:
        """What a user has chosen: the budget, and for each state, as places in the list of states, what to gather ahead
        in forward and in backward.
        """
        place = {state: i for i, state in enumerate(self._states)}

        def places(chosen: list[FSDPState] | None) -> list[int] | None:
            return None if chosen is None else [place[state] for state in chosen if state in place]

        chosen = [(places(state.forward_prefetch), places(state.backward_prefetch)) for state in self._states]
        return {"budget": self.budget, "chosen": chosen}

    def take_settings(self, budget: int | None, chosen: list[tuple[list[int] | None, list[int] | None]]) -> None:
        self.budget = budget
        for state, lists in zip(self._states, chosen, strict=True):
            state.forward_prefetch, state.backward_prefetch = (
                None if each is None else [self._states[i] for i in each] for each in lists
            )

    def begin_pass(self) -> None:
        self._typical_nbytes = median_low(state.group.nbytes for state in self._states)
        self._forward = self._cursors(self._order)
        self._num_last = self._count_last([state for state in self._order if state.gate is None])
        self._order_now, self._is_common = [], False
        self.drop()

    def in_forward(self, state: FSDPState) -> None:
        """`state` is about to compute: begin to gather what followed it in the pass before, or what the user chose."""
        self._order_now.append(state)
        self._is_common |= not state.held
        cursor = self._forward[state.gate]
        state.is_needed_at_once = cursor.visit(state) and cursor.num_left < self._num_last and state.gate is None
        if state.forward_prefetch is None:
            ahead = _until_optional(cursor) if self._has_optional else cursor.ahead()
            self._start(self._within_budget(ahead, _bytes_to_gather), for_backward=False)
        else:
            self._start(state.forward_prefetch, for_backward=False)

    def ran(self, state: FSDPState) -> None:
        """A forward of `state` has ended that backward will come back to."""
        self._ran.append(state)

    def end_pass(self) -> None:
        if self._is_common:
            self._order = self._order_now

    def begin_backward(self) -> None:
        self._backward = self._cursors(list(reversed(self._ran)))

    def in_backward(self, state: FSDPState) -> None:
        """`state` is about to compute gradients: begin to gather what ran before it in forward, or what was chosen."""
        cursor = self._backward[state.gate]
        cursor.visit(state)
        if state.backward_prefetch is None:
            ahead = _until_optional(cursor) if self._has_optional else cursor.ahead()
            expected = (other for other in ahead if other.unshard_in_backward)
            self._start(self._within_budget(expected, _bytes_to_have), for_backward=True)
        else:
            self._start(state.backward_prefetch, for_backward=True)

    def forget_forwards(self) -> None:
        """No backward comes back to what has run so far."""
        self._ran.clear()

    def forget_order(self) -> None:
        """Ranks may have recorded different ones."""
        self._order = []
        self._ran.clear()

    def drop(self) -> None:
        """Free what was gathered in vain."""
        for state in self.prefetched:
            state.release()
        self.prefetched.clear()

    def _cursors(self, recorded: Sequence[FSDPState]) -> dict[FSDPState | None, Cursor[FSDPState]]:
        if not self._has_optional:
            return {None: Cursor(recorded)}
        return {gate: Cursor([state for state in recorded if state.gate is gate]) for gate in self._gates}

    def _count_last(self, recorded: Sequence[FSDPState]) -> int:
        """The last of a pass, and what is gathered ahead as soon as backward begins with it: if that was freed after
        forward, it would be back at once.
        """
        if not recorded or recorded[-1].backward_prefetch is not None:
            return min(1, len(recorded))
        expected = takewhile(lambda state: state.unshard_in_backward, reversed(recorded[:-1]))
        return 1 + sum(1 for _ in self._within_budget(expected, lambda state: max(1, state.group.nbytes)))

    def _within_budget(self, expected: Iterable[FSDPState], nbytes: Callable[[FSDPState], int]) -> Iterator[FSDPState]:
        if self.budget is None:
            return within_budget(expected, nbytes, self._typical_nbytes)
        return within_budget(expected, nbytes, self.budget, at_least_one=False)

    def _start(self, chosen: Iterable[FSDPState], for_backward: bool) -> None:
        for state in chosen:
            if state.group.state is SHARDED:
                state.group.start_unshard(for_backward)
                if state.context.prefetcher is self:  # what is under another root stays until that runs
                    self.prefetched.add(state)


def _until_optional(cursor: Cursor[FSDPState]) -> Iterator[FSDPState]:
    """What follows, up to where a conditional module begins, which may be left out this time."""
    return takewhile(lambda state: not state.conditional, cursor.ahead())


def _bytes_to_gather(state: FSDPState) -> int:
    return 0 if state.group.state is UNSHARDED else state.group.nbytes


def _bytes_to_have(state: FSDPState) -> int:
    """What stayed because backward would have gathered it ahead takes the place of that."""
    return state.group.nbytes if state.is_needed_at_once else _bytes_to_gather(state)
