"""Memory that `to_empty` gives to what was on meta: marked, so that what nobody initialises is told from what somebody
has, also by a collective or through `.data`, which count nowhere.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

from .checksum import values_of

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class EmptyBuffers:
    """Buffers that were given such memory."""

    def __init__(self) -> None:
        # The count of in-place operations on each of then.
        self._noted: list[tuple[weakref.ref[Tensor], int]] = []

    def note(self, buffers: Iterable[Tensor]) -> None:
        """These have just been given it."""
        for buffer in buffers:
            mark(buffer)
            self._noted.append((weakref.ref(buffer), buffer._version))

    def unwritten(self) -> list[Tensor]:
        """Those that nobody has written to since. They need not be registered any more."""
        noted = [(reference(), count) for reference, count in self._noted]
        left = [(each, count) for each, count in noted if each is not None and each._version == count]
        self._noted = [(weakref.ref(each), count) for each, count in left]
        return [each for each, _ in left if is_marked(each)]


def mark(tensor: Tensor) -> None:
    """Fill it with what no initialisation leaves, which no version counter shows. Bools have no such value."""
    for part in values_of(tensor):
        value = _mark_of(part.dtype)
        if value is not None:
            part.data.fill_(value)


def is_marked(tensor: Tensor) -> bool:
    """Whether that is all that `tensor` holds on this rank, which has some of it."""
    parts = [part for part in values_of(tensor) if part.numel() and _mark_of(part.dtype) is not None]
    return bool(parts) and all(map(_holds_mark, parts))


def _mark_of(dtype: torch.dtype) -> float | None:
    if dtype.is_complex or (dtype.is_floating_point and dtype is not torch.float4_e2m1fn_x2):  # which torch can't fill
        return float("nan")
    return torch.iinfo(dtype).max if dtype in _INTEGERS else None


def _holds_mark(part: Tensor) -> bool:
    holds = part.eq(torch.iinfo(part.dtype).max) if part.dtype in _INTEGERS else part.isnan()
    return bool(holds.all())
