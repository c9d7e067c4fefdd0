"""A copy of this rank's shards in host memory, which is written while training goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .state import State

_ALIGNMENT = 64


class Snapshot:
    """A copy of tensors in one buffer of host memory.

    Tensors that only `optimizer.step` changes may be copied by `finish`, in another thread, while a forward runs. Those
    of a device are copied on a stream of their own, into pinned memory.

    Args:
        state: the tensors.
        names: which of them to copy.
        later: those of them that `finish` may copy, and a function that returns a number which changes when the tensor
            is written to.
        buffer: memory of an earlier snapshot, which is used again if it is as large.
    """

    def __init__(
        self, state: State, names: Sequence[str], later: Mapping[str, Callable[[], int]], buffer: Tensor | None
    ) -> None:
        self._values: dict[str, Tensor] = {}
        self._later: dict[str, Tensor] = {}
        self._versions = {name: (version, version()) for name, version in later.items() if name in {*names}}
        self._copied: list[Any] = []
        sources = {name: state.local(name) for name in names}
        sizes = {name: -(-each.nbytes // _ALIGNMENT) * _ALIGNMENT for name, each in sources.items()}
        total, is_on_device = sum(sizes.values()), any(not each.is_cpu for each in sources.values())
        if buffer is None or not total <= buffer.numel() <= 2 * total or buffer.is_pinned() < is_on_device:
            buffer = torch.empty(total, dtype=torch.uint8, pin_memory=is_on_device)
        self.buffer = buffer
        start = 0
        for name, source in sources.items():
            memory = buffer[start : start + source.nbytes].view(source.dtype).view(source.shape)
            self._values[name] = memory
            start += sizes[name]
            if source.is_cpu and name in later:
                self._later[name] = source
            elif source.is_cpu:
                memory.copy_(source)
        for device in {each.device for each in sources.values() if not each.is_cpu}:
            self._copy_from(device, {name: each for name, each in sources.items() if each.device == device})

    def _copy_from(self, device: torch.device, sources: dict[str, Tensor]) -> None:
        module: Any = torch.get_device_module(device)
        stream, current = module.Stream(device), module.current_stream(device)
        stream.wait_stream(current)
        with module.stream(stream):
            for name, source in sources.items():
                self._values[name].copy_(source, non_blocking=True)
                source.record_stream(stream)
            self._copied.append(stream.record_event())

    def finish(self) -> None:
        """Copies what is left, and waits for copies from devices.

        Raises:
            RuntimeError: a tensor was written to meanwhile by something else than a step that waits.
        """
        for name, source in self._later.items():
            self._values[name].copy_(source)
        self._later.clear()
        for event in self._copied:
            event.synchronize()
        self._copied.clear()
        for name, (version, before) in self._versions.items():
            if version() != before:
                raise RuntimeError(
                    f"{name}: expected no write between save(wait=False) and the next optimizer.step(), got one, of "
                    "which the checkpoint could have a half. Save with wait=True before you write to it."
                )
        self._versions.clear()

    def value(self, name: str) -> Tensor:
        """Returns the copy of a tensor."""
        return self._values[name]
