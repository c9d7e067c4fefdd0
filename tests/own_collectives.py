"""Collectives as a user writes them, for `set_custom_all_gather` and `set_custom_reduce_scatter`."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Gather:
    """A user's all-gather, which remembers what it was called with. `is_async`: return a Work."""

    def __init__(self, is_async: bool) -> None:
        self.is_async = is_async
        self.given: list[Tensor] = []
        self.calls: list[tuple[Tensor, Tensor]] = []

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.given.append(torch.empty(size, dtype=dtype, device=device))
        return self.given[-1]

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        self.calls.append((output_tensor, input_tensor))
        return self.done(group.allgather_into_tensor_coalesced([output_tensor], [input_tensor]))

    def done(self, work: Any) -> Any:
        if not self.is_async:
            work.wait()
        return work if self.is_async else None


class Scatter(Gather):
    """The same for a reduce-scatter, of which `factor` times the result is delivered."""

    def __init__(self, is_async: bool, factor: float = 1) -> None:
        super().__init__(is_async)
        self.factor = factor

    def __call__(  # type: ignore[override]
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        self.calls.append((output_tensor, input_tensor))
        input_tensor.mul_(self.factor)
        options = dist.ReduceScatterOptions()
        options.reduceOp = op
        return self.done(group.reduce_scatter_tensor_coalesced([output_tensor], [input_tensor], options))
