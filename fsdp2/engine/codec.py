"""Encodes gradients and weights that ranks of a shard group send each other: as they are, cast, or by a codec of your
own.

Shape legend:  W ranks,  P elements of one rank's segment of a bucket,  n elements of that segment as it is sent.

A reduction of one bucket packs a segment of P elements for each rank. Then a codec decides (`exchanges`): either the
process group sums the segments (reduce-scatter), or

    encode    [W, P] numbers  -> [W, n] of any dtype     on the rank that has computed the gradients
    exchange  row r of all ranks goes to rank r           an all-to-all: bytes, which no process group sums
    sum       [W, n]          -> [P] in the summed dtype  on the rank that owns the shard, in the order of ranks

and the sum is divided there. Each rank's gradient is so rounded once.

Replicas sum the shards that result by one collective, or by a `ReplicaSum`: encoded, as matrices of low rank, or by a
user's hook (codecs/).

A gather of a parameter needs two of these methods. Each rank encodes its shard, [1, P] numbers in the dtype in which
it rests; the process group gathers bytes; and each rank decodes [W, n] of them into the unsharded parameter, [W, P]
numbers in the dtype in which it computes.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeAlias, final

import torch
from torch import Tensor, nn

from ..devices.streams import Rows as Rows
from ..devices.streams import costs_launches, sum_pairs, sum_rows

if TYPE_CHECKING:
    from .comm import Comm, Work
    from .layout import ParamSpec

SMALL_NUMEL = 256
"""Codecs leave parameters of fewer elements alone, as those of one dim: they are few bytes, and matter."""


def is_large(shape: Sequence[int]) -> bool:
    """Returns True if codecs compress parameters of this shape: they have SMALL_NUMEL elements, and two dims or more
    that are longer than one.
    """
    return math.prod(shape) >= SMALL_NUMEL and sum(size > 1 for size in shape) > 1


def is_compressed(codec: Codec, shape: Sequence[int] | None, dtype: torch.dtype) -> bool:
    """Returns True if `codec` compresses what is sent in `dtype` of a parameter of this shape: a dtype does if it is
    narrower, whatever the shape. None: the parameter is large.
    """
    return codec.dtype.itemsize < dtype.itemsize if type(codec) is Cast else shape is None or is_large(shape)


class Codec(Protocol):
    """Encodes gradients, or weights, while they are sent. `Compression` takes codecs; a class of yours may be one.

    A codec is a value: it is immutable, two equal ones have one hash and one `repr`, and what it returns depends on its
    arguments only. A frozen dataclass is all that. Ranks compare its `repr`, so that must say everything and must not
    hold an address. It knows no parameters and no ranks; the engine owns what it keeps between steps.

    Of weights, `summed` is the dtype in which the parameter is stored. `sum` is not called, and `seed` is the same each
    time, so that backward has the weights of the forward. There is no feedback: sharded parameters are exact.
    """

    @property
    def exchanges(self) -> bool:
        """True if ranks exchange bytes that this codec encodes and sums. False: the process group sums numbers; then
        only the methods `packed_dtype` and `sent_nbytes` are called.
        """

    @property
    def feedback(self) -> bool:
        """True if what encoding has changed is added to the next gradient of the same parameter (error feedback).

        The engine keeps it for each parameter on each rank, as large as the unsharded gradient in the packed dtype
        (between replicas: as the shard), also while the parameter is frozen, until another object takes its place or a
        backward pass fails. `fsdp2.checkpoint` saves it.
        """

    def packed_dtype(self, summed: torch.dtype) -> torch.dtype:
        """Returns the dtype in which gradients are packed, no wider than `summed`, the dtype of their sums: casting
        copies them, too. Raises NotImplementedError if gradients of that dtype can't be sent so.
        """

    def sent_nbytes(self, numel: int, summed: torch.dtype) -> int:
        """Returns how many bytes a segment of `numel` elements takes as it is sent, to plan and to describe."""

    def encode(self, numbers: Tensor, seed: int) -> Tensor:
        """Returns what is sent, [W, n], of [W, P] numbers in the packed dtype, contiguous; it must not write to these.

        n must depend on P alone. Rows of a multiple of 16 bytes are copied fastest. The result may share memory with
        `numbers`. `seed`: another number at each call, and on each rank, for codecs that round at random; users' random
        numbers stay as they are. Padding is zeros.
        """

    def decode(self, wire: Tensor, numbers: Tensor) -> None:
        """Fills `numbers`, [R, P] in any dtype, with what R encoded rows, [R, n], stand for. The rows of either may lie
        apart.
        """

    def sum(self, rows: Rows, total: Tensor) -> None:
        """Fills `total`, [P], in the summed dtype (float32 if that is float16), with the sum of what the encoded rows
        of all ranks stand for: rows[r] has n elements, and comes from rank r. Adding in the order of ranks gives the
        same bits in each run; `sum_decoded(self, rows, total)` does it.
        """


def sum_decoded(codec: Codec, rows: Rows, total: Tensor) -> None:
    """Fills `total`, [P], with the sum of the decoded `rows`, in their order: `Codec.sum`, in terms of `decode`.

    It takes memory for one more row; on a device for all of them, where it takes a few launches instead of a few for
    each row.
    """
    if isinstance(rows, Tensor) and costs_launches(rows.device):
        numbers = total.new_empty(len(rows), total.numel())
        codec.decode(rows, numbers)
        sum_rows(numbers, total)
        return
    first, *rest = rows
    codec.decode(first[None], total[None])
    decoded = torch.empty_like(total) if rest else total
    for row in rest:
        codec.decode(row[None], decoded[None])
        total.add_(decoded)


@dataclass(frozen=True)
class AsIs:
    """Gradients are sent in the dtype in which they are summed, and the process group sums them: no compression."""

    exchanges: ClassVar[bool] = False
    feedback: ClassVar[bool] = False

    def packed_dtype(self, summed: torch.dtype) -> torch.dtype:
        return summed

    def sent_nbytes(self, numel: int, summed: torch.dtype) -> int:
        return numel * summed.itemsize

    def encode(self, numbers: Tensor, seed: int) -> Tensor:
        return numbers

    def decode(self, wire: Tensor, numbers: Tensor) -> None:
        numbers.copy_(wire)

    def sum(self, rows: Rows, total: Tensor) -> None:
        sum_rows(rows, total)


@dataclass(frozen=True)
class Cast:
    """Numbers are sent in `dtype`, if that is narrower than their own dtype: a dtype given to `Compression`."""

    dtype: torch.dtype

    exchanges: ClassVar[bool] = True
    feedback: ClassVar[bool] = False

    def __repr__(self) -> str:
        return repr(self.dtype)

    def packed_dtype(self, summed: torch.dtype) -> torch.dtype:
        return self.dtype if self.dtype.itemsize < summed.itemsize else summed

    def sent_nbytes(self, numel: int, summed: torch.dtype) -> int:
        return numel * self.packed_dtype(summed).itemsize

    def encode(self, numbers: Tensor, seed: int) -> Tensor:
        return numbers  # packing has cast them

    def decode(self, wire: Tensor, numbers: Tensor) -> None:
        numbers.copy_(wire)

    def sum(self, rows: Rows, total: Tensor) -> None:
        sum_rows(rows, total)


AS_IS = AsIs()


@dataclass(frozen=True)
class InPairs(AsIs):
    """Numbers are sent in the dtype in which they are summed; a rank adds those of neighbours, then the sums of
    neighbouring pairs, and so on: the upper levels of the tree that `PartialSums` begins on each rank.
    """

    exchanges: ClassVar[bool] = True

    def sum(self, rows: Rows, total: Tensor) -> None:
        sum_pairs(rows, total)


IN_PAIRS = InPairs()

_MEMBERS = ("exchanges", "feedback", "packed_dtype", "sent_nbytes", "encode", "decode", "sum")


def check_codec(codec: object, where: str, may_sum: bool) -> None:
    """Refuses what is no codec. `where`: the argument, for errors. `may_sum`: it may be a way to sum between replicas.

    Raises:
        TypeError: it lacks something, or can't be hashed.
    """
    sums = hasattr(codec, "make_sum")
    if sums and not may_sum and not isinstance(codec, type):
        raise TypeError(f"{where}: expected a codec, got {codec!r}, which sums between replicas: it is for all_reduce.")
    missing = [] if sums else [name for name in _MEMBERS if not hasattr(codec, name)]
    if isinstance(codec, type) or missing:
        label = "its class" if isinstance(codec, type) else f"one without {', '.join(missing)}"
        raise TypeError(
            f"{where}: expected a torch.dtype, a codec as fsdp2.compression.Codec describes it, or None, got {label}: "
            f"{codec!r}"
        )
    try:
        hash(codec)
    except TypeError:
        raise TypeError(
            f"{where}: expected a codec that can be hashed, a frozen dataclass for example, got {codec!r}"
        ) from None
    if " at 0x" in repr(codec):
        raise TypeError(
            f"{where}: expected a codec whose repr says how it encodes, which ranks compare: a frozen dataclass for "
            f"example, got {codec!r}"
        )


@dataclass(frozen=True)
class Compression:
    """How weights and gradients are compressed while they are sent, for `MixedPrecisionPolicy(compression=)`.

    Each argument is None (no compression), a dtype, in which numbers of a wider dtype are sent, or a codec: `Int8()`,
    `Float8()`, or one of your own (`Codec`). A dtype holds for all floating-point parameters; a codec for parameters of
    256 elements or more, in two dims or more that are longer than one, and others are sent as without it, to the bit.
    Values are equal on all ranks.

    Args:
        all_gather: how weights are sent in all-gathers. Each rank compresses its shard, and restores what it gathers
            into unsharded parameters in the dtype in which they compute: forward and backward compute with rounded
            weights. Sharded parameters, optimizer states and checkpoints stay exact. It holds for parameters whose
            dtype `param_dtype_override_fn` leaves alone. Secondary shards (`reshard_after_forward=k`, `outer_shard`)
            are restored weights. On one rank nothing is sent, but weights are rounded alike.
        reduce_scatter: how gradients are sent between the ranks of a shard group. Each rank's gradient is rounded once
            (beyond 65504, float16 is infinite). Ranks exchange the shards by an all-to-all, then sum and divide in the
            reduce dtype. That is for one machine: across machines an all-to-all uses one network card a rank, where the
            ring that it replaces uses all. A dtype is at most as wide as `reduce_dtype`. With `param_dtype` bfloat16,
            gradients are bfloat16 already, and bfloat16 rounds nothing: a step then sends (2 + 2 + 2) (N - 1) / N bytes
            per parameter instead of (2 + 2 + 4), two all-gathers and the gradients over N ranks. Unsynchronized
            gradients accumulate in the reduce dtype, and are compressed when they are sent. None: on gloo, where each
            rank sums what it receives, gradients of one backward are sent in the dtype in which autograd computes them,
            which changes no bit of the sums; ranks that accumulate different numbers of batches with parameters kept
            over steps pass the reduce dtype itself.
        all_reduce: how gradients are sent between replicas (HSDP, `replicate`, `outer_shard`), in place of an
            all-reduce in the reduce dtype. `PowerSGD()` is for it alone. Two replicas gather what both have compressed;
            of more, each sums a slice, and all gather the sums, compressed once more. All replicas get the same bits.
            Where there is one replica, nothing is rounded.

    Raises:
        TypeError: a value is neither a floating-point dtype of 16 bits or more, nor a codec, nor None.
        ValueError: `all_gather` has feedback; or it, or `all_reduce`, is a codec that does not exchange bytes.

    Example:
        `MixedPrecisionPolicy(compression=Compression(all_gather=Float8(), reduce_scatter=torch.bfloat16))`
    """

    all_gather: Codec | None = None
    reduce_scatter: Codec | None = None
    all_reduce: Codec | ReplicaCodec | None = None

    if TYPE_CHECKING:  # a dtype becomes a Cast

        def __init__(
            self,
            all_gather: torch.dtype | Codec | None = None,
            reduce_scatter: torch.dtype | Codec | None = None,
            all_reduce: torch.dtype | Codec | ReplicaCodec | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        for name in ("all_gather", "reduce_scatter", "all_reduce"):
            given, where = getattr(self, name), f"Compression.{name}"
            if isinstance(given, torch.dtype):
                if not given.is_floating_point or given.itemsize < 2:
                    raise TypeError(f"{where}: expected a floating-point dtype of 16 bits or more, got {given}")
                object.__setattr__(self, name, Cast(given))
            elif given is not None:
                check_codec(given, where, may_sum=name == "all_reduce")
                if name != "reduce_scatter" and not getattr(given, "exchanges", True):
                    raise ValueError(f"{where}: expected a codec that exchanges bytes, got {given!r}, which does not.")
        if self.all_gather is not None and self.all_gather.feedback:
            raise ValueError(
                f"Compression.all_gather: expected a codec without feedback, got {self.all_gather!r}. What is gathered "
                "is rounded anew from weights that are exact: there is nothing to feed back."
            )


def encode(codec: Codec, numbers: Tensor, seed: int) -> Tensor:
    """Returns what a codec makes of numbers, [W, P].

    Raises:
        ValueError: that can't be sent.
        RuntimeError: the codec has written to the numbers.
    """
    before = None if numbers.is_inference() else numbers._version
    wire = codec.encode(numbers, seed)
    if wire is numbers:
        return wire
    if wire.dim() != 2 or len(wire) != len(numbers) or not wire.is_contiguous():
        raise ValueError(
            f"{codec!r}.encode: expected a contiguous tensor [{len(numbers)}, n], a row for each rank, got "
            f"one of shape {tuple(wire.shape)} and strides {wire.stride()}"
        )
    if before is not None and numbers._version != before:
        raise RuntimeError(f"{codec!r}.encode has written to the numbers that it was given: return a copy")
    return wire


class Member(NamedTuple):
    """The place of a parameter's shards, or of a piece of them, in packed segments."""

    i: int
    """Index of the parameter in its group."""
    offset: int
    """First element in each segment."""
    first: int
    """First element of the piece, in each rank's shard."""
    last: int
    """One past its last element."""
    shard_numel: int
    """Elements of one rank's padded shard."""


