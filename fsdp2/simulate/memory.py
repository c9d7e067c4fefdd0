"""Counts the memory of one simulated rank's tensors: all ranks share the process and its allocator."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..torch_private.rare_internals import TorchDispatchMode
from .turns import Rank


class PeakMemory(TorchDispatchMode):
    """Context: looks after each operation of its thread at the storages that the thread's operations have made.

    `peak`: most bytes that were alive at once. Memory that no operation makes is unknown: NumPy's, and that of files.
    """

    sees_fsdp2 = True

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self._rank, self.peak = rank, 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it calls operations on its local tensor, which come here
        result = func(*args, **(kwargs or {}))
        results = result if isinstance(result, tuple | list) else (result,)
        for each in results if not self._rank.acts_for_others else ():
            if isinstance(each, Tensor) and each.device.type == "cpu":
                storage = each.untyped_storage()
                self._alive[storage._cdata] = weakref.ref(storage)
        self._measure()
        return result

    def _measure(self) -> None:
        storages = {key: storage for key, ref in self._alive.items() if (storage := ref()) is not None}
        self._alive = {key: self._alive[key] for key in storages}
        self.peak = max(self.peak, sum(storage.nbytes() for storage in storages.values()))
