"""Copies between the CPU's memory, where offloaded shards rest, and the device, beside what that computes.

Each direction has a stream of its own, on which the host never waits before it has to: events order copies and
computation. Lifetime rule: the device's memory is allocated and freed on the stream that computes, which a copy waits
for when it begins, and which waits for the copy, or the host does, before the memory is freed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


class Transfer(Generic[Result]):
    """A copy that has begun, which holds what it reads and writes."""

    def __init__(self, event: Any, tensors: tuple[Tensor, ...], result: Result) -> None:
        self._event, self._tensors, self._result = event, tensors, result

    def wait(self) -> Result:
        """Make the stream that computes wait for it."""
        self._event.wait()
        return self._result

    def finish(self) -> Result:
        """Make the host wait for it."""
        self._event.synchronize()
        return self._result


class Transfers:
    """The copies to one device and back.

    Args:
        device: an accelerator.
        pin: allocate the CPU's side in page-locked memory; copies from and to other memory make the host wait.
    """

    def __init__(self, device: torch.device, pin: bool) -> None:
        self._device, self._pin = device, pin
        self._inward, self._outward = torch.Stream(device), torch.Stream(device)
        # Behind the last copy from the CPU's memory that the host does not know to be through.
        self._last: Any = None

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory on the CPU, not initialised."""
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=self._pin)

    def start_in(self, target: Tensor, source: Tensor, then: Callable[[], Result]) -> Transfer[Result]:
        """Begin to copy `source`, on the CPU, to `target`; what `then` launches, at once, runs behind the copy.

        `source` must not be written to before `settle`.
        """
        self._inward.wait_stream(torch.accelerator.current_stream(self._device))
        with self._inward:
            target.copy_(source, non_blocking=True)
            result = then()
        self._last = self._inward.record_event()
        return Transfer(self._last, (target, source), result)

    def start_out(self, source: Tensor) -> Transfer[Tensor]:
        """Begin to copy a flat tensor to new memory on the CPU: the result, to be read after `finish` only."""
        target = self.allocate(source.numel(), source.dtype)
        self._outward.wait_stream(torch.accelerator.current_stream(self._device))
        with self._outward:
            target.copy_(source, non_blocking=True)
        return Transfer(self._outward.record_event(), (source,), target)

    def settle(self) -> None:
        """Make the host wait until no copy reads the CPU's memory any more."""
        last, self._last = self._last, None
        if last is not None and not last.query():
            last.synchronize()


@cache
def make_transfers(device: torch.device, pin: bool) -> Transfers:
    """The ones that all groups on `device` share."""
    return Transfers(device, pin)
