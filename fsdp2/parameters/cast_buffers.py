"""Gives modules their floating-point buffers in another dtype (`buffer_dtype`), and state dicts the exact ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from ..engine.state import FSDPState

_Place = tuple[nn.Module, str]
# Buffers that kernels write to without counting it.
_UNCOUNTED = ("running_mean", "running_var")


class _Cast(NamedTuple):
    """Holds a buffer, the copy in another dtype that modules have in its place, and the versions of both when the copy
    was made. Version None: there is none, of tensors made in inference mode.
    """

    exact: Tensor
    version: int | None
    copy: Tensor
    copy_version: int | None


class CastBuffers:
    """Registers copies, in `dtype`, of the buffers of one state: those of modules that `ignored_params` does not name.

    The buffers themselves are registered while a state dict is made or loaded. What was written to a copy by then is
    written to its buffer.
    """

    def __init__(self, state: FSDPState, dtype: torch.dtype) -> None:
        self._state, self._dtype = state, dtype
        self.casts: dict[_Place, _Cast] = {}

    def cast(self) -> None:
        """Registers copies of all buffers of other dtypes, also of those that were replaced since."""
        before, self.casts = self.casts, {}
        ignored = {inner for module in self._state.ignored for inner in module.modules()}
        for module in self._state.own_modules():
            for name, buffer in module._buffers.items() if module not in ignored else ():
                if buffer is None or not buffer.is_floating_point() or buffer.itemsize < 2 or buffer.requires_grad:
                    continue
                last = before.get((module, name))
                if last is not None and buffer.dtype == self._dtype:
                    self.casts[module, name] = last if last.copy is buffer else _widened(buffer, last.exact.dtype)
                elif buffer.dtype != self._dtype:
                    found = last if last is not None and _is_unchanged(last, buffer) else self._make(buffer)
                    self.casts[module, name] = found
        for (module, name), found in self.casts.items():
            module._buffers[name] = found.copy

    def take(self, casts: dict[_Place, _Cast]) -> None:
        """Takes those of a state of which this one is a copy, copied."""
        self.casts = {
            place: found._replace(version=_version(found.exact), copy_version=_version(found.copy))
            for place, found in casts.items()
        }

    def _make(self, buffer: Tensor) -> _Cast:
        with torch.inference_mode(False), torch.no_grad():
            copy = buffer.to(self._dtype)
        return _Cast(buffer, _version(buffer), copy, _version(copy))

    def restore(self) -> None:
        """Registers the buffers, with what was written to their copies."""
        for (module, name), found in self.casts.items():
            now = module._buffers.get(name)
            if now is not found.copy:
                if now is None or now.dtype != self._dtype:
                    continue  # it was removed, or replaced by one of another dtype
                found = self.casts[module, name] = _widened(now, found.exact.dtype)
            exact, copy = found.exact, found.copy
            if copy.device != exact.device:  # the module was moved
                exact = copy.to(exact.dtype) if exact.is_meta or copy.is_meta else exact.to(copy.device)
            is_written = _version(copy) != found.copy_version
            if is_written or (name in _UNCOUNTED and not torch.equal(copy, exact.to(copy.dtype))):
                exact = copy.to(exact.dtype)
            if exact is not found.exact:
                self.casts[module, name] = _Cast(exact, _version(exact), copy, _version(copy))
            module._buffers[name] = exact


def _widened(copy: Tensor, dtype: torch.dtype) -> _Cast:
    """Returns the cast of a buffer whose exact values are those of `copy`, which has replaced one."""
    exact = copy.detach().to(dtype)
    return _Cast(exact, _version(exact), copy, _version(copy))


def _is_unchanged(cast: _Cast, buffer: Tensor) -> bool:
    return cast.exact is buffer and cast.version is not None and cast.version == _version(buffer)


def _version(tensor: Tensor) -> int | None:
    """Returns the version counter of a tensor, or None if it has none."""
    return None if tensor.is_inference() else tensor._version
