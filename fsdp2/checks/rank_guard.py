"""What ranks must have in common though no gather shows it: the weights they start from, memory that somebody has
initialised, and trainable parameters that no group manages. And what each sees by itself, of which all must be told:
whole numbers among its inputs that a policy rounds. Besides, optimizers that would never step.

Ranks look when one of the groups is gathered for the first time; later, at the times of looks.py, where there are such
parameters, or casts. A number that all have in common is its own maximum and minimum over them: an all-reduce of some
integers.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .. import torch_compat
from ..core.mesh import DataMesh
from ..ext.owners import sharded_owner
from ..core.parameter import fqn, names_of_full
from ..core.group import FSDPParamGroup
from ..core.state import FSDPState, data_mesh_of, some_of
from .checksum import checksum
from .common_start import ask_of_starts
from .looks import is_time_to_look
from .questions import Question, ask, connects, greatest
from .reads import PassReads
from .rounding import numbers_in, rounded_whole_numbers, tells, tells_of_numbers
from .running_stats import RunningStats
from .step_history import StepHistory, refuse_different_steps


class RankGuard:
    """What the ranks of one root, and of all states below it, have found in common so far."""

    def __init__(self, root: FSDPState, states: Sequence[FSDPState], reads: PassReads) -> None:
        self._root, self._states, self._reads = root, states, reads
        self._times = 0
        self.stats = RunningStats(root.modules)
        self.steps = StepHistory()
        # How often the inputs of each were cast, and what whole numbers were rounded then; those of the pass that runs,
        # which the host has not read yet.
        self._casts: dict[FSDPState, int] = {}
        self._rounded: dict[FSDPState, set[int]] = {}
        self._unread: dict[FSDPState, Tensor] = {}
        # Whether ranks look at the next time, whichever that is: all have loaded weights.
        self._looks_again = False
        # Unmanaged parameters that were there when ranks last looked, and those of them that were the same on all.
        self._known: set[str] = set()
        self._common: set[str] = set()
        # Plain parameters that an optimizer steps on beside sharded ones, and what they were before.
        self._beside: dict[str, tuple[weakref.ref[Tensor], Tensor]] = {}
        # Over which they look, if it connects them; known at the first time.
        self._mesh: DataMesh | None = None

    def attach(self) -> None:
        """Look when a group that all ranks use communicates: they need not all begin a pass, with what is unsharded."""
        for state in self._states:
            state.group.guard = state.group.gradients.guard = None
        mesh = data_mesh_of(self._states)
        for state in self._states:
            group = state.group
            if group.params and group.mesh == mesh and state.gate is None:
                group.guard = self._gathers
                group.gradients.guard = partial(self._reduces, group)
                return

    def begin_anew(self) -> None:
        """Ranks were out of step: they may have looked different numbers of times."""
        self._times, self._looks_again = 0, False
        self.steps = StepHistory()
        self.stats.begin_anew()

    def casts(self, state: FSDPState, inputs: Sequence[Tensor], dtype: torch.dtype) -> None:
        """A forward of `state` is about to cast its inputs to `dtype`: look at them, at times 1, 2, 4, ..."""
        number = self._casts[state] = self._casts.get(state, 0) + 1
        found = rounded_whole_numbers(inputs, dtype) if is_time_to_look(number) and connects(state.group.mesh) else None
        if found is not None:
            self._unread[state] = found
            self._reads.add(found, partial(self._note_rounded, state))

    def _note_rounded(self, state: FSDPState, found: Sequence[int]) -> None:
        self._unread.pop(state, None)
        self._rounded.setdefault(state, set()).update(numbers_in(found))

    def _gathers(self) -> None:
        self._communicates()
        self.stats.before_gather(self._mesh)

    def _reduces(self, group: FSDPParamGroup) -> None:
        if group.mesh.size == 1:
            self._communicates()
        self.stats.before_reduction(self._mesh, group.gradients.backward_pass)

    def _communicates(self) -> None:
        """
        Raises:
            RuntimeError: ranks differ in what they must have in common; on every rank.
        """
        number = self._times + 1
        if self._looks_again or is_time_to_look(number):
            self._look(number)
        self._times, self._looks_again = number, False  # unless that raises: then it is looked at again

    def note_beside(self, params: Mapping[str, Tensor]) -> None:
        """An optimizer is about to step on these for the first time. All ranks must call it alike."""
        self._beside.update((name, (weakref.ref(param), checksum(param))) for name, param in params.items())

    def look_again(self) -> None:
        """Look when ranks communicate next. All must call it."""
        self._looks_again = True

    def _look(self, number: int) -> None:
        _refuse_own_optimizers(self._states)
        starts: dict[DataMesh, Question] = {}
        if number == 1 or self._looks_again:
            starts = ask_of_starts(self._states)
            widest = data_mesh_of(self._states)
            self._mesh = widest if connects(widest) else None
        for mesh, question in starts.items():
            if mesh != self._mesh:
                ask(mesh, [question], self._root.context)
        if self._mesh is not None:
            first = [starts[self._mesh]] if self._mesh in starts else []
            ask(self._mesh, [*first, *self._questions(self._mesh, number)], self._root.context)

    def _questions(self, mesh: DataMesh, number: int) -> Iterator[Question]:
        if mesh.num_ranks > 1:
            if number > 1:
                yield self._ask_of_steps()
            unmanaged = dict(_find_unmanaged(self._root, self._states))
            if unmanaged:
                _refuse_replaced_modules(unmanaged, self._states)
                yield self._ask_of_unmanaged(unmanaged, is_first=number == 1)
            else:
                self._known = set()
            if self._beside:
                yield self._ask_of_beside()
        if any(state.input_dtype is not None for state in self._states):
            yield self._ask_of_rounding()

    def _ask_of_steps(self) -> Question:
        divisors = [state.group.gradients.reduction.divisor for state in self._states]
        steps, self.steps = self.steps, StepHistory()

        def judge(bounds: Sequence[tuple[int, int]]) -> None:
            (least, most), *others = bounds
            if least != most:
                raise RuntimeError(
                    f"{self._root}: gradients are divided by other numbers on some rank than on others. Call "
                    "set_gradient_divide_factor on all ranks, with the same factor."
                )
            names = [param.name for state in self._states for param in state.group.params]
            refuse_different_steps(some_of(names), *others)

        numbers = (zlib.crc32(repr(divisors).encode()), steps.count, steps.settings)
        return Question(f"optimizer steps of {self._root}", numbers, judge)

    def _ask_of_unmanaged(self, unmanaged: dict[str, nn.Parameter], is_first: bool) -> Question:
        def judge(bounds: Sequence[tuple[int, int]]) -> None:
            common = {name for name, (least, most) in zip(unmanaged, bounds, strict=True) if least == most}
            late = set() if is_first else set(unmanaged) - self._known
            apart = [name for name in unmanaged if name in (self._common | late) - common]
            if apart:
                raise RuntimeError(
                    f"{some_of(apart)}: no fully_shard call manages it. It was the same on all ranks, or has come "
                    "since, and is not the same: each rank trains it with its own gradient. Have it there before "
                    "fully_shard, and out of ignored_params; or freeze it, or average its gradient before each step."
                )
            self._common, self._known = common, set(unmanaged)

        sums = [checksum(parameter) for parameter in unmanaged.values()]
        return Question(f"checksums of {some_of([*unmanaged])} (unmanaged)", sums, judge)

    def _ask_of_beside(self) -> Question:
        numbers = []
        for there, before in self._beside.values():
            param = there()
            numbers += [before, before if param is None else checksum(param)]

        def judge(bounds: Sequence[tuple[int, int]]) -> None:
            pairs = zip(self._beside, bounds[::2], bounds[1::2], strict=True)
            apart = [name for name, before, now in pairs if before[0] == before[1] and now[0] != now[1]]
            if apart:
                raise RuntimeError(
                    f"{some_of(apart)}: no fully_shard call manages it. It was the same on all ranks, and is not any "
                    "more: each rank has trained it with its own gradient. Apply fully_shard to the module around it; "
                    "or freeze it, or average its gradient before each step."
                )

        return Question(f"checksums of {some_of([*self._beside])} (unmanaged)", numbers, judge)

    def _ask_of_rounding(self) -> Question:
        places = {state: i for i, state in enumerate(self._states, 1)}
        known = max((places[state] for state, found in self._rounded.items() if tells_of_numbers(found)), default=0)
        # Of the pass that runs, which the host has not read: what several forwards have found shows one look later.
        unread = [tells(found) * places[state] for state, found in self._unread.items()]

        def judge(bounds: Sequence[tuple[int, int]]) -> None:
            found = max(most for _, most in bounds)
            if found:
                self._rounded.clear()
                self._unread.clear()
                state = self._states[found - 1]
                raise RuntimeError(
                    f"{state}: its inputs hold, on some rank, floating-point whole numbers (positions, time steps?) "
                    f"that {state.input_dtype}, to which its MixedPrecisionPolicy casts them, makes others of. Pass "
                    "cast_forward_inputs=False there, and cast in the module what may be rounded; or pass integers; "
                    "or, if it is meant, cast them before the call."
                )

        return Question("rounded inputs", [known, greatest(unread)], judge)


def _refuse_own_optimizers(states: Sequence[FSDPState]) -> None:
    """Raise NotImplementedError if a parameter would be stepped on where autograd accumulates its gradient."""
    stepped = torch_compat.stepped_on_accumulation()
    for param in (param for state in states if stepped for param in state.group.params):
        if param.sharded in stepped:
            raise NotImplementedError(
                f"{param.name}: _apply_optimizer_in_backward would never step, for gradients of sharded parameters "
                "come from reductions, not from autograd. Call model.set_optimizer_in_backward(optimizer), or step in "
                "register_post_accumulate_grad_hook of each parameter."
            )


def _refuse_replaced_modules(unmanaged: Mapping[str, nn.Parameter], states: Sequence[FSDPState]) -> None:
    """Raise RuntimeError if an unmanaged parameter has the name of one that is managed, in a module that was there."""
    managed = {name: param for state in states for param in state.group.params for name in param.names}
    for name, parameter in unmanaged.items():
        if name in managed:
            raise RuntimeError(
                f"{name}: the module around it was replaced after fully_shard, which manages the parameter of shape "
                f"{managed[name].shape} that was there; each rank would train the new one, of shape "
                f"{tuple(parameter.shape)}, with its own gradient. Replace or resize modules before fully_shard; or "
                "build the model anew with the new one, apply fully_shard, and load the rest."
            )


def _find_unmanaged(root: FSDPState, states: Sequence[FSDPState]) -> Iterator[tuple[str, nn.Parameter]]:
    """Trainable parameters below `root` that no group has, with their names. A module that has come later, sharded by
    itself, is its own root.
    """
    managed = {(slot.module, slot.name) for s in states for param in s.group.params for slot in param.slots}
    for outer in root.modules:
        for prefix, module in outer.named_modules():
            for name, parameter in module._parameters.items():
                if parameter is None or not parameter.requires_grad or (module, name) in managed:
                    continue
                if names_of_full(parameter):
                    continue
                if not isinstance(parameter, DTensor) or sharded_owner(parameter) is None:
                    yield fqn(prefix, name), parameter
