"""Reduces unsharded gradients, as autograd produces them, into the sharded parameters' `.grad`.

A gradient takes this way. The last column says who calls the method:

| it is | where | by | called by |
|---|---|---|---|
| counted, as autograd has accumulated it | `.grad` of the unsharded parameter | `Bucket.arrive` | autograd's hook |
| taken, when its bucket is complete | a bucket's dict | `_complete`, `flush`, `end_backward` | Bucket, group, root |
| kept for a later pass, without gradient sync | `unsynchronized` | `_process` | |
| in flight | a Pending in the ReductionQueue | `_process`, `resume` | root |
| kept, as replicas have not summed it yet | `partial` | `receive` | the queue |
| delivered | `.grad` of the sharded parameter | `receive` | the queue |

Ranks that must reduce what others do, without gradients of their own, call `reduce_with_zeros` (conditional modules).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from ..calls.user_code import are_in_force, hidden, run_shown
from ..parameters.cut_graphs import refuse_graph
from ..torch_private import compat
from ..torch_private.compat import backward_hooks_of, new_dtensor, post_accumulate_hooks_of
from . import reduce
from .buckets import Bucket, ReducePlan, cuts_for, plan_buckets
from .codec import Codec, Encoder, Part, ReplicaSum
from .layout import ParamSpec, bucket_layout
from .mesh import Distribution
from .parameter import FSDPParam
from .policy import MixedPrecisionPolicy, ReduceWhen
from .reduce import Pending, Reduction, Shards

if TYPE_CHECKING:
    from ..devices.home_streams import GroupStreams
    from .group import FSDPParamGroup

_KEY = "fsdp2"
_NOTHING = nullcontext()


@final
class GroupGradients:
    """Reduces the gradients of one group as they arrive in backward, and keeps unsynchronized ones.

    The group owns it. GroupParameters calls `prepare` when parameters, or which of them are trainable, have changed;
    the group calls `use` when its Comms or its settings have. Nothing else changes how gradients are reduced.

    `unsynchronized`: parameter index -> unsharded gradient, in the reduce dtype, which a later pass will reduce.
    `partial`: parameter index -> flat padded shard, in the reduce dtype, which is still to be summed between replicas;
        one for each replica, [M, shard_numel], if these share one set of shards.
    `taken`: indices of parameters whose unsynchronized or partial gradients, of earlier passes, the backward pass that
        runs has included. If it fails, these are lost.

    Args:
        group: the group, which is told of the first gradient and of the last.
        params: its parameters; a parameter index counts them.
        reduction: how their gradients are summed.
        streams: the group's streams, on whose home all of this runs. None: the device has none.
    """

    def __init__(
        self, group: FSDPParamGroup, params: Sequence[FSDPParam], reduction: Reduction, streams: GroupStreams | None
    ) -> None:
        self.group, self._params, self.reduction, self._streams = group, params, reduction, streams
        self.unsynchronized: dict[int, Tensor] = {}
        self.partial: dict[int, Tensor] = {}
        self.taken: set[int] = set()
        # Indices of those that had a graph (create_graph=True), of which `.grad` must tell.
        self._had_graph: set[int] = set()
        # True if gradients of the pass that runs may be sums of several micro-batches, on this rank or another. Sums
        # are in the reduce dtype, and travel by `_codecs_of_sums`. It is the same on all ranks.
        self._may_be_sums = False
        # True if the last backward pass has left gradients to a later one, by its settings; the same on all ranks.
        self.left_gradients = False
        # Identity of the backward pass that runs, or ran last.
        self.backward_pass: object = None
        self._specs: tuple[ParamSpec, ...] = ()
        self._reduce_dtypes: tuple[torch.dtype, ...] = ()
        # How each gradient travels: as it is computed; and if sums of several may be among them.
        self._codecs: tuple[Codec, ...] = ()
        self._codecs_of_sums: tuple[Codec, ...] = ()
        # What their codecs are to get between steps.
        self._encoders: dict[Codec, Encoder] = {}
        # How replicas sum, if not by one collective, and for which choices that was made.
        self._summing: ReplicaSum | None = None
        self._summing_for: object = None
        self._summing_name = ""
        self.buckets: list[Bucket] = []
        # Bytes of all gradients when they are sent.
        self.sent_nbytes = 0
        self._plan, self._names = cache(self._make_plan), cache(self._make_names)
        # Unsharded parameters that tell a bucket of their gradients.
        self._hooked: list[Tensor] = []

    def is_pending(self) -> bool:
        """Returns True if gradients have not come to `.grad` yet: they are unsynchronized, or in flight."""
        return bool(self.unsynchronized or self.partial or (self.group.queue and self.group.queue.has(self)))

    @property
    def kept_nbytes(self) -> int:
        """Bytes that codecs with feedback, and sums between replicas, keep between steps."""
        between = 0 if self._summing is None else self._summing.nbytes
        return between + sum(encoder.nbytes for encoder in self._encoders.values())

    def forget_kept(self) -> None:
        """Drops what codecs with feedback, and sums between replicas, keep between steps. It is called when a parameter
        was replaced, whose gradients the residuals no longer are of, and by `discard`.
        """
        for encoder in self._encoders.values():
            encoder.discard()
        if self._summing is not None:
            self._summing.discard()

    def kept_state(self) -> dict[str, Any]:
        """Returns copies, on the CPU, of what codecs and sums keep between steps, and for which parameters, ranks and
        codecs that holds.
        """
        summing = {} if self._summing is None else self._summing.kept_state()
        return {
            **self._kept_for(),
            "encoders": [encoder.kept_state() for encoder in self._encoders.values()],
            "summing": summing,
        }

    def check_kept(self, state: dict[str, Any]) -> None:
        """Checks that `state`, which `kept_state` has returned in some program, holds here.

        Raises:
            ValueError: it holds for other parameters, ranks or codecs.
        """
        for what, here in self._kept_for().items():
            if here != state[what]:
                raise ValueError(
                    f"{self.group}: expected what codecs have kept of the {what} {here}, got that of {state[what]}. "
                    "Load on each rank what it has saved, with the same policies on as many ranks; or leave it out: "
                    "codecs then begin anew."
                )

    def load_kept(self, state: dict[str, Any]) -> None:
        """Takes what `kept_state` has returned, and `check_kept` has checked."""
        device = self._params[0].unsharded.device if self._params else torch.device("cpu")
        for encoder, saved in zip(self._encoders.values(), state["encoders"], strict=True):
            encoder.load_kept(saved, device)
        if self._summing is not None:
            self._summing.load_kept(state["summing"], device)

    def _kept_for(self) -> dict[str, Any]:
        comms = self.reduction.shards, self.reduction.replicas
        return {
            "parameters": [
                (param.name, spec.shard_numel) for param, spec in zip(self._params, self._specs, strict=True)
            ],
            "ranks": [(comm.rank, comm.size) for comm in comms if comm is not None],
            "codecs": [repr(codec) for codec in self._encoders],
            "sums between replicas": self._summing_name,
        }

    # ---- plans

    def use(self, reduction: Reduction) -> None:
        """Reduces in that way from now on."""
        self.reduction = reduction
        self._names.cache_clear()

    def prepare(self, specs: tuple[ParamSpec, ...], policy: MixedPrecisionPolicy, trainable: Iterable[int]) -> None:
        """Plans the buckets of the parameters `trainable`."""
        self._specs = specs
        ranks = self.reduction.shards.rank, self.reduction.replicas.rank if self.reduction.replicas else 0
        name = f"{ranks} {self.group.name} {[param.name for param in self._params[:1]]}"
        self._find_summing(policy, name)
        for parameter in self._hooked:
            compat.on_accumulated(parameter, _KEY, None)
        device = self._params[0].unsharded.device if self._params else torch.device("cpu")
        cuts = cuts_for(specs, device)
        # Which parameters replicas sum otherwise than by one collective. Empty: none.
        summed_apart = () if self._summing is None else tuple(map(self._summing.holds_for, specs))
        which = self.reduction.shards.sums_on_arrival, tuple(trainable), cuts, summed_apart
        plan = plan_buckets(specs, policy, *which, self.group.settings.bucket_bytes)
        self._reduce_dtypes, self._codecs, self._codecs_of_sums = plan[:3]
        codecs = {*plan.codecs, *plan.codecs_of_sums}
        self._encoders = {codec: self._encoders.get(codec) or Encoder(codec, name) for codec in codecs}
        self.buckets = [Bucket(indices, self.group.first_gradient, self._complete) for indices in plan.buckets]
        self.sent_nbytes = plan.sent_nbytes * self.reduction.num_shards
        self._hooked = [self._params[i].unsharded for indices in plan.buckets for i in indices]
        for bucket in self.buckets:
            arrive = bucket.arrive if self._streams is None else _noting(self._streams, bucket.arrive)
            for i in bucket.indices:
                compat.on_accumulated(self._params[i].unsharded, _KEY, arrive)
        self._plan.cache_clear()
        self._names.cache_clear()
        for notify in self.group.events.settings_changed:
            notify(self.group)

    def _make_plan(self, indices: tuple[int, ...], may_be_sums: bool) -> ReducePlan:
        first, buffers = indices[0], self.group.parameters.buffers
        # As the shards lie, so that both can be used as one tensor; those that gather themselves come behind.
        offsets = dict(enumerate(buffers.layout.shard_offsets if buffers is not None else ()))
        indices = tuple(sorted(indices, key=lambda i: (i not in offsets, offsets.get(i, i))))
        codec, reduce_dtype = (self._codecs_of_sums if may_be_sums else self._codecs)[first], self._reduce_dtypes[first]
        # Feedback is added to what is sent, hence to a copy.
        direct_min_bytes = sys.maxsize if codec.feedback else self.reduction.direct_min_bytes
        layout = bucket_layout(self._specs, indices, reduce_dtype, direct_min_bytes, codec.packed_dtype(reduce_dtype))
        device = self._params[0].unsharded.device
        encoder, summing = self._encoders[codec], self._summing
        if summing is None or not summing.holds_for(self._specs[first]):
            return ReducePlan(layout, self._specs, self.reduction.num_shards, device, encoder)
        parts = [self._part(i, layout.offsets[i]) for i in indices]
        return ReducePlan(layout, self._specs, self.reduction.num_shards, device, encoder, summing, parts)

    def _part(self, i: int, offset: int) -> Part:
        param, spec = self._params[i], self._specs[i]
        shape = spec.local_shape(self.reduction.shards.rank)
        return Part(i, param.name, offset, spec.shard_numel, shape, param.sharded)

    def _find_summing(self, policy: MixedPrecisionPolicy, name: str) -> None:
        """Finds how replicas sum, and keeps what they have if that has not changed."""
        replicas, hook = self.reduction.replicas, self.group.settings.comm_hook
        wanted = (policy.compression.all_reduce, hook, replicas is not None)
        if wanted == self._summing_for:
            return
        self._summing_for, self._summing = wanted, None
        if replicas is not None and wanted[:2] != (None, None):
            from ..codecs.choose_sum import replica_sum_of  # a plain training needs none of them

            self._summing = replica_sum_of(policy, hook, name)
        self._summing_name = hook.name if hook is not None else repr(policy.compression.all_reduce)

    def _make_names(self, indices: tuple[int, ...]) -> str:
        divisor, is_late = self.reduction.divisor, self.reduction.divide_late is not None  # which checks compare
        divided = ", weighted," if is_late else "" if divisor is None else f", divided by {divisor:g},"
        return f"{divided} of {', '.join(self._params[i].name for i in indices)}"

    # ---- as gradients arrive

    def _complete(self, bucket: Bucket) -> None:
        """Handles a bucket whose last gradient has arrived. Usually it is reduced now.

        Unless the group reduces at `ReduceWhen.BUCKET`, all its buckets are reduced when the last of them is complete.
        With `reduce_unused` this does nothing: all buckets are reduced when backward leaves the module. Without
        gradient sync, `_process` keeps the gradients.
        """
        if (streams := self._streams) is not None and streams.are_apart():
            with streams.at_home():
                return self._complete(bucket)
        if (compat.num_dispatch_modes() or compat.num_function_modes()) and are_in_force():
            with hidden():
                return self._complete(bucket)
        # Other ranks' buckets may be complete at other times: then all reduce when backward leaves the module.
        if self.group.settings.reduce_unused:
            return
        bucket.missing, bucket.completed = bucket.size, bucket.completed + 1
        is_last = all(each.completed for each in self.buckets)
        if self.group.settings.reduce_when is ReduceWhen.BUCKET:
            gradients = self._take(bucket.indices)
            if is_last:  # it gives memory back before packing takes some
                self.group.last_gradient()
            self._process(gradients)
        elif is_last:
            self.flush()
            self.group.last_gradient()

    def flush(self) -> None:
        """Reduces what has arrived, also if the rest of its bucket has not."""
        if (streams := self._streams) is not None and streams.are_apart():
            with streams.at_home():
                return self.flush()
        self._process_agreed(self._find_arrived(self.buckets if self._fills() else []))

    def _fills(self) -> bool:
        """Returns True if all ranks reduce all gradients now, zeros where they have none."""
        settings = self.group.settings
        return settings.reduce_unused and settings.reduce_gradients and settings.reduce_when is not ReduceWhen.ASKED

    def _find_arrived(self, filled: Iterable[Bucket]) -> set[int]:
        """Returns the indices of gradients that are there; in buckets to be `filled`, zeros stand for missing ones."""
        for bucket in filled:
            bucket.missing, bucket.completed = bucket.size, bucket.completed + 1
            self._fill(bucket)
        return {i for i, param in enumerate(self._params) if param.unsharded.grad is not None}

    def _fill(self, bucket: Bucket) -> None:
        """Puts zeros in place of gradients that this rank does not have."""
        for i in bucket.indices:
            unsharded = self._params[i].unsharded
            if unsharded.grad is None:
                dtype = self._specs[i].arriving_dtype or self._reduce_dtypes[i]
                unsharded.grad = torch.zeros_like(unsharded, dtype=dtype)

    def reduce_with_zeros(self) -> None:
        """Reduces all buckets, with zeros for the gradients that this rank does not have. Every rank must call it."""
        if (streams := self._streams) is not None and streams.are_apart():
            with streams.at_home():
                return self.reduce_with_zeros()
        for bucket in self.buckets:
            self._fill(bucket)
            self._process(self._take(bucket.indices))

    def _process_agreed(self, left: set[int]) -> None:
        """Processes the gradients of parameters `left`, or of those on which ranks agree under a consensus, bucket by
        bucket: that order is the same on all ranks.
        """
        consensus = self.group.root.consensus
        if consensus is not None and self.group.settings.reduce_gradients and left:
            left = consensus.before_reduce(self.group, left)
        for bucket in self.buckets:
            self._process(self._take([i for i in bucket.indices if i in left]))
            left.difference_update(bucket.indices)
        for i in sorted(left, reverse=True):  # frozen since they were computed, hence in no bucket
            self._process(self._take((i,)))

    # ---- backward passes

    def begin_backward(self, backward_pass: object) -> None:
        """Begins a backward pass, or what stands for one."""
        self.backward_pass, self._may_be_sums = backward_pass, self.left_gradients
        self.taken.clear()

    def end_backward(self) -> None:
        """Reduces what is left. `resume` follows, when no rank reduces any more."""
        if (streams := self._streams) is not None and streams.are_apart():
            with streams.at_home():
                return self.end_backward()
        settings = self.group.settings
        self.left_gradients = not (settings.reduce_gradients and settings.all_reduce)
        unused = [each for each in self.buckets if not each.completed and self._fills()]
        is_partly_there = [each for each in self.buckets if each.missing < each.size]
        if unused or is_partly_there or settings.reduce_when is not ReduceWhen.BUCKET:
            self._process_agreed(self._find_arrived(unused))
        if self.unsynchronized and settings.reduce_gradients:
            self._process_agreed(set(self.unsynchronized))
        for bucket in self.buckets:
            bucket.missing, bucket.completed = bucket.size, 0

    def resume(self) -> None:
        """Begins to sum between replicas those partial gradients that no reduction of this backward pass has included.
        (A reduction of a parameter with a partial gradient includes it: `_process` passes it on as `carried`.)
        """
        if (streams := self._streams) is not None and streams.are_apart():
            with streams.at_home():
                return self.resume()
        settings = self.group.settings
        while self.partial and settings.reduce_gradients and settings.all_reduce:
            first = next(iter(self.partial))
            carried = self._take_partial(next((b.indices for b in self.buckets if first in b.indices), (first,)))
            indices = tuple(carried)
            plan, device = self._plan(indices, True), self._params[0].unsharded.device
            pending = reduce.resume(carried, plan, self.reduction, device, self._names(indices))
            self.group.queue.add(self, pending)

    def discard(self) -> None:
        """After an error: drops the gradients of the backward pass that failed, and keeps those of earlier ones, unless
        the pass has included them already: `taken`. What codecs and sums between replicas keep goes, too
        (`forget_kept`): it may be of gradients that were dropped, and ranks may have stopped at different places.
        """
        for param in self._params:
            param.unsharded.grad = None
        for bucket in self.buckets:
            bucket.missing, bucket.completed = bucket.size, 0
        self.forget_kept()
        for i in self.taken:
            self.forget(i)
        self._had_graph &= {*self.unsynchronized, *self.partial}

    def forget(self, i: int) -> None:
        """Drops the unsynchronized gradient of parameter i."""
        self._had_graph.discard(i)
        self.unsynchronized.pop(i, None)
        self.partial.pop(i, None)

    # ---- one bucket

    def _take_partial(self, indices: Iterable[int]) -> dict[int, Tensor]:
        """Takes those partial sums that are there."""
        taken = {i: self.partial.pop(i) for i in indices if i in self.partial}
        self.taken.update(taken)
        return taken

    def _take(self, indices: Sequence[int]) -> dict[int, Tensor]:
        """Takes the unsharded gradients that are there, with unsynchronized ones, and drops other references."""
        taken, may_have_graph = {}, torch.is_grad_enabled()
        with compat.no_torch_function():
            frozen = [i for i in indices if not self._params[i].sharded.requires_grad]
        for i in indices:
            param = self._params[i]
            gradient = param.unsharded.grad
            if gradient is not None:
                param.unsharded.grad = None
                if i in frozen:
                    continue  # since the forward
                if may_have_graph and gradient.requires_grad:
                    self._had_graph.add(i)
                    gradient = gradient.detach()
                if gradient.layout is not torch.strided:
                    raise NotImplementedError(f"{param.name}: sparse gradients are not supported. Use sparse=False.")
                if type(param.distribution) is not Distribution or not param.shape:
                    gradient = param.gathered_gradient(gradient)
                spec = self._specs[i]
                # To compare shapes would take twice as long.
                if gradient.numel() != spec.numel or gradient.size(0) != spec.shape[0]:
                    self._refuse_shape(i, gradient)
                if (
                    spec.takes_any_dtype
                    and torch.promote_types(gradient.dtype, self._reduce_dtypes[i]) != (self._reduce_dtypes[i])
                ):
                    self._refuse_dtype(i, gradient)
                taken[i] = gradient
            if i in self.unsynchronized:
                self.taken.add(i)
                earlier = self.unsynchronized.pop(i)
                taken[i] = earlier.add_(taken[i]) if i in taken else earlier
        return taken

    def _refuse_shape(self, i: int, gradient: Tensor) -> None:
        """Raises RuntimeError: the gradient would be copied to memory of other sizes."""
        raise RuntimeError(
            f"{self._params[i].name}: expected a gradient of shape {self._specs[i].shape}, got "
            f"{tuple(gradient.shape)}. Its `.data` was assigned while it was unsharded. Write inside "
            "`with fsdp2.full_params(module, writeback=True):`; change a shape before fully_shard."
        )

    def _refuse_dtype(self, i: int, gradient: Tensor) -> None:
        """Raises RuntimeError: the gradient, which may come in any dtype, would be rounded to be reduced."""
        raise RuntimeError(
            f"{self._params[i].name}: its grad_dtype is None, and its gradient has come in {gradient.dtype}, which the "
            f"dtype of its reduction, {self._reduce_dtypes[i]}, can't hold. Pass "
            f"MixedPrecisionPolicy(reduce_dtype={gradient.dtype}), or set grad_dtype to {gradient.dtype} before "
            "fully_shard."
        )

    def _process(self, gradients: dict[int, Tensor]) -> None:
        """Reduces gradients of one bucket, or keeps them unsynchronized."""
        if not gradients:
            return
        if not self.group.settings.reduce_gradients:
            self._may_be_sums = True
            for i, gradient in gradients.items():  # to which later ones are added
                self.unsynchronized[i] = compat.owned(gradient.to(self._reduce_dtypes[i]))
            return
        for notify in self.group.events.before_reduce:
            notify(self.group)
        queue, indices = self.group.queue, tuple(gradients)
        queue.make_room()
        plan, what = self._plan(indices, self._may_be_sums), self._names(indices)
        try:
            carried = self._take_partial(gradients) if self.partial else {}
            queue.add(self, reduce.start(gradients, plan, self.reduction, carried, what))
        except RuntimeError as error:  # out of memory, for example: allocators don't know for whom
            self.group.purpose.locate(error, f"reducing the gradients{what}")
            raise

    # ---- delivery

    def start_return(self, pending: Pending) -> bool:
        """Waits for the sums, and begins to copy them to the CPU. Returns True if gradients rest there."""
        if (streams := self._streams) is not None and streams.are_apart():
            with streams.at_home():
                return self.start_return(pending)
        return pending.start_return()

    def abandon(self, pending: Pending) -> None:
        """Waits until no buffer is in use, and drops the results."""
        if (streams := self._streams) is not None and streams.are_apart():
            with streams.at_home():
                return self.abandon(pending)
        pending.abandon()

    def receive(self, pending: Pending, of_pass: object) -> None:
        """Waits for a reduction, and adds its shards to the sharded parameters' `.grad`; or to `self.partial`, if they
        are still to be summed between replicas.
        """
        if (streams := self._streams) is not None and streams.are_apart():
            with streams.at_home():
                return self.receive(pending, of_pass)
        shards = pending.finish()
        if pending.is_partial:
            count = self.reduction.num_blocks
            for i, (flat, offset) in shards.items():
                numel = self._specs[i].shard_numel
                size, strides = ((numel,), (1,)) if count == 1 else ((count, numel), (flat.numel() // count, 1))
                shard = flat.as_strided(size, strides, offset)
                self.partial[i] = self.partial[i] + shard if i in self.partial else shard
            return
        if self._streams is not None:
            for flat, _ in shards.values():
                self._streams.lend(flat)
        sharded = [self._params[i].sharded for i in shards]
        with torch.no_grad() if torch.is_grad_enabled() else _NOTHING:  # to disable it takes as long as two operations
            with compat.no_torch_function():
                is_hooked = any(map(backward_hooks_of, sharded)) or any(map(post_accumulate_hooks_of, sharded))
                if not is_hooked:
                    self._accumulate(shards, False)
            if is_hooked:  # users' hooks may need torch functions, and their modes
                run_shown(self._accumulate, shards, True)
        if self.group.root.steps is not None:
            run_shown(self.group.root.steps.step, self.group, [self._params[i] for i in shards], of_pass)

    def _accumulate(self, shards: Shards, is_hooked: bool) -> None:
        """Adds this rank's gradient shards to `.grad`, whose dtype they have.

        The hooks of a sharded parameter, if it may have any (`is_hooked`), run: on the gradient as in plain training,
        then on the parameter.
        """
        for i, (flat, offset) in shards.items():
            param = self._params[i]
            local = flat.as_strided(param.local_shape, param.local_stride, offset)
            gradient: Tensor = new_dtensor(param.tensor_class, local, param.gradient_spec)
            sharded = param.sharded
            if is_hooked:
                for hook in tuple((sharded._backward_hooks or {}).values()):  # a hook may remove itself
                    replaced = hook(gradient)
                    gradient = gradient if replaced is None else param.adopt_gradient(replaced, local.device)
            accumulated = sharded.grad
            if accumulated is None:
                sharded.grad = gradient
            else:
                param.add_to_gradient(accumulated, gradient)
            if i in self._had_graph:
                self._had_graph.discard(i)
                refuse_graph(param)
            if is_hooked:
                for hook in tuple((sharded._post_accumulate_grad_hooks or {}).values()):
                    hook(sharded)


def _noting(streams: GroupStreams, arrive: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """Returns a hook that also notes the stream which has computed the gradient."""

    def note_and_arrive(gradient: Tensor) -> None:
        streams.note()
        arrive(gradient)

    return note_and_arrive
