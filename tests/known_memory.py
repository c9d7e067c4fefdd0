"""Stands for memory that a communicator has registered, on a CPU."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class KnownMemory:
    """Stands for memory that a communicator has registered: it knows what it has given."""

    is_registered, is_symmetric = True, False

    def __init__(self) -> None:
        self.storages: list[torch.UntypedStorage] = []

    def empty(self, *size: Any, **options: Any) -> Tensor:
        tensor = torch.empty(*size, **options)
        self.storages.append(tensor.untyped_storage())
        return tensor

    def zeros(self, *size: Any, **options: Any) -> Tensor:
        return self.empty(*size, **options).zero_()

    def allocator(self, nbytes: int) -> Callable[[torch.UntypedStorage], object]:
        def resize(storage: torch.UntypedStorage) -> None:
            storage.resize_(nbytes)
            self.storages.append(storage)

        return resize

    def meet(self, *_: Any) -> None:
        raise AssertionError("only symmetric memory needs it")

    def has(self, tensor: Tensor) -> bool:
        places = [(each.data_ptr(), each.nbytes()) for each in self.storages]
        return any(0 <= tensor.data_ptr() - start <= nbytes - tensor.nbytes for start, nbytes in places)
