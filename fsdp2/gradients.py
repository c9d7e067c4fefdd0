"""From full gradients, as they arrive in backward, to the sharded parameters' `.grad`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from . import reduce, torch_compat
from .comm import Comm
from .layout import BucketLayout, ParamSpec, bucket_layout, split_buckets
from .param import FSDPParam

# A group's gradients are reduced in up to four parts, so that what has arrived can be sent and freed while the rest is
# computed; parts below this size cost more in latency than they save.
MAX_BUCKETS = 4
MIN_BUCKET_BYTES = 1024 * 1024


class UnsyncedGrad(DTensor):
    """Stands in `.grad` while gradients wait, unreduced, for a backward pass that synchronises.

    It makes the waiting gradients visible to `zero_grad`, in both of its ways: set to zero, it becomes a plain DTensor
    of zeros. It refuses every other use, since the value isn't known before it is reduced.
    """

    # What had been reduced before, if anything.
    reduced: Tensor | None = None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func not in torch_compat.ZERO_OPS:
            _refuse(str(func))
        several = not isinstance(args[0], Tensor)
        for gradient in args[0] if several else [args[0]]:
            if isinstance(gradient, UnsyncedGrad):
                zeros = torch.zeros_like(torch_compat.local_of(gradient), memory_format=torch.contiguous_format)
                torch_compat.set_local(gradient, zeros)
                gradient.__class__ = DTensor  # type: ignore[assignment]
            else:
                torch_compat.local_of(gradient).zero_()
        return None if several else args[0]

    def to_local(self, **_: Any) -> Any:
        _refuse("to_local")

    def full_tensor(self, **_: Any) -> Any:
        _refuse("full_tensor")

    def redistribute(self, *_: Any, **__: Any) -> Any:
        _refuse("redistribute")


def _refuse(what: str) -> NoReturn:
    raise RuntimeError(
        f"{what}: this gradient is not synchronised between ranks yet. Call set_requires_gradient_sync(True) before "
        "the last backward of an accumulation, and use .grad (clip, step, ...) after it."
    )


class ReductionQueue:
    """The reductions in flight of all groups under one root, oldest first.

    One may run while the next is packed; the older ones are finished first, which bounds the memory they hold.
    """

    def __init__(self) -> None:
        self._running: deque[tuple[GroupGradients, Any]] = deque()

    def make_room(self) -> None:
        while len(self._running) > 1:
            self._finish_oldest()

    def add(self, owner: GroupGradients, pending: Any) -> None:
        self._running.append((owner, pending))

    def finish_all(self) -> None:
        while self._running:
            self._finish_oldest()

    def abandon_all(self) -> None:
        """After an error: wait until no buffer is in use, and drop the results."""
        while self._running:
            with suppress(RuntimeError):  # a peer is gone: then nothing writes to the buffers any more
                self._running.popleft()[1].abandon()

    def _finish_oldest(self) -> None:
        owner, pending = self._running.popleft()
        owner.receive(pending.finish())


class _Bucket:
    """Parameters whose gradients are reduced together, and how many of these are still to come in this backward."""

    def __init__(self, indices: tuple[int, ...]) -> None:
        self.indices, self.missing = indices, len(indices)


class GroupGradients:
    """The gradients of one group: which have arrived in this backward pass, which wait for a synchronised one.

    `synchronise`: reduce between ranks (the default), or accumulate the full gradients, in the reduce dtype, until it
    is set again.
    """

    def __init__(self, params: Sequence[FSDPParam], comm: Comm) -> None:
        self._params, self._comm = params, comm
        self.synchronise = True
        self._specs: tuple[ParamSpec, ...] = ()
        self._reduce_dtypes: tuple[torch.dtype, ...] = ()
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[int, _Bucket] = {}
        self._arrived: set[int] = set()
        # How many of the trainable parameters are done in this backward pass.
        self._done = 0
        self._waiting: dict[int, Tensor] = {}
        # Set by the context that the group runs in.
        self.queue = ReductionQueue()

    def prepare(
        self, specs: tuple[ParamSpec, ...], reduce_dtypes: tuple[torch.dtype, ...], trainable: Iterable[int]
    ) -> None:
        """Plan the buckets of the parameters that are `trainable`, which are expected in reverse order."""
        self._specs, self._reduce_dtypes = specs, reduce_dtypes
        expected = sorted(trainable, reverse=True)
        buckets = split_buckets(specs, reduce_dtypes, expected, MAX_BUCKETS, MIN_BUCKET_BYTES)
        self._buckets = [_Bucket(indices) for indices in buckets]
        self._bucket_of = {i: bucket for bucket in self._buckets for i in bucket.indices}
        self._layout = cache(self._make_layout)

    def _make_layout(self, indices: tuple[int, ...]) -> BucketLayout:
        return bucket_layout(self._specs, indices, self._reduce_dtypes[indices[0]], self._comm.direct_min_bytes)

    def arrive(self, i: int) -> bool:
        """The full gradient of parameter i is complete. Return whether those of all trainable parameters are."""
        param, bucket = self._params[i], self._bucket_of[i]
        self._done += 1
        if not param.sharded.requires_grad:
            param.full.grad = None  # frozen since the forward
        elif not self.synchronise:
            self._keep(i)
        else:
            self._arrived.add(i)
            bucket.missing -= 1
            if bucket.missing == 0:
                bucket.missing = len(bucket.indices)  # reentrant checkpointing may bring them once more
                self._reduce_arrived(bucket.indices)
        return self._done >= len(self._bucket_of)

    def flush(self) -> None:
        """Reduce what has arrived, also if the rest of its bucket has not."""
        if not self._arrived:
            return
        # What waits may have been frozen, and be in no bucket since.
        buckets = (self._bucket_of.get(i) or _Bucket((i,)) for i in sorted(self._arrived, reverse=True))
        for bucket in dict.fromkeys(buckets):
            self._reduce_arrived(bucket.indices)

    def begin_backward(self) -> None:
        """Find out which of the waiting gradients the user has cleared or replaced since the last backward."""
        self._done = 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.indices)
        for i in list(self._waiting):
            marker = self._params[i].sharded.grad
            if isinstance(marker, UnsyncedGrad):
                self._params[i].sharded.grad = marker.reduced
            else:
                del self._waiting[i]

    def end_backward(self) -> None:
        """Reduce what is left; then let `.grad` show what must wait."""
        self.flush()
        if self.synchronise and self._waiting:
            self._arrived.update(self._waiting)
            self.flush()

    def mark_waiting(self) -> None:
        """Put a stand-in into `.grad` of the parameters whose gradients wait."""
        for i in self._waiting:
            param = self._params[i]
            nothing = torch.zeros((), dtype=param.local.dtype, device=param.local.device).expand(param.local.shape)
            marker = UnsyncedGrad(nothing, param.dtensor_spec, requires_grad=False)
            marker.reduced = param.sharded.grad
            param.sharded.grad = marker

    def discard(self) -> None:
        """After an error: drop the gradients of the backward pass that failed, keep those of earlier ones."""
        for param in self._params:
            param.full.grad = None
        self._arrived.clear()
        self.mark_waiting()

    def receive(self, shards: reduce.Shards) -> None:
        """Accumulate reduced shards into the sharded parameters' `.grad`."""
        with torch.no_grad():
            for i, (flat, offset) in shards.items():
                self._params[i].accumulate(flat, offset)

    def _keep(self, i: int) -> None:
        gradient = self._take(i)
        self._waiting[i] = gradient if gradient.dtype == self._reduce_dtypes[i] else gradient.to(self._reduce_dtypes[i])

    def _take(self, i: int) -> Tensor:
        """The full gradient of parameter i, with those that waited for it; nobody else holds it then."""
        full = self._params[i].full
        self._arrived.discard(i)
        gradient, full.grad = full.grad, None
        waited = self._waiting.pop(i, None)
        if gradient is None:
            assert waited is not None, "a gradient was announced by its hook, or waits"
            return waited
        gradient = gradient.detach()  # has a graph of its own under create_graph
        return gradient if waited is None else waited.add_(gradient)

    def _reduce_arrived(self, bucket: tuple[int, ...]) -> None:
        # Under reentrant checkpointing one may arrive twice before another does once.
        indices = bucket if self._arrived.issuperset(bucket) else tuple(i for i in bucket if i in self._arrived)
        self.queue.make_room()
        gradients = {i: self._take(i) for i in indices}
        self.queue.add(self, reduce.start(gradients, self._layout(indices), self._specs, self._comm))
