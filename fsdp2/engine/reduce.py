"""Reduces unsharded gradients to this rank's shards of their mean. It knows tensors and layouts, and no parameters."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from ..codecs.replicas import Steps, Sums
from ..devices import streams
from ..devices.streams import AllWork, SumWork, Transfer, Transfers
from ..torch_private import compat
from .buckets import PIECES_IN_FLIGHT, ReducePlan
from .codec import Member, Rows
from .comm import Comm, Work

# Parameter index -> (a flat tensor, the offset in its storage at which this rank's padded shard begins).
Shards = dict[int, tuple[Tensor, int]]


@dataclass(frozen=True)
class Reduction:
    """How one group's gradients are summed.

    Args:
        shards: the ranks that reduce first; each gets its slice of the sum.
        replicas: the ranks that sum these slices between them, if there are several.
        divisor: what the sum over all ranks is divided by. None: their number.
        all_reduce: also sum between replicas; else keep what this rank got until a later reduction does. With
            `divide_late` it is kept where there are no replicas, too.
        hook: called with each reduced flat tensor, in the reduce dtype, before it becomes gradients.
        transfers: copy the gradients to the CPU. None: they stay where they were computed.
        scatters_twice: replicas share one set of shards: each of them gets its slice of their sum, by a second
            reduce-scatter. False: each gets all of it, by an all-reduce.
        divide_late: divides complete sums in place, by a number that is not known before. `divisor` is 1 then.
        by_hook: `shards` reduces by a hook of a user's, which sees whole buckets, with zeros for padding.

    `num_blocks`: how many shards the first step leaves on each rank: one, or that of each replica, which the second
    step sums. `num_shards`: of how many ranks a bucket has shards; replica by replica, and the ranks of each in order.
    """

    shards: Comm
    replicas: Comm | None = None
    divisor: float | None = None
    all_reduce: bool = True
    hook: Callable[[Tensor], None] | None = None
    transfers: Transfers | None = None
    scatters_twice: bool = False
    divide_late: Callable[[Tensor], None] | None = None
    by_hook: bool = False
    num_blocks: int = field(init=False, repr=False)
    num_shards: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        num_blocks = self.replicas.size if self.replicas is not None and self.scatters_twice else 1
        object.__setattr__(self, "num_blocks", num_blocks)
        object.__setattr__(self, "num_shards", self.shards.size * num_blocks)

    @property
    def direct_min_bytes(self) -> int:
        """A shard of at least so many bytes is reduced from where autograd has put its gradient, without a copy. None
        is where collectives need registered memory, because autograd's is not.
        """
        return sys.maxsize if self.shards.memory.is_registered else self.shards.direct_min_bytes * self.num_blocks

    def divisors(self) -> tuple[float, float]:
        """Returns the divisor of the reduce-scatter, and of the step between replicas behind it."""
        if self.divisor is not None:
            return (self.divisor, 1) if self.shards.size > 1 else (1, self.divisor)
        return self.shards.size, self.replicas.size if self.replicas else 1


class Pending:
    """One reduction in flight.

    `nbytes`: size of its inputs. `is_partial`: a later reduction sums the result between replicas; it stays in the
    reduce dtype until then. `has_second_stage`: `advance` begins an all-reduce, or a reduce-scatter, between replicas,
    or the next step of another sum. `is_last`: no other reduction follows in this backward pass; the queue says so when
    it knows.
    """

    nbytes: int
    is_partial = False
    has_second_stage = False
    is_last = False

    def advance(self) -> None:
        """Waits for the collective in flight, and begins the next one between replicas, if there is one."""

    def start_return(self) -> bool:
        """Waits for the sums, and begins to copy them to the CPU. Returns True if gradients rest there."""
        return False

    def finish(self) -> Shards:
        """Waits, and returns this rank's shards of the mean gradients."""
        return {}

    def abandon(self) -> None:
        """Waits until no buffer is in use, and drops the buffers."""


class Unreduced(Pending):
    """The gradients of a group of one rank, which need no reduction."""

    def __init__(self, shards: Shards, nbytes: int) -> None:
        self._shards, self.nbytes = shards, nbytes

    def finish(self) -> Shards:
        return self._shards


