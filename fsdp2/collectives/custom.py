"""Communicates by a user's own all-gather and reduce-scatter."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..devices.streams import CopyWork, DividedWork
from ..engine.comm import TORCH_MEMORY, Comm, Work
from .delegating import DelegatingComm


class CustomComm(DelegatingComm):
    """Replaces the all-gather or the reduce-scatter of another Comm by a user's own, which gets one flat payload.

    The user's object has `allocate(size, *, dtype, device)` for the tensors it is called with; the group's tensors are
    copied from and to these, since the user's may need memory of a special kind.
    """

    def __init__(self, inner: Comm, all_gather: Any, reduce_scatter: Any) -> None:
        super().__init__(inner)
        self._gather, self._scatter = all_gather, reduce_scatter
        self.direct_min_bytes = sys.maxsize  # no parameter is gathered on its own
        self.receiver_sums = inner.receiver_sums and reduce_scatter is None
        self.is_stream_ordered, self.memory = False, TORCH_MEMORY  # it is copied from and to the user's

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
        if self._gather is None:
            return self.inner_comm.all_gather(outputs, inputs)
        works, copies = [], []
        for output, own in zip(outputs, inputs, strict=True):
            whole = self._gather.allocate(output.shape, dtype=output.dtype, device=output.device)
            part = whole[self.rank * own.numel() : (self.rank + 1) * own.numel()]
            part.copy_(own)
            work = self._gather(output_tensor=whole, input_tensor=part, group=self.group, async_op=True)
            works += [work] if work is not None else []
            copies.append((output, whole))
        return CopyWork(works, copies)

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float, label: str = ""
    ) -> Work:
        if self._scatter is None:
            return self.inner_comm.reduce_scatter(outputs, inputs, divisor, label)
        averages = divisor == self.size and not self.force_sum
        before = divisor if not averages and inputs[0].dtype == torch.float16 else 1  # its sums could pass 65504
        works, copies, sources = [], [], []
        for output, whole in zip(outputs, inputs, strict=True):
            source, shard = (
                self._scatter.allocate(each.shape, dtype=each.dtype, device=each.device) for each in (whole, output)
            )
            source.copy_(whole)
            if before != 1:
                source.div_(before)
            work = self._scatter(
                output_tensor=shard,
                input_tensor=source,
                group=self.group,
                op=dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM,
                async_op=True,
            )
            works += [work] if work is not None else []
            copies.append((output, shard))
            sources.append(source)
        copy = CopyWork(works, copies, sources)
        return copy if averages else DividedWork([copy], outputs, divisor / before)
