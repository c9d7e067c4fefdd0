"""Has torch's `CommDebugMode` count the collectives of operations on sharded parameters: `p.norm()`, `clip_grad_norm_`.

It leaves operations to torch's DTensor by its exact class, so that it sees the collectives that these issue. Operations
on a subclass it would carry out itself, out of its own sight.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from torch.distributed.tensor import DTensor

from ..torch_private.when_imported import when_imported
from .sharded_dtensor import ShardedDTensor


def count_collectives_of_shards() -> None:
    """Makes `CommDebugMode` take operations on a ShardedDTensor for those on a DTensor."""
    when_imported("torch.distributed.tensor.debug", _adapt)


def _adapt(debug: ModuleType) -> None:
    mode: Any = debug.CommDebugMode
    mode.__torch_dispatch__ = _as_of_dtensors(mode.__torch_dispatch__)


def _as_of_dtensors(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def dispatch(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, ShardedDTensor) for each in types):
            types = tuple(DTensor if issubclass(each, ShardedDTensor) else each for each in types)
        return original(self, func, types, args, kwargs)

    return dispatch
