"""Full gradients to this rank's shards of their mean. Takes tensors and a layout; knows no parameter."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from . import group_compat, streams, torch_compat
from .comm import Comm, make_comm
from .headers import Label
from .layout import BucketLayout
from .mesh import DataMesh
from .pack import pack_piece
from .reduce_plan import ReducePlan
from .transfers import Transfer, Transfers
from .work import AllWork, Work

# Of one gradient that is sent in pieces, so many at a time: see reduce_plan.py.
PIECES_IN_FLIGHT = 2

# Parameter index -> (a tensor, where in its storage this rank's padded shard of the gradient begins).
Shards = dict[int, tuple[Tensor, int]]


@dataclass
class Reduction:
    """How one group's gradients are summed, which a user may change between backward passes.

    Args:
        shards: the ranks that share the parameters; each gets its part of the sum.
        replicas: the ranks that hold the same shards, if there are several.
        divisor: what the sum over all ranks is divided by. None: their number.
        all_reduce: also sum between replicas, or keep what this rank got until a later reduction does.
        hook: called with each reduced, flat tensor, in the reduce dtype, before it becomes gradients.
        transfers: copy the gradients to the CPU. None: they stay where they were computed.
    """

    shards: Comm
    replicas: Comm | None = None
    divisor: float | None = None
    all_reduce: bool = True
    hook: Callable[[Tensor], None] | None = None
    transfers: Transfers | None = None

    @classmethod
    def over(cls, mesh: DataMesh, transfers: Transfers | None, label: Label) -> Reduction:
        """The usual one of parameters on `mesh`."""
        groups = mesh.shard_group, mesh.replicate_group
        shards, replicas = (make_comm(group, mesh.device, label) for group in groups)
        may_grow = groups[1] is not None and group_compat.size_may_change(groups[1])
        return cls(shards, replicas if may_grow or replicas.size > 1 else None, transfers=transfers)

    def divisors(self) -> tuple[float, float]:
        """Of the reduce-scatter, and of the all-reduce behind it."""
        if self.divisor is not None:
            return (self.divisor, 1) if self.shards.size > 1 else (1, self.divisor)
        return self.shards.size, self.replicas.size if self.replicas else 1


class PendingReduce:
    """A reduction in flight; holds its buffers, and the gradients it reads, until `finish`.

    `carried`: index -> flat padded shard that an earlier reduction has left for this one to include.
    `nbytes`: of its inputs. `num_halves`: 1 if the rest of its bucket is a FirstHalf. `give_back`: to be called when
    the inputs have been read.
    """

    def __init__(
        self,
        layout: BucketLayout,
        reduction: Reduction,
        work: Work | None,
        output: Tensor,
        inputs: list[Tensor],
        carried: Mapping[int, Tensor],
        nbytes: int,
        num_halves: int = 2,
        give_back: Callable[[], None] | None = None,
    ) -> None:
        self.nbytes, self.num_halves, self._give_back = nbytes, num_halves, give_back
        self._layout, self._reduction, self._work, self._output = layout, reduction, work, output
        self._inputs_kept_alive, self._carried = inputs, carried
        self._is_scattered = False
        # What the stream beside the one that computes may still use.
        self._held_beside: tuple[Work, list[Tensor]] | None = None
        self._return: Transfer[Tensor] | None = None
        # The result still is to be summed between replicas, later: it stays in the reduce dtype.
        self.is_partial = reduction.replicas is not None and not reduction.all_reduce
        self.has_second_stage = reduction.replicas is not None and reduction.all_reduce
        # For the second stage, before which other reductions may begin.
        self._part = "" if reduction.replicas is None else reduction.replicas.label.part
        self._advance_if_free()

    def advance(self) -> None:
        """Wait for the reduce-scatter; begin the all-reduce between replicas, if there is one."""
        if self._is_scattered:
            return
        self._is_scattered = True
        self.abandon()
        for i, shard in self._carried.items():
            self._output.as_strided(shard.shape, (1,), self._layout.offsets[i]).add_(shard)
        comm = self._reduction.replicas
        if comm is not None and self.has_second_stage:
            comm.label.part = self._part
            self._work = comm.all_reduce(self._output, self._reduction.divisors()[1])

    def _advance_if_free(self) -> None:
        """The same, if neither the caller nor the stream that computes has to wait: replicas sum beside backward."""
        if self._work is None:
            self.advance()
        elif self.has_second_stage and streams.exist_on(self._output.device):
            held = self._work, [*self._inputs_kept_alive]
            with streams.beside(self._output.device):
                self.advance()
            self._held_beside = held

    def start_return(self) -> bool:
        """Wait for the sums; begin to copy them to the CPU, if gradients rest there. Return whether they do."""
        transfers = self._reduction.transfers
        if transfers is None or self.is_partial:
            return False
        if self._return is None:
            self._return = transfers.start_out(self._finish_sums())
        return True

    def finish(self) -> Shards:
        """Wait; return this rank's shards of the mean gradients, in the storage dtype (partial: the reduce dtype).

        If they rest on the CPU the host waits, else as with collectives.
        """
        self.start_return()
        shards = self._finish_sums() if self._return is None else self._return.finish()
        return {i: (shards, self._layout.offsets[i]) for i in self._layout.indices}

    def _finish_sums(self) -> Tensor:
        self.advance()
        self.abandon()
        if self.is_partial:
            return self._output
        if self._reduction.hook is not None:
            self._reduction.hook(self._output)
        output, dtype = self._output, self._layout.storage_dtype
        return output if output.dtype == dtype else output.to(dtype)

    def abandon(self) -> None:
        """Wait until the buffers are no longer in use, and give them up."""
        if self._work is not None:
            try:
                self._work.wait()
            except RuntimeError as error:  # a peer is gone, say
                label = (self._reduction.replicas or self._reduction.shards).label
                label.locate(error, f"reducing gradients of {label.name}")
                raise
            self._work = None
        self._held_beside = None
        if self._return is not None:
            self._return.finish()
        self._inputs_kept_alive.clear()
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


class _Local:
    """What a reduction over one rank is: the gradients themselves."""

    is_partial = False
    num_halves = 2

    def __init__(self, shards: Shards, nbytes: int) -> None:
        self._shards, self.nbytes = shards, nbytes

    def start_return(self) -> bool:
        return False

    def finish(self) -> Shards:
        return self._shards

    def abandon(self) -> None:
        pass


class FirstHalf:
    """A half of one gradient, in flight. Finished before the other is packed, it holds its memory no longer; with the
    other all of `output` is there.
    """

    is_partial = False
    num_halves = 1

    def __init__(self, output: Tensor, work: Work, nbytes: int) -> None:
        self.output, self._work, self.nbytes = output, work, nbytes

    def start_return(self) -> bool:
        return False

    def finish(self) -> Shards:
        self.abandon()
        return {}

    def abandon(self) -> None:
        self._work.wait()


Pending = PendingReduce | _Local | FirstHalf


def start_half(gradients: Mapping[int, Tensor], plan: ReducePlan, reduction: Reduction) -> FirstHalf | None:
    """Begin to reduce a half of what is one gradient, if it is worth that; `start` does the rest.

    Every rank must call it, in the same order, with the same plan.
    """
    if not plan.halves or reduction.hook is not None or reduction.replicas is not None or reduction.shards.size == 1:
        return None
    gradient = gradients[plan.layout.indices[0]]
    output = gradient.new_empty(plan.layout.shard_numel, dtype=plan.layout.reduce_dtype)
    return FirstHalf(output, _start_piece(gradient, plan, reduction, output, *plan.halves[0]), plan.nbytes // 2)


def start(
    gradients: Mapping[int, Tensor],
    plan: ReducePlan,
    reduction: Reduction,
    carried: Mapping[int, Tensor],
    half: FirstHalf | None = None,
) -> Pending:
    """Begin to reduce `gradients` (index -> full gradient), which must not be written to until `finish`.

    Every rank must call it, in the same order, with the same plan. `half`: what `start_half` has begun.
    """
    if half is not None:
        rest = _start_piece(gradients[plan.layout.indices[0]], plan, reduction, half.output, *plan.halves[1])
        return PendingReduce(plan.layout, reduction, rest, half.output, [], carried, plan.nbytes // 2, num_halves=1)
    layout, comm = plan.layout, reduction.shards
    if comm.size == 1:
        if reduction.replicas is None and reduction.hook is None and reduction.transfers is None:
            return _Local({i: _own(gradients[i], layout, reduction.divisor) for i in layout.indices}, plan.nbytes)
        output = _as_one(gradients, layout, _allocator(reduction))
        if reduction.replicas is None and reduction.divisor is not None:
            output.div_(reduction.divisor)
        return PendingReduce(layout, reduction, None, output, [], carried, plan.nbytes)
    device = gradients[layout.indices[0]].device
    allocate = _allocator(reduction)
    output = allocate(layout.shard_numel, dtype=layout.reduce_dtype, device=device)
    if plan.pieces and reduction.hook is None:
        gradient = gradients[layout.indices[0]]
        work: Work | None = _start_in_pieces(gradient, plan, reduction, output)
        # Where the caller has not waited for the pieces to be packed.
        inputs = [gradient] if streams.exist_on(device) else []
        nbytes = plan.nbytes if inputs else plan.nbytes * PIECES_IN_FLIGHT // len(plan.pieces)
        return PendingReduce(layout, reduction, work, output, inputs, carried, nbytes)
    inputs = [gradients[i].to(layout.wire_dtype).contiguous().view(-1) for i in layout.direct]
    outputs = [output.as_strided(size, (1,), offset) for size, offset in plan.direct]
    give_back = None
    if layout.packed_numel:
        segments = plan.take_segments(device)
        if reduction.hook is not None:
            segments.flat.zero_()
        plan.pack(gradients, segments)
        inputs.append(segments.flat)
        outputs.append(output[layout.packed_start :] if outputs else output)
        give_back = partial(plan.give_back, segments)
    work = comm.reduce_scatter(outputs, inputs, reduction.divisors()[0]) if outputs else None
    return PendingReduce(layout, reduction, work, output, inputs, carried, plan.nbytes, give_back=give_back)


def _allocator(reduction: Reduction) -> Callable[..., Tensor]:
    """Of memory with padding, which nobody reads but a user's hook."""
    return torch.empty if reduction.hook is None else torch.zeros