class PendingReduce(Pending):
    """One reduction between ranks in flight. It holds its buffers, and the gradients it reads, until `finish`.

    `carried`: parameter index -> flat padded shard that an earlier reduction has left for this one to include.
    `what`: names the gradients, for the second stage. `return_segments`: called when the inputs have been read.
    `plan`: says how replicas sum, if not by one collective.
    """

    def __init__(
        self,
        plan: ReducePlan,
        reduction: Reduction,
        work: Work | None,
        output: Tensor,
        inputs: list[Tensor],
        carried: Mapping[int, Tensor],
        nbytes: int,
        what: str = "",
        return_segments: Callable[[], None] | None = None,
    ) -> None:
        self.nbytes, self._return_segments = nbytes, return_segments
        self._plan, self._layout, self._reduction, self._work, self._output = plan, plan.layout, reduction, work, output
        # What is still to be done between replicas, in several collectives.
        self._steps: Steps | None = None
        self._inputs_kept_alive = inputs
        # None: the reduce-scatter has been waited for.
        self._carried: Mapping[int, Tensor] | None = carried
        # What the stream beside the one that computes may still use.
        self._held_beside: tuple[Work, list[Tensor]] | None = None
        self._held: list[Work] = []
        self._return: Transfer[Tensor] | None = None
        may_wait = reduction.replicas is not None or reduction.divide_late is not None
        self.is_partial = may_wait and not reduction.all_reduce
        self.has_second_stage = reduction.replicas is not None and reduction.all_reduce
        self._what = what
        # What a second reduce-scatter fills: allocated here, on the stream that computes.
        self._own: Tensor | None = None
        if self.has_second_stage and reduction.scatters_twice:
            self._own = output.new_empty(self._layout.shard_numel)
        if work is None:
            self.advance()
        elif self.has_second_stage and streams.exist_on(output.device):  # replicas sum beside backward
            held = work, [*inputs, *carried.values()]
            with streams.beside(output.device, waits=not reduction.shards.follows_stream):
                self.advance()
            self._held_beside = held

    def advance(self) -> None:
        if self._steps is not None:
            self._step(self._steps)
            return
        if self._carried is None:
            return
        carried, self._carried = self._carried, None
        self._wait()
        for i, shard in carried.items():
            strides = (self._layout.shard_numel, 1)[-shard.dim() :]
            self._output.as_strided(shard.shape, strides, self._layout.offsets[i]).add_(shard)
        comm = self._reduction.replicas
        if comm is not None and self.has_second_stage:
            divisor = self._reduction.divisors()[1]
            if self._plan.summing is not None and comm.size > 1:
                sums = Sums(self._output, self._own, self._plan.parts, lambda: self.is_last)
                self._steps = self._plan.summing.steps(sums, comm, divisor, self._what)
                if self._own is not None:
                    self._output, self._own = self._own, None
                self._step(self._steps)
                return
            if self._own is None:
                self._work = comm.all_reduce(self._output, divisor, self._what)
                return
            blocks, self._output, self._own = self._output, self._own, None
            self._inputs_kept_alive.append(blocks)
            self._work = comm.reduce_scatter([self._output], [blocks], divisor, self._what)

    def _step(self, steps: Steps) -> None:
        """Waits for the collective in flight, and begins the next one between replicas. Where there are streams, all
        that are left, on a stream beside the caller's.
        """
        device = self._output.device
        if not streams.exist_on(device):
            self._wait()
            try:
                self._work = next(steps)
            except StopIteration:
                self._steps = None
            return
        with streams.beside(device):
            for work in steps:
                if work is None:
                    return
                self._held.append(work)
                work.wait()
            self._steps, self._work = None, streams.StreamWork(device)

    def start_return(self) -> bool:
        transfers = self._reduction.transfers
        if transfers is None or self.is_partial:
            return False
        if self._return is None:
            self._return = transfers.start_out(self._finish_sums())
        return True

    def finish(self) -> Shards:
        """Waits, and returns this rank's shards of the mean gradients, in the dtype of `.grad` (partial: the
        reduce dtype).

        If they rest on the CPU the host waits, else as with collectives.
        """
        if self._reduction.transfers is not None and self.start_return():
            shards = self._return.finish()  # type: ignore[union-attr]
        else:
            shards = self._finish_sums()
        return {i: (shards, self._layout.offsets[i]) for i in self._layout.indices}

    def _finish_sums(self) -> Tensor:
        self.advance()
        while self._steps is not None:
            self.advance()
        self._wait()
        if self.is_partial:
            return self._output
        if self._reduction.divide_late is not None:
            self._reduction.divide_late(self._output)
        if self._reduction.hook is not None:
            self._reduction.hook(self._output)
        output, dtype = self._output, self._layout.delivered_dtype
        return output if output.dtype == dtype else output.to(dtype)

    def abandon(self) -> None:
        self._wait()

    def _wait(self) -> None:
        """Waits for the collective in flight, and drops what it has read. The sums stay."""
        if self._work is not None:
            try:
                self._work.wait()
            except RuntimeError as error:  # a peer is gone, for example
                purpose = (self._reduction.replicas or self._reduction.shards).purpose
                purpose.locate(error, f"reducing gradients of {purpose.label}")
                raise
            self._work = None
        self._held_beside = None
        self._held.clear()
        if self._return is not None:
            self._return.finish()
        self._inputs_kept_alive.clear()
        return_segments, self._return_segments = self._return_segments, None
        if return_segments is not None:
            return_segments()


