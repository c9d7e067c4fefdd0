"""Marks memory without values, which `to_empty` gives to tensors on the meta device, until somebody has initialised it.

What nobody initialises is so told from what somebody has, also by a collective or through `.data`, which count nowhere.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..engine.group_parameters import version_if_counted
from ..engine.parameter import FSDPParam
from ..torch_private.internals import no_torch_function
from .checksum import values_of

if TYPE_CHECKING:
    from ..engine.group import FSDPParamGroup

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def mark(tensor: Tensor) -> None:
    """Fills `tensor` with what no initialisation leaves, which no version counter shows. Bools have no such value."""
    for part in values_of(tensor):
        value = _mark_of(part.dtype)
        if value is not None:
            part.data.fill_(value)


def is_marked(tensor: Tensor) -> bool:
    """Returns True if that is all that `tensor` holds on this rank, which has some of it."""
    parts = [part for part in values_of(tensor) if part.numel() and _mark_of(part.dtype) is not None]
    return bool(parts) and all(map(_holds_mark, parts))


def _mark_of(dtype: torch.dtype) -> float | None:
    if dtype.is_complex or (dtype.is_floating_point and dtype is not torch.float4_e2m1fn_x2):  # which torch can't fill
        return float("nan")
    return torch.iinfo(dtype).max if dtype in _INTEGERS else None


def _holds_mark(part: Tensor) -> bool:
    holds = part.eq(torch.iinfo(part.dtype).max) if part.dtype in _INTEGERS else part.isnan()
    return bool(holds.all())


class EmptyTensors:
    """Holds the parameters and buffers of one group that were given memory without values, and their versions then.

    It holds them by weak references: a parameter holds its modules, and these hold the group, which would never be
    freed.
    """

    def __init__(self) -> None:
        self._params: list[tuple[weakref.ref[FSDPParam], weakref.ref[Tensor], int]] = []
        self._buffers: list[tuple[weakref.ref[Tensor], int]] = []

    def note_parameters(self, params: Iterable[FSDPParam]) -> None:
        """Notes that these parameters of the group, which were on the meta device, have just been given memory."""
        with no_torch_function():
            for param in params:
                found = weakref.ref(param), weakref.ref(param.local), version_if_counted(param.sharded)
                self._params.append(found)

    def note_buffers(self, buffers: Iterable[Tensor]) -> None:
        """Marks and notes buffers below modules of the group, which have just been given memory without values."""
        for buffer in buffers:
            mark(buffer)
            self._buffers.append((weakref.ref(buffer), version_if_counted(buffer)))

    def unwritten_params(self) -> list[FSDPParam]:
        """Returns those of the parameters that no in-place operation has written to since, and nobody has replaced, as
        far as version counters tell: collectives don't count.
        """
        left = []
        with no_torch_function():
            for each in self._params:
                param, local, version = each[0](), each[1](), each[2]
                if param is not None and local is param.local and version_if_counted(param.sharded) == version:
                    left.append((param, each))
        self._params = [each for _, each in left]
        return [param for param, _ in left]

    def unwritten_buffers(self) -> list[Tensor]:
        """Returns those buffers that nobody has written to since. They need not be registered any more."""
        alive = [(tensor, version) for reference, version in self._buffers if (tensor := reference()) is not None]
        left = [(tensor, version) for tensor, version in alive if version_if_counted(tensor) == version]
        self._buffers = [(weakref.ref(tensor), version) for tensor, version in left]
        return [tensor for tensor, _ in left if is_marked(tensor)]


def find_unwritten(groups: Iterable[FSDPParamGroup]) -> set[FSDPParam | Tensor]:
    """Returns the parameters and buffers of `groups` that were given memory, and that nobody has written to since."""
    found: set[FSDPParam | Tensor] = set()
    for group in groups:
        found.update(group.empty.unwritten_params(), group.empty.unwritten_buffers())
    return found
