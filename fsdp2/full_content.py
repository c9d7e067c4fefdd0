"""Whether a forward writes to its full parameters where their versions don't show it: through `.data`.

Such a write is lost when they are given up; an assignment would have the module compute with it for ever after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor

from . import torch_compat
from .checksum import read
from .param import FSDPParam


class FullContent:
    """What full parameters hold when a forward begins, and where they lie: `memories` are theirs, in whole words."""

    def __init__(self, params: Sequence[FSDPParam], memories: Sequence[Tensor]) -> None:
        self._params, self._memories = params, memories
        self._pointers, self._sums = self._find_pointers(), self._find_sums()

    def _find_pointers(self) -> list[int]:
        return [_local(param).data_ptr() for param in self._params]

    def _find_sums(self) -> list[int]:
        """Modulo 2 ** 64: another value in one place shows, an exchange of values does not."""
        return read([memory.sum() for memory in self._memories])

    def written(self, overwritten: Callable[[], list[str]]) -> list[str]:
        """Names of those that lie over other memory now; if theirs holds something else, what `overwritten` says."""
        pointers = zip(self._params, self._pointers, self._find_pointers(), strict=True)
        assigned = [param.name for param, old, new in pointers if old != new]
        return assigned if self._sums == self._find_sums() else [*assigned, *overwritten()]


def _local(param: FSDPParam) -> Tensor:
    return torch_compat.local_of(param.full) if isinstance(param.full, DTensor) else param.full
