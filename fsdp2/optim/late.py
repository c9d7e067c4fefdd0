"""Runs the steps of a flat optimizer group by group, in the order of forward, during the next forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

from torch import Tensor

from ..shards.late import are_ours_alone, group_of, in_forwards_order, late_steps_of, may_be_late, stepping_late
from ..shards.tensors import local_of
from .spans import Packed, Span

if TYPE_CHECKING:
    from .steps import Plan

Flats = Sequence[tuple[Span, Tensor, "list[Tensor] | None"]]


class LateParts:
    """Decides which steps of one optimizer overlap the next forward, and takes them.

    The others are in the usual order: the stream that computes waits. Such are the first step on the same parameters,
    which makes states; a step with a loss scaler, whose scale the host changes behind it; one with options that are
    tensors; and one while something else has a view of a parameter, a gradient or a state.
    """

    def __init__(self) -> None:
        self._steps: Any = lambda: None
        # What the step that is about to be taken reads and writes, by spans.
        self._uses: dict[int, list[Tensor]] = {}
        # How many steps ran beside, for tests.
        self.taken = 0

    def begin(self) -> None:
        """Makes the current stream wait for the step before."""
        steps = self._steps()
        if steps is not None:
            steps.begin()

    def read(self) -> None:
        """Makes the host wait for the step before: its states are about to be read."""
        steps = self._steps()
        if steps is not None:
            steps.read()

    def takes(
        self, plan: Plan, optimizer: Any, gradients: Sequence[Tensor], flats: Flats, states: Mapping[Any, Any]
    ) -> bool:
        """Returns True if a step is to overlap the next forward. `gradients`: those of the plan's members."""
        if not (plan.has_stepped and flats) or plan.listed or _has_tensors(optimizer):
            return False
        if any(isinstance(span, Packed) or span.writes_gradients for span, _, _ in flats):
            return False
        if not all(span.keeps_zeros or not span.padding for span, _, _ in flats):
            return False
        groups = [group_of(span.members[0].parameter) for span, _, _ in flats]
        if not may_be_late([group for group in groups if group is not None]):
            return False
        self._uses = {id(span): [span.flat, flat, *_elements(states.get(span.flat))] for span, flat, _ in flats}
        own = [*map(local_of, plan.members), *gradients]
        kept = [tensor for uses in self._uses.values() for tensor in uses[1:]]
        tensors = list({id(tensor): tensor for tensor in (*own, *kept)}.values())
        return are_ours_alone(tensors)

    def step(
        self, plan: Plan, optimizer: Any, own_step: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        """Takes a step. `own_step`: of the optimizer's class, on what `param_groups` have."""
        entries, uses = optimizer.param_groups, self._uses
        self._uses = {}
        spans: dict[Any, list[Span]] = {}
        for span in plan.flats:
            spans.setdefault(group_of(span.members[0].parameter), []).append(span)
        flat = {id(span.flat) for span in plan.flats}
        for entry, stepped in zip(entries, plan.stepped, strict=True):
            entry["params"] = [each for each in stepped if id(each) not in flat]
        result = own_step(*args, **options)  # which may be given a closure
        groups = in_forwards_order(spans)
        self._steps = ref(late_steps_of(groups[0].root))
        with stepping_late(groups) as issued:
            for group in groups:
                for i, entry in enumerate(entries):
                    entry["params"] = [span.flat for span in spans[group] if span.entry == i]
                own_step()
                parameters = [member.parameter for span in spans[group] for member in span.members]
                issued(group, parameters, [tensor for span in spans[group] for tensor in uses[id(span)]])
        self.taken += 1
        return result


def _has_tensors(optimizer: Any) -> bool:
    """Returns True if options are tensors, or a loss scaler has set some: they may be written to behind the step."""
    if any(getattr(optimizer, name, None) is not None for name in ("grad_scale", "found_inf")):
        return True
    values = [value for entry in optimizer.param_groups for name, value in entry.items() if name != "params"]
    parts = [part for value in values for part in (value if isinstance(value, tuple | list) else [value])]
    return any(isinstance(part, Tensor) for part in parts)


def _elements(state: Any) -> list[Tensor]:
    return [] if not state else [value for value in state.values() if isinstance(value, Tensor)]
