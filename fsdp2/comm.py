"""The only file that calls a collective.

A `Comm` moves bytes between the ranks of one group and returns at once; the returned `Work` is waited on by whoever
needs the bytes. Every method is a collective: all ranks of the group must call it, in the same order, with tensors of
the same sizes. Tensors are flat and contiguous, and must live until `wait` has returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from . import torch_compat

# Point-to-point messages of one pair of ranks are matched in order, per tag. Ours must not meet a user's.
_GATHER_TAG = 0x0F5D_0001
_REDUCE_TAG = 0x0F5D_0002


class Work(Protocol):
    """A collective in flight."""

    def wait(self) -> object:
        """Make the caller's stream (on CPU: the caller) wait until the outputs are there."""


class Comm(Protocol):
    """Collectives over one group of ranks."""

    rank: int
    size: int
    # Parameters of at least so many bytes are gathered and reduced on their own, straight from and into place.
    direct_min_bytes: int

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
        """outputs[i] := the inputs[i] of all ranks, in rank order. inputs[i] may be its own slot of outputs[i]."""

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
        """outputs[i] := mean over ranks of this rank's slice of inputs[i]; inputs[i] is `size` slices in rank order."""


class CoalescedComm:
    """One coalesced launch per call: NCCL and the backends that follow its interface."""

    # Not measured on several GPUs; small enough that a transformer block's matrices go direct at any usual width.
    direct_min_bytes = 128 * 1024

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self.rank, self.size = group, group.rank(), group.size()
        self._all_gather_one, self._reduce_scatter_one = torch_compat.single_tensor_collectives(group)
        self._average = dist.ReduceScatterOptions()
        self._average.reduceOp = dist.ReduceOp.AVG  # type: ignore[assignment]

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
        if len(outputs) == 1:
            return self._all_gather_one(outputs[0], inputs[0])
        return self._group.allgather_into_tensor_coalesced(list(outputs), list(inputs))

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
        if len(outputs) == 1:
            return self._reduce_scatter_one(outputs[0], inputs[0], self._average)
        return self._group.reduce_scatter_tensor_coalesced(list(outputs), list(inputs), self._average)


class PairwiseComm:
    """Every pair of ranks exchanges its parts directly: gloo.

    gloo's own all-gather and reduce-scatter take two to five times as long from a few MB on (the latter is an
    all-reduce inside and moves twice the bytes), and run one after the other. See benchmarks/results.
    """

    direct_min_bytes = 1024 * 1024

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self.rank, self.size = group, group.rank(), group.size()

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
        slots = [output.view(self.size, -1) for output in outputs]
        works = []
        for to, source in self._peers():
            for slot, own in zip(slots, inputs, strict=True):
                works.append(self._group.send([own], to, _GATHER_TAG))
                works.append(self._group.recv([slot[source]], source, _GATHER_TAG))
        for slot, own in zip(slots, inputs, strict=True):
            if slot[self.rank].data_ptr() != own.data_ptr():
                slot[self.rank].copy_(own)
        return _AllWork(works)

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
        slices = [tensor.view(self.size, -1) for tensor in inputs]
        received = [torch.empty_like(tensor[1:]) for tensor in slices]
        works = []
        for to, source in self._peers():
            for mine, theirs in zip(slices, received, strict=True):
                works.append(self._group.send([mine[to]], to, _REDUCE_TAG))
                works.append(self._group.recv([theirs[self._place(source)]], source, _REDUCE_TAG))
        parts = [
            [mine[rank] if rank == self.rank else theirs[self._place(rank)] for rank in range(self.size)]
            for mine, theirs in zip(slices, received, strict=True)
        ]
        return _MeanWork(works, outputs, parts)

    def _peers(self) -> list[tuple[int, int]]:
        """(rank to send to, rank to receive from), step by step, so that no rank is everybody's first."""
        return [((self.rank + step) % self.size, (self.rank - step) % self.size) for step in range(1, self.size)]

    def _place(self, rank: int) -> int:
        """Row of another rank's part in a receive buffer, which has none for this rank."""
        return rank if rank < self.rank else rank - 1


class _AllWork:
    """Several works as one."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        works, self._works = self._works, ()  # gloo hangs if one is waited for twice
        for work in works:
            work.wait()


class _MeanWork(_AllWork):
    """Averages what arrived, adding it up in rank order, whichever rank that is computed on."""

    def __init__(self, works: Sequence[Work], outputs: Sequence[Tensor], parts: list[list[Tensor]]) -> None:
        super().__init__(works)
        self._outputs, self._parts = outputs, parts

    def wait(self) -> None:
        super().wait()
        waiting, self._parts = self._parts, []
        for output, parts in zip(self._outputs, waiting):  # noqa: B905  the second wait finds no parts
            _mean(parts, output)


def _mean(parts: list[Tensor], output: Tensor) -> None:
    if output.dtype == torch.float16:  # the sum of many ranks' gradients could pass 65504
        total = parts[0].float()
        for part in parts[1:]:
            total.add_(part)
        output.copy_(total.div_(len(parts)))
        return
    first, *rest = parts
    if rest:
        torch.add(first, rest[0], out=output)
    else:
        output.copy_(first)
    for part in rest[1:]:
        output.add_(part)
    output.div_(len(parts))


def make_comm(group: dist.ProcessGroup, device: torch.device) -> Comm:
    """The way to communicate that measured best for the group's backend on `device`."""
    return PairwiseComm(group) if torch_compat.backend_name(group, device) == "gloo" else CoalescedComm(group)
