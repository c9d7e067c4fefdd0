"""Reduces unsharded gradients, as autograd produces them, into the sharded parameters' `.grad`.

A gradient takes this way. The last column says who calls the method:

| it is | where | by | called by |
|---|---|---|---|
| counted, as autograd has accumulated it | `.grad` of the unsharded parameter | `Bucket.arrive` | autograd's hook |
| taken, when its bucket is complete | a bucket's dict | `_complete`, `flush`, `end_backward` | Bucket, group, root |
| kept for a later pass, without gradient sync | `unsynchronized.unreduced` | `_process` | |
| in flight | a Pending in the ReductionQueue | `_process`, `resume` | root |
| kept, as replicas have not summed it yet | `unsynchronized.reduced_in_shard` | `receive` | the queue |
| delivered | `.grad` of the sharded parameter | `receive` | the queue |

Ranks that must reduce what others do, without gradients of their own, call `reduce_with_zeros` (conditional modules).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import cache, cached_property, wraps
from typing import TYPE_CHECKING, Any, TypeVar, final

import torch
from torch import Tensor

from ..calls.user_code import are_in_force, hidden, run_shown
from ..parameters.cut_graphs import refuse_graph
from ..torch_private import internals
from ..torch_private.internals import backward_hooks_of, new_dtensor, post_accumulate_hooks_of
from . import reduce
from .buckets import BucketPlan, cuts_for, plan_buckets
from .codec import IN_PAIRS, Codec, Part
from .gradient_codecs import GradientCodecs
from .layout import ParamSpec, bucket_layout
from .mesh import Distribution
from .pack import ReducePlan
from .parameter import FSDPParam
from .policy import MixedPrecisionPolicy, ReduceWhen
from .reduce import Pending, Reduction, Shards
from .unsynchronized import UnsynchronizedGradients

if TYPE_CHECKING:
    from ..devices.owner_stream import GroupStreams
    from .group import FSDPParamGroup

_KEY = "fsdp2"
_NOTHING = nullcontext()
Method = TypeVar("Method", bound=Callable[..., Any])


@final
class Bucket:
    """Counts the gradients of one bucket that are still to come in this backward pass.

    The unsharded parameters hold it by their hooks, so it must not hold the group that owns them.
    """

    def __init__(self, indices: tuple[int, ...], begin: Callable[[], None], complete: Callable[[Bucket], None]) -> None:
        self.indices = indices
        """The parameters of the bucket."""
        self.size = len(indices)
        """How many they are."""
        self._begin, self._complete = weakref.WeakMethod(begin), weakref.WeakMethod(complete)
        self.missing = self.size
        """How many gradients are still to come."""

    def arrive(self, _: Tensor) -> None:
        """Counts a gradient. It is a post-accumulate hook, and calls back at the first gradient and at the last."""
        self.missing -= 1
        if self.missing == self.size - 1 and (begin := self._begin()) is not None:
            begin()
        if self.missing == 0 and (complete := self._complete()) is not None:
            complete(self)

    def reset(self) -> None:
        """Counts anew: reentrant checkpointing may bring gradients again in this backward pass."""
        self.missing = self.size


class GroupGradients:
    """Reduces the gradients of one group as they arrive in backward, and keeps unsynchronized ones.

    The group owns it. GroupParameters calls `prepare` when parameters, or which of them are trainable, have changed;
    the group calls `use` when its Comms or its settings have. Nothing else changes how gradients are reduced.

    Args:
        group: the group, which is told of the first gradient and of the last.
        params: its parameters; a parameter index counts them.
        reduction: how their gradients are summed.
        streams: the group's streams, see GradientsOnOwnerStream. None: the device has none.
    """

    def __init__(
        self, group: FSDPParamGroup, params: Sequence[FSDPParam], reduction: Reduction, streams: GroupStreams | None
    ) -> None:
        self.group, self._params, self._streams = group, params, streams
        self.reduction = reduction
        """How gradients are summed."""
        self.codecs = GradientCodecs()
        """How gradients are encoded, and what codecs keep between steps."""
        self.unsynchronized = UnsynchronizedGradients()
        """Gradients that a later backward pass is to reduce."""
        self.backward_pass: object = None
        """Identity of the backward pass that runs, or ran last."""
        self.buckets: list[Bucket] = []
        """The buckets of the trainable parameters."""
        # Those whose gradients were all there in this backward pass.
        self._complete_buckets: set[Bucket] = set()
        self.sent_nbytes = 0
        """Bytes of all gradients when they are sent."""
        # Indices of parameters whose gradients had a graph (create_graph=True), which `.grad` must refuse to continue.
        self._had_graph: set[int] = set()
        self.specs: tuple[ParamSpec, ...] = ()
        """The layout of each parameter."""
        self._bucket_plan = BucketPlan((), (), (), (), 0)
        # Unsharded parameters with a hook that tells a bucket of their gradients.
        self._hooked: list[Tensor] = []

    def is_pending(self) -> bool:
        """Returns True if gradients have not come to `.grad` yet: they are unsynchronized, or in flight."""
        root = self.group.built_root
        return bool(self.unsynchronized or (root is not None and root.queue.has(self)))

    # ---- plans

    def set_reduction(self, reduction: Reduction) -> None:
        """Reduces in that way from now on."""
        before, self.reduction = self.reduction, reduction
        if (before.divisor, before.divide_late) != (reduction.divisor, reduction.divide_late):  # names tell them
            self.forget_names()

    def forget_names(self) -> None:
        """Notes that the parameters have got other names."""
        vars(self).pop("_names", None)

    def prepare(self, specs: tuple[ParamSpec, ...], policy: MixedPrecisionPolicy, trainable: Iterable[int]) -> None:
        """Plans the buckets of the parameters `trainable`."""
        self.specs = specs
        ranks = self.reduction.shards.rank, self.reduction.replicas.rank if self.reduction.replicas else 0
        name = f"{ranks} {self.group.name} {[param.name for param in self._params[:1]]}"
        summing = self.codecs.choose_sum(policy, self.group.settings, self.reduction.replicas is not None, name)
        for parameter in self._hooked:
            internals.on_accumulated(parameter, _KEY, None)
        device = self._params[0].unsharded.device if self._params else torch.device("cpu")
        cuts = cuts_for(specs, device)
        # Which parameters replicas sum otherwise than by one collective. Empty: none.
        summed_apart = () if summing is None else tuple(map(summing.holds_for, specs))
        which = self.reduction.shards.receiver_sums, tuple(trainable), cuts, summed_apart
        plan = self._bucket_plan = plan_buckets(specs, policy, *which, self.group.settings.bucket_bytes)
        self.codecs.use({*plan.codecs, *plan.codecs_of_sums}, name)
        self.buckets = [Bucket(indices, self.group.first_gradient, self._complete) for indices in plan.buckets]
        self._complete_buckets.clear()
        self.sent_nbytes = plan.sent_nbytes * self.reduction.num_shards
        self._hooked = [self._params[i].unsharded for indices in plan.buckets for i in indices]
        for bucket in self.buckets:
            arrive = bucket.arrive if self._streams is None else _noting(self._streams, bucket.arrive)
            for i in bucket.indices:
                internals.on_accumulated(self._params[i].unsharded, _KEY, arrive)
        vars(self).pop("_plan", None)
        self.forget_names()

    @cached_property
    def _plan(self) -> Callable[..., ReducePlan]:
        """Returns how parameters are reduced, by their indices. It is made in backward, as the next one."""
        return cache(self._make_plan)

    @cached_property
    def _names(self) -> Callable[[tuple[int, ...]], str]:
        """Returns the names of parameters for errors, by their indices."""
        return cache(self._make_names)

    def _make_plan(self, indices: tuple[int, ...], may_be_sums: bool, in_tree: bool = False) -> ReducePlan:
        first, buffers = indices[0], self.group.parameters.buffers
        # As the shards lie, so that both can be used as one tensor; those that gather themselves come behind.
        offsets = dict(enumerate(buffers.layout.shard_offsets if buffers is not None else ()))
        indices = tuple(sorted(indices, key=lambda i: (i not in offsets, offsets.get(i, i))))
        how = self._bucket_plan
        codec: Codec = IN_PAIRS if in_tree else (how.codecs_of_sums if may_be_sums else how.codecs)[first]
        reduce_dtype = how.reduce_dtypes[first]
        # Feedback is added to what is sent, hence to a copy.
        direct_min_bytes = sys.maxsize if codec.feedback else self.reduction.direct_min_bytes
        layout = bucket_layout(self.specs, indices, reduce_dtype, direct_min_bytes, codec.packed_dtype(reduce_dtype))
        device = self._params[0].unsharded.device
        if in_tree:
            encoder, summing = self.codecs.in_tree(self.group.settings.policy, self.reduction.replicas is not None)
        else:
            encoder, summing = self.codecs.encoders[codec], self.codecs.replica_sum
        if summing is None or not (in_tree or summing.holds_for(self.specs[first])):
            return ReducePlan(layout, self.specs, self.reduction.num_shards, device, encoder)
        parts = [self._part(i, layout.offsets[i]) for i in indices]
        return ReducePlan(layout, self.specs, self.reduction.num_shards, device, encoder, summing, parts)

    def _part(self, i: int, offset: int) -> Part:
        param, spec = self._params[i], self.specs[i]
        shape = spec.local_shape(self.reduction.shards.rank)
        return Part(i, param.name, offset, spec.shard_numel, shape, param.sharded)

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
        if (internals.num_dispatch_modes() or internals.num_function_modes()) and are_in_force():
            with hidden():
                return self._complete(bucket)
        # Other ranks' buckets may be complete at other times: then all reduce when backward leaves the module.
        if self.group.settings.reduce_unused:
            return
        bucket.reset()
        self._complete_buckets.add(bucket)
        is_last = len(self._complete_buckets) == len(self.buckets)
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
        self._process_agreed(self._find_arrived(self.buckets if self._fills() else []))

    def _fills(self) -> bool:
        """Returns True if all ranks reduce all gradients now, zeros where they have none."""
        settings = self.group.settings
        return settings.reduce_unused and settings.reduce_gradients and settings.reduce_when is not ReduceWhen.ASKED

    def _find_arrived(self, filled: Iterable[Bucket]) -> set[int]:
        """Returns the indices of gradients that are there; in buckets to be `filled`, zeros stand for missing ones."""
        for bucket in filled:
            bucket.reset()
            self._complete_buckets.add(bucket)
            self._fill(bucket)
        return {i for i, param in enumerate(self._params) if param.unsharded.grad is not None}

    def _fill(self, bucket: Bucket) -> None:
        """Puts zeros in place of gradients that this rank does not have."""
        for i in bucket.indices:
            unsharded = self._params[i].unsharded
            if unsharded.grad is None:
                dtype = self.specs[i].arriving_dtype or self._bucket_plan.reduce_dtypes[i]
                unsharded.grad = torch.zeros_like(unsharded, dtype=dtype)

    def reduce_with_zeros(self) -> None:
        """Reduces all buckets, with zeros for the gradients that this rank does not have. Every rank must call it."""
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
        self.backward_pass, earlier = backward_pass, self.unsynchronized
        if earlier.included or earlier.may_be_sums is not earlier.were_left:
            earlier.begin_pass()

    def end_backward(self) -> None:
        """Reduces what is left. `resume` follows, when no rank reduces any more."""
        settings, earlier = self.group.settings, self.unsynchronized
        leaves = not (settings.reduce_gradients and settings.all_reduce)
        if leaves is not earlier.were_left:
            earlier.end_pass(leaves)
        fills = len(self._complete_buckets) < len(self.buckets) and self._fills()
        unused = [each for each in self.buckets if each not in self._complete_buckets] if fills else []
        is_partly_there = [each for each in self.buckets if each.missing < each.size]
        if unused or is_partly_there or settings.reduce_when is not ReduceWhen.BUCKET:
            self._process_agreed(self._find_arrived(unused))
        if earlier.unreduced and settings.reduce_gradients:
            self._process_agreed(set(earlier.unreduced))
        for bucket in is_partly_there:
            bucket.reset()
        self._complete_buckets.clear()

    def resume(self) -> None:
        """Begins to sum between replicas those shards of earlier passes that no reduction of this pass has included.
        (A reduction of a parameter includes them: `_process` passes them on as `carried`.)
        """
        settings, shards = self.group.settings, self.unsynchronized.reduced_in_shard
        while shards and settings.reduce_gradients and settings.all_reduce:
            first = next(iter(shards))
            members = next((bucket.indices for bucket in self.buckets if first in bucket.indices), (first,))
            carried = self.unsynchronized.include_shards(members)
            indices = tuple(carried)
            plan, label = self._plan(indices, True, self.unsynchronized.leaf is not None), self._names(indices)
            self.group.root.queue.add(self, reduce.start({}, plan, self.reduction, carried, label))

    def discard(self) -> None:
        """After an error: drops the gradients of the backward pass that failed, and keeps those of earlier ones, unless
        the pass has included them already. What codecs and sums between replicas keep goes, too: it may be of
        gradients that were dropped, and ranks may have stopped at different places.
        """
        for param in self._params:
            param.unsharded.grad = None
        for bucket in self.buckets:
            bucket.reset()
        self._complete_buckets.clear()
        self.codecs.discard()
        self.unsynchronized.fail_pass()
        self._had_graph &= self.unsynchronized.indices

    def forget(self, i: int) -> None:
        """Drops the unsynchronized gradient of parameter i."""
        self._had_graph.discard(i)
        self.unsynchronized.forget(i)

    # ---- one bucket

    def _take(self, indices: Sequence[int]) -> dict[int, Tensor]:
        """Takes the unsharded gradients that are there, and drops other references; with unsynchronized ones, if they
        are reduced now.
        """
        taken, unreduced, may_have_graph = dict[int, Tensor](), self.unsynchronized.unreduced, torch.is_grad_enabled()
        reduces = self.group.settings.reduce_gradients
        with internals.no_torch_function():
            frozen = [i for i in indices if not self._params[i].sharded.requires_grad]
        reduce_dtypes = self._bucket_plan.reduce_dtypes
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
                spec = self.specs[i]
                # To compare shapes would take twice as long.
                if gradient.numel() != spec.numel or gradient.size(0) != spec.shape[0]:
                    self._refuse_shape(i, gradient)
                if spec.takes_any_dtype and torch.promote_types(gradient.dtype, reduce_dtypes[i]) != reduce_dtypes[i]:
                    self._refuse_dtype(i, gradient)
                taken[i] = gradient
            if i in unreduced and reduces:
                taken[i] = self.unsynchronized.include(i, taken.get(i))
        return taken

    def _refuse_shape(self, i: int, gradient: Tensor) -> None:
        """Raises RuntimeError: the gradient would be copied to memory of other sizes."""
        raise RuntimeError(
            f"{self._params[i].name}: expected a gradient of shape {self.specs[i].shape}, got "
            f"{tuple(gradient.shape)}. Its `.data` was assigned while it was unsharded. Write inside "
            "`with fsdp2.full_params(module, writeback=True):`; change a shape before fully_shard."
        )

    def _refuse_dtype(self, i: int, gradient: Tensor) -> None:
        """Raises RuntimeError: the gradient, which may come in any dtype, would be rounded to be reduced."""
        raise RuntimeError(
            f"{self._params[i].name}: its grad_dtype is None, and its gradient has come in {gradient.dtype}, which the "
            f"dtype of its reduction, {self._bucket_plan.reduce_dtypes[i]}, can't hold. Pass "
            f"MixedPrecisionPolicy(reduce_dtype={gradient.dtype}), or set grad_dtype to {gradient.dtype} before "
            "fully_shard."
        )

    def _process(self, gradients: dict[int, Tensor]) -> None:
        """Reduces gradients of one bucket, or keeps them unsynchronized."""
        if not gradients:
            return
        if not self.group.settings.reduce_gradients:
            for i, gradient in gradients.items():
                self.unsynchronized.keep(i, gradient, self._bucket_plan.reduce_dtypes[i])
            return
        for notify in self.group.events.before_reduce:
            notify(self.group)
        queue, indices = self.group.root.queue, tuple(gradients)
        queue.make_room()
        earlier = self.unsynchronized
        plan, label = self._plan(indices, earlier.may_be_sums, earlier.leaf is not None), self._names(indices)
        try:
            completes = earlier.reduced_in_shard and self.group.settings.all_reduce
            carried = earlier.include_shards(gradients) if completes else {}
            queue.add(self, reduce.start(gradients, plan, self.reduction, carried, label))
        except RuntimeError as error:  # out of memory, for example: allocators don't know for whom
            self.group.comm_label.locate(error, f"reducing the gradients{label}")
            raise

    # ---- delivery

    def start_return(self, pending: Pending) -> bool:
        """Waits for the sums, and begins to copy them to the CPU. Returns True if gradients rest there."""
        return pending.start_return()

    def abandon(self, pending: Pending) -> None:
        """Waits until no buffer is in use, and drops the results."""
        pending.abandon()

    def receive(self, pending: Pending, of_pass: object) -> None:
        """Waits for a reduction, and adds its shards to the sharded parameters' `.grad`; or keeps them, if a later pass
        is to sum them between replicas.
        """
        shards = pending.finish()
        if pending.is_partial:
            count = self.reduction.num_blocks
            for i, (flat, offset) in shards.items():
                numel = self.specs[i].shard_numel
                size, strides = ((numel,), (1,)) if count == 1 else ((count, numel), (flat.numel() // count, 1))
                self.unsynchronized.keep_shard(i, flat.as_strided(size, strides, offset))
            return
        if self._streams is not None:
            for flat, _ in shards.values():
                self._streams.record_streams(flat)
        sharded = [self._params[i].sharded for i in shards]
        with torch.no_grad() if torch.is_grad_enabled() else _NOTHING:  # to disable it takes as long as two operations
            with internals.no_torch_function():
                is_hooked = any(map(backward_hooks_of, sharded)) or any(map(post_accumulate_hooks_of, sharded))
                if not is_hooked:
                    self._accumulate(shards, False)
            if is_hooked:  # users' hooks may need torch functions, and their modes
                run_shown(self._accumulate, shards, True)
        if self.group.root.stepper is not None:
            run_shown(self.group.root.stepper.step, self.group, [self._params[i] for i in shards], of_pass)

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


# ---- models that compute on several streams


def _on_owner_stream(method: Method) -> Method:
    """Decorator: the method of GroupGradients runs on the owner stream of the group."""

    @wraps(method)
    def run(self: GroupGradients, *args: Any) -> Any:
        streams = self._streams
        if streams is None or not streams.are_apart():
            return method(self, *args)
        with streams.on_owner_stream():
            return method(self, *args)

    return run  # type: ignore[return-value]


@final
class GradientsOnOwnerStream(GroupGradients):
    """The GroupGradients of a group whose device has streams: all that enters runs on the group's owner stream, behind
    the work of the streams that have computed gradients.
    """

    _complete = _on_owner_stream(GroupGradients._complete)
    flush = _on_owner_stream(GroupGradients.flush)
    reduce_with_zeros = _on_owner_stream(GroupGradients.reduce_with_zeros)
    end_backward = _on_owner_stream(GroupGradients.end_backward)
    resume = _on_owner_stream(GroupGradients.resume)
    start_return = _on_owner_stream(GroupGradients.start_return)
    abandon = _on_owner_stream(GroupGradients.abandon)
    receive = _on_owner_stream(GroupGradients.receive)


def _noting(streams: GroupStreams, arrive: Callable[[Tensor], None]) -> Callable[[Tensor], None]:
    """Returns a hook that also notes the stream which has computed the gradient."""

    def note_and_arrive(gradient: Tensor) -> None:
        streams.note()
        arrive(gradient)

    return note_and_arrive
