"""Sums gradients by a user's hook in the shape of DDP's (`register_comm_hook`)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..collectives.gloo import SUMMING
from ..collectives.watching import compare_first
from ..engine.codec import Part, Steps, Sums
from ..engine.comm import Comm
from ..engine.layout import ParamSpec


@final
class GradBucket:
    """The argument of a hook in DDP's shape: gradients of this rank, in one flat tensor. Like `dist.GradBucket`."""

    def __init__(self, index: int, flat: Tensor, parts: Sequence[Part], is_last: bool) -> None:
        self._index, self._flat, self._is_last = index, flat, is_last
        self._parts = [part for part in parts if 0 not in part.shape]
        self.names = [part.name for part in self._parts]
        """Names of the parameters, in the order of `gradients`."""
        self.shapes = [part.shape for part in self._parts]
        """Shapes of this rank's shards of them."""

    def index(self) -> int:
        """Returns the number of the bucket: the same for the same parameters, in each pass and on all ranks."""
        return self._index

    def buffer(self) -> Tensor:
        """Returns the flat tensor. Between gradients there may be zeros."""
        return self._flat

    def set_buffer(self, buffer: Tensor) -> None:
        """Puts another flat tensor, of the same size, in its place."""
        if buffer.shape != self._flat.shape:
            raise ValueError(f"set_buffer: expected a tensor of {self._flat.numel()} elements, got {[*buffer.shape]}")
        self._flat = buffer

    def gradients(self) -> list[Tensor]:
        """Returns the gradients, as views of the flat tensor: of the parameters that this rank has any rows of."""
        return [part.of(self._flat) for part in self._parts]

    def parameters(self) -> list[nn.Parameter]:
        """Returns the sharded parameters."""
        return [part.parameter for part in self._parts]

    def is_last(self) -> bool:
        """Returns True if no other bucket follows in this backward pass."""
        return self._is_last


@final
class CommHook:
    """Sums gradients by a user's hook. The groups of a model share it.

    Replicas sum by `hook(state, bucket)`, which returns a future of the mean. Without replicas, the ranks that shard
    reduce by `hook(state, gradient, shard)` (`HookedComm`).

    Between replicas it runs when the next bucket is there, or none will come: so `is_last` is true. The host waits for
    its future before it goes on, where there are no streams: hooks may begin collectives from threads, and in the same
    order as other ranks only if nothing else does.

    Args:
        in_place: between replicas it is `hook(state, gradient)`, which puts the mean into the flat tensor.
    """

    nbytes = 0
    is_running = False
    """True while the collectives that begin are the hook's, for a reduction that all ranks have agreed on."""

    def __init__(self, state: object, hook: Callable[..., Any], in_place: bool = False) -> None:
        self.state, self.hook, self.in_place = state, hook, in_place
        # Names of the parameters of a bucket -> its index.
        self._indices: dict[tuple[str, ...], int] = {}

    @property
    def name(self) -> str:
        return getattr(self.hook, "__qualname__", repr(self.hook))

    def __deepcopy__(self, memo: dict[int, Any]) -> CommHook:
        """Returns a copy for a copied model, which communicates over the same process group."""
        for group in (self.state, getattr(self.state, "process_group", None)):
            if isinstance(group, dist.ProcessGroup):
                memo[id(group)] = group
        copied = CommHook(copy.deepcopy(self.state, memo), copy.deepcopy(self.hook, memo), self.in_place)
        copied._indices.update(self._indices)
        memo[id(self)] = copied
        return copied

    @contextmanager
    def runs(self) -> Iterator[None]:
        """Context: the collectives that begin inside are the hook's."""
        self.is_running = True
        try:
            yield
        finally:
            self.is_running = False

    def holds_for(self, spec: ParamSpec) -> bool:
        return True

    def discard(self) -> None:
        pass

    def kept_state(self) -> dict[str, Any]:
        return {}  # the user has that of the hook

    def load_kept(self, state: dict[str, Any], device: torch.device) -> None:
        pass

    def steps(self, sums: Sums, comm: Comm, divisor: float, label: str) -> Steps:
        yield None
        flat, _, parts, is_last = sums
        index = self._indices.setdefault(tuple(part.name for part in parts), len(self._indices))
        compare_first(comm, SUMMING, flat, label)  # gloo ends the process if the hook's own messages differ
        with torch.no_grad():
            mean = flat.detach()
            with self.runs():
                if self.in_place:
                    self.hook(self.state, mean)
                else:
                    future = self.hook(self.state, GradBucket(index, flat, parts, is_last()))
                    mean = _value_of(future, flat, self.name)
            if mean.data_ptr() != flat.data_ptr() or mean.dtype != flat.dtype:
                flat.copy_(mean)
            if divisor != comm.size:
                flat.mul_(comm.size / divisor)


def _value_of(future: Any, flat: Tensor, name: str) -> Tensor:
    """Waits for what a hook has returned, and returns the flat tensor."""
    if not hasattr(future, "wait"):
        raise TypeError(f"{name}: expected a torch.futures.Future of a tensor, got {type(future).__name__}")
    value = future.wait()
    value = value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value
    if not isinstance(value, Tensor) or value.numel() != flat.numel():
        got = f"{value.numel()} elements" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name}: expected a future of a tensor of {flat.numel()} elements, as the buffer, got {got}")
    return value.view(-1)
