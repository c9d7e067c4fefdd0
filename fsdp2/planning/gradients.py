"""Replays the reduction of gradients: buckets, their copies, and what is in flight, in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from types import NoneType, SimpleNamespace
from typing import Any

from ..engine.buckets import PIECES_IN_FLIGHT, ReducePlan, codecs_of, find_buckets
from ..engine.codec import AsIs, Cast, Encoder
from ..engine.layout import BucketLayout, ParamSpec, bucket_layout
from ..engine.reduce import Pending


class ReplayedGradients:
    """Counts the gradients of one group, and reduces each bucket when it is complete, as GroupGradients does."""

    def __init__(self, group: Any, specs: tuple[ParamSpec, ...]) -> None:
        self.group, self.specs, self.ledger = group, specs, group.ledger
        self.machine, self.num_shards = group.ledger.machine, group.num_shards
        self.num_replicas = group.root.setting.replicas
        self.trainable = [i for i, p in enumerate(group.planned.parameters) if p.requires_grad]
        self.are_all_trainable = len(self.trainable) == len(specs)
        policy = group.settings.policy
        if type(policy.gradient_codec) not in (AsIs, Cast, NoneType):
            raise NotImplementedError(
                f"plan: expected no gradient_codec but Cast or AsIs, got {policy.gradient_codec!r}: encoded gradients "
                "are not replayed. Plan with wire_dtype=torch.bfloat16 in its place."
            )
        self.reduce_dtypes = tuple(policy.gradient_dtype(spec.storage_dtype) for spec in specs)
        self.codecs = codecs_of(specs, policy, self.machine.sums_on_arrival(self.num_shards))
        each = zip(self.codecs, self.reduce_dtypes, strict=True)
        self.wire_dtypes = tuple(codec.packed_dtype(summed) for codec, summed in each)
        device = self.machine.torch_device
        self.buckets = find_buckets(specs, self.reduce_dtypes, self.wire_dtypes, self.trainable, device)
        self.sent_nbytes = sum(specs[i].shard_numel * self.wire_dtypes[i].itemsize for i in self.trainable)
        self.sent_nbytes *= self.num_shards
        self._plans = [self._plan(indices) for indices in self.buckets]
        self._bucket_of = {i: number for number, indices in enumerate(self.buckets) for i in indices}
        # Those that are to be reduced, by bucket; how many are still to come; and buckets of which all have come. An
        # earlier reduction may have taken some of a bucket.
        self._arrived: dict[int, set[int]] = {}
        self._missing: list[int] = []
        self._done: set[int] = set()
        # Bytes of sharded gradients that this step has delivered.
        self.delivered = 0
        # What ReductionQueue reads.
        self.backward_pass: object = None
        self.reduction = SimpleNamespace(transfers=None)

    def _plan(self, indices: Sequence[int]) -> ReducePlan:
        offsets = self.group.layout.shard_offsets
        ordered = sorted(indices, key=offsets.__getitem__)
        minimum = self.machine.direct_min_bytes(self.num_shards)
        first = ordered[0]
        layout = bucket_layout(self.specs, ordered, self.reduce_dtypes[first], minimum, self.wire_dtypes[first])
        return ReducePlan(layout, self.specs, self.num_shards, self.machine.torch_device, Encoder(self.codecs[first]))

    def nbytes(self, i: int) -> int:
        """Returns the bytes of a parameter's gradient, as autograd computes it."""
        parameter = self.group.planned.parameters[i]
        return parameter.numel() * self.specs[i].compute_dtype.itemsize

    # ---- as gradients arrive

    def clear(self) -> None:
        """Frees the sharded gradients, between steps."""
        self.ledger.drop(self.delivered)
        self.delivered = 0

    def begin_backward(self) -> None:
        self._arrived, self._missing, self._done = {}, [*map(len, self.buckets)], set()

    def arrive(self, i: int) -> None:
        self.ledger.add(self.nbytes(i))
        number = self._bucket_of[i]
        self._arrived.setdefault(number, set()).add(i)
        self._missing[number] -= 1
        if not self._missing[number]:
            self._done.add(number)
            if len(self._done) == len(self.buckets):
                self.group.last_gradient()
            self._process(number)

    def end_backward(self) -> None:
        """Reduces buckets that are not complete."""
        for number in [*self._arrived]:
            self._process(number)

    def _process(self, number: int) -> None:
        arrived = self._arrived.pop(number)
        queue, plan = self.group.root.queue, self._plans[number]
        if len(arrived) < len(self.buckets[number]):
            plan = self._plan(sorted(arrived))
        queue.make_room()
        if self.num_shards == 1:
            queue.add(self, self._start_alone(plan, arrived))
        elif plan.halves and self.num_replicas == 1:
            queue.add(self, self._start_in_halves(plan, arrived))
        elif plan.pieces:
            queue.add(self, self._start_in_pieces(plan, arrived))
        else:
            queue.add(self, self._start(plan, arrived))

    # ---- reductions

    def _start(self, plan: ReducePlan, arrived: set[int]) -> ReplayedReduction:
        layout, ledger = plan.layout, self.ledger
        ledger.add(layout.shard_numel * layout.reduce_dtype.itemsize)
        ledger.add(packed := layout.packed_numel * self.num_shards * layout.wire_dtype.itemsize)
        direct = sum(self.nbytes(i) for i in layout.direct)
        pending = ReplayedReduction(self, layout, plan.nbytes, direct + packed)
        largest = max([layout.packed_numel, *(self.specs[i].shard_numel for i in layout.direct)])
        pending.exchange(layout.shard_numel, direct + packed, largest, len(layout.direct) + (packed > 0))
        ledger.drop(sum(self.nbytes(i) for i in arrived) - direct)  # what was packed
        pending.sum_replicas_beside()
        return pending

    def _start_in_halves(self, plan: ReducePlan, arrived: set[int]) -> ReplayedReduction:
        queue, layout, ledger = self.group.root.queue, plan.layout, self.ledger
        ledger.add(layout.shard_numel * layout.reduce_dtype.itemsize)
        for number, (first, last) in enumerate(plan.halves):
            copied = (last - first) * self.num_shards * layout.wire_dtype.itemsize
            ledger.add(copied)
            pending = ReplayedReduction(self, layout, plan.nbytes // 2, copied, num_halves=1, is_first=number == 0)
            pending.exchange(last - first, copied, last - first)
            if number == 0:
                queue.add(self, pending)
                queue.make_room()
        ledger.drop(sum(self.nbytes(i) for i in arrived))
        return pending

    def _start_in_pieces(self, plan: ReducePlan, arrived: set[int]) -> ReplayedReduction:
        layout, ledger = plan.layout, self.ledger
        ledger.add(layout.shard_numel * layout.reduce_dtype.itemsize)
        gradient = sum(self.nbytes(i) for i in arrived)
        running: list[ReplayedReduction] = []
        for first, last in plan.pieces:
            if len(running) == PIECES_IN_FLIGHT:
                running.pop(0).end_inputs()
            copied = (last - first) * self.num_shards * layout.wire_dtype.itemsize
            ledger.add(copied)
            running.append(ReplayedReduction(self, layout, 0, copied, waits=not self.machine.has_streams))
            running[-1].exchange(last - first, copied, last - first)
        held = gradient if self.machine.has_streams else 0
        nbytes = plan.nbytes if held else plan.nbytes * PIECES_IN_FLIGHT // len(plan.pieces)
        pending = ReplayedReduction(self, layout, nbytes, held, earlier=running)
        ledger.drop(gradient - held)
        pending.sum_replicas_beside()
        return pending

    def _start_alone(self, plan: ReducePlan, arrived: set[int]) -> ReplayedReduction:
        """One rank has whole parameters: its gradients are used where they lie, or cast, or put into one tensor."""
        layout = plan.layout
        computed = sum(self.nbytes(i) for i in arrived)
        summed = layout.shard_numel * layout.reduce_dtype.itemsize
        lies_there = all(self.specs[i].compute_dtype == layout.reduce_dtype for i in arrived)
        if not (lies_there and (len(arrived) == 1 or (self.num_replicas == 1 and not self.group.offloads))):
            self.ledger.add(summed)
            self.ledger.drop(computed)
        pending = ReplayedReduction(self, layout, plan.nbytes, 0)
        pending.advance()
        return pending

    def receive(self, pending: ReplayedReduction, of_pass: object) -> None:
        """Finishes a reduction. The shards become gradients: they stay, unless they are copied to the CPU."""
        pending.finish()
        if pending.is_first:
            return
        layout = pending.layout
        summed, stored = (layout.shard_numel * each.itemsize for each in (layout.reduce_dtype, layout.storage_dtype))
        is_cast = layout.storage_dtype != layout.reduce_dtype
        if is_cast:
            self.ledger.add(stored)
        if self.group.offloads:  # a reduction holds its sums until the copy has ended
            self.group.root.start_return(summed + stored * is_cast)
            return
        self.ledger.drop(summed * is_cast)
        self.delivered += stored


class ReplayedReduction(Pending):
    """Represents a reduction in flight, in bytes.

    `inputs`: bytes that are freed when it has been waited for. `earlier`: reductions of the same gradient's pieces,
    which end with this one. `waits`: the host waits for its end.
    """

    def __init__(
        self,
        gradients: ReplayedGradients,
        layout: BucketLayout,
        nbytes: int,
        inputs: int,
        num_halves: int = 2,
        is_first: bool = False,
        earlier: Sequence[ReplayedReduction] = (),
        waits: bool = True,
    ) -> None:
        self.layout, self.nbytes, self.num_halves, self.is_first = layout, nbytes, num_halves, is_first
        self._gradients, self._inputs, self._earlier, self._waits = gradients, inputs, earlier, waits
        self._ends = 0.0
        self._sum_nbytes = 0
        self._is_reduced = False
        self.has_second_stage = gradients.num_replicas > 1

    def exchange(self, numel: int, inputs: int, largest: int, num_tensors: int = 1) -> None:
        """Begins to send `numel` elements to each other rank in so many tensors, `largest` of them at most in one. What
        arrives takes memory where ranks sum it themselves: on gloo, and for a wire dtype.
        """
        gradients, layout = self._gradients, self.layout
        others, ranks = gradients.num_shards - 1, gradients.num_shards
        is_cast = layout.wire_dtype != layout.reduce_dtype
        last = layout.packed_numel or gradients.specs[layout.direct[-1]].shard_numel
        self._receive(gradients.machine.messages_nbytes(ranks, min(last, numel) * layout.wire_dtype.itemsize))
        if gradients.machine.backend == "gloo":
            self._receive(inputs * others // ranks)
        elif is_cast:
            self._receive(inputs)
        if is_cast and not gradients.machine.launches:
            self._sum_nbytes = largest * layout.reduce_dtype.itemsize  # a slice that is cast to be added
        nbytes = numel * layout.wire_dtype.itemsize * ranks
        self._ends = gradients.ledger.communicate(
            "reduce_scatter", nbytes, ranks, num_tensors=num_tensors, exchanges=is_cast
        )

    def _receive(self, nbytes: int) -> None:
        self._gradients.ledger.add(nbytes)
        self._inputs += nbytes

    @property
    def ends(self) -> float:
        """When the last of its collectives ends that have begun."""
        return max([self._ends, *(each.ends for each in self._earlier)])

    def sum_replicas_beside(self) -> None:
        """Begins the all-reduce between replicas behind the reduce-scatter, where a stream beside the one that computes
        waits for that. What was sent then stays until the end.
        """
        if self.has_second_stage and self._gradients.machine.has_streams:
            self._is_reduced = True
            self._sum_replicas(after=self.ends)

    def end_inputs(self) -> None:
        """Waits for the sums, and frees what they were made of."""
        ledger = self._gradients.ledger
        for each in self._earlier:
            each.end_inputs()
        if self._waits:
            ledger.wait(self._ends)
        ledger.add(self._sum_nbytes)
        ledger.drop(self._sum_nbytes + self._inputs)
        self._earlier, self._inputs, self._sum_nbytes = (), 0, 0

    def advance(self) -> None:
        if self._is_reduced:
            return
        self._is_reduced = True
        self.end_inputs()
        if self.has_second_stage and not self.is_first:
            self._sum_replicas()

    def _sum_replicas(self, after: float = 0.0) -> None:
        gradients = self._gradients
        nbytes = self.layout.shard_numel * self.layout.reduce_dtype.itemsize
        self._receive(gradients.machine.messages_nbytes(gradients.num_replicas, 0))
        ranks = gradients.group.root.setting.ranks
        self._ends = gradients.ledger.communicate("all_reduce", nbytes, gradients.num_replicas, ranks, after)

    def finish(self) -> Any:
        ends = self.ends
        self.advance()
        self._gradients.ledger.wait(max(ends, self._ends))
        self.end_inputs()
        return {}
