"""Floating-point inputs that a policy casts to fewer bits, though they hold positions, time steps or other whole
numbers that must stay what they are.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..dtensor_compat import local_if_any

_SAMPLE = 4096
_TELLING = 3


def rounded_whole_numbers(tensors: Iterable[Tensor], dtype: torch.dtype) -> set[float]:
    """Whole numbers, some of them, that `dtype` makes others of, in tensors that hold nothing else, as far as their
    first 4,096 elements say; of DTensors, this rank's part. The host waits for them.
    """
    found: set[float] = set()
    for tensor in tensors:
        if tensor.is_floating_point() and torch.promote_types(tensor.dtype, dtype) != dtype:
            found.update(_rounded(local_if_any(tensor.detach()), dtype))
    return found


def tells_of_numbers(rounded: set[float]) -> bool:
    """Whether so many different ones are too many for a mask, which has one large value, or two that were added."""
    return len(rounded) >= _TELLING


def _rounded(tensor: Tensor, dtype: torch.dtype) -> list[float]:
    if tensor.layout != torch.strided:
        return []
    sample = tensor.flatten()[:_SAMPLE]  # of what is contiguous, a view
    if not bool((sample == sample.round()).all()):
        return []
    values: list[float] = sample[sample.to(dtype) != sample].unique()[:_TELLING].tolist()
    return values
