"""Whether somebody writes to parameters where their versions don't show it: through a plain tensor's `.data`.

What a forward so writes to its full parameters is lost when they are given up; an assignment would have the module
compute with it for ever after. What is so written to a shard whose full parameter is kept takes no part in forwards.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..buffers import GroupBuffers
from ..param import FSDPParam
from .checksum import bits_of, read


class FullContent:
    """What the full parameters in `buffers`, of which the first of `params` have theirs there, hold when a forward
    begins, in `every` so many words.
    """

    def __init__(self, params: Sequence[FSDPParam], buffers: GroupBuffers, every: int) -> None:
        self._params, self._buffers = params[: len(buffers.layout.specs)], buffers
        self._words = buffers.full_words(every)
        self._sums = self._find_sums()

    def _find_sums(self) -> list[int]:
        """Modulo 2 ** 64: another value in one place shows, an exchange of values does not."""
        return read([words.sum() for words in self._words])

    def written(self) -> list[str]:
        """Names of those whose memory holds something else now."""
        return [] if self._sums == self._find_sums() else self._overwritten()

    def refuse_differing(self) -> None:
        """Raise RuntimeError if what had been gathered before this forward is not what the shards hold."""
        names = self._find_differing()
        if names:
            raise RuntimeError(
                f"{', '.join(names)}: what was gathered before this forward, and has stayed, is not what the sharded "
                "parameter holds. Either was written to where nothing counts it, as through a plain tensor's `.data`. "
                "Write to the sharded parameter, or to what its to_local() returns, under torch.no_grad()."
            )

    def _overwritten(self) -> list[str]:
        return self._find_differing() or [f"one of {', '.join(param.name for param in self._params)}"]

    def _find_differing(self) -> list[str]:
        """Names of those that differ from their shards, as far as this rank can tell."""
        differ = read([_differs(param, self._buffers.full_parameter(i)) for i, param in enumerate(self._params)])
        return [param.name for param, differs in zip(self._params, differ, strict=True) if differs]


def _differs(param: FSDPParam, full: Tensor) -> Tensor:
    own = param.own_rows(full)
    expected = param.local.to(own.device, own.dtype)
    # Another NaN is none: to which one NaN is cast depends on the instruction.
    return ((bits_of(own) != bits_of(expected)) & ~expected.reshape(-1).isnan()).any()
