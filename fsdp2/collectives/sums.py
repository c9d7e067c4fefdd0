"""Options of torch's collectives that sum or average, and what keeps a sum in fp16 finite."""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

_Options = TypeVar("_Options", dist.ReduceScatterOptions, dist.AllreduceOptions)


def _options(kind: type[_Options], op: dist.ReduceOp.RedOpType) -> _Options:
    options = kind()
    options.reduceOp = op  # type: ignore[assignment]
    return options


AVERAGE_SCATTER = _options(dist.ReduceScatterOptions, dist.ReduceOp.AVG)
SUM_SCATTER = _options(dist.ReduceScatterOptions, dist.ReduceOp.SUM)
AVERAGE_ALL = _options(dist.AllreduceOptions, dist.ReduceOp.AVG)
SUM_ALL = _options(dist.AllreduceOptions, dist.ReduceOp.SUM)


def divide_before(tensor: Tensor, divisor: float) -> float:
    """Divides a tensor in fp16 before it is summed: the sum could pass 65504. Returns what is left to divide by."""
    if tensor.dtype != torch.float16:
        return divisor
    tensor.div_(divisor)
    return 1
