"""Whether a forward writes to its full parameters where their versions don't show it: through `.data`.

Such a write is lost when they are given up; an assignment would have the module compute with it for ever after.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .. import dtensor_compat
from ..buffers import GroupBuffers
from ..param import FSDPParam
from .checksum import bits_of, read


class FullContent:
    """What the full parameters in `buffers`, of which the first of `params` have theirs there, hold when a forward
    begins, in `every` so many words; and where they lie.
    """

    def __init__(self, params: Sequence[FSDPParam], buffers: GroupBuffers, every: int) -> None:
        self._params, self._buffers = params[: len(buffers.layout.specs)], buffers
        self._words = buffers.full_words(every)
        self._pointers, self._sums = self._find_pointers(), self._find_sums()

    def _find_pointers(self) -> list[int]:
        return [dtensor_compat.local_if_any(param.full).data_ptr() for param in self._params]

    def _find_sums(self) -> list[int]:
        """Modulo 2 ** 64: another value in one place shows, an exchange of values does not."""
        return read([words.sum() for words in self._words])

    def written(self) -> list[str]:
        """Names of those that lie over other memory now, or whose memory holds something else."""
        pointers = zip(self._params, self._pointers, self._find_pointers(), strict=True)
        assigned = [param.name for param, old, new in pointers if old != new]
        return assigned if self._sums == self._find_sums() else [*assigned, *self._overwritten()]

    def _overwritten(self) -> list[str]:
        """Those that differ from what they were gathered from, as far as this rank can tell."""
        found = [param.name for i, param in enumerate(self._params) if self._is_overwritten(i)]
        return found or [f"one of {', '.join(param.name for param in self._params)}"]

    def _is_overwritten(self, i: int) -> bool:
        own, local = self._params[i].own_rows(self._buffers.full_parameter(i)), self._params[i].local
        return not torch.equal(bits_of(own), bits_of(local.to(own.device, own.dtype)))
