"""Reduces unsharded gradients to this rank's shards of their mean. It knows tensors and layouts, and no parameters."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeAlias, final

import torch
from torch import Tensor

from ..devices import streams
from ..devices.streams import AllWork, SumWork, Transfer, Transfers
from ..torch_private import internals
from .buckets import PIECES_IN_FLIGHT
from .codec import Member, Rows, Sums
from .comm import Comm, Work
from .pack import Pieces, ReducePlan

# Parameter index -> (a flat tensor, the offset in its storage at which this rank's padded shard begins).
Shards = dict[int, tuple[Tensor, int]]


@dataclass(frozen=True)
class Reduction:
    """How one group's gradients are summed."""

    shards: Comm
    """The ranks that reduce first. Each gets its slice of the sum."""
    replicas: Comm | None = None
    """The ranks that sum these slices between them, if there are several."""
    divisor: float | None = None
    """The sum over all ranks is divided by it. None: by the number of ranks."""
    all_reduce: bool = True
    """Also sums between replicas. False: keeps the slice of this rank until a later reduction does; with `divide_late`
    also where there are no replicas."""
    hook: Callable[[Tensor], None] | None = None
    """Called with each reduced flat tensor, in the reduce dtype, before it becomes gradients."""
    transfers: Transfers | None = None
    """Copies the gradients to the CPU. None: they stay where they were computed."""
    scatters_twice: bool = False
    """Replicas share one set of shards: each gets its slice of their sum, by a second reduce-scatter. False: each gets
    all of it, by an all-reduce."""
    divide_late: Callable[[Tensor], None] | None = None
    """Divides complete sums in place, by a number that is not known before. `divisor` is 1 then."""
    by_hook: bool = False
    """`shards` reduces by a user's hook, which sees whole buckets, with zeros for padding."""
    num_blocks: int = field(init=False, repr=False)
    """How many shards the first step leaves on each rank: one, or that of each replica, which the second step sums."""
    num_shards: int = field(init=False, repr=False)
    """How many ranks have shards of a bucket: replica by replica, the ranks of each in order."""

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
    """One reduction in flight."""

    nbytes: int
    """Size of its inputs."""
    is_partial = False
    """True if a later reduction sums the result between replicas. It stays in the reduce dtype until then."""
    is_summing = False
    """True while collectives between replicas are still to begin: `advance` begins the next one."""
    is_last = False
    """True if no other reduction follows in this backward pass, as far as is known."""

    def advance(self) -> None:
        """Waits for the collective in flight, and begins the next one between replicas, if there is one."""

    def mark_last(self) -> None:
        """Notes that no other reduction follows in this backward pass."""
        self.is_last = True

    def start_return(self) -> bool:
        """Waits for the sums, and begins to copy them to the CPU. Returns True if gradients rest there."""
        return False

    def finish(self) -> Shards:
        """Waits, and returns this rank's shards of the mean gradients."""
        return {}

    def abandon(self) -> None:
        """Waits until no buffer is in use, and drops the buffers."""


@final
class Unreduced(Pending):
    """The gradients of a group of one rank, which need no reduction."""

    def __init__(self, shards: Shards, nbytes: int) -> None:
        self._shards, self.nbytes = shards, nbytes

    def finish(self) -> Shards:
        return self._shards


class Begun(NamedTuple):
    """The first step of a reduction, in flight: each rank gets its shards of the sum over the ranks that shard."""

    output: Tensor
    """This rank's shards, flat, in the reduce dtype."""
    work: Work | None
    """Fills the output. None: it is filled."""
    inputs: list[Tensor]
    """Memory that is read until then."""
    nbytes: int
    """Size of the inputs."""
    when_read: Callable[[], None] | None = None
    """Called when the inputs have been read."""


