"""Whether a forward writes to its full parameters where their versions don't show it: through `.data`.

Such a write is lost when they are given up; an assignment would have the module compute with it for ever after.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor

from . import torch_compat
from .checksum import bits_of, read
from .param import FSDPParam


class FullContent:
    """What full parameters hold when a forward begins. They must have their data."""

    def __init__(self, params: Sequence[FSDPParam]) -> None:
        self._params = [param for param in params if type(_memory(param)) is Tensor and not _memory(param).is_meta]
        self._pointers = [_memory(param).data_ptr() for param in self._params]
        self._sums = self._find_sums()

    def _find_sums(self) -> list[int]:
        return read([bits_of(_memory(param)).sum() for param in self._params])

    def written(self) -> list[str]:
        """Names of those that hold something else now; of those whose memory is another, too."""
        pointers = [_memory(param).data_ptr() for param in self._params]
        found = zip(self._params, self._pointers, pointers, self._sums, self._find_sums(), strict=True)
        return [param.name for param, *(before, pointer, old, new) in found if (before, old) != (pointer, new)]


def _memory(param: FSDPParam) -> Tensor:
    return torch_compat.local_of(param.full) if isinstance(param.full, DTensor) else param.full.detach()
