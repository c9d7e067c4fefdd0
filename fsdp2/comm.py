"""What moves bytes between ranks: this file and `any_comm.py` are the only ones that call a collective.

A `Comm` moves bytes between the ranks of one group and returns at once; the returned `Work` is waited on by whoever
needs the bytes. Every method is a collective: all ranks of the group must call it, in the same order, with tensors of
the same sizes. Tensors are flat and contiguous, and must live until `wait` has returned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import broadcast  # by name, as in any_comm.py

from . import group_compat, torch_compat
from .any_comm import AnyComm
from .gloo_threads import let_callers_finish
from .headers import GOODBYE, HEADER_NBYTES, REDUCING, SUMMING, Conversation, Exchange, Label, differ
from .layout import MAX_OPERATIONS
from .work import AllWork, DividedWork, SumWork, Work

# A tensor of at most so many bytes, as it goes to all other ranks together, travels in the messages that carry headers:
# to copy it twice takes less than messages of its own. See benchmarks/results.
_MAX_RIDER_NBYTES = 1024 * 1024


class Comm(Protocol):
    """Collectives over one group of ranks."""

    rank: int
    # Parameters of which each rank holds so many bytes are gathered and reduced on their own, straight from and into
    # place. What is saved, a copy, and what it costs, messages, both grow with the ranks.
    direct_min_bytes: int
    # Sum, and divide afterwards, even where the backend can average.
    force_sum: bool
    # Whether each rank itself sums what others send it: in a dtype that is as wide as it likes.
    sums_on_arrival: bool
    # What the collectives are called among ranks.
    label: Label

    @property
    def group(self) -> dist.ProcessGroup | None:
        """None: this rank alone."""

    @property
    def size(self) -> int:
        """The number of ranks. Between steps it may change where ranks join and leave: see AnyComm."""

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
_LARGEST_ALL = _options(dist.AllreduceOptions, dist.ReduceOp.MAX)


def backend_averages(comm: Comm, divisor: float) -> bool:
    """Whether to leave the division to the backend."""
    return divisor == comm.size and not comm.force_sum


class CoalescedComm:
    """One coalesced launch per call: NCCL and the backends that follow its interface."""

    # Not measured on several GPUs. The few operations of a call, see MAX_OPERATIONS, run side by side, so that a small
    # one takes no longer than what is packed, which is copied and is there twice; of less there is nothing to save.
    direct_min_bytes = 1024
    sums_on_arrival = False  # unless the dtypes differ: it takes another collective

    def __init__(self, group: dist.ProcessGroup, label: Label | None = None) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self._all_gather_one, self._reduce_scatter_one = group_compat.single_tensor_collectives(group)
        self.force_sum, self.label = False, label or Label()
        # What torch 2.11 wraps process groups in then does not know coalesced collectives.
        self._coalesces = dist.get_debug_level() != dist.DebugLevel.DETAIL

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
        if len(outputs) == 1:
            return self._all_gather_one(outputs[0], inputs[0])
        if self._coalesces:
            return _in_calls(self.group.allgather_into_tensor_coalesced, outputs, inputs)
        return AllWork([*map(self._all_gather_one, outputs, inputs)])

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float) -> Work:
        if outputs[0].dtype != inputs[0].dtype:
            return self._exchange(outputs, inputs, divisor)
        if backend_averages(self, divisor):
            return self._scatter(outputs, inputs, _AVERAGE_SCATTER)
        if outputs[0].dtype == torch.float16:  # the sum of many ranks' gradients could pass 65504
            inputs = torch_compat.quotients([*inputs], divisor)  # autograd may have lent theirs
            return AllWork([self._scatter(outputs, inputs, _SUM_SCATTER)], inputs)
        return DividedWork([self._scatter(outputs, inputs, _SUM_SCATTER)], outputs, divisor)

    def _scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], options: Any) -> Work:
        if len(outputs) == 1:
            return self._reduce_scatter_one(outputs[0], inputs[0], options)
        if self._coalesces:
            return _in_calls(self.group.reduce_scatter_tensor_coalesced, outputs, inputs, options)
        return AllWork([self._reduce_scatter_one(*each, options) for each in zip(outputs, inputs, strict=True)])

    def _exchange(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float) -> Work:
        """All to all, a launch for each tensor; the sums are made when they are waited for."""
        received = [torch.empty_like(tensor) for tensor in inputs]
        works = [self.group.alltoall_base(theirs, mine, [], []) for theirs, mine in zip(received, inputs, strict=True)]
        parts = [theirs.view(self.size, -1) for theirs in received]
        return SumWork(works, [*inputs, *received], outputs, parts, divisor)

    def all_reduce(self, tensor: Tensor, divisor: float) -> Work:
        if backend_averages(self, divisor):
            return self.group.allreduce([tensor], _AVERAGE_ALL)
        divisor = _divide_before(tensor, divisor)
        return DividedWork([self.group.allreduce([tensor], _SUM_ALL)], [tensor], divisor)


def _divide_before(tensor: Tensor, divisor: float) -> float:
    """Divide what is to be summed, if it is in fp16: the sum could pass 65504. Return what is left to divide by."""
    if tensor.dtype != torch.float16:
        return divisor
    tensor.div_(divisor)
    return 1


def _in_calls(
    coalesced: Callable[..., Work], outputs: Sequence[Tensor], inputs: Sequence[Tensor], *options: Any
) -> Work:
    """Launch these collectives at once; if there are more than a call may have, in calls of about equal numbers."""
    number = -(-len(outputs) // MAX_OPERATIONS)
    if number == 1:
        return coalesced(list(outputs), list(inputs), *options)
    works = [coalesced([*outputs[i::number]], [*inputs[i::number]], *options) for i in range(number)]
    return AllWork(works, [*outputs, *inputs])


class PairwiseComm:
    """Every pair of ranks exchanges its parts directly: gloo.

    gloo's own all-gather and reduce-scatter take two to five times as long from a few MB on (the latter is an
    all-reduce inside and moves twice the bytes), and run one after the other. See benchmarks/results.

    The first message to each rank begins with a header, which is compared before anything else is looked at.
    """

    direct_min_bytes = 512 * 1024  # measured on two ranks
    force_sum = sums_on_arrival = True  # there is no other way

    def __init__(self, group: dist.ProcessGroup, label: Label | None = None) -> None:
        self.group, self.rank, self.size, self.label = group, group.rank(), group.size(), label or Label()
        if group not in _conversations:
            _conversations[group] = Conversation(group)
            let_callers_finish()
        self._conversation = _conversations[group]
        self.label.comms.add(self)
        self._conversation.labels.add(self.label)
        # Of a message whose sender may be out of step: one that is longer than expected would end the process.
        self._max_rider = _MAX_RIDER_NBYTES // max(1, self.size - 1)
        self.longest_first = HEADER_NBYTES + self._max_rider
        # (rank to send to, rank to receive from), step by step, so that no rank is everybody's first.
        steps = range(1, self.size)
        self._peers = [((self.rank + step) % self.size, (self.rank - step) % self.size) for step in steps]

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
        slots = [output.view(self.size, -1) for output in outputs]
        exchange = self._exchange("gathering", inputs, [[own] * self.size for own in inputs], slots)
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

    def compare(self, kind: str, tensor: Tensor) -> None:
        """Return when all ranks are about to do that with a tensor of this size."""
        self._exchange(kind, [tensor], [], []).wait()

    def all_reduce(self, tensor: Tensor, divisor: float) -> Work:
        exchange = self._exchange(SUMMING, [tensor], [], [])
        exchange.wait()  # gloo's own messages have no header: ranks must agree before there are any
        divisor = _divide_before(tensor, divisor)
        exchange.rest[self.rank] = [self.group.allreduce([tensor], _SUM_ALL)]
        return DividedWork([exchange], [tensor], divisor)

    def _exchange(
        self,
        kind: str,
        tensors: Sequence[Tensor],
        outgoing: Sequence[Sequence[Tensor] | Tensor],
        incoming: Sequence[Sequence[Tensor] | Tensor],
    ) -> Exchange:
        """Begin to send outgoing[i][r] to each other rank r, and to receive its incoming[i][r].

        `tensors`: what this rank gives, to be compared.
        """
        header, conversation = self.label.header(kind, tensors), self._conversation
        if conversation.partings:
            conversation.come_back(self._take_leave)
        rows = {source: torch.empty(self.longest_first, dtype=torch.uint8, device="cpu") for _, source in self._peers}
        exchange = Exchange(conversation, self.label, header, rows, self._take_leave)
        first_tag, tag = conversation.header_tag, conversation.begin(exchange)
        rides = bool(outgoing) and outgoing[-1][0].nbytes <= self._max_rider
        bulk = [*zip(outgoing, incoming, strict=True)][: len(outgoing) - rides]
        try:
            for to, source in self._peers:
                message = header.data
                if rides:
                    message = torch.cat([message, _bytes_of(outgoing[-1][to])])
                    exchange.riders.append((_bytes_of(incoming[-1][source]), rows[source]))
                exchange.sent.append(self.group.send([message], to, first_tag))
                exchange.received[source] = self.group.recv([rows[source]], source, first_tag)
                for out, into in bulk:
                    exchange.rest[to].append(self.group.send([out[to]], to, tag))
                    exchange.rest[source].append(self.group.recv([into[source]], source, tag))
        except RuntimeError as error:  # a peer is gone
            exchange.fail(error)
            raise
        return exchange

    def leave(self) -> None:
        """Say goodbye, once, to the other ranks: they get that in place of the next collective's header, and raise."""
        if not self._conversation.partings:
            tag = self._conversation.header_tag
            with suppress(RuntimeError):  # a peer is gone
                self._conversation.partings = [self.group.send([GOODBYE.data], to, tag) for to, _ in self._peers]

    def _take_leave(self, begun: Sequence[Exchange]) -> None:
        """Ranks are out of step since the first of `begun`: wait until none is under way to this one.

        gloo stops delivering to a rank that has dropped a message which arrives after all. What each other rank has
        begun is known when it says goodbye, as all do as soon as they compare the first.
        """
        self.leave()
        for _, source in self._peers:
            self._wait_for_goodbye(source, begun)

    def _wait_for_goodbye(self, source: int, begun: Sequence[Exchange]) -> None:
        agrees = True
        for i, exchange in enumerate(begun):
            if i > 0:
                exchange.received[source].wait()
            if not differ(exchange.rows[source], GOODBYE):
                return
            agrees = agrees and not differ(exchange.rows[source], exchange.header)
            for work in exchange.rest[source] if agrees else ():
                work.wait()
        message, tag = torch.zeros(self.longest_first, dtype=torch.uint8, device="cpu"), self._conversation.header_tag
        message[0] = 1  # no goodbye yet
        while differ(message, GOODBYE):
            self.group.recv([message], source, tag).wait()


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype is torch.uint8 else tensor.view(torch.uint8)


