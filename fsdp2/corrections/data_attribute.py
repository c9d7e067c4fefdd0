"""`p.data` of a sharded parameter, and of any DTensor: what is written to it, or assigned, is seen.

Torch's own is that of a plain tensor. It replaces what the DTensor says of itself, and leaves the local tensor that all
operations use; so an assignment does nothing, without a word.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import dtensor_compat, torch_compat
from ..versions import note_data

_PLAIN: Any = torch.Tensor.data


@cache
def follow_data() -> None:
    """From now on `.data` of a DTensor can be assigned another DTensor. Nothing else changes for users."""
    DTensor.data = property(_get, _set)  # type: ignore[assignment]


@torch_compat.untraced
def _get(self: DTensor) -> Tensor:
    data: Tensor = _PLAIN.__get__(self)
    note_data(self, data)
    return data


@torch_compat.untraced
def _set(self: DTensor, value: Tensor) -> None:
    """
    Raises:
        TypeError: it is no DTensor.
    """
    if not isinstance(value, DTensor):
        raise TypeError(
            f"the .data of a DTensor of global shape {tuple(self.shape)}: expected a DTensor, got "
            f"{type(value).__name__}, which would change nothing. Assign one that is distributed like it, or write to "
            "what is there: p.data.copy_(...)."
        )
    _PLAIN.__set__(self, value)
    dtensor_compat.set_local(self, dtensor_compat.local_of(value), value)
