"""Sums encoded gradients between replicas: `Compression(all_reduce=)` with a dtype or a codec that exchanges bytes.

Shape legend:  R replicas,  P elements of one rank's shards of a bucket,  S elements of a slice, at least P / R,
               n encoded elements of a slice, or of P.

How many bytes a rank sends for P encoded gradients:

    two replicas    each gathers what the other has encoded, and adds both:                n
    more            rank r is sent slice r of all ranks, sums them, encodes the sum
                    once more, and all gather these sums:                       2 (R - 1) n, of slices
    replicas with   rank r is sent what the others have encoded of the shard
    one set of      that it keeps (`outer_shard`), as in a reduction:           (R - 1) n, of shards
    shards

To gather all of it from all would take (R - 1) n(P) bytes, twice as many from four replicas on. In each case all
replicas decode the same bytes, and add in the order of ranks: so they have the same bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

import torch

from ..devices.streams import SumWork
from ..engine.codec import Encoder, Member, Steps, Sums, is_compressed
from ..engine.comm import Comm
from ..engine.layout import RANK_ALIGNMENT, ParamSpec, align

if TYPE_CHECKING:
    from ..engine.policy import MixedPrecisionPolicy


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

    def steps(self, sums: Sums, comm: Comm, divisor: float, label: str) -> Steps:
        encoder, (flat, own, parts, _) = self._encoder, sums
        codec, size = encoder.codec, comm.size
        members = [Member(part.i, part.offset, 0, part.numel, part.numel) for part in parts]
        numbers = flat.to(codec.packed_dtype(flat.dtype))
        if own is not None:
            wire = encoder.encode(numbers.view(size, -1), members).view(-1)
            work, rows = comm.exchange([wire], label)
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
        work, rows = comm.exchange([wire], label)
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