# Of process groups. Several Comms may share one.
_conversations: WeakKeyDictionary[dist.ProcessGroup, Conversation] = WeakKeyDictionary()


class SoloComm:
    """One rank: nothing to communicate, and nobody calls a collective."""

    group, rank, size, direct_min_bytes, force_sum, sums_on_arrival = None, 0, 1, 0, False, False
    label = Label()

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
        raise AssertionError("one rank gathers nothing")

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float) -> Work:
        raise AssertionError("one rank reduces nothing")

    def all_reduce(self, tensor: Tensor, divisor: float) -> Work:
        raise AssertionError("one rank reduces nothing")


def make_comm(group: dist.ProcessGroup | None, device: torch.device, label: Label | None = None) -> Comm:
    """The way to communicate that measured best for the group's backend on `device`; None: there is nobody else.

    `label`: under which ranks know what it is used for.

    Raises:
        NotImplementedError: gloo with tensors that are not on the CPU, which would crash the process.
        RuntimeError: the group has no backend for `device`.
    """
    if group is None:
        return SoloComm()
    name = group_compat.backend_name(group, device)
    if name == "gloo" and device.type != "cpu":
        raise NotImplementedError(
            f"a process group whose backend for {device.type} is gloo can't gather there. Initialise it with the "
            "device's own backend too: init_process_group('cpu:gloo,cuda:nccl'), say."
        )
    if name == "gloo":
        return PairwiseComm(group, label)
    coalesces = name in _COALESCING or (name and group_compat.coalesces(group, device))
    return CoalescedComm(group, label) if coalesces else AnyComm(group, label)


# Backends of which that is known, also where a debug level wraps them. Others say so themselves.
_COALESCING = ("nccl", "xccl", "hccl", "fake")


def all_reduce_now(tensor: Tensor, group: dist.ProcessGroup, *, largest: bool) -> None:
    """tensor := its sum, or its largest values, over the ranks of `group`, on return. All of these must call it."""
    group.allreduce([tensor], _LARGEST_ALL if largest else _SUM_ALL).wait()


def broadcast_over(tensor: Tensor, groups: Sequence[dist.ProcessGroup]) -> None:
    """tensor := that of the first rank of a mesh that has these groups, on return. All of its ranks must call it."""
    for group in groups:
        broadcast(tensor, group=group, group_src=0)


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
    return bool(groups) and all(group_compat.backend_name(group, device) != "fake" for group in groups)