def _start_in_pieces(gradient: Tensor, plan: ReducePlan, reduction: Reduction, output: Tensor) -> Work:
    """Begin to reduce one gradient, which is packed; of each piece but the last ones, the sum is there on return.

    Where there are streams, that is so on one beside the caller's, which goes on.
    """
    running: deque[Work] = deque()
    with streams.beside(output.device):
        for first, last in plan.pieces:
            if len(running) == PIECES_IN_FLIGHT:
                running.popleft().wait()
            running.append(_start_piece(gradient, plan, reduction, output, first, last))
    return AllWork(running)


def _start_piece(
    gradient: Tensor, plan: ReducePlan, reduction: Reduction, output: Tensor, first: int, last: int
) -> Work:
    """Begin to reduce elements `first` to `last` of each rank's shard of one gradient into its place in `output`."""
    segments = output.new_empty(plan.world_size, last - first, dtype=plan.layout.wire_dtype)
    pack_piece(gradient, plan.spec, first, last, segments)
    comm = reduction.shards
    work = comm.reduce_scatter([output[first:last]], [segments.view(-1)], reduction.divisors()[0])
    return AllWork([work], [segments])


def resume(
    carried: Mapping[int, Tensor], layout: BucketLayout, reduction: Reduction, device: torch.device
) -> PendingReduce:
    """Begin to sum between replicas what earlier reductions have left, where no gradient has come since."""
    output = torch.zeros(layout.shard_numel, dtype=layout.reduce_dtype, device=device)
    return PendingReduce(layout, reduction, None, output, [], carried, layout.payload_nbytes)


