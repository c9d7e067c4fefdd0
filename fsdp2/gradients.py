"""From full gradients, as they arrive in backward, to the sharded parameters' `.grad`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from . import dtensor_compat, reduce, torch_compat
from .agreement import Turn
from .bucket import Bucket, find_buckets, noting, wire_dtypes
from .headers import DIVIDED, Label
from .layout import ParamSpec, bucket_layout
from .modes import are_in_force, hidden, num_dispatch_modes, num_function_modes, run_shown
from .param import FSDPParam
from .policy import MixedPrecisionPolicy
from .reduce import Reduction
from .reduce_plan import ReducePlan
from .reduction_queue import ReductionQueue
from .stepper import GroupSteps
from .streams import GroupStreams
from .waiting_gradients import WaitingGradients

_KEY = "fsdp2"
_NOTHING = nullcontext()


def _do_nothing() -> None:
    pass


class GroupGradients:
    """The gradients of one group: which have arrived in this backward pass, which wait for a synchronised one.

    `synchronise`: reduce between ranks (the default), or accumulate the full gradients, in the reduce dtype, until it
    is set again.
    `on_first`, `on_last`: called when the first gradient of a bucket is there, and when all of the group are.
    `changes`: how often, in this process, settings of a group, or which of its parameters are trainable, have changed.
    """

    changes = 0

    def __init__(self, params: Sequence[FSDPParam], reduction: Reduction, streams: GroupStreams | None = None) -> None:
        self._params, self.reduction, self.streams = params, reduction, streams
        self.synchronise = True
        # Reduce zeros for parameters that have no gradient on this rank: they may have one on others.
        self.reduces_unused = False
        self.on_first: Callable[[], None] = _do_nothing
        self.on_last: Callable[[], None] = _do_nothing
        # What to ask before a reduction, if some group under the same root is conditional. All of a group's gradients
        # are reduced together then: ranks meet once for each group, and need not get them in one order.
        self.turn: Turn | None = None
        # Under which name its reductions are known among ranks.
        self.label = Label()
        # What to do before a reduction, if nothing is gathered at which it could be done.
        self.guard: Callable[[], None] | None = None
        self._specs: tuple[ParamSpec, ...] = ()
        self._reduce_dtypes: tuple[torch.dtype, ...] = ()
        # In which they travel: as they come; and where some may have waited for others.
        self._wire_dtypes: tuple[torch.dtype, ...] = ()
        self._waited_wire_dtypes: tuple[torch.dtype, ...] = ()
        self._buckets: list[Bucket] = []
        # What all gradients take when they are sent.
        self.sent_nbytes = 0
        self._plan, self._names = cache(self._make_plan), cache(self._make_names)
        # Full parameters that tell a bucket of their gradients.
        self._followed: list[Tensor] = []
        self.waiting = WaitingGradients(params)
        # Whether sums of several gradients may be among those of the pass that runs, on whichever rank.
        self._may_have_waited = False
        # Identity of the backward pass that runs, or ran last.
        self.backward_pass: object = None
        # Whether the last backward pass has left gradients to a later one, on whichever rank.
        self.owes = False
        self.steps = GroupSteps()
        # Set by the context that the group runs in.
        self.queue = ReductionQueue()

    def is_pending(self) -> bool:
        """Whether some wait, or are in flight: they are known by the places of their parameters, which must stay."""
        return self.waiting.are_wanted() or self.queue.has(self)

    def are_under_way(self) -> bool:
        """Between backward passes that do not finish them: whether some have not come to `.grad`."""
        return bool(self.waiting.full or self.waiting.partial) or self.queue.has(self)

    def settings(self) -> dict[str, Any]:
        """What a user has set."""
        reduction = {name: getattr(self.reduction, name) for name in ("divisor", "all_reduce", "hook")}
        return {"synchronise": self.synchronise, "reduces_unused": self.reduces_unused, "reduction": reduction}

    def take_settings(self, synchronise: bool, reduces_unused: bool, reduction: dict[str, Any]) -> None:
        """Take over the settings of another."""
        self.synchronise, self.reduces_unused = synchronise, reduces_unused
        self.reduction = replace(self.reduction, **reduction)

    def prepare(self, specs: tuple[ParamSpec, ...], policy: MixedPrecisionPolicy, trainable: Iterable[int]) -> None:
        """Plan the buckets of the parameters that are `trainable`."""
        self.note_change()
        self._specs = specs
        self._reduce_dtypes = tuple(policy.gradient_dtype(spec.storage_dtype) for spec in specs)
        self._wire_dtypes = wire_dtypes(specs, policy, self.reduction.shards.sums_on_arrival)
        self._waited_wire_dtypes = wire_dtypes(specs, policy, as_they_come=False)
        for full in self._followed:
            torch_compat.on_accumulated(full, _KEY, None)
        device = self._params[0].full.device if self._params else torch.device("cpu")
        buckets = find_buckets(specs, self._reduce_dtypes, self._wire_dtypes, trainable, device)
        self._buckets = [Bucket(indices, self._progress) for indices in buckets]
        expected = [i for indices in buckets for i in indices]
        per_rank = sum([specs[i].shard_numel * self._wire_dtypes[i].itemsize for i in expected])
        self.sent_nbytes = per_rank * self.reduction.shards.size
        self._followed = [self._params[i].full for i in expected]
        for bucket in self._buckets:
            arrive = bucket.arrive if self.streams is None else noting(self.streams, bucket)
            for i in bucket.indices:
                torch_compat.on_accumulated(self._params[i].full, _KEY, arrive)
        self._plan.cache_clear()
        self._names.cache_clear()

    def _make_plan(self, indices: tuple[int, ...], have_waited: bool) -> ReducePlan:
        shards, first = self.reduction.shards, indices[0]
        wire_dtype = (self._waited_wire_dtypes if have_waited else self._wire_dtypes)[first]
        layout = bucket_layout(self._specs, indices, self._reduce_dtypes[first], shards.direct_min_bytes, wire_dtype)
        return ReducePlan(layout, self._specs, shards.size)

    def _make_names(self, indices: tuple[int, ...]) -> str:
        divisor = self.reduction.divisor  # which ranks compare
        divided = "" if divisor is None else f"{DIVIDED}{divisor:g},"
        return f"{divided} of {', '.join(self._params[i].name for i in indices)}"

    def divide_by(self, divisor: float) -> None:
        """Have the sum over all ranks divided by that from now on."""
        self.reduction.divisor = divisor
        self._names.cache_clear()
        self.note_change()

    @staticmethod
    def note_change() -> None:
        """A setting has changed: optimizers check the settings of their model before their next step."""
        GroupGradients.changes += 1

    def _progress(self, bucket: Bucket) -> None:
        if (num_dispatch_modes() or num_function_modes()) and are_in_force():
            with hidden():
                return self._progress(bucket)
        if bucket.missing == bucket.size - 1:
            self.on_first()
        # Other ranks' buckets may be complete at other times: then all reduce at the module's boundary.
        if bucket.missing == 0 and not self.reduces_unused:
            if self.streams is None:
                self._complete(bucket)
            else:
                with self.streams.at_home():
                    self._complete(bucket)

    def _complete(self, bucket: Bucket) -> None:
        bucket.missing, bucket.complete = bucket.size, True  # reentrant checkpointing may bring them once more
        if self.turn is None:
            self._process(self._take(bucket.indices))
        if all(each.complete for each in self._buckets):
            if self.turn is not None:
                self._flush_arrived()
            self.on_last()

    def flush(self) -> None:
        """Reduce what has arrived, also if the rest of its bucket has not."""
        if self.streams is None:
            self._flush_arrived()
        else:
            with self.streams.at_home():
                self._flush_arrived()

    def _flush_arrived(self) -> None:
        self._flush(self._find_arrived(self._buckets if self.reduces_unused and self._reduces_all() else []))

    def _reduces_all(self) -> bool:
        """Whether all ranks reduce now, whatever they have. Conditional groups are reduced when any rank has some."""
        return self.synchronise and (self.turn is None or not self.turn.is_conditional)

    def _find_arrived(self, filled: Iterable[Bucket]) -> set[int]:
        """Indices of full gradients that are there; in buckets to be `filled`, zeros stand for missing ones."""
        for bucket in filled:
            bucket.missing, bucket.complete = bucket.size, True
            self._fill(bucket)
        return {i for i, param in enumerate(self._params) if param.full.grad is not None}

    def _fill(self, bucket: Bucket) -> None:
        for full in (self._params[i].full for i in bucket.indices):
            if full.grad is None:
                full.grad = torch.zeros_like(full)

    def serve(self) -> None:
        """Take part in a reduction that other ranks need, with what this one has by now, and zeros for the rest.

        Every rank must call it, or `flush` a conditional group.
        """
        if self.streams is not None and self.streams.are_apart():
            with self.streams.at_home():
                return self.serve()
        for bucket in self._buckets:
            self._fill(bucket)
            self._process(self._take(bucket.indices))

    def _flush(self, left: set[int]) -> None:
        if self.turn is not None and self.synchronise and left:
            self.turn.reduce()
            if self.turn.is_conditional:
                self.serve()
                left = left.difference(*(bucket.indices for bucket in self._buckets))
        for bucket in self._buckets:
            self._process(self._take(i for i in bucket.indices if i in left))
            left.difference_update(bucket.indices)
        for i in sorted(left, reverse=True):  # frozen since they began to wait, hence in no bucket
            self._process(self._take((i,)))

    def begin_backward(self, backward_pass: object) -> None:
        """Find out which of the waiting gradients the user has cleared or replaced since the last backward."""
        self.backward_pass, self._may_have_waited = backward_pass, self.owes
        self.steps.unmark()
        self.waiting.unmark()

    def end_backward(self) -> None:
        """Reduce what is left. `resume` follows, when no rank reduces any more."""
        if self.streams is not None and self.streams.are_apart():
            with self.streams.at_home():
                return self.end_backward()
        self.owes = not (self.synchronise and self.reduction.all_reduce)
        fills = self.reduces_unused and self._reduces_all()
        unused = [each for each in self._buckets if not each.complete] if fills else []
        if unused or self.turn is not None or any(bucket.missing < bucket.size for bucket in self._buckets):
            self._flush(self._find_arrived(unused))
        if self.synchronise:
            self._flush(set(self.waiting.full))
        for bucket in self._buckets:
            bucket.restart()

    def reduce_waiting(self) -> None:
        """Between backward passes: do what one more, that computes nothing, would do with the gradients that wait.

        Those that somebody assigned to the full parameters are taken along.
        """
        if self.owes:
            self.begin_backward(object())
            self.flush()
            self.end_backward()

    def resume(self) -> None:
        """Sum between replicas what no gradient of this backward pass has taken along."""
        if self.streams is not None and self.streams.are_apart():
            with self.streams.at_home():
                return self.resume()
        partial = self.waiting.partial
        while partial and self.synchronise and self.reduction.all_reduce:
            carried = self.waiting.take_partial([next(iter(partial))])
            indices = tuple(carried)
            layout, self.label.part = self._plan(indices, True).layout, self._names(indices)
            self.queue.add(self, reduce.resume(carried, layout, self.reduction, self._params[0].full.device))

    def mark_waiting(self) -> None:
        """The pass is over: put a stand-in into `.grad` of the parameters whose gradients wait."""
        self.waiting.mark()
        self.steps.mark(self.backward_pass)

    def discard(self) -> None:
        """After an error: drop the gradients of the backward pass that failed, keep those of earlier ones.

        Unless it has added to them already: then they are lost, which their stand-ins say.
        """
        for param in self._params:
            param.full.grad = None
        for bucket in self._buckets:
            bucket.restart()
        self.waiting.lose_taken()
        self.mark_waiting()

    def receive(self, pending: reduce.Pending, of_pass: object) -> None:
        """Accumulate reduced shards into the sharded parameters' `.grad`; step on them, if that is to be."""
        shards = pending.finish()
        if pending.is_partial:
            for i, (flat, offset) in shards.items():
                self.waiting.keep_partial(i, flat.as_strided((self._specs[i].shard_numel,), (1,), offset))
            return
        if self.streams is not None:
            for flat, _ in shards.values():
                self.streams.lend(flat)
        with torch.no_grad() if torch.is_grad_enabled() else _NOTHING:  # to disable it takes as long as two operations
            with dtensor_compat.no_torch_function():
                is_hooked = torch_compat.have_gradient_hooks([self._params[i].sharded for i in shards])
                if not is_hooked:
                    self._accumulate(shards, False)
            if is_hooked:  # users' hooks may need torch functions, and their modes
                run_shown(self._accumulate, shards, True)
        if self.steps.stepper is not None:
            run_shown(self.steps.step, map(self._params.__getitem__, shards), of_pass)

    def start_step(self, pending: reduce.Pending, of_pass: object) -> Future[None] | None:
        """Have `receive` done beside this thread, if that ends in a step."""
        return self.steps.start(self.receive, pending, of_pass)

    def _accumulate(self, shards: reduce.Shards, is_hooked: bool) -> None:
        for i, (flat, offset) in shards.items():
            self._params[i].accumulate(flat, offset, is_hooked)

    def _take(self, indices: Iterable[int]) -> dict[int, Tensor]:
        """The full gradients of those that have one, with what waited for them; nobody else holds them then."""
        taken, indices, may_have_graph = {}, tuple(indices), torch.is_grad_enabled()
        with dtensor_compat.no_torch_function():
            frozen = [i for i in indices if not self._params[i].sharded.requires_grad]
        for i in indices:
            param = self._params[i]
            gradient = param.full.grad
            if gradient is not None:
                param.full.grad = None
                if i in frozen:
                    continue  # since the forward
                if may_have_graph and gradient.requires_grad:
                    gradient = _without_graph(gradient)
                if gradient.layout is not torch.strided:
                    raise NotImplementedError(f"{param.name}: sparse gradients are not supported. Use sparse=False.")
                gradient = gradient if param.is_usual else param.gathered_gradient(gradient)
                spec = self._specs[i]
                # To compare shapes would take twice as long.
                if gradient.numel() != spec.numel or gradient.size(0) != spec.shape[0]:
                    self._refuse_shape(i, gradient)
                taken[i] = gradient
            if i in self.waiting.full:
                waited = self.waiting.take_full(i)
                taken[i] = waited.add_(taken[i]) if i in taken else waited
        return taken

    def _refuse_shape(self, i: int, gradient: Tensor) -> None:
        """Raises RuntimeError: it would be copied to memory of other sizes."""
        raise RuntimeError(
            f"{self._params[i].name}: expected a gradient of shape {self._specs[i].shape}, got "
            f"{tuple(gradient.shape)}. Its `.data` was assigned while it was unsharded. Write inside "
            "`with fsdp2.full_params(module, writeback=True):`; change a shape before fully_shard."
        )

    def _process(self, gradients: dict[int, Tensor]) -> None:
        """Reduce gradients of one bucket, or have them wait."""
        if not gradients:
            return
        if self.synchronise:
            if self.guard is not None:
                self.guard()
            self._reduce(gradients)
        else:
            self._may_have_waited = True
            for i, gradient in gradients.items():  # to which later ones are added
                self.waiting.full[i] = torch_compat.owned(gradient.to(self._reduce_dtypes[i]))

    def _reduce(self, gradients: dict[int, Tensor]) -> None:
        self.queue.make_room()
        indices = tuple(gradients)
        plan, self.label.part = self._plan(indices, self._may_have_waited), self._names(indices)
        carried, half = self.waiting.take_partial(gradients), None
        if plan.halves:
            half = self._started(reduce.start_half, gradients, plan, self.reduction)
            if half is not None:
                self.queue.add(self, half)
                self.queue.make_room()
        self.queue.add(self, self._started(reduce.start, gradients, plan, self.reduction, carried, half))

    def _started(self, start: Callable[..., Any], gradients: dict[int, Tensor], *arguments: Any) -> Any:
        try:
            return start(gradients, *arguments)
        except RuntimeError as error:  # out of memory, say: allocators don't know for whom
            self.label.locate(error, f"reducing the gradients{self._names(tuple(gradients))}")
            raise


def _without_graph(gradient: Tensor) -> Tensor:
    warnings.warn(
        "backward(create_graph=True): gradients of sharded parameters have no graph, so a loss made of them would not "
        "train. Differentiate by what full_params yields instead, inside its block, with torch.autograd.grad.",
        stacklevel=2,
    )
    return gradient.detach()
