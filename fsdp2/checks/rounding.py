"""Floating-point inputs that a policy casts to fewer bits, though they hold positions, time steps or other whole
numbers that must stay what they are.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..dtensor.compat import local_if_any

_SAMPLE = 4096
_TELLING = 3
_NONE = torch.iinfo(torch.int64).max


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
    """Returns, on the device of `found`, whether that alone holds too many for `tells_of_numbers`."""
    return found[-1] != _NONE


def numbers_in(found: Iterable[int]) -> set[int]:
    return set(found) - {_NONE}


def tells_of_numbers(rounded: set[int]) -> bool:
    """Whether so many different ones are too many for a mask, which has one large value, or two that were added."""
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
