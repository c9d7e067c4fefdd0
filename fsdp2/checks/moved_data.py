"""Checks that the full parameters of a group lie in the group's memory, as gathers and reductions assume."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from . import dtensor_compat
from ..core.parameter import FSDPParam


class FullPlaces:
    """The addresses and shapes that the full parameters of one group must have.

    Users can assign `.data` of a full parameter while it is unsharded, which no version counter shows.
    """

    def __init__(self, params: Sequence[FSDPParam], offsets: Sequence[int], storage: torch.UntypedStorage) -> None:
        rows = [(each, offset) for each, offset in zip(params, offsets, strict=True) if each.full.numel()]
        self._params, self._offsets = [param for param, _ in rows], [offset for _, offset in rows]
        self._full: list[Tensor] = [param.full for param in self._params]
        self._are_distributed = DTensor in map(type, self._full)
        self._shapes = [tensor.shape for tensor in self._find_full()]
        self._numels = [*map(torch.Size.numel, self._shapes)]
        self._storage = storage
        # The address of the storage, which is another one after each gather, and those that follow from it.
        self._base, self._pointers = 0, self._offsets

    def _find_full(self) -> list[Tensor]:
        return [*map(dtensor_compat.local_if_any, self._full)] if self._are_distributed else self._full

    def are_kept(self, addresses_only: bool = False) -> bool:
        """Returns True if all lie where they must, contiguously. They must have their data.

        It takes 0.2 us for each parameter, or 0.07 us with `addresses_only`. Of shapes it compares the number of
        elements: another shape over the same elements shows by that of its gradient.
        """
        base = self._storage.data_ptr()
        if base != self._base:
            self._base, self._pointers = base, [*map(base.__add__, self._offsets)]
        full = self._find_full() if self._are_distributed else self._full
        if [*map(Tensor.data_ptr, full)] != self._pointers:
            return False
        return addresses_only or ([*map(Tensor.numel, full)] == self._numels and all(map(Tensor.is_contiguous, full)))

    def find_moved(self) -> dict[FSDPParam, tuple[int, ...] | None]:
        """Returns the parameters of those that lie elsewhere, with the shapes of those that have another shape."""
        found: dict[FSDPParam, tuple[int, ...] | None] = {}
        rows = zip(self._params, self._find_full(), self._pointers, self._shapes, strict=True)
        for param, full, pointer, shape in rows:
            if full.shape != shape:
                found[param] = tuple(full.shape)
            elif full.data_ptr() != pointer or not full.is_contiguous():
                found[param] = None
        return found
