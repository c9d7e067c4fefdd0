"""Has modules see their floating-point buffers in another dtype, as they see unsharded parameters (`buffer_dtype`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from .state import FSDPState

_Place = tuple[nn.Module, str]
# Buffers that kernels write to in training, without counting it.
_UNCOUNTED = ("running_mean", "running_var")


class _Cast(NamedTuple):
    """Holds a buffer, its version when it was cast, the copy, and the copy's version when modules last got it. Version
    None: it serves once.
    """

    buffer: Tensor
    version: int | None
    copy: Tensor
    copy_version: int | None


class CastBuffers:
    """Registers copies, in `dtype`, of the buffers of one state while its modules have the unsharded parameters.

    A copy serves until its buffer is written to or replaced. Then there is a new one, since graphs may hold the old.
    """

    def __init__(self, state: FSDPState, dtype: torch.dtype) -> None:
        self._state, self._dtype = state, dtype
        self._casts: dict[_Place, _Cast] = {}
        self._are_registered = False

    def register(self, cast: bool) -> None:
        """Registers the copies, or the buffers with what modules have written to the copies, or put in their place."""
        if cast is self._are_registered:
            return
        self._are_registered = cast
        if cast:
            self._casts = {place: self._cast(place, buffer) for place, buffer in self._find()}
            for (module, name), found in self._casts.items():
                module._buffers[name] = found.copy
        else:
            self._casts = {place: self._take_back(place, found) for place, found in self._casts.items()}

    def _find(self) -> Iterator[tuple[_Place, Tensor]]:
        ignored = {inner for module in self._state.ignored for inner in module.modules()}
        for module in self._state.own_modules():
            for name, buffer in module._buffers.items() if module not in ignored else ():
                is_cast = buffer is not None and buffer.is_floating_point() and buffer.itemsize > 1
                if buffer is not None and is_cast and buffer.dtype != self._dtype:
                    yield (module, name), buffer

    def _cast(self, place: _Place, buffer: Tensor) -> _Cast:
        last, version = self._casts.get(place), _version(buffer)
        if last is not None and last.buffer is buffer and version is not None and last.version == version:
            return last._replace(copy_version=_version(last.copy))
        if buffer.requires_grad:  # its gradient goes through the copy
            copy, version = buffer.to(self._dtype), None
        else:
            with torch.inference_mode(False), torch.no_grad():
                copy = buffer.to(self._dtype)
        return _Cast(buffer, version, copy, _version(copy))

    def _take_back(self, place: _Place, found: _Cast) -> _Cast:
        (module, name), now = place, place[0]._buffers.get(place[1])
        if now is found.copy:
            module._buffers[name] = found.buffer
            is_statistics = name in _UNCOUNTED and module.training
            if is_statistics or _version(found.copy) != found.copy_version:
                with torch.no_grad():
                    found.buffer.copy_(found.copy)
                return found._replace(version=None)  # it may change further without counting (running statistics)
        elif now is not None and now.dtype == self._dtype:
            module._buffers[name] = now.to(found.buffer.dtype)
        return found


def _version(tensor: Tensor) -> int | None:
    """Returns the version counter of a tensor, or None if it has none (it was made in inference mode)."""
    return None if tensor.is_inference() else tensor._version
