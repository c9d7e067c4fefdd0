"""Communicates over process groups that lack functions of torch.distributed: ranks that are threads, for example."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch.distributed as dist
from torch import Tensor

# Imported by name: an extension may put other functions under these names in `dist`.
from torch.distributed import all_gather, all_reduce, broadcast, reduce_scatter

from ..engine.comm import AllWork, AnyComm, CopyWork, Purpose, Work

# Matches the errors, besides NotImplementedError, of groups and backends that lack a function. The error of a
# connection that has failed, "Operation not supported", does not match.
_LACKS = re.compile("does(n't| not) support|(?<!operation )not (supported|implemented)|no backend type", re.IGNORECASE)


class _FirstOffered:
    """Calls the first of several functions, in order of their cost, that the group offers, and keeps to that one.

    All ranks of a group find the same, because a group offers the same functions on all ranks.
    """

    def __init__(self, *functions: Callable[[FallbackComm, Tensor, Tensor], Work]) -> None:
        self._functions = list(functions)

    def __call__(self, comm: FallbackComm, output: Tensor, source: Tensor) -> Work:
        while True:
            try:
                return self._functions[0](comm, output, source)
            except RuntimeError as error:  # NotImplementedError is one
                lacks = isinstance(error, NotImplementedError) or _LACKS.search(str(error))
                if not lacks or len(self._functions) == 1:
                    raise
                del self._functions[0]


class FallbackComm(AnyComm):
    """Is an AnyComm that uses another function, at more cost, in place of one that the process group lacks."""

    def __init__(self, group: dist.ProcessGroup, purpose: Purpose) -> None:
        super().__init__(group, purpose)
        cls, one = FallbackComm, AnyComm  # their functions, not this object's methods, which would keep it alive
        self._first_gather = _FirstOffered(one._gather, cls._gather_into_list, cls._gather_by_broadcasts)
        self._first_scatter = _FirstOffered(one._scatter, cls._scatter_list, cls._scatter_by_all_reduce)
        self._first_exchange = _FirstOffered(one._exchange, cls._exchange_by_gather)

    def _gather(self, output: Tensor, source: Tensor) -> Work:
        return self._first_gather(self, output, source)

    def _scatter(self, output: Tensor, source: Tensor) -> Work:
        return self._first_scatter(self, output, source)

    def _exchange(self, received: Tensor, source: Tensor) -> Work:
        return self._first_exchange(self, received, source)

    # Ways to gather: fill `output` with the sources of all ranks.

    def _gather_into_list(self, output: Tensor, source: Tensor) -> Work:
        is_part = source.untyped_storage().data_ptr() == output.untyped_storage().data_ptr()
        own = source.clone() if is_part else source
        return AllWork([all_gather([*output.view(self.size, -1)], own, group=self.group, async_op=True)], [own])

    def _gather_by_broadcasts(self, output: Tensor, source: Tensor) -> Work:
        parts = output.view(self.size, -1)
        if parts[self.rank].data_ptr() != source.data_ptr():
            parts[self.rank].copy_(source)
        return AllWork([broadcast(part, group=self.group, group_src=i, async_op=True) for i, part in enumerate(parts)])

    # Ways to reduce: fill `output` with the sum of this rank's slices of all ranks' sources.

    def _scatter_list(self, output: Tensor, source: Tensor) -> Work:
        work: Work = reduce_scatter(output, [*source.view(self.size, -1)], group=self.group, async_op=True)
        return work

    def _scatter_by_all_reduce(self, output: Tensor, source: Tensor) -> Work:
        total = source.clone()
        work = all_reduce(total, group=self.group, async_op=True)
        return CopyWork([work], [(output, total.view(self.size, -1)[self.rank])])

    # Ways to exchange: fill `received` with this rank's slices of all ranks' sources.

    def _exchange_by_gather(self, received: Tensor, source: Tensor) -> Work:
        """Gathers all slices of all ranks: as many times the bytes as there are ranks, sent and in memory."""
        of_all = source.new_empty(self.size * source.numel())
        own_slices = of_all.view(self.size, self.size, -1)[:, self.rank]
        return CopyWork([self._gather(of_all, source)], [(received.view(self.size, -1), own_slices)], [source])
