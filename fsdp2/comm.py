"""The only file that calls a collective.

A `Comm` moves bytes between the ranks of one group and returns at once; the returned `Work` is waited on by whoever
needs the bytes. Every method is a collective: all ranks of the group must call it, in the same order, with tensors of
the same sizes. Tensors are flat and contiguous, and must live until `wait` has returned.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from . import torch_compat
from .work import AllWork, CopyWork, DividedWork, SumWork, Work

# Point-to-point messages of one pair of ranks are matched in order, per tag. Ours must not meet a user's.
_GATHER_TAG = 0x0F5D_0001
_REDUCE_TAG = 0x0F5D_0002


class Comm(Protocol):
    """Collectives over one group of ranks."""

    rank: int
    size: int
    # Parameters of at least so many bytes are gathered and reduced on their own, straight from and into place.
    direct_min_bytes: int
    # Sum, and divide afterwards, even where the backend can average.
    force_sum: bool

    @property
    def group(self) -> dist.ProcessGroup | None:
        """None: this rank alone."""

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
        """outputs[i] := the inputs[i] of all ranks, in rank order. inputs[i] may be its own slot of outputs[i]."""

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float) -> Work:
        """outputs[i] := sum over ranks of this rank's slice of inputs[i], divided by `divisor`.

        inputs[i] is `size` slices in rank order. If its dtype is narrower than that of outputs[i], the slices travel in
        it and are summed in that of outputs[i], on this rank.
        """

    def all_reduce(self, tensor: Tensor, divisor: float) -> Work:
        """tensor := its sum over ranks, divided by `divisor`."""


def _options(kind: Any, op: Any) -> Any:
    options = kind()
    options.reduceOp = op
    return options


_AVERAGE_SCATTER, _SUM_SCATTER, _AVERAGE_ALL, _SUM_ALL = (
    _options(kind, op)
    for kind in (dist.ReduceScatterOptions, dist.AllreduceOptions)
    for op in (dist.ReduceOp.AVG, dist.ReduceOp.SUM)
)


def _averages(comm: Comm, divisor: float) -> bool:
    """Whether to leave the division to the backend."""
    return divisor == comm.size and not comm.force_sum


class CoalescedComm:
    """One coalesced launch per call: NCCL and the backends that follow its interface."""

    # Not measured on several GPUs; small enough that a transformer block's matrices go direct at any usual width.
    direct_min_bytes = 128 * 1024

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self._all_gather_one, self._reduce_scatter_one = torch_compat.single_tensor_collectives(group)
        self.force_sum = False

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
        if len(outputs) == 1:
            return self._all_gather_one(outputs[0], inputs[0])
        return self.group.allgather_into_tensor_coalesced(list(outputs), list(inputs))

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float) -> Work:
        if outputs[0].dtype != inputs[0].dtype:
            return self._exchange(outputs, inputs, divisor)
        averages = _averages(self, divisor)
        options = _AVERAGE_SCATTER if averages else _SUM_SCATTER
        if len(outputs) == 1:
            work = self._reduce_scatter_one(outputs[0], inputs[0], options)
        else:
            work = self.group.reduce_scatter_tensor_coalesced(list(outputs), list(inputs), options)
        return work if averages else DividedWork([work], outputs, divisor)

    def _exchange(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float) -> Work:
        """All to all, a launch for each tensor; the sums are made when they are waited for."""
        received = [torch.empty_like(tensor) for tensor in inputs]
        works = [self.group.alltoall_base(theirs, mine, [], []) for theirs, mine in zip(received, inputs, strict=True)]
        parts = [theirs.view(self.size, -1) for theirs in received]
        return SumWork(works, [*inputs, *received], outputs, parts, divisor)

    def all_reduce(self, tensor: Tensor, divisor: float) -> Work:
        averages = _averages(self, divisor)
        work = self.group.allreduce([tensor], _AVERAGE_ALL if averages else _SUM_ALL)
        return work if averages else DividedWork([work], [tensor], divisor)


class PairwiseComm:
    """Every pair of ranks exchanges its parts directly: gloo.

    gloo's own all-gather and reduce-scatter take two to five times as long from a few MB on (the latter is an
    all-reduce inside and moves twice the bytes), and run one after the other. See benchmarks/results.
    """

    direct_min_bytes = 1024 * 1024
    force_sum = True  # there is no other way

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
        slots = [output.view(self.size, -1) for output in outputs]
        works = []
        for to, source in self._peers():
            for slot, own in zip(slots, inputs, strict=True):
                works.append(self.group.send([own], to, _GATHER_TAG))
                works.append(self.group.recv([slot[source]], source, _GATHER_TAG))
        for slot, own in zip(slots, inputs, strict=True):
            if slot[self.rank].data_ptr() != own.data_ptr():
                slot[self.rank].copy_(own)
        return AllWork(works, [*outputs, *inputs])

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float) -> Work:
        slices = [tensor.view(self.size, -1) for tensor in inputs]
        received = [torch.empty_like(tensor[1:]) for tensor in slices]
        works = []
        for to, source in self._peers():
            for mine, theirs in zip(slices, received, strict=True):
                works.append(self.group.send([mine[to]], to, _REDUCE_TAG))
                works.append(self.group.recv([theirs[self._place(source)]], source, _REDUCE_TAG))
        parts = [
            [mine[rank] if rank == self.rank else theirs[self._place(rank)] for rank in range(self.size)]
            for mine, theirs in zip(slices, received, strict=True)
        ]
        return SumWork(works, [*inputs, *received], outputs, parts, divisor)

    def all_reduce(self, tensor: Tensor, divisor: float) -> Work:
        if tensor.dtype == torch.float16:  # the sum of many ranks' gradients could pass 65504
            return AllWork([self.group.allreduce([tensor.div_(divisor)], _SUM_ALL)], [tensor])
        return DividedWork([self.group.allreduce([tensor], _SUM_ALL)], [tensor], divisor)

    def _peers(self) -> list[tuple[int, int]]:
        """(rank to send to, rank to receive from), step by step, so that no rank is everybody's first."""
        return [((self.rank + step) % self.size, (self.rank - step) % self.size) for step in range(1, self.size)]

    def _place(self, rank: int) -> int:
        """Row of another rank's part in a receive buffer, which has none for this rank."""
        return rank if rank < self.rank else rank - 1