@final
class PendingReduce(Pending):
    """One reduction between ranks in flight. It holds its buffers, and the gradients it reads, until `finish`.

    The first step has begun when it is made. A sum between replicas may follow, in one collective or several; where
    there are streams, it runs on a side stream.

    Args:
        carried: parameter index -> flat padded shards that earlier reductions have left for this one to include, in the
            order in which they are added.
        what: names the gradients.
    """

    def __init__(
        self, plan: ReducePlan, reduction: Reduction, carried: Mapping[int, Sequence[Tensor]], begun: Begun, label: str
    ) -> None:
        self.nbytes, self._plan, self._reduction, self._what = begun.nbytes, plan, reduction, label
        has_second_part = reduction.replicas is not None or reduction.divide_late is not None
        self.is_partial = has_second_part and not reduction.all_reduce
        self.is_summing = reduction.replicas is not None and reduction.all_reduce
        # This rank's shards of the sum, when all collectives are over.
        self._output = begun.output
        # The collective in flight.
        self._work = begun.work
        # Tensors and works that this collective, or a side stream, may still use. They are dropped when it has been
        # waited for.
        self._in_use: list[object] = [*begun.inputs]
        self._when_read = begun.when_read
        # The collectives that follow the one in flight. None: no other does.
        self._steps: _Steps | None = None
        # True if a collective has failed: the sums are incomplete.
        self._has_failed = False
        self._return: Transfer[Tensor] | None = None
        if self.is_summing or carried:
            own = None
            if self.is_summing and reduction.scatters_twice:  # allocated here, on the stream that computes
                own = self._output = begun.output.new_empty(plan.layout.shard_numel)
            self._in_use = [*begun.inputs, begun.output, *carried.values()]
            self._steps = _sum(begun.output, own, carried, plan, reduction, label, lambda: self.is_last)
            if begun.work is None or self._runs_beside:
                self._advance(waits=begun.work is None or not reduction.shards.is_stream_ordered)

    @property
    def _runs_beside(self) -> bool:
        """True if what follows runs on a side stream."""
        needs_time = self._work is not None or self._plan.summing is not None  # else one collective begins at once
        return self.is_summing and needs_time and streams.exist_on(self._output.device)

    def advance(self) -> None:
        if self._steps is not None:
            self._advance()

    def _advance(self, waits: bool = True) -> None:
        """Begins the next collective between replicas; on a side stream, all of them. `waits`: as for
        `streams.side_stream`.
        """
        if not self._runs_beside:
            self._step()
            return
        held, device = [self._work, *self._in_use], self._output.device
        with streams.side_stream(device, waits):
            self._step()
            while self._steps is not None and self._work is not None:
                held.append(self._work)
                self._step()
            if self._work is None:
                self._work = streams.StreamWork(device)
        self._in_use = held

    def _step(self) -> None:
        """Waits for the collective in flight, and begins the next one, if there is one."""
        self._wait()
        assert self._steps is not None, "something follows"
        try:
            self._work = next(self._steps)
        except StopIteration as end:
            self._work, self._steps, self.is_summing = end.value, None, False
        except BaseException:
            self._steps, self._has_failed = None, True
            raise

    def _wait(self) -> None:
        """Waits for the collective in flight, and drops what it has read. The sums stay."""
        if self._work is not None:
            try:
                self._work.wait()
            except RuntimeError as error:  # a peer is gone, for example
                self._has_failed = True
                comm_label = (self._reduction.replicas or self._reduction.shards).comm_label
                comm_label.locate(error, f"reducing gradients of {comm_label.label}")
                raise
            self._work = None
        self._in_use.clear()
        when_read, self._when_read = self._when_read, None
        if when_read is not None:
            when_read()

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

        Raises:
            RuntimeError: a collective fails, or has failed before.
        """
        if self._reduction.transfers is not None and self.start_return():
            shards = self._return.finish()  # type: ignore[union-attr]
        else:
            shards = self._finish_sums()
        return {i: (shards, self._plan.layout.offsets[i]) for i in self._plan.layout.indices}

    def _finish_sums(self) -> Tensor:
        if self._has_failed:
            raise RuntimeError(f"the reduction of gradients{self._what} has failed before: its sums are incomplete")
        while self._steps is not None:
            self._advance()
        self._wait()
        output, reduction, dtype = self._output, self._reduction, self._plan.layout.delivered_dtype
        if self.is_partial:
            return output
        if reduction.divide_late is not None:
            reduction.divide_late(output)
        if reduction.hook is not None:
            reduction.hook(output)
        return output if output.dtype == dtype else output.to(dtype)

    def abandon(self) -> None:
        self._wait()
        if self._return is not None:
            self._return.finish()
        self._steps = None


_Steps: TypeAlias = "Generator[Work | None, None, Work | None]"


def _sum(
    output: Tensor,
    own: Tensor | None,
    carried: Mapping[int, Sequence[Tensor]],
    plan: ReducePlan,
    reduction: Reduction,
    label: str,
    is_last: Callable[[], bool],
) -> _Steps:
    """Adds to `output` what earlier reductions have left, and has replicas sum it, where it is, or into `own`.

    It yields what is to be waited for before it goes on, as `codec.Steps` do, and returns the collective that is still
    in flight. Never yield inside a `with`: the caller would go on inside it, on another stream for example.
    """
    layout, comm, divisor = plan.layout, reduction.replicas, reduction.divisors()[1]
    for i, shards in carried.items():
        for shard in shards:
            strides = (layout.shard_numel, 1)[-shard.dim() :]
            output.as_strided(shard.shape, strides, layout.offsets[i]).add_(shard)
    del carried  # its memory
    if comm is None or not reduction.all_reduce:
        return None
    if plan.summing is not None and comm.size > 1:
        yield from plan.summing.steps(Sums(output, own, plan.parts, is_last), comm, divisor, label)
        return None
    if own is None:
        return comm.all_reduce(output, divisor, label)
    return AllWork([comm.reduce_scatter([own], [output], divisor, label)], [output])


# ---- the first step


def start(
    gradients: Mapping[int, Tensor],
    plan: ReducePlan,
    reduction: Reduction,
    carried: Mapping[int, Sequence[Tensor]],
    label: str = "",
) -> Pending:
    """Begins to reduce `gradients` (parameter index -> unsharded gradient, for each index of the plan), which must not
    be written to until `finish`. `label` names them.

    No gradients: begins to sum between replicas what earlier reductions have left (`carried`), where no gradient has
    come since. Every rank must call it, in the same order, with the same plan.
    """
    if not gradients:
        begun = _begin_with_nothing(carried, plan, reduction)
    elif reduction.shards.size == 1:
        extras = reduction.replicas, reduction.hook, reduction.transfers, reduction.divide_late
        if not any(each is not None for each in extras):
            shards = {i: _own(gradients[i], i, plan, reduction.divisor) for i in plan.layout.indices}
            return Unreduced(shards, plan.nbytes)
        begun = _begin_alone(gradients, plan, reduction)
    elif plan.pieces is not None and reduction.hook is None and not reduction.by_hook:  # a hook sees the whole sum
        begun = _scatter_pieces(gradients[plan.layout.indices[0]], plan, plan.pieces, reduction, label)
    else:
        begun = _scatter(gradients, plan, reduction, label)
    return PendingReduce(plan, reduction, carried, begun, label)


def _scatter(gradients: Mapping[int, Tensor], plan: ReducePlan, reduction: Reduction, label: str) -> Begun:
    """Packs gradients, and begins a reduce-scatter, or an exchange of what is encoded."""
    layout, comm, num_blocks = plan.layout, reduction.shards, reduction.num_blocks
    device = gradients[layout.indices[0]].device
    # Nobody reads padding but a user's hook, and other sums than all-reduces.
    reads_padding = reduction.hook is not None or plan.summing is not None or reduction.by_hook
    allocate = comm.memory.zeros if reads_padding else comm.memory.empty
    output = allocate(layout.shard_numel * num_blocks, dtype=layout.reduce_dtype, device=device)
    inputs = [gradients[i].to(layout.wire_dtype).contiguous().view(-1) for i in layout.direct]
    outputs = [output.as_strided(size, (1,), offset) for size, offset in plan.direct]
    when_read = None
    if layout.packed_numel:
        segments = plan.take_segments(device, comm.memory)
        plan.pack(gradients, segments, reads_padding)
        inputs.append(segments.flat)
        is_part = outputs or num_blocks > 1
        outputs.append(output[layout.packed_start : layout.shard_numel] if is_part else output)
        when_read = partial(plan.return_segments, segments)
    divisor = comm.size if reduction.divisor is None else reduction.divisor
    if not outputs:
        return Begun(output, None, inputs, plan.nbytes)
    if plan.exchanges:
        work, sent = _exchange(plan, reduction, outputs, inputs, plan.members[: len(inputs)], divisor, label)
        if when_read is not None and not _share_memory(sent[-1], inputs[-1]):
            when_read()  # they are encoded
            when_read = None
        return Begun(output, work, sent, plan.nbytes, when_read)
    sources = inputs
    if num_blocks > 1:
        outputs, sources = _in_blocks(outputs, inputs, num_blocks, layout.shard_numel)
    if comm.memory.is_symmetric:
        _meet(comm, outputs, sources)
    return Begun(output, comm.reduce_scatter(outputs, sources, divisor, label), inputs, plan.nbytes, when_read)


def _begin_with_nothing(carried: Mapping[int, Sequence[Tensor]], plan: ReducePlan, reduction: Reduction) -> Begun:
    """Begins with zeros, to which what earlier reductions have left is added."""
    layout, (some, *_) = plan.layout, next(iter(carried.values()))
    numel = layout.shard_numel * reduction.num_blocks
    output = reduction.shards.memory.zeros(numel, dtype=layout.reduce_dtype, device=some.device)
    return Begun(output, None, [], layout.payload_nbytes)


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
    label: str,
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
    return exchange_and_sum(reduction.shards, outputs, sent, divisor, encoder.codec.sum, label), sent


def exchange_and_sum(
    comm: Comm,
    outputs: Sequence[Tensor],
    sent: Sequence[Tensor],
    divisor: float,
    add: Callable[[Rows, Tensor], None] | None = None,
    label: str = "",
) -> Work:
    """Begins to exchange the slices of each of `sent`. Waiting for the work sums what has arrived into outputs[i], by
    `add(rows, total)`, or in the dtype of that, and divides it. Every rank must call it.
    """
    work, rows = comm.exchange(sent, label)
    return SumWork([work], sent, outputs, rows, divisor, add)


def _share_memory(one: Tensor, other: Tensor) -> bool:
    """Returns True if both lie in one storage, or, as those that other libraries have wrapped, in two at one address.
    Storages on the meta device have the address 0.
    """
    address = one.untyped_storage().data_ptr()
    is_one_address = address != 0 and address == other.untyped_storage().data_ptr()
    return is_one_address or internals.storage_id(one) == internals.storage_id(other)


def _begin_alone(gradients: Mapping[int, Tensor], plan: ReducePlan, reduction: Reduction) -> Begun:
    """Begins the reduction of a group whose parameters one rank holds whole: nothing is scattered."""
    output = _as_one(gradients, plan, reads_padding=reduction.hook is not None or plan.summing is not None)
    if reduction.replicas is None and reduction.divisor not in (None, 1):
        output.div_(reduction.divisor)
    return Begun(output, None, [], plan.nbytes)


def _own(gradient: Tensor, i: int, plan: ReducePlan, divisor: float | None) -> tuple[Tensor, int]:
    """Returns one rank's gradient in the dtype of `.grad`, in memory that nobody else has, and its offset there."""
    layout = plan.layout
    shard = _rounded(gradient, i, plan) if plan.exchanges else gradient.contiguous().to(layout.reduce_dtype)
    if divisor is not None:
        shard = shard / divisor
    shard = internals.owned(shard.to(layout.delivered_dtype))  # later gradients are added to it
    return shard, int(shard.storage_offset())


