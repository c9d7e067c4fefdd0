"""Counts the bytes of storages that have a size and no memory: those on meta, and those of FakeTensors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..torch_private.plans import PlainDispatchMode


class StorageMeter(PlainDispatchMode):
    """Counts the bytes of all storages that operations make while it is in force, until they are freed.

    `live`, `peak`: bytes now, and the most so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live: Any = 0
        self.peak: Any = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.see(out)
        return out

    def see(self, out: Any) -> None:
        """Counts the storages of what an operation has returned, unless they are known."""
        for each in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(each, Tensor):
                self._enter(each, True)

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Does not count the storages of these tensors, nor of their views."""
        for each in tensors:
            self._enter(each, False)

    def change(self, nbytes: int, more: int) -> None:
        """Takes note of `nbytes` more, or fewer; before, of `more` for a moment."""
        self.peak = max(self.peak, self.live + more)
        self.live += nbytes
        self.peak = max(self.peak, self.live)

    def _enter(self, tensor: Tensor, counts: bool) -> None:
        storage: Any = tensor.untyped_storage()
        if not isinstance(storage, _SizedStorage) and storage.device.type == "meta":
            storage.__class__ = _SizedStorage
            storage.entry = entry = _Entry(self) if counts else None
            if entry is not None:
                entry.resize(storage.nbytes())


class _Entry:
    """The size of one storage, as a meter knows it."""

    __slots__ = ("_meter", "_nbytes")

    def __init__(self, meter: StorageMeter) -> None:
        self._meter, self._nbytes = meter, 0

    def resize(self, nbytes: int) -> None:
        before, self._nbytes = self._nbytes, nbytes
        # torch gives a storage other memory before it frees what it has.
        self._meter.change(nbytes - before, nbytes if before else 0)


class _SizedStorage(torch.UntypedStorage):
    """A storage that a meter has seen. The meter hears when its size changes, and when it is freed."""

    entry: _Entry | None

    def __del__(self) -> None:
        if self.entry is not None:
            self.entry.resize(0)

    def resize_(self, nbytes: int) -> Any:
        super().resize_(nbytes)
        if self.entry is not None:
            self.entry.resize(nbytes)
        return self