@final
class Encoder:
    """Encodes the gradients of one group by its codec. It owns what a codec is to get between steps: what encoding has
    changed, and numbers for rounding at random.

    Args:
        codec: how gradients are sent.
        name: differs between groups and ranks, so that they round differently.
    """

    def __init__(self, codec: Codec, name: str = "") -> None:
        self.codec = codec
        # A generator on the CPU reads the lowest 32 bits of a seed alone.
        self._first_seed, self._calls = zlib.crc32(name.encode()), 0
        # Parameter index -> what has not been sent: [W, shard_numel], in the packed dtype.
        self._residuals: dict[int, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of what has not been sent: what this rank keeps between steps."""
        return sum(residual.nbytes for residual in self._residuals.values())

    def discard(self) -> None:
        """Drops what has not been sent."""
        self._residuals.clear()

    def kept_state(self) -> dict[str, Any]:
        """Returns copies, on the CPU, of what it keeps between steps."""
        return {
            "calls": self._calls,
            "residuals": {i: each.to("cpu", copy=True) for i, each in self._residuals.items()},
        }

    def load_kept(self, state: dict[str, Any], device: torch.device) -> None:
        """Takes what `kept_state` has returned, in place of what it has."""
        self._calls = state["calls"]
        self._residuals = {i: each.to(device, copy=True) for i, each in state["residuals"].items()}

    def encode(self, numbers: Tensor, members: Sequence[Member], slices: int = 1) -> Tensor:
        """Returns what is sent, [W, n], of packed segments, [W, P]. With feedback it writes to these.

        `members`: the parameters in the segments. `slices`: each segment is sent in so many equal slices, [W * slices,
        n], which are encoded one by one.
        """
        codec, sent, seed = self.codec, numbers.view(len(numbers) * slices, -1), self._next_seed()
        if not codec.feedback:
            return encode(codec, sent, seed)
        parts = [numbers[:, each.offset : each.offset + each.last - each.first] for each in members]
        residuals = [self._residual(each, numbers)[:, each.first : each.last] for each in members]
        for part, residual in zip(parts, residuals, strict=True):
            part.add_(residual)
        wire = encode(codec, sent, seed)
        decoded = torch.empty_like(numbers)
        codec.decode(wire, decoded.view_as(sent))
        # What is sent may share memory with the numbers. What is not finite would stay in all later gradients.
        lost = torch.sub(numbers, decoded, out=decoded).nan_to_num_(0, 0, 0)
        for each, residual in zip(members, residuals, strict=True):
            residual.copy_(lost[:, each.offset : each.offset + each.last - each.first])
        return wire

    def encode_sum(self, total: Tensor, first: int, members: Sequence[Member], share: float) -> Tensor:
        """Returns what is sent, [1, n], of a sum that this rank has made of what ranks have sent: elements `first` on.

        With feedback, what encoding changes of it joins what this rank has not sent itself. `share`: how many times as
        much as it adds to such a sum that is.
        """
        wire = encode(self.codec, total[None], self._next_seed())
        if self.codec.feedback:
            decoded = torch.empty_like(total)
            self.codec.decode(wire, decoded[None])
            lost = torch.sub(total, decoded, out=decoded).nan_to_num_(0, 0, 0)
            for each in members:
                begin, end = max(each.offset, first), min(each.offset + each.shard_numel, first + total.numel())
                if begin < end:
                    residual = self._residual(each, total[None])[0]
                    residual[begin - each.offset : end - each.offset].add_(
                        lost[begin - first : end - first], alpha=share
                    )
        return wire

    def _next_seed(self) -> int:
        self._calls += 1
        return self._first_seed + self._calls

    def _residual(self, member: Member, numbers: Tensor) -> Tensor:
        found, shape = self._residuals.get(member.i), (len(numbers), member.shard_numel)
        if found is None or found.shape != shape or found.dtype != numbers.dtype:
            found = self._residuals[member.i] = numbers.new_zeros(shape)
        return found


# ---- sums between replicas


Steps: TypeAlias = "Generator[Work | None, None, None]"
"""A sum in several collectives: it begins one, yields its Work, and is resumed when that has been waited for. It yields
None to be resumed later: when another bucket is there, or none will come."""


class Part(NamedTuple):
    """The place of the shard of one parameter in a flat tensor of sums."""

    i: int
    """Index of the parameter in its group."""
    name: str
    offset: int
    """First element of the shard."""
    numel: int
    """Elements of the shard with padding."""
    shape: tuple[int, ...]
    """Shape of this rank's shard, without padding."""
    parameter: nn.Parameter
    """The sharded parameter."""

    def of(self, flat: Tensor) -> Tensor:
        """Returns the shard in `flat`, as a view."""
        return flat.narrow(0, self.offset, math.prod(self.shape)).view(self.shape)


class Sums(NamedTuple):
    """The reduced gradients of one bucket that replicas add up. Padding is zeros."""

    flat: Tensor
    """[P], to which the sum of all replicas is written. If replicas share one set of shards, [R * P]: the shards of all
    of them."""
    own: Tensor | None
    """[P], to which this rank's sum is written, if replicas share one set of shards."""
    parts: Sequence[Part]
    is_last: Callable[[], bool]
    """Returns True if no other bucket follows in this backward pass."""


class ReplicaSum(Protocol):
    """Sums the gradients of one group between replicas, and keeps what that needs between steps."""

    @property
    def nbytes(self) -> int:
        """Bytes that it keeps between steps."""

    def holds_for(self, spec: ParamSpec) -> bool:
        """Returns True if gradients of such a parameter are summed so; the others are by one collective. Equal on all
        ranks.
        """

    def steps(self, sums: Sums, comm: Comm, divisor: float, label: str) -> Steps:
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
        """Returns the sum of one group."""
