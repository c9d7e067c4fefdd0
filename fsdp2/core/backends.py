"""Comms for backends that were measured: one coalesced launch (NCCL), messages between pairs of ranks (gloo)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from . import compat
from .comm import AllWork, AnyComm, Comm, DividedWork, Purpose, SumWork, Work
from .layout import MAX_OPERATIONS

GATHERING, REDUCING, SUMMING = "gathering", "reducing", "summing replicas of"
"""What a collective of the engine does with a group, in words."""


def _options(kind: Any, op: Any) -> Any:
    options = kind()
    options.reduceOp = op
    return options


_AVERAGE_SCATTER, _SUM_SCATTER, _AVERAGE_ALL, SUM_ALL = (
    _options(kind, op)
    for kind in (dist.ReduceScatterOptions, dist.AllreduceOptions)
    for op in (dist.ReduceOp.AVG, dist.ReduceOp.SUM)
)


def backend_averages(comm: Comm, divisor: float) -> bool:
    """Returns True if the division is left to the backend."""
    return divisor == comm.size and not comm.force_sum


class CoalescedComm:
    """Issues one coalesced launch per call: NCCL and the backends that follow its interface."""

    # Not measured on several GPUs. The few operations of a call, see MAX_OPERATIONS, run side by side, so that a small
    # one takes no longer than the packed ones, which are copied and exist twice; less than this saves nothing.
    direct_min_bytes = 1024
    sums_on_arrival = False  # unless the dtypes differ: then it takes another collective

    def __init__(self, group: dist.ProcessGroup, purpose: Purpose) -> None:
        self.group, self.rank, self.size, self.purpose = group, group.rank(), group.size(), purpose
        self._gather_one, self._scatter_one = compat.single_tensor_collectives(group)
        self.force_sum = False
        # At that debug level torch 2.11 wraps process groups in one that does not know coalesced collectives.
        self._max_operations = 1 if dist.get_debug_level() == dist.DebugLevel.DETAIL else MAX_OPERATIONS

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
        if len(outputs) == 1:
            return self._gather_one(outputs[0], inputs[0])
        if len(outputs) <= self._max_operations:
            return self.group.allgather_into_tensor_coalesced([*outputs], [*inputs])
        return self._in_calls(self.all_gather, outputs, inputs)

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float) -> Work:
        if outputs[0].dtype != inputs[0].dtype:
            return self._exchange(outputs, inputs, divisor)
        averages = backend_averages(self, divisor)
        if not averages and outputs[0].dtype == torch.float16:  # the sum of many ranks' gradients could pass 65504
            inputs = compat.quotients([*inputs], divisor)  # in other memory: autograd may still use the gradients
            return AllWork([self._scatter(outputs, inputs, _SUM_SCATTER)], inputs)
        work = self._scatter(outputs, inputs, _AVERAGE_SCATTER if averages else _SUM_SCATTER)
        return work if averages else DividedWork([work], outputs, divisor)

    def _scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], options: Any) -> Work:
        if len(outputs) == 1:
            return self._scatter_one(outputs[0], inputs[0], options)
        if len(outputs) <= self._max_operations:
            return self.group.reduce_scatter_tensor_coalesced([*outputs], [*inputs], options)
        return self._in_calls(self._scatter, outputs, inputs, options)

    def _in_calls(
        self, launch: Callable[..., Work], outputs: Sequence[Tensor], inputs: Sequence[Tensor], *options: Any
    ) -> Work:
        """Launches more collectives than one call may have, in calls of about equal numbers."""
        number = -(-len(outputs) // self._max_operations)
        works = [launch(outputs[i::number], inputs[i::number], *options) for i in range(number)]
        return AllWork(works, [*outputs, *inputs])

    def _exchange(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float) -> Work:
        """Exchanges all to all, a launch for each tensor; waiting for the work sums what arrived."""
        received = [torch.empty_like(tensor) for tensor in inputs]
        works = [self.group.alltoall_base(theirs, mine, [], []) for theirs, mine in zip(received, inputs, strict=True)]
        parts = [theirs.view(self.size, -1) for theirs in received]
        return SumWork(works, [*inputs, *received], outputs, parts, divisor)

    def all_reduce(self, tensor: Tensor, divisor: float) -> Work:
        if backend_averages(self, divisor):
            return self.group.allreduce([tensor], _AVERAGE_ALL)
        divisor = divide_before(tensor, divisor)
        return DividedWork([self.group.allreduce([tensor], SUM_ALL)], [tensor], divisor)


def divide_before(tensor: Tensor, divisor: float) -> float:
    """Divides a tensor in fp16 before it is summed: the sum could pass 65504. Returns what is left to divide by."""
    if tensor.dtype != torch.float16:
        return divisor
    tensor.div_(divisor)
    return 1


class PairwiseComm:
    """Has every pair of ranks exchange its slices directly: gloo.

    gloo's own all-gather and reduce-scatter take two to five times as long from a few MB on (the latter is an
    all-reduce inside and moves twice the bytes), and run one after the other. See benchmarks/results.
    """

    direct_min_bytes = 512 * 1024  # measured on two ranks
    force_sum = sums_on_arrival = True  # gloo has no average

    # Tag of the messages, which must not meet a user's.
    _TAG = 0x0F5D_0000

    def __init__(self, group: dist.ProcessGroup, purpose: Purpose) -> None:
        self.group, self.rank, self.size, self.purpose = group, group.rank(), group.size(), purpose
        # (rank to send to, rank to receive from), step by step, so that no rank is everybody's first.
        steps = range(1, self.size)
        self._peers = [((self.rank + step) % self.size, (self.rank - step) % self.size) for step in steps]

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
        slots = [output.view(self.size, -1) for output in outputs]
        exchange = self._exchange(GATHERING, inputs, [[own] * self.size for own in inputs], slots)
        for slot, own in zip(slots, inputs, strict=True):
            if slot[self.rank].data_ptr() != own.data_ptr():
                slot[self.rank].copy_(own)
        return AllWork([exchange], [*outputs, *inputs])

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float) -> Work:
        slices = [tensor.view(self.size, -1) for tensor in inputs]
        received = [torch.empty_like(tensor[1:]) for tensor in slices]
        parts = [
            # `theirs` has no row for this rank.
            [mine[rank] if rank == self.rank else theirs[rank - (rank > self.rank)] for rank in range(self.size)]
            for mine, theirs in zip(slices, received, strict=True)
        ]
        exchange = self._exchange(REDUCING, inputs, slices, parts)
        return SumWork([exchange], [*inputs, *received], outputs, parts, divisor)

    def all_reduce(self, tensor: Tensor, divisor: float) -> Work:
        divisor = divide_before(tensor, divisor)
        return DividedWork([self.group.allreduce([tensor], SUM_ALL)], [tensor], divisor)

    def _exchange(
        self,
        kind: str,
        tensors: Sequence[Tensor],
        outgoing: Sequence[Sequence[Tensor] | Tensor],
        incoming: Sequence[Sequence[Tensor] | Tensor],
    ) -> Work:
        """Begins to send outgoing[i][r] to each other rank r, and to receive that rank's slice into incoming[i][r].

        `kind`, `tensors`: what this is, and what this rank gives: for a subclass that compares ranks.
        """
        works: list[Work] = []
        for to, source in self._peers:
            for out, into in zip(outgoing, incoming, strict=True):
                works.append(self.group.send([out[to]], to, self._TAG))
                works.append(self.group.recv([into[source]], source, self._TAG))
        return AllWork(works)


class SoloComm:
    """One rank, which has nothing to communicate, and never calls a collective."""

    group, rank, size, direct_min_bytes, force_sum, sums_on_arrival = None, 0, 1, 0, False, False
    purpose = Purpose()

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
        raise AssertionError("one rank gathers nothing")

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float) -> Work:
        raise AssertionError("one rank reduces nothing")

    def all_reduce(self, tensor: Tensor, divisor: float) -> Work:
        raise AssertionError("one rank reduces nothing")


# Backends that are known to coalesce, also where a debug level wraps them. Others say so themselves.
_COALESCING = ("nccl", "xccl", "hccl", "fake")


def make_comm(group: dist.ProcessGroup | None, device: torch.device, purpose: Purpose) -> Comm:
    """Returns the Comm that measured best for the group's backend on `device`. None: one rank.

    Raises:
        NotImplementedError: gloo with tensors that are not on the CPU, which would crash the process.
        RuntimeError: the group has no backend for `device`.
    """
    if group is None:
        return SoloComm()
    name = compat.backend_name(group, device)
    if name == "gloo" and device.type != "cpu":
        raise NotImplementedError(
            f"a process group whose backend for {device.type} is gloo can't gather there. Initialise it with the "
            "device's own backend too: init_process_group('cpu:gloo,cuda:nccl'), for example."
        )
    if name == "gloo":
        return PairwiseComm(group, purpose)
    coalesces = name in _COALESCING or (name and compat.coalesces(group, device))
    return CoalescedComm(group, purpose) if coalesces else AnyComm(group, purpose)
