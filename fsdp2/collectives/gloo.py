"""Exchanges messages between pairs of ranks: the collectives over gloo."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..devices.streams import AllWork, DividedWork, SumWork, Work
from ..engine.comm import TORCH_MEMORY, CommLabel, CommMemory, Rows
from .sums import SUM_ALL, divide_before

GATHERING, REDUCING, SUMMING = "gathering", "reducing", "summing replicas of"
"""The words for what a collective does with a group."""


class PairwiseComm:
    """Has every pair of ranks exchange its slices directly: gloo.

    gloo's own all-gather and reduce-scatter take two to five times as long from a few MB on (the latter is an
    all-reduce inside and moves twice the bytes), and run one after the other. See benchmarks/results.
    """

    direct_min_bytes = 512 * 1024  # measured on two ranks
    force_sum = receiver_sums = True  # gloo has no average
    is_stream_ordered = False  # there are no streams
    memory: CommMemory = TORCH_MEMORY

    # The tag of the messages. No message of a user, and none that carries a header, should have it.
    _TAG = 0x0F5C_0000

    def __init__(self, group: dist.ProcessGroup, comm_label: CommLabel) -> None:
        self.group, self.rank, self.size, self.comm_label = group, group.rank(), group.size(), comm_label
        # (rank to send to, rank to receive from), step by step, so that ranks do not all begin with the same one.
        steps = range(1, self.size)
        self._peers = [((self.rank + step) % self.size, (self.rank - step) % self.size) for step in steps]

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
        parts = [output.view(self.size, -1) for output in outputs]
        exchange = self._exchange(GATHERING, inputs, [[own] * self.size for own in inputs], parts)
        for part, own in zip(parts, inputs, strict=True):
            if part[self.rank].data_ptr() != own.data_ptr():
                part[self.rank].copy_(own)
        return AllWork([exchange], [*outputs, *inputs])

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float, label: str = ""
    ) -> Work:
        work, rows, received = self._send_slices(inputs, label)
        return SumWork([work], [*inputs, *received], outputs, rows, divisor)

    def exchange(self, sent: Sequence[Tensor], label: str = "") -> tuple[Work, Sequence[Rows]]:
        work, rows, received = self._send_slices(sent, label)
        return AllWork([work], [*sent, *received]), rows

    def all_reduce(self, tensor: Tensor, divisor: float, label: str = "") -> Work:
        divisor = divide_before(tensor, divisor)
        return DividedWork([self.group.allreduce([tensor], SUM_ALL)], [tensor], divisor)

    def _send_slices(self, sent: Sequence[Tensor], label: str) -> tuple[Work, Sequence[Rows], Sequence[Tensor]]:
        """Exchanges slices, see `exchange`. Returns the memory in which they arrive, too."""
        slices = [tensor.view(self.size, -1) for tensor in sent]
        received = [torch.empty_like(tensor[1:]) for tensor in slices]
        rows = [
            # `theirs` has no row for this rank.
            [mine[rank] if rank == self.rank else theirs[rank - (rank > self.rank)] for rank in range(self.size)]
            for mine, theirs in zip(slices, received, strict=True)
        ]
        return self._exchange(REDUCING, sent, slices, rows, label), rows, received

    def _exchange(
        self,
        kind: str,
        tensors: Sequence[Tensor],
        outgoing: Sequence[Rows],
        incoming: Sequence[Rows],
        label: str = "",
    ) -> Work:
        """Begins to send outgoing[i][r] to each other rank r, and to receive that rank's slice into incoming[i][r].

        `kind`, `tensors`, `label`: the kind of collective, the inputs of this rank, and which gradients they are, for a
        subclass that compares ranks.
        """
        works: list[Work] = []
        for to, source in self._peers:
            for out, into in zip(outgoing, incoming, strict=True):
                works.append(self.group.send([out[to]], to, self._TAG))
                works.append(self.group.recv([into[source]], source, self._TAG))
        return AllWork(works)
