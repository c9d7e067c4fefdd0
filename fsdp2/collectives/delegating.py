"""Issues the collectives of another Comm: the base of Comms that replace one of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from ..engine.comm import Comm, Rows, Work


class DelegatingComm:
    """Issues the collectives of another Comm, `inner_comm`. A subclass replaces some of them."""

    def __init__(self, inner: Comm) -> None:
        self.inner_comm, self.rank, self.comm_label = inner, inner.rank, inner.comm_label
        self.direct_min_bytes, self.receiver_sums = inner.direct_min_bytes, inner.receiver_sums
        self.is_stream_ordered, self.memory = inner.is_stream_ordered, inner.memory

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self.inner_comm.group

    @property
    def size(self) -> int:
        return self.inner_comm.size

    @property
    def force_sum(self) -> bool:
        return self.inner_comm.force_sum

    @force_sum.setter
    def force_sum(self, value: bool) -> None:
        self.inner_comm.force_sum = value

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
        return self.inner_comm.all_gather(outputs, inputs)

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float, label: str = ""
    ) -> Work:
        return self.inner_comm.reduce_scatter(outputs, inputs, divisor, label)

    def exchange(self, sent: Sequence[Tensor], label: str = "") -> tuple[Work, Sequence[Rows]]:
        return self.inner_comm.exchange(sent, label)

    def all_reduce(self, tensor: Tensor, divisor: float, label: str = "") -> Work:
        return self.inner_comm.all_reduce(tensor, divisor, label)
