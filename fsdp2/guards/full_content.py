"""Whether somebody writes to parameters where their versions don't show it: through `.data`.

What a forward so writes to its full parameters is lost when they are given up; an assignment would have the module
compute with it for ever after. What is so written to a shard whose full parameter is kept takes no part in forwards.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

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
        found = [param.name for param in differing(self._params, self._buffers)]
        return found or [f"one of {', '.join(param.name for param in self._params)}"]


def differing(params: Sequence[FSDPParam], buffers: GroupBuffers) -> list[FSDPParam]:
    """Those of `params` whose full parameters, in `buffers`, are not what their shards hold, as far as this rank can
    tell.
    """
    return [params[i] for i in range(len(buffers.layout.specs)) if _differs(params[i], buffers.full_parameter(i))]


def _differs(param: FSDPParam, full: Tensor) -> bool:
    own = param.own_rows(full)
    expected = param.local.to(own.device, own.dtype)
    # Another NaN is none: to which one NaN is cast depends on the instruction.
    return bool(((bits_of(own) != bits_of(expected)) & ~expected.reshape(-1).isnan()).any())
