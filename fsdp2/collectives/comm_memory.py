"""Gives memory that collectives send and fill from a pool that NCCL has registered.

NCCL sends straight from registered memory and into it, instead of copying through buffers of its own; inside switches
(NVLink SHARP) it also needs fewer of the device's processors. Memory of a pool returns to the pool when it is freed,
and the next group gets it again at the same address. So a model takes as much as the groups that are unsharded, or
reduced, at the same time, and NCCL registers it once.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..torch_private.rare_internals import symmetric_memory

if TYPE_CHECKING:
    from ..engine.comm import Comm


class PoolMemory:
    """A CommMemory over a pool of torch's CUDA allocator, which communicators register segment by segment.

    Args:
        pool: a `torch.cuda.MemPool` whose allocator is a communicator's.
        device: where it is.
        is_symmetric: it is torch's pool of symmetric memory. Ranks must allocate and free alike.
    """

    is_registered = True

    def __init__(self, pool: Any, device: torch.device, is_symmetric: bool) -> None:
        self._pool, self.device, self.is_symmetric = pool, device, is_symmetric
        self._groups: list[dist.ProcessGroup] = []
        # The backends that have registered the pool.
        backends: list[Any] = []
        self._backends = backends
        weakref.finalize(self, _give_back, pool, backends)

    def empty(self, *size: Any, **options: Any) -> Tensor:
        with torch.cuda.use_mem_pool(self._pool, self.device):
            return torch.empty(*size, **options)

    def zeros(self, *size: Any, **options: Any) -> Tensor:
        return self.empty(*size, **options).zero_()

    def allocator(self, nbytes: int) -> Callable[[torch.UntypedStorage], object]:
        return partial(self._resize, nbytes)

    def _resize(self, nbytes: int, storage: torch.UntypedStorage) -> None:
        with torch.cuda.use_mem_pool(self._pool, self.device):
            storage.resize_(nbytes)

    def join(self, comm: Comm) -> None:
        """Has the communicator of `comm` register what the pool has, and will have. Every rank of it must call it."""
        group = comm.group
        if group is None or any(each is group for each in self._groups):
            return
        self._groups.append(group)
        # There is no communicator before the first collective.
        comm.all_reduce(torch.zeros(1, device=self.device), comm.size).wait()
        if not self.is_symmetric:
            backend: Any = group._get_backend(self.device)
            backend.register_mem_pool(self._pool)
            self._backends.append(backend)

    def meet(self, group: dist.ProcessGroup, tensors: Sequence[Tensor]) -> None:
        # One for each storage, which torch finds again at its address.
        for tensor in {each.untyped_storage()._cdata: each for each in tensors}.values():
            symmetric_memory().rendezvous(tensor, group=group.group_name)


def _give_back(pool: Any, backends: Sequence[Any]) -> None:
    """Has communicators forget a pool that nobody uses any more, whose memory goes with it.

    If one is gone already, the pool stays for ever: freeing a segment that it had registered would end the process.
    """
    try:
        for backend in backends:
            backend.deregister_mem_pool(pool)
    except RuntimeError:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))


def pool_of_group(group: dist.ProcessGroup, device: torch.device) -> PoolMemory | None:
    """Returns a pool of the memory that the backend of `group` allocates; None if it allocates none."""
    backend: Any = group._get_backend(device)
    if device.type != "cuda" or not backend.supports_tensor_alloc(device):
        return None
    return PoolMemory(torch.cuda.MemPool(backend.mem_allocator), device, is_symmetric=False)


def symmetric_pool(device: torch.device) -> PoolMemory:
    """Returns torch's pool of symmetric memory."""
    symmetric = symmetric_memory()
    symmetric.set_backend("NCCL")
    return PoolMemory(symmetric.get_mem_pool(device), device, is_symmetric=True)
