"""Issues the collectives of another Comm: the base of Comms that replace one of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from ..engine.comm import Comm, Rows, Work


class DelegatingComm:
    """Issues the collectives of another Comm, `inner_comm`. A subclass replaces some of them."""

    def __init__(self, inner: Comm) -> None:
        self.inner_comm, self.rank, self.purpose = inner, inner.rank, inner.purpose
        self.direct_min_bytes, self.sums_on_arrival = inner.direct_min_bytes, inner.sums_on_arrival
        self.follows_stream, self.memory = inner.follows_stream, inner.memory

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
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float, what: str = ""
    ) -> Work:
        return self.inner_comm.reduce_scatter(outputs, inputs, divisor, what)

    def exchange(self, sent: Sequence[Tensor], what: str = "") -> tuple[Work, Sequence[Rows]]:
        return self.inner_comm.exchange(sent, what)

    def all_reduce(self, tensor: Tensor, divisor: float, what: str = "") -> Work:
        return self.inner_comm.all_reduce(tensor, divisor, what)