def start(
    gradients: Mapping[int, Tensor],
    plan: ReducePlan,
    reduction: Reduction,
    carried: Mapping[int, Tensor],
    what: str = "",
) -> Pending:
    """Begins to reduce `gradients` (parameter index -> unsharded gradient, for each index of the plan), which must not
    be written to until `finish`. `what` names them.

    Every rank must call it, in the same order, with the same plan.
    """
    layout, comm = plan.layout, reduction.shards
    if comm.size == 1:
        return _start_alone(gradients, plan, reduction, carried, what)
    if plan.pieces and reduction.hook is None and not reduction.by_hook:  # a hook sees the sum as a whole
        return _start_in_pieces(gradients[layout.indices[0]], plan, reduction, carried, what)
    device = gradients[layout.indices[0]].device
    # Nobody reads padding but a user's hook, and other sums than all-reduces.
    reads_padding = reduction.hook is not None or plan.summing is not None or reduction.by_hook
    allocate = comm.memory.zeros if reads_padding else comm.memory.empty
    num_blocks = reduction.num_blocks
    output = allocate(layout.shard_numel * num_blocks, dtype=layout.reduce_dtype, device=device)
    inputs = [gradients[i].to(layout.wire_dtype).contiguous().view(-1) for i in layout.direct]
    outputs = [output.as_strided(size, (1,), offset) for size, offset in plan.direct]
    return_segments = None
    if layout.packed_numel:
        segments = plan.take_segments(device, comm.memory)
        if reads_padding:
            segments.flat.zero_()
        plan.pack(gradients, segments)
        inputs.append(segments.flat)
        is_part = outputs or num_blocks > 1
        outputs.append(output[layout.packed_start : layout.shard_numel] if is_part else output)
        return_segments = partial(plan.return_segments, segments)
    divisor = comm.size if reduction.divisor is None else reduction.divisor
    work = None
    if plan.exchanges and outputs:
        work, sent = _exchange(plan, reduction, outputs, inputs, plan.members[: len(inputs)], divisor, what)
        if return_segments is not None and not _share_memory(sent[-1], inputs[-1]):
            return_segments()  # they are encoded
            return_segments = None
        inputs = sent
    elif outputs:
        sources = inputs
        if num_blocks > 1:
            outputs, sources = _in_blocks(outputs, inputs, num_blocks, layout.shard_numel)
        if comm.memory.is_symmetric:
            _meet(comm, outputs, sources)
        work = comm.reduce_scatter(outputs, sources, divisor, what)
    return PendingReduce(
        plan, reduction, work, output, inputs, carried, plan.nbytes, what, return_segments=return_segments
    )


