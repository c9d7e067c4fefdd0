"""Communicates over process groups that lack functions of torch.distributed: ranks that are threads, for example."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

# Imported by name: an extension may put other functions under these names in `dist`.
from torch.distributed import all_gather, all_reduce, all_to_all_single, broadcast, reduce_scatter

from ..devices.streams import AllWork, CopyWork, DividedWork, SumWork, Work
from ..engine.comm import TORCH_MEMORY, CommLabel, CommMemory, Rows
from ..torch_private import internals

# Matches the errors, besides NotImplementedError, of groups and backends that lack a function. The error of a
# connection that has failed, "Operation not supported", does not match.
_LACKS = re.compile("does(n't| not) support|(?<!operation )not (supported|implemented)|no backend type", re.IGNORECASE)


class _FirstOffered:
    """Calls the first of several functions, in order of their cost, that the group offers, and keeps to that one.

    All ranks of a group find the same, because a group offers the same functions on all ranks.
    """

    def __init__(self, *functions: Callable[[AnyComm, Tensor, Tensor], Work]) -> None:
        self._functions = list(functions)

    def __call__(self, comm: AnyComm, output: Tensor, source: Tensor) -> Work:
        while True:
            try:
                return self._functions[0](comm, output, source)
            except RuntimeError as error:  # NotImplementedError is one
                lacks = isinstance(error, NotImplementedError) or _LACKS.search(str(error))
                if not lacks or len(self._functions) == 1:
                    raise
                del self._functions[0]


class AnyComm:
    """Communicates over any process group by public functions, one launch for each tensor, and divides sums afterwards.

    Where the process group lacks a function, another one does the same at more cost.
    """

    direct_min_bytes = 512 * 1024
    force_sum = True
    receiver_sums = is_stream_ordered = False  # it may run on the current stream, with a Work that is done
    memory: CommMemory = TORCH_MEMORY

    def __init__(self, group: dist.ProcessGroup, comm_label: CommLabel) -> None:
        self.group, self.rank, self.comm_label = group, group.rank(), comm_label
        cls = AnyComm  # its functions, not this object's methods, which would keep it alive
        self._gather = _FirstOffered(cls._gather_single, cls._gather_into_list, cls._gather_by_broadcasts)
        self._scatter = _FirstOffered(cls._scatter_single, cls._scatter_list, cls._scatter_by_all_reduce)
        self._exchange = _FirstOffered(cls._exchange_single, cls._exchange_by_gather)
        self._size = None if internals.size_may_change(group) else group.size()

    @property
    def size(self) -> int:
        """The number of ranks; of a group that ranks join and leave, the number of those that take part now."""
        return self._size or max(1, self.group.size())

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
        return AllWork([*map(partial(self._gather, self), outputs, inputs)], [*outputs, *inputs])

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float, label: str = ""
    ) -> Work:
        if outputs and outputs[0].dtype == torch.float16:  # the sum of many ranks' gradients could pass 65504
            work, rows = self.exchange(inputs, label)
            return SumWork([work], inputs, outputs, rows, divisor)
        return DividedWork([AllWork([*map(partial(self._scatter, self), outputs, inputs)], inputs)], outputs, divisor)

    def exchange(self, sent: Sequence[Tensor], label: str = "") -> tuple[Work, Sequence[Rows]]:
        received = [torch.empty_like(tensor) for tensor in sent]
        work = AllWork([*map(partial(self._exchange, self), received, sent)], [*received, *sent])
        return work, [theirs.view(self.size, -1) for theirs in received]

    def all_reduce(self, tensor: Tensor, divisor: float, label: str = "") -> Work:
        wide = tensor.float() if tensor.dtype == torch.float16 else tensor
        return _divide_wide(all_reduce(wide, group=self.group, async_op=True), wide, tensor, divisor)

    # Ways to gather: fill `output` with the sources of all ranks.

    def _gather_single(self, output: Tensor, source: Tensor) -> Work:
        work: Work = internals.all_gather_one(output, source, group=self.group, async_op=True)
        return work

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

    def _scatter_single(self, output: Tensor, source: Tensor) -> Work:
        work: Work = internals.reduce_scatter_one(output, source, group=self.group, async_op=True)
        return work

    def _scatter_list(self, output: Tensor, source: Tensor) -> Work:
        work: Work = reduce_scatter(output, [*source.view(self.size, -1)], group=self.group, async_op=True)
        return work

    def _scatter_by_all_reduce(self, output: Tensor, source: Tensor) -> Work:
        total = source.clone()
        work = all_reduce(total, group=self.group, async_op=True)
        return CopyWork([work], [(output, total.view(self.size, -1)[self.rank])])

    # Ways to exchange: fill `received` with this rank's slices of all ranks' sources.

    def _exchange_single(self, received: Tensor, source: Tensor) -> Work:
        work: Work = all_to_all_single(received, source, group=self.group, async_op=True)
        return work

    def _exchange_by_gather(self, received: Tensor, source: Tensor) -> Work:
        """Gathers all slices of all ranks: as many times the bytes as there are ranks, sent and in memory."""
        of_all = source.new_empty(self.size * source.numel())
        own_slices = of_all.view(self.size, self.size, -1)[:, self.rank]
        return CopyWork([self._gather(self, of_all, source)], [(received.view(self.size, -1), own_slices)], [source])


def _divide_wide(work: Work, wide: Tensor, output: Tensor, divisor: float) -> Work:
    """Divides the sum in `wide`, and casts it to `output` if that is another tensor, when the work is waited for."""
    divided = DividedWork([work], [wide], divisor)
    return divided if wide is output else CopyWork([divided], [(output, wide)])