def _rounded(gradient: Tensor, i: int, plan: ReducePlan) -> Tensor:
    """Returns one rank's gradient in the reduce dtype, encoded and decoded as if it had been sent."""
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
    """Returns one rank's gradients as one flat tensor in the reduce dtype, rounded as if they had been sent.

    It will be written to: a gradient's own memory is used only if nobody else holds it. Autograd may have given another
    part of the graph, whose backward is still to come, a view of the same memory.
    """
    layout = plan.layout
    if plan.exchanges:
        gradients = {i: _rounded(gradients[i], i, plan) for i in layout.indices}
    some = gradients[layout.indices[0]]
    if some.numel() == layout.shard_numel:  # there is no other, and no padding
        whole = some.to(layout.reduce_dtype)
        if whole.is_contiguous() and internals.owns_memory(whole):
            return whole.view(-1)
    allocate = torch.zeros if reads_padding else torch.empty
    output = allocate(layout.shard_numel, dtype=layout.reduce_dtype, device=some.device)
    for i in layout.indices:
        gradient = gradients[i]
        output.as_strided((gradient.numel(),), (1,), layout.offsets[i]).copy_(gradient.reshape(-1))
    return output


# ---- large gradients, piece by piece


def _scatter_pieces(gradient: Tensor, plan: ReducePlan, pieces: Pieces, reduction: Reduction, label: str) -> Begun:
    """Begins to reduce one gradient piece by piece. On return all but the last pieces are reduced; where there are
    streams, a side stream still reduces them.
    """
    layout, device = plan.layout, gradient.device
    numel = layout.shard_numel * reduction.num_blocks
    output = reduction.shards.memory.empty(numel, dtype=layout.reduce_dtype, device=device)
    running: deque[Work] = deque()
    with streams.side_stream(device):
        for bounds in pieces.bounds:
            if len(running) == PIECES_IN_FLIGHT:
                running.popleft().wait()
            running.append(_scatter_piece(gradient, plan, pieces, reduction, output, bounds, label))
    # On streams the host has not waited for the pieces to be packed.
    inputs = [gradient] if streams.exist_on(device) else []
    nbytes = plan.nbytes if inputs else plan.nbytes * PIECES_IN_FLIGHT // len(pieces.bounds)
    return Begun(output, AllWork(running), inputs, nbytes)


def _scatter_piece(
    gradient: Tensor,
    plan: ReducePlan,
    pieces: Pieces,
    reduction: Reduction,
    output: Tensor,
    bounds: tuple[int, int],
    label: str,
) -> Work:
    """Begins to reduce one piece of each rank's shard of a gradient into its place in `output`."""
    comm, divisor, (first, last) = reduction.shards, reduction.divisors()[0], bounds
    segments = comm.memory.empty(plan.world_size, last - first, dtype=plan.layout.wire_dtype, device=output.device)
    pieces.pack(gradient, first, last, segments)
    outputs, inputs = [output[first:last]], [segments.view(-1)]
    if not plan.exchanges:
        if reduction.num_blocks > 1:
            outputs, inputs = _in_blocks(outputs, inputs, reduction.num_blocks, plan.layout.shard_numel)
        if comm.memory.is_symmetric:
            _meet(comm, outputs, inputs)
        return AllWork([comm.reduce_scatter(outputs, inputs, divisor, label)], [segments])
    work, sent = _exchange(plan, reduction, outputs, inputs, [[pieces.member(first, last)]], divisor, label)
    return AllWork([work], sent)
