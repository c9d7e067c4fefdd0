"""Finds floating-point inputs that a policy casts to fewer bits, though they hold whole numbers, such as positions or
time steps, that must stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..engine.mesh import DataMesh
from ..engine.state import FSDPState
from ..ranks.compare_ranks import ComparedNumbers, Comparison, connects, greatest
from ..torch_private.internals import local_if_any
from .due import ForwardCheck, RankCheck, judge_at_end

_SAMPLE = 4096
_TELLING = 3
_NONE = torch.iinfo(torch.int64).max


class RoundedInputs(RankCheck, ForwardCheck):
    """Checks the inputs that forwards cast, and tells all ranks what one of them has found."""

    def __init__(self) -> None:
        # What whole numbers were rounded when the inputs of each state were cast; those of the pass that runs, which
        # the host has not read yet.
        self._rounded: dict[Any, set[int]] = {}
        self._unread: dict[Any, Tensor] = {}

    def before_cast(self, state: FSDPState, inputs: Sequence[Tensor], dtype: torch.dtype) -> None:
        if connects(state.groups[0].mesh):
            found = rounded_whole_numbers(inputs, dtype)
            if found is not None:
                self._unread[state] = found
                judge_at_end(state.root, found, partial(self._note_rounded, state))

    def _note_rounded(self, state: FSDPState, found: Sequence[int]) -> None:
        self._unread.pop(state, None)
        self._rounded.setdefault(state, set()).update(numbers_in(found))

    def numbers(self, comparison: Comparison) -> Iterator[tuple[DataMesh, ComparedNumbers]]:
        states = comparison.root.states
        if comparison.mesh is None:
            return
        indices = {state: i for i, state in enumerate(states, 1)}
        known = max((indices[state] for state, found in self._rounded.items() if tells_of_numbers(found)), default=0)
        # The host has not read what the pass that runs has found. What only several of its forwards show together is
        # told in the next comparison.
        unread = [tells(found) * indices[state] for state, found in self._unread.items()]

        def judge(bounds: Sequence[tuple[int, int]]) -> None:
            found = max(most for _, most in bounds)
            if found:
                self._rounded.clear()
                self._unread.clear()
                state = states[found - 1]
                raise RuntimeError(
                    f"{state}: its inputs hold, on some rank, floating-point whole numbers (positions, time steps?) "
                    f"that {state.input_dtype}, to which its MixedPrecisionPolicy casts them, makes others of. Pass "
                    "cast_forward_inputs=False there, and cast in the module what may be rounded; or pass integers; "
                    "or, if it is meant, cast them before the call."
                )

        yield comparison.mesh, ComparedNumbers("rounded inputs", [known, greatest(unread)], judge)


def rounded_whole_numbers(tensors: Iterable[Tensor], dtype: torch.dtype) -> Tensor | None:
    """Returns whole numbers, some of them, that `dtype` makes others of, in tensors that hold nothing else, as far as
    their first 4,096 elements say; of DTensors, this rank's part.

    Nothing waits for the device: the result is a flat int64 tensor there, for `tells` and `numbers_in`. None: no tensor
    is cast to fewer bits.
    """
    found: list[Tensor] = []
    for tensor in tensors:
        if tensor.is_floating_point() and torch.promote_types(tensor.dtype, dtype) != dtype:
            local = local_if_any(tensor.detach())
            if local.layout == torch.strided and local.numel():
                found.append(_rounded(local, dtype))
    return _least(torch.cat([each.to(found[0].device) for each in found])) if found else None


def tells(found: Tensor) -> Tensor:
    """Returns, on the device of `found`, True if that alone holds too many for `tells_of_numbers`."""
    return found[-1] != _NONE


def numbers_in(found: Iterable[int]) -> set[int]:
    """Returns the numbers that `rounded_whole_numbers` has found, as the host has read them."""
    return set(found) - {_NONE}


def tells_of_numbers(rounded: set[int]) -> bool:
    """Returns True if so many different ones are too many for a mask, which has one large value, or two, added."""
    return len(rounded) >= _TELLING


def _rounded(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the first elements of `tensor` that `dtype` makes others of, and `_NONE` in place of the rest; of all, if
    one of them is no whole number.
    """
    sample = tensor.flatten()[:_SAMPLE]  # of what is contiguous, a view
    counts = (sample.to(dtype) != sample) & (sample == sample.round()).all()
    return torch.where(counts, sample.to(torch.int64), _NONE)


def _least(values: Tensor) -> Tensor:
    """Returns the `_TELLING` least different ones of `values`, in order, and `_NONE` where there are no more."""
    found = []
    for _ in range(_TELLING):
        found.append(values.amin())
        values = torch.where(values > found[-1], values, _NONE)
    return torch.stack(found)
