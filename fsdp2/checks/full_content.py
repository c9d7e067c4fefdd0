"""Finds writes to parameters that no version counter shows: through a plain tensor's `.data`.

What a forward so writes to its full parameters is lost when they are given up; an assignment would have the module
compute with it for ever after. What is so written to a shard whose full parameter is kept takes no part in forwards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.buffers import GroupBuffers
from ..core.parameter import FSDPParam
from .checksum import bits_of
from .reads import NO_NUMBERS


class FullContent:
    """Holds a sum, on the device, of what each full parameter in `buffers` holds when a forward begins, in `every` so
    many words. The first of `params` have their full parameters there.

    Nothing here waits for the device.
    """

    def __init__(self, params: Sequence[FSDPParam], buffers: GroupBuffers, every: int) -> None:
        self._params, self._buffers = params[: len(buffers.layout.specs)], buffers
        self._words = buffers.full_words(every)
        self._sums = self._find_sums()

    def _find_sums(self) -> Tensor:
        """Modulo 2 ** 64: another value in one place shows, an exchange of values does not."""
        sums = [words.sum() for words in self._words]
        return torch.stack(sums) if sums else NO_NUMBERS

    def changes(self) -> Tensor:
        """Returns, as int64, which full parameters hold something else now; for `named`."""
        return (self._sums != self._find_sums()).to(torch.int64)

    def differences(self) -> Tensor:
        """Returns, as int64, which full parameters differ from their shards, as far as this rank knows; for `named`."""
        differ = [_differs(param, self._buffers.full_parameter(i)) for i, param in enumerate(self._params)]
        return torch.stack(differ).to(torch.int64) if differ else NO_NUMBERS

    def named(self, flags: Sequence[int]) -> list[str]:
        """Returns the names of the parameters whose flag is set."""
        return [param.name for param, flag in zip(self._params, flags, strict=True) if flag]


def refuse_differing(names: Sequence[str]) -> None:
    """Raise RuntimeError if there are any whose full parameter, gathered before a forward, differs from its shard."""
    if names:
        raise RuntimeError(
            f"{', '.join(names)}: what was gathered before this forward, and has stayed, is not what the sharded "
            "parameter holds. Either was written to where nothing counts it, as through a plain tensor's `.data`. "
            "Write to the sharded parameter, or to what its to_local() returns, under torch.no_grad()."
        )


def _differs(param: FSDPParam, full: Tensor) -> Tensor:
    own = param.own_rows(full)
    expected = param.local.to(own.device, own.dtype, non_blocking=True)
    # Another NaN is none: to which one NaN is cast depends on the instruction.
    return ((bits_of(own) != bits_of(expected)) & ~expected.reshape(-1).isnan()).any()
