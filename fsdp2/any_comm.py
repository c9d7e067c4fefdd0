"""Collectives over any process group: threads as ranks, groups written in Python, backends that nobody has measured.

Only public functions of torch.distributed are used, one launch for each tensor, and sums that are divided afterwards.
Nothing is assumed of the group: neither that it has a backend for each device, nor that it averages, nor that it
gathers into one tensor. Where it lacks a function, another one does the same at more cost.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

# Imported by name: `dist` may get others that make ranks meet first, see corrections/own_collectives.py.
from torch.distributed import all_gather, all_reduce, all_to_all_single, broadcast, reduce_scatter

from .group_compat import all_gather_one, reduce_scatter_one, size_may_change
from .headers import Label
from .work import AllWork, CopyWork, DividedWork, SumWork, Work

# What groups and backends say, apart from a NotImplementedError, of a function that they lack. A connection that has
# failed says "Operation not supported".
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
    """A Comm over a process group of which nothing is known but that torch.distributed's functions work on it."""

    direct_min_bytes = 512 * 1024
    force_sum = True
    sums_on_arrival = False  # unless the dtypes differ

    def __init__(self, group: dist.ProcessGroup, label: Label | None = None) -> None:
        self.group, self.rank, self.label = group, group.rank(), label or Label()
        self._size = None if size_may_change(group) else group.size()
        cls = AnyComm  # its methods, not this object's, which would then own itself
        self._gather = _FirstOffered(cls._gather_into_one, cls._gather_into_list, cls._gather_by_broadcasts)
        self._scatter = _FirstOffered(cls._scatter_one, cls._scatter_list, cls._scatter_by_all_reduce)
        self._exchange = _FirstOffered(cls._exchange_and_sum, cls._sum_in_dtype_of_output)

    @property
    def size(self) -> int:
        """The number of ranks; of a group that ranks join and leave, the number of those that take part now."""
        return self._size or max(1, self.group.size())

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
        works = [self._gather(self, output, own) for output, own in zip(outputs, inputs, strict=True)]
        return AllWork(works, [*outputs, *inputs])

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float) -> Work:
        works = []
        for output, source in zip(outputs, inputs, strict=True):
            if output.dtype == torch.float16:  # the sum of many ranks' gradients could pass 65504
                wide = torch.empty_like(output, dtype=torch.float32)
                works.append(_divide_wide(self._reduce_one(wide, source), wide, output, divisor))
            else:
                works.append(DividedWork([self._reduce_one(output, source)], [output], divisor))
        return AllWork(works, [*outputs, *inputs])

    def all_reduce(self, tensor: Tensor, divisor: float) -> Work:
        wide = tensor.float() if tensor.dtype == torch.float16 else tensor
        work = all_reduce(wide, group=self.group, async_op=True)
        return DividedWork([work], [tensor], divisor) if wide is tensor else _divide_wide(work, wide, tensor, divisor)

    def _reduce_one(self, output: Tensor, source: Tensor) -> Work:
        reduce = self._scatter if output.dtype == source.dtype else self._exchange
        return reduce(self, output, source)

    # ---- ways to gather: output := the sources of all ranks

    def _gather_into_one(self, output: Tensor, source: Tensor) -> Work:
        return all_gather_one(output, source, group=self.group, async_op=True)

    def _gather_into_list(self, output: Tensor, source: Tensor) -> Work:
        own = source.clone()  # it may be a part of the output
        return AllWork([all_gather([*output.view(self.size, -1)], own, group=self.group, async_op=True)], [own])

    def _gather_by_broadcasts(self, output: Tensor, source: Tensor) -> Work:
        parts = output.view(self.size, -1)
        if parts[self.rank].data_ptr() != source.data_ptr():
            parts[self.rank].copy_(source)
        return AllWork([broadcast(part, group=self.group, group_src=i, async_op=True) for i, part in enumerate(parts)])

    # ---- ways to reduce: output := the sum of this rank's parts of all ranks' sources

    def _scatter_one(self, output: Tensor, source: Tensor) -> Work:
        return reduce_scatter_one(output, source, group=self.group, async_op=True)

    def _scatter_list(self, output: Tensor, source: Tensor) -> Work:
        return reduce_scatter(output, [*source.view(self.size, -1)], group=self.group, async_op=True)

    def _scatter_by_all_reduce(self, output: Tensor, source: Tensor) -> Work:
        total = source.clone()
        work = all_reduce(total, group=self.group, async_op=True)
        return CopyWork([work], [(output, total.view(self.size, -1)[self.rank])])

    # ---- the same, where the output has a wider dtype than what travels

    def _exchange_and_sum(self, output: Tensor, source: Tensor) -> Work:
        received = torch.empty_like(source)
        work = all_to_all_single(received, source, group=self.group, async_op=True)
        return SumWork([work], [source, received], [output], [received.view(self.size, -1)], 1)

    def _sum_in_dtype_of_output(self, output: Tensor, source: Tensor) -> Work:
        return self._scatter(self, output, source.to(output.dtype))


def _divide_wide(work: Work, wide: Tensor, output: Tensor, divisor: float) -> Work:
    """Divides the sum in `wide` by `divisor`, and casts the result to `output`, when `work` is waited for."""
    return CopyWork([DividedWork([work], [wide], divisor)], [(output, wide)])
