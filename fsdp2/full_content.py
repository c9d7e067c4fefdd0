"""Whether a forward writes to its full parameters where their versions don't show it: through `.data`.

Such a write is lost when they are given up; an assignment would have the module compute with it for ever after.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor

from . import torch_compat
from .checksum import read
from .param import FSDPParam


class FullContent:
    """What full parameters hold when a forward begins: `memories`, the words that are theirs, which must be there."""

    def __init__(self, params: Sequence[FSDPParam], memories: Sequence[Tensor]) -> None:
        held = [(param, memory) for param, memory in zip(params, memories, strict=True) if memory.numel()]
        self._params, self._memories = [param for param, _ in held], [memory for _, memory in held]
        self._sums = self._find_sums()

    def _find_sums(self) -> list[int]:
        """Modulo 2 ** 64: another value in one place shows, an exchange of values does not."""
        return read([memory.sum() for memory in self._memories])

    def written(self) -> list[str]:
        """Names of those whose memory holds something else now, or that lie over other memory."""
        found = zip(self._params, self._memories, self._sums, self._find_sums(), strict=True)
        return [p.name for p, memory, old, new in found if old != new or _local(p).data_ptr() != memory.data_ptr()]


def _local(param: FSDPParam) -> Tensor:
    return torch_compat.local_of(param.full) if isinstance(param.full, DTensor) else param.full
