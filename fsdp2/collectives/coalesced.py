"""Communicates over NCCL, and the backends that follow its interface."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..devices.streams import AllWork, DividedWork, Work
from ..engine.comm import TORCH_MEMORY, CommLabel, CommMemory, Rows
from ..engine.layout import MAX_OPERATIONS
from ..torch_private import internals
from .sums import AVERAGE_ALL, AVERAGE_SCATTER, SUM_ALL, SUM_SCATTER, divide_before


class CoalescedComm:
    """Issues one coalesced launch per call: NCCL and the backends that follow its interface."""

    # Not measured on several GPUs. The few operations of a call, see MAX_OPERATIONS, run side by side, so that a small
    # one takes no longer than the packed ones, which are copied and exist twice; less than this saves nothing.
    direct_min_bytes = 1024
    receiver_sums = False
    is_stream_ordered = True

    def __init__(self, group: dist.ProcessGroup, comm_label: CommLabel, memory: CommMemory = TORCH_MEMORY) -> None:
        self.group, self.rank, self.size, self.comm_label = group, group.rank(), group.size(), comm_label
        self.memory = memory
        self._gather_one, self._scatter_one = internals.single_tensor_collectives(group)
        self.force_sum = False
        # At that debug level torch 2.11 wraps process groups in one that does not know coalesced collectives.
        self._max_operations = 1 if dist.get_debug_level() == dist.DebugLevel.DETAIL else MAX_OPERATIONS

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
        if len(outputs) == 1:
            work: Work = self._gather_one(outputs[0], inputs[0])
            return work
        if len(outputs) <= self._max_operations:
            return self.group.allgather_into_tensor_coalesced([*outputs], [*inputs])
        return self._in_calls(self.all_gather, outputs, inputs)

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float, label: str = ""
    ) -> Work:
        averages = divisor == self.size and not self.force_sum
        if not averages and outputs[0].dtype == torch.float16:  # the sum of many ranks' gradients could pass 65504
            inputs = internals.quotients([*inputs], divisor)  # in other memory: autograd may still use the gradients
            return AllWork([self._scatter(outputs, inputs, SUM_SCATTER)], inputs)
        work = self._scatter(outputs, inputs, AVERAGE_SCATTER if averages else SUM_SCATTER)
        return work if averages else DividedWork([work], outputs, divisor)

    def _scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], options: dist.ReduceScatterOptions) -> Work:
        if len(outputs) == 1:
            work: Work = self._scatter_one(outputs[0], inputs[0], options)
            return work
        if len(outputs) <= self._max_operations:
            return self.group.reduce_scatter_tensor_coalesced([*outputs], [*inputs], options)
        return self._in_calls(self._scatter, outputs, inputs, options)

    def _in_calls(
        self,
        launch: Callable[..., Work],
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        *options: dist.ReduceScatterOptions,
    ) -> Work:
        """Launches more collectives than one call may have, in calls of about equal numbers."""
        number = -(-len(outputs) // self._max_operations)
        works = [launch(outputs[i::number], inputs[i::number], *options) for i in range(number)]
        return AllWork(works, [*outputs, *inputs])

    def exchange(self, sent: Sequence[Tensor], label: str = "") -> tuple[Work, Sequence[Rows]]:
        received = [torch.empty_like(tensor) for tensor in sent]
        works = [self.group.alltoall_base(theirs, mine, [], []) for theirs, mine in zip(received, sent, strict=True)]
        return AllWork(works, [*sent, *received]), [theirs.view(self.size, -1) for theirs in received]

    def all_reduce(self, tensor: Tensor, divisor: float, label: str = "") -> Work:
        if divisor == self.size and not self.force_sum:
            return self.group.allreduce([tensor], AVERAGE_ALL)
        divisor = divide_before(tensor, divisor)
        return DividedWork([self.group.allreduce([tensor], SUM_ALL)], [tensor], divisor)
