"""A user's own collectives in place of the usual ones, and what else a user chooses of how to communicate."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..checks.rollcall import CheckedComm
from ..core.comm import Comm, backend_averages, make_comm
from ..core.mesh import subgroup
from ..core.comm import CopyWork, DividedWork, Work


class CustomComm:
    """Replaces the all-gather or the reduce-scatter of another Comm by a user's own, which gets one flat payload.

    The user's object has `allocate(size, *, dtype, device)` for the tensors it is called with; ours are copied from
    and to these, since it may need memory of a special kind.
    """

    direct_min_bytes = sys.maxsize  # nothing on its own

    def __init__(self, inner: Comm, all_gather: Any, reduce_scatter: Any) -> None:
        self._comm, self._gather, self._scatter = inner, all_gather, reduce_scatter
        self.rank, self.size, self.force_sum = inner.rank, inner.size, inner.force_sum
        self.sums_on_arrival = inner.sums_on_arrival and reduce_scatter is None
        self.label = inner.label

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self._comm.group

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
        if self._gather is None:
            return self._comm.all_gather(outputs, inputs)
        works, copies = [], []
        for output, own in zip(outputs, inputs, strict=True):
            whole = self._gather.allocate(output.shape, dtype=output.dtype, device=output.device)
            slot = whole[self.rank * own.numel() : (self.rank + 1) * own.numel()]
            slot.copy_(own)
            work = self._gather(output_tensor=whole, input_tensor=slot, group=self.group, async_op=True)
            works += [work] if work is not None else []
            copies.append((output, whole))
        return CopyWork(works, copies)

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float) -> Work:
        if self._scatter is None:
            return self._comm.reduce_scatter(outputs, inputs, divisor)
        averages = backend_averages(self, divisor)
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

    def all_reduce(self, tensor: Tensor, divisor: float) -> Work:
        return self._comm.all_reduce(tensor, divisor)


@dataclass(frozen=True)
class CommChoice:
    """What a user has chosen in place of the usual Comm of a group of parameters.

    Args:
        all_gather, reduce_scatter: the user's own, as `CustomComm` calls them.
        separate: reduce on a process group of its own.
        force_sum: sum and divide afterwards, even where the backend can average.
        checked: have ranks compare what they are about to do, before each collective.
    """

    all_gather: Any = None
    reduce_scatter: Any = None
    separate: bool = False
    force_sum: bool = False
    checked: bool = False

    def build(self, plain: Comm, device: torch.device) -> tuple[Comm, Comm]:
        """The Comm that gathers and the one that reduces. Every rank of `plain` must call it."""
        gathers, reduces = plain, plain
        if self.separate and plain.group is not None and plain.size > 1:
            reduces = make_comm(subgroup(plain.group, plain.size), device, plain.label)
        if self.all_gather is not None:
            gathers = CustomComm(plain, self.all_gather, None)
        if self.reduce_scatter is not None:
            reduces = CustomComm(reduces, None, self.reduce_scatter)
        return self.complete(gathers, device), self.complete(reduces, device)

    def complete(self, comm: Comm, device: torch.device) -> Comm:
        """`comm` as chosen: checked, or no longer; summing only, or no longer."""
        plain = comm.unchecked if isinstance(comm, CheckedComm) else comm
        plain.force_sum = self.force_sum
        return CheckedComm(plain, device) if self.checked and plain.size > 1 else plain