def _meet(comm: Comm, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    """Has ranks meet for what they reduce in symmetric memory. In fp16 quotients are summed, which lie elsewhere."""
    if comm.group is not None and outputs[0].dtype != torch.float16:
        comm.memory.meet(comm.group, [*outputs, *inputs])


def _in_blocks(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], count: int, stride: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the outputs and inputs of reduce-scatters that are for `count` replicas, block by block.

    inputs[i]: the segments of all ranks, those of each replica side by side. outputs[i]: where this rank's shard for
    the first replica goes; that for the next is `stride` elements behind.
    """
    blocks = [
        each.as_strided(each.shape, (1,), each.storage_offset() + b * stride) for each in outputs for b in range(count)
    ]
    return blocks, [block for each in inputs for block in each.view(count, -1).unbind()]


def _exchange(
    plan: ReducePlan,
    reduction: Reduction,
    outputs: Sequence[Tensor],
    inputs: Sequence[Tensor],
    members: Sequence[Sequence[Member]],
    divisor: float,
    what: str,
) -> tuple[Work, list[Tensor]]:
    """Begins to exchange encoded gradients, which are summed into `outputs` when the work is waited for. Returns what
    is sent, too.

    inputs[i]: the segments of all ranks, one behind the other. members[i]: the parameters in them.
    """
    encoder = plan.encoder
    encoded = [encoder.encode(each.view(plan.world_size, -1), m) for each, m in zip(inputs, members, strict=True)]
    sent = [each.view(-1) for each in encoded]
    if reduction.num_blocks > 1:
        outputs, sent = _in_blocks(outputs, sent, reduction.num_blocks, plan.layout.shard_numel)
    return exchange_and_sum(reduction.shards, outputs, sent, divisor, encoder.codec.sum, what), sent


def exchange_and_sum(
    comm: Comm,
    outputs: Sequence[Tensor],
    sent: Sequence[Tensor],
    divisor: float,
    add: Callable[[Rows, Tensor], None] | None = None,
    what: str = "",
) -> Work:
    """Begins to exchange the slices of each of `sent`. Waiting for the work sums what has arrived into outputs[i], by
    `add(rows, total)`, or in the dtype of that, and divides it. Every rank must call it.
    """
    work, rows = comm.exchange(sent, what)
    return SumWork([work], sent, outputs, rows, divisor, add)


def _share_memory(one: Tensor, other: Tensor) -> bool:
    """Returns True if both lie in one storage, or, as those that other libraries have wrapped, in two at one address.
    Storages on the meta device have the address 0.
    """
    address = one.untyped_storage().data_ptr()
    is_one_address = address != 0 and address == other.untyped_storage().data_ptr()
    return is_one_address or compat.storage_id(one) == compat.storage_id(other)


def resume(
    carried: Mapping[int, Tensor], plan: ReducePlan, reduction: Reduction, device: torch.device, what: str
) -> PendingReduce:
    """Begins to sum between replicas what earlier reductions have left, where no gradient has come since. Every rank
    must call it, in the same order.
    """
    layout = plan.layout
    numel = layout.shard_numel * reduction.num_blocks
    output = reduction.shards.memory.zeros(numel, dtype=layout.reduce_dtype, device=device)
    return PendingReduce(plan, reduction, None, output, [], carried, layout.payload_nbytes, what)


def _start_alone(
    gradients: Mapping[int, Tensor],
    plan: ReducePlan,
    reduction: Reduction,
    carried: Mapping[int, Tensor],
    what: str,
) -> Pending:
    """Begins the reduction of a group whose parameters one rank holds whole."""
    layout = plan.layout
    extras = reduction.replicas, reduction.hook, reduction.transfers, reduction.divide_late
    if not any(each is not None for each in extras):
        return Unreduced({i: _own(gradients[i], i, plan, reduction.divisor) for i in layout.indices}, plan.nbytes)
    output = _as_one(gradients, plan, reads_padding=reduction.hook is not None or plan.summing is not None)
    if reduction.replicas is None and reduction.divisor not in (None, 1):
        output.div_(reduction.divisor)
    return PendingReduce(plan, reduction, None, output, [], carried, plan.nbytes, what)


def _own(gradient: Tensor, i: int, plan: ReducePlan, divisor: float | None) -> tuple[Tensor, int]:
    """Returns one rank's gradient in the dtype of `.grad`, in memory that nobody else has, and its offset there."""
    layout = plan.layout
    shard = _rounded(gradient, i, plan) if plan.exchanges else gradient.contiguous().to(layout.reduce_dtype)
    if divisor is not None:
        shard = shard / divisor
    shard = compat.owned(shard.to(layout.delivered_dtype))  # later gradients are added to it
    return shard, int(shard.storage_offset())


def _rounded(gradient: Tensor, i: int, plan: ReducePlan) -> Tensor:
    """Returns one rank's gradient in the reduce dtype, encoded and decoded as if it had travelled."""
    layout, codec = plan.layout, plan.encoder.codec
    packed = gradient.to(layout.wire_dtype).contiguous()
    if not packed.numel():
        return packed.to(layout.reduce_dtype)
    if codec.feedback and _share_memory(packed, gradient):
        packed = packed.clone()  # what was not sent before is added to it
    size = packed.numel()
    wire = plan.encoder.encode(packed.view(1, -1), [Member(i, 0, 0, size, size)])
    total_dtype = torch.float32 if layout.reduce_dtype == torch.float16 else layout.reduce_dtype
    total = torch.empty(size, dtype=total_dtype, device=gradient.device)
    codec.sum(wire, total)
    return total.to(layout.reduce_dtype).view(gradient.shape)


def _as_one(gradients: Mapping[int, Tensor], plan: ReducePlan, reads_padding: bool) -> Tensor:
    """Returns one rank's gradients as one flat tensor in the reduce dtype, rounded as if they had travelled.

    It will be written to: a gradient's own memory is used only if nobody else holds it. Autograd may have given another
    part of the graph, whose backward is still to come, a view of the same memory.
    """
    layout = plan.layout
    if plan.exchanges:
        gradients = {i: _rounded(gradients[i], i, plan) for i in layout.indices}
    some = gradients[layout.indices[0]]
    if some.numel() == layout.shard_numel:  # there is no other, and no padding
        whole = some.to(layout.reduce_dtype)
        if whole.is_contiguous() and compat.owns_memory(whole):
            return whole.view(-1)
    allocate = torch.zeros if reads_padding else torch.empty
    output = allocate(layout.shard_numel, dtype=layout.reduce_dtype, device=some.device)
    for i in layout.indices:
        gradient = gradients[i]
        output.as_strided((gradient.numel(),), (1,), layout.offsets[i]).copy_(gradient.reshape(-1))
    return output


# ---- large gradients, part by part


def _start_in_pieces(
    gradient: Tensor, plan: ReducePlan, reduction: Reduction, carried: Mapping[int, Tensor], what: str
) -> PendingReduce:
    """Begins to reduce one gradient piece by piece. All but the last pieces are finished on return; where there are
    streams, they are on a stream beside the caller's, which goes on.
    """
    layout, device = plan.layout, gradient.device
    numel = layout.shard_numel * reduction.num_blocks
    output = reduction.shards.memory.empty(numel, dtype=layout.reduce_dtype, device=device)
    running: deque[Work] = deque()
    with streams.beside(device):
        for first, last in plan.pieces:
            if len(running) == PIECES_IN_FLIGHT:
                running.popleft().wait()
            running.append(_start_piece(gradient, plan, reduction, output, first, last, what))
    # On streams the host has not waited for the pieces to be packed.
    inputs = [gradient] if streams.exist_on(device) else []
    nbytes = plan.nbytes if inputs else plan.nbytes * PIECES_IN_FLIGHT // len(plan.pieces)
    return PendingReduce(plan, reduction, AllWork(running), output, inputs, carried, nbytes, what)


def _start_piece(
    gradient: Tensor, plan: ReducePlan, reduction: Reduction, output: Tensor, first: int, last: int, what: str = ""
) -> Work:
    """Begins to reduce elements `first` to `last` of each rank's shard of one gradient into their place in `output`."""
    comm, divisor = reduction.shards, reduction.divisors()[0]
    size = plan.world_size, last - first
    segments = comm.memory.empty(*size, dtype=plan.layout.wire_dtype, device=output.device)
    plan.pack_piece(gradient, first, last, segments)
    outputs, inputs = [output[first:last]], [segments.view(-1)]
    if not plan.exchanges:
        if reduction.num_blocks > 1:
            outputs, inputs = _in_blocks(outputs, inputs, reduction.num_blocks, plan.layout.shard_numel)
        if comm.memory.is_symmetric:
            _meet(comm, outputs, inputs)
        return AllWork([comm.reduce_scatter(outputs, inputs, divisor, what)], [segments])
    work, sent = _exchange(plan, reduction, outputs, inputs, [[plan.member_of_piece(first, last)]], divisor, what)
    return AllWork([work], sent)