class SoloComm:
    """One rank: nothing to communicate, and nobody calls a collective."""

    group, rank, size, direct_min_bytes, force_sum = None, 0, 1, 0, False

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
        raise AssertionError("one rank gathers nothing")

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float) -> Work:
        raise AssertionError("one rank reduces nothing")

    def all_reduce(self, tensor: Tensor, divisor: float) -> Work:
        raise AssertionError("one rank reduces nothing")


class CustomComm:
    """Replaces the all-gather or the reduce-scatter of another Comm by a user's own, which gets one flat payload.

    The user's object has `allocate(size, *, dtype, device)` for the tensors it is called with; ours are copied from
    and to these, since it may need memory of a special kind.
    """

    direct_min_bytes = sys.maxsize  # nothing on its own

    def __init__(self, inner: Comm, all_gather: Any, reduce_scatter: Any) -> None:
        self._inner, self._all_gather, self._reduce_scatter = inner, all_gather, reduce_scatter
        self.rank, self.size, self.force_sum = inner.rank, inner.size, inner.force_sum

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self._inner.group

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
        if self._all_gather is None:
            return self._inner.all_gather(outputs, inputs)
        works, copies = [], []
        for output, own in zip(outputs, inputs, strict=True):
            whole = self._all_gather.allocate(output.shape, dtype=output.dtype, device=output.device)
            slot = whole[self.rank * own.numel() : (self.rank + 1) * own.numel()]
            slot.copy_(own)
            work = self._all_gather(output_tensor=whole, input_tensor=slot, group=self.group, async_op=True)
            works += [work] if work is not None else []
            copies.append((output, whole))
        return CopyWork(works, copies)

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float) -> Work:
        if self._reduce_scatter is None:
            return self._inner.reduce_scatter(outputs, inputs, divisor)
        averages = _averages(self, divisor)
        works, copies, sources = [], [], []
        for output, whole in zip(outputs, inputs, strict=True):
            source, shard = (
                self._reduce_scatter.allocate(each.shape, dtype=each.dtype, device=each.device)
                for each in (whole, output)
            )
            source.copy_(whole)
            work = self._reduce_scatter(
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
        return copy if averages else DividedWork([copy], outputs, divisor)

    def all_reduce(self, tensor: Tensor, divisor: float) -> Work:
        return self._inner.all_reduce(tensor, divisor)


@dataclass(frozen=True)
class CommChoice:
    """What a user has chosen in place of the usual Comm of a group of parameters.

    Args:
        all_gather, reduce_scatter: the user's own, as `CustomComm` calls them.
        separate: reduce on a process group of its own.
        force_sum: sum and divide afterwards, even where the backend can average.
    """

    all_gather: Any = None
    reduce_scatter: Any = None
    separate: bool = False
    force_sum: bool = False

    def build(self, plain: Comm, device: torch.device) -> tuple[Comm, Comm]:
        """The Comm that gathers and the one that reduces. Every rank of `plain` must call it."""
        gathers, reduces = plain, plain
        if self.separate and plain.group is not None and plain.size > 1:
            reduces = make_comm(subgroup(plain.group, plain.size), device)
        reduces.force_sum = self.force_sum
        if self.all_gather is not None:
            gathers = CustomComm(plain, self.all_gather, None)
        if self.reduce_scatter is not None:
            reduces = CustomComm(reduces, None, self.reduce_scatter)
        return gathers, reduces


def make_comm(group: dist.ProcessGroup | None, device: torch.device) -> Comm:
    """The way to communicate that measured best for the group's backend on `device`; None: there is nobody else.

    Raises:
        NotImplementedError: gloo with tensors that are not on the CPU, which would crash the process.
    """
    if group is None:
        return SoloComm()
    if torch_compat.backend_name(group, device) != "gloo":
        return CoalescedComm(group)
    if device.type != "cpu":
        raise NotImplementedError(
            f"a process group whose backend for {device.type} is gloo can't gather there. Initialise it with the "
            "device's own backend too: init_process_group('cpu:gloo,cuda:nccl'), say."
        )
    return PairwiseComm(group)


def all_reduce_now(tensor: Tensor, group: dist.ProcessGroup, *, largest: bool) -> None:
    """tensor := its sum, or its largest values, over the ranks of `group`, on return. All of these must call it."""
    dist.all_reduce(tensor, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM, group)


def all_gather_now(own: bytes | bytearray, comm: Comm, device: torch.device) -> list[bytes]:
    """What each rank of `comm` has, of equal length on all, in rank order, on return. All of these must call it."""
    if comm.size == 1:
        return [bytes(own)]
    mine = torch.frombuffer(bytearray(own), dtype=torch.uint8).to(device)
    of_all = mine.new_empty(comm.size, mine.numel())
    comm.all_gather([of_all.view(-1)], [mine]).wait()
    return [_bytes(each) for each in of_all]


def _bytes(row: Tensor) -> bytes:
    data = bytearray(row.numel())  # numpy, which could do that, need not be there
    torch.frombuffer(data, dtype=torch.uint8).copy_(row)
    return bytes(data)


def moves_data(groups: Sequence[dist.ProcessGroup], device: torch.device) -> bool:
    """Whether these connect ranks: a simulated backend returns at once, and leaves in a tensor what was there."""
    return bool(groups) and {torch_compat.backend_name(group, device) for group in groups} <= _BACKENDS


_BACKENDS = {"gloo", "mpi", "nccl", "ucc", "xccl"}


def gather_objects(value: Any, groups: Sequence[dist.ProcessGroup], device: torch.device) -> list[Any]:
    """`value` of every rank of a mesh that has these groups, one for each of its axes; in one order on all ranks.

    All of these ranks must call it. What can be pickled crosses as bytes on `device`; torch's own function needs numpy.
    """
    found = [value]
    for group in groups:
        data = pickle.dumps(found)
        nbytes = torch.tensor([len(data)], device=device)
        all_reduce_now(nbytes, group, largest=True)
        # What follows a pickle is not read.
        of_all = all_gather_now(data.ljust(int(nbytes), b"\0"), make_comm(group, device), device)
        found = [each for theirs in of_all for each in pickle.loads(theirs)]
    return found


@cache
def subgroup(group: dist.ProcessGroup, size: int) -> dist.ProcessGroup:
    """A process group of this rank's `size` neighbours in `group`, made once. All of these ranks must call it.

    Of all of them: a second one over the same ranks.
    """
    ranks = dist.get_process_group_ranks(group)
    first = group.rank() // size * size
    return dist.new_group(ranks[first : first + size], use_local_synchronization=True)