def _own(gradient: Tensor, layout: BucketLayout, divisor: float | None) -> tuple[Tensor, int]:
    shard = gradient.contiguous().to(layout.wire_dtype).to(layout.reduce_dtype)
    if divisor is not None:
        shard = shard / divisor
    shard = torch_compat.owned(shard.to(layout.storage_dtype))  # later gradients are added to it
    return shard, int(shard.storage_offset())


def _as_one(gradients: Mapping[int, Tensor], layout: BucketLayout, allocate: Callable[..., Tensor]) -> Tensor:
    """One rank's whole gradients as one flat tensor in the reduce dtype, rounded as if they had travelled.

    To be written to: a gradient's own memory only if nobody else holds it. Autograd may have given another part of the
    graph, whose backward is still to come, a view of the same.
    """
    some = gradients[layout.indices[0]]
    if some.numel() == layout.shard_numel:  # there is no other, and no padding
        rounded = some.to(layout.wire_dtype).to(layout.reduce_dtype)
        if rounded.is_contiguous() and torch_compat.owns_memory(rounded):
            return rounded.view(-1)
    output = allocate(layout.shard_numel, dtype=layout.reduce_dtype, device=some.device)
    for i in layout.indices:
        gradient = gradients[i]
        if layout.wire_dtype != layout.reduce_dtype:
            gradient = gradient.to(layout.wire_dtype)
        output.as_strided((gradient.numel(),), (1,), layout.offsets[i]).copy_(gradient.reshape(-1))
    return output


def on_stream(hook: Callable[[Tensor], None], stream: torch.Stream) -> Callable[[Tensor], None]:
    """`hook` run on `stream`, ordered behind and before what the current stream does."""

    def run(reduced: Tensor) -> None:
        current = torch.accelerator.current_stream(reduced.device)
        stream.wait_stream(current)
        with stream:
            hook(reduced)
        current.wait_stream(stream)

    return run
