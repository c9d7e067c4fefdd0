"""Sums gradients between replicas in other ways than one all-reduce: encoded, or by a user's hook in DDP's shape.

Shape legend:  R replicas,  P elements of one rank's shards of a bucket,  S elements of a slice, at least P / R,
               n elements of a slice, or of P, as it travels.

A sum takes several collectives. It is a generator: it begins one, yields its Work, and goes on when somebody has waited
for that. `PendingReduce` runs it. How many bytes a rank sends for P encoded gradients:

    two replicas    each gathers what the other has encoded, and adds both:                n
    more            rank r is sent slice r of all ranks, sums them, encodes the sum
                    once more, and all gather these sums:                       2 (R - 1) n, of slices
    that share one  rank r is sent what the others have encoded of the shard
    set of shards   that it keeps (`outer_shard`), as in a reduction:           (R - 1) n, of shards

To gather all of it from all would take (R - 1) n(P) bytes, twice as many from four replicas on. In each case all
replicas decode the same bytes, and add in the order of ranks: so they have the same bits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, final

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..collectives.gloo import SUMMING
from ..collectives.watching import compare_first
from ..devices.streams import SumWork
from ..engine.codec import Encoder, Member, is_compressed
from ..engine.comm import Comm, Work
from ..engine.layout import RANK_ALIGNMENT, ParamSpec, align, contiguous_stride

if TYPE_CHECKING:
    from ..engine.policy import MixedPrecisionPolicy

# Yields what is to be waited for before it goes on. None: it is to go on later, when another bucket is there or none
# will come.
Steps: TypeAlias = "Generator[Work | None, None, None]"


class Part(NamedTuple):
    """The place of the shard of parameter i in a flat tensor of sums: `numel` elements, padded, from `offset` on.

    `shape`: of the shard of this rank, without padding. `parameter`: the sharded parameter.
    """

    i: int
    name: str
    offset: int
    numel: int
    shape: tuple[int, ...]
    parameter: nn.Parameter

    def of(self, flat: Tensor) -> Tensor:
        """Returns the shard in `flat`, as a view."""
        return flat.as_strided(self.shape, contiguous_stride(self.shape), flat.storage_offset() + self.offset)


class Sums(NamedTuple):
    """The sums of one bucket that replicas are to add up.

    `flat`: [P]; the sum of all replicas is written here. If they share one set of shards, [R * P]: shards for all of
    them; this rank's sum is written to `own`, [P]. Padding is zeros. `is_last`: returns True if no other bucket follows
    in this backward pass.
    """

    flat: Tensor
    own: Tensor | None
    parts: Sequence[Part]
    is_last: Callable[[], bool]


class ReplicaSum(Protocol):
    """Sums the gradients of one group between replicas, and keeps what that needs between steps."""

    @property
    def nbytes(self) -> int:
        """Bytes that it keeps between steps."""

    def holds_for(self, spec: ParamSpec) -> bool:
        """Returns True if gradients of such a parameter are summed so; the others are by an all-reduce. Equal on all
        ranks.
        """

    def steps(self, sums: Sums, comm: Comm, divisor: float, what: str) -> Steps:
        """Sums, and divides by `divisor`. Every replica must run it, with the same parts."""

    def discard(self) -> None:
        """Drops what it keeps, after a backward pass that has failed."""

    def kept_state(self) -> dict[str, Any]:
        """Returns copies, on the CPU, of what it keeps."""

    def load_kept(self, state: dict[str, Any], device: torch.device) -> None:
        """Takes what `kept_state` has returned, in place of what it has."""


class ReplicaCodec(Protocol):
    """A codec that sums between replicas by collectives of its own: `PowerSGD`."""

    def make_sum(self) -> ReplicaSum:
        """Returns what sums one group so."""


def replica_sum_of(policy: MixedPrecisionPolicy, hook: ReplicaSum | None, name: str) -> ReplicaSum | None:
    """Returns how replicas sum the gradients of a group. None: by an all-reduce, in the reduce dtype.

    `name`: differs between groups and ranks, so that they round differently.
    """
    codec: Any = policy.compression.all_reduce
    if hook is not None or codec is None:
        return hook
    if hasattr(codec, "make_sum"):
        made: ReplicaSum = codec.make_sum()
        return made
    return EncodedSum(Encoder(codec, f"replicas {name}"), policy) if codec.exchanges else None


@final
class EncodedSum:
    """Sums what a codec has encoded."""

    def __init__(self, encoder: Encoder, policy: MixedPrecisionPolicy) -> None:
        self._encoder, self._policy = encoder, policy

    @property
    def nbytes(self) -> int:
        return self._encoder.nbytes

    def holds_for(self, spec: ParamSpec) -> bool:
        return is_compressed(self._encoder.codec, spec.shape, self._policy.gradient_dtype(spec.delivered_dtype))

    def discard(self) -> None:
        self._encoder.discard()

    def kept_state(self) -> dict[str, Any]:
        return self._encoder.kept_state()

    def load_kept(self, state: dict[str, Any], device: torch.device) -> None:
        self._encoder.load_kept(state, device)

    def steps(self, sums: Sums, comm: Comm, divisor: float, what: str) -> Steps:
        encoder, (flat, own, parts, _) = self._encoder, sums
        codec, size = encoder.codec, comm.size
        members = [Member(part.i, part.offset, 0, part.numel, part.numel) for part in parts]
        numbers = flat.to(codec.packed_dtype(flat.dtype))
        if own is not None:
            wire = encoder.encode(numbers.view(size, -1), members).view(-1)
            work, rows = comm.exchange([wire], what)
            yield SumWork([work], [wire], [own], rows, divisor, codec.sum)
            return
        if size == 2:
            wire = encoder.encode(numbers[None], members)
            everything = wire.new_empty(size, wire.size(1))
            work = comm.all_gather([everything.view(-1)], [wire.view(-1)])
            yield SumWork([work], [wire], [flat], [everything], divisor, codec.sum)
            return
        slice_numel = align(-(-flat.numel() // size) * numbers.itemsize, RANK_ALIGNMENT) // numbers.itemsize
        padded = numbers
        if slice_numel * size != flat.numel():
            padded = numbers.new_zeros(slice_numel * size)
            padded[: flat.numel()] = numbers
        wire = encoder.encode(padded[None], members, size).view(-1)
        total = flat.new_empty(slice_numel)
        work, rows = comm.exchange([wire], what)
        yield SumWork([work], [wire], [total], rows, divisor, codec.sum)
        first = comm.rank * slice_numel
        wire = encoder.encode_sum(total.to(padded.dtype), first, members, divisor)
        everything = wire.new_empty(size, wire.size(1))
        yield comm.all_gather([everything.view(-1)], [wire.view(-1)])
        if padded is flat:
            codec.decode(everything, flat.view(size, -1))
        else:
            decoded = flat.new_empty(size, slice_numel)
            codec.decode(everything, decoded)
            flat.copy_(decoded.view(-1)[: flat.numel()])


# ---- hooks in the shape of DDP's


@final
class GradBucket:
    """The argument of a hook in the shape of DDP's: gradients of this rank, in one flat tensor. Like `dist.GradBucket`.

    `names`, `shapes`: of the parameters, in the order of `gradients`.
    """

    def __init__(self, index: int, flat: Tensor, parts: Sequence[Part], is_last: bool) -> None:
        self._index, self._flat, self._is_last = index, flat, is_last
        self._parts = [part for part in parts if 0 not in part.shape]
        self.names = [part.name for part in self._parts]
        self.shapes = [part.shape for part in self._parts]

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
    """Has replicas sum by `hook(state, bucket)`, which returns a future of the mean; where there are none, the ranks
    that shard by `hook(state, gradient, shard)` (`HookedComm`). Groups of a model share it.

    Between replicas it runs when the next bucket is there, or none will come: so `is_last` is true. The host waits for
    its future before it goes on, where there are no streams: hooks may begin collectives from threads, and in the same
    order as other ranks only if nothing else does.

    `in_place`: between replicas it is `hook(state, gradient)`, which puts the mean into the flat tensor.
    `is_running`: the collectives that begin now are the hook's, for a reduction that all ranks have agreed on.
    """

    nbytes = 0
    is_running = False

    def __init__(self, state: object, hook: Callable[..., Any], in_place: bool = False) -> None:
        self.state, self.hook, self.in_place = state, hook, in_place
        # Which parameters, by name -> index of the bucket.
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

    def steps(self, sums: Sums, comm: Comm, divisor: float, what: str) -> Steps:
        yield None
        flat, _, parts, is_last = sums
        index = self._indices.setdefault(tuple(part.name for part in parts), len(self._indices))
        compare_first(comm, SUMMING, flat, what)  # gloo ends the process if the hook's own messages differ
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
