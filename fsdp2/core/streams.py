"""Streams of an accelerator: one beside each stream that computes, the streams that use one group, and copies between
the CPU and the device. On CPU there are none.

Lifetime rule: what a collective or a stream beside reads or writes stays alive until the stream that computes has
waited for a collective that was issued later. Then that stream may free it and take the memory again, in the order of
its own work; `record_stream` is called only for gradients that are delivered while several streams are in use. Memory
that was allocated on a stream beside goes back to it, in order, too: what is issued there runs behind all work that the
stream that computes was given before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
Method = TypeVar("Method", bound=Callable[..., Any])


def exist_on(device: torch.device) -> bool:
    """Returns True if work on `device` is queued on streams, so that waiting does not hold up the host."""
    return device.type not in ("cpu", "meta")


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Context: what is issued inside runs behind all work that the current stream was given, and beside later work.

    See the lifetime rule. On a device without streams nothing changes.
    """
    if not exist_on(device):
        yield
        return
    current = torch.accelerator.current_stream(device)
    stream = _stream_beside(current, device)
    stream.wait_stream(current)
    with stream:
        yield


@cache
def _stream_beside(stream: torch.Stream, device: torch.device) -> torch.Stream:
    """Returns a stream for each stream that computes: no other stream orders the memory that is allocated on it."""
    return torch.Stream(device)


class GroupStreams:
    """Orders the streams that use one group's memory. One of them is its home.

    What the engine itself does with a group's memory (gather, pack, reduce, deliver, free) runs at home, behind all
    work that the other streams were given so far. Whoever else uses the memory first waits for home. So nobody reads
    memory before it is filled, and memory that is given back, to whichever stream's pool, is no longer in use.

    While a model computes on one stream, that stream is home, and nobody waits. If a group's modules run on another
    stream than the one that gathers ahead, home is the stream on which they ran last time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._home: torch.Stream | None = None
        self._others: list[torch.Stream] = []
        # Streams that have waited for home since the last gather.
        self._readers: list[torch.Stream] = []
        # Streams on whose behalf work runs at home now. None: no work does.
        self._guests: list[torch.Stream] | None = None
        # Stream that began a gather -> the stream that first used what was gathered, the last time.
        self._used_on: dict[torch.Stream, torch.Stream] = {}
        self._began_on: torch.Stream | None = None

    @classmethod
    def of(cls, device: torch.device) -> GroupStreams | None:
        """Returns None if `device` has no streams."""
        return cls(device) if exist_on(device) else None

    def choose_home(self, ahead: bool, holds_memory: Callable[[], bool]) -> bool:
        """Notes that a gather is about to begin on the current stream. Returns True if that stream is not home.

        `ahead`: before the modules that need it run, perhaps on another stream. Home stays the same while the group
        `holds_memory` there, gradients in flight for example.
        """
        self._readers.clear()
        if self._guests is not None:
            return False
        current = torch.accelerator.current_stream(self._device)
        wanted = self._used_on.get(current, current) if ahead else current
        if self._home is None:
            self._home = wanted
        elif (wanted != self._home or self._others) and not holds_memory():
            if wanted != self._home:
                wanted.wait_stream(self._home)
            self._home = wanted
            self._others.clear()
        self._began_on = current
        return self.are_apart()

    def use(self) -> None:
        """Makes the current stream, which is about to read unsharded parameters, wait for home."""
        if self._guests is not None:
            return
        current = torch.accelerator.current_stream(self._device)
        if self._began_on is not None:
            self._used_on[self._began_on] = current
            self._began_on = None
        if current != self._home and current not in self._readers and self._home is not None:
            current.wait_stream(self._home)
            self._readers.append(current)
            self.note()

    def note(self) -> None:
        """Notes that the current stream computes a gradient, or reads parameters."""
        stream = torch.accelerator.current_stream(self._device)
        if stream != self._home and stream not in self._others:
            self._others.append(stream)

    def lend(self, tensor: Tensor) -> None:
        """Records the guests' streams on `tensor`, which was made at home: its users free it on their own streams."""
        if tensor.device == self._device:
            for stream in self._guests or ():
                tensor.record_stream(stream)

    def are_apart(self) -> bool:
        """Returns True if `at_home` makes a difference."""
        return (
            self._guests is None
            and self._home is not None
            and (bool(self._others) or torch.accelerator.current_stream(self._device) != self._home)
        )

    @contextmanager
    def at_home(self, joins: bool = True) -> Iterator[None]:
        """Context: what is issued inside runs at home, behind all work that the streams in use were given so far.

        `joins`: all of them wait for it afterwards. Otherwise, a reader waits by `use`.
        """
        if not self.are_apart():
            yield
            return
        home = self._home
        assert home is not None, "are_apart says so"
        users = [*dict.fromkeys([*self._others, torch.accelerator.current_stream(self._device)])]
        users = [stream for stream in users if stream != home]
        for stream in users:
            home.wait_stream(stream)
        self._guests = users
        try:
            with home:
                yield
        finally:
            self._guests = None
            if joins:
                for stream in users:
                    stream.wait_stream(home)


def at_home(method: Method) -> Method:
    """Decorator of a method of an object with `streams`: it runs on the group's home stream."""

    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.streams is None or not self.streams.are_apart():
            return method(self, *args, **kwargs)
        with self.streams.at_home():
            return method(self, *args, **kwargs)

    return run  # type: ignore[return-value]


# ---- copies between the CPU and the device


class Transfer(Generic[Result]):
    """A copy that has begun. It keeps alive what it reads and writes."""

    def __init__(self, event: Any, tensors: tuple[Tensor, ...], result: Result) -> None:
        self._event, self._tensors, self._result = event, tensors, result

    def wait(self) -> Result:
        """Makes the current stream wait for the copy."""
        self._event.wait()
        return self._result

    def finish(self) -> Result:
        """Makes the host wait for the copy."""
        self._event.synchronize()
        return self._result


class Transfers:
    """Copies between the CPU's memory, where offloaded shards rest, and a device, beside what the device computes.

    Each direction has a stream of its own. The device's memory is allocated and freed on the stream that computes: a
    copy waits for that stream when it begins, and that stream, or the host, waits for the copy before memory is freed.

    Args:
        device: an accelerator.
        pin: allocate the CPU's side in page-locked memory; copies from and to other memory make the host wait.
    """

    def __init__(self, device: torch.device, pin: bool) -> None:
        self._device, self._pin = device, pin
        self._inward, self._outward = torch.Stream(device), torch.Stream(device)
        # Recorded behind the last copy from the CPU's memory that the host has not waited for.
        self._last: Any = None

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns uninitialised memory on the CPU."""
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=self._pin)

    def start_in(self, target: Tensor, source: Tensor, then: Callable[[], Result]) -> Transfer[Result]:
        """Begins to copy `source`, on the CPU, to `target`; what `then` launches runs behind the copy.

        `source` must not be written to before `settle`.
        """
        self._inward.wait_stream(torch.accelerator.current_stream(self._device))
        with self._inward:
            target.copy_(source, non_blocking=True)
            result = then()
        self._last = self._inward.record_event()
        return Transfer(self._last, (target, source), result)

    def start_out(self, source: Tensor) -> Transfer[Tensor]:
        """Begins to copy a flat tensor to new memory on the CPU: the result, which may be read after `finish`."""
        target = self.allocate(source.numel(), source.dtype)
        self._outward.wait_stream(torch.accelerator.current_stream(self._device))
        with self._outward:
            target.copy_(source, non_blocking=True)
        return Transfer(self._outward.record_event(), (source,), target)

    def settle(self) -> None:
        """Makes the host wait until no copy reads the CPU's memory any more."""
        last, self._last = self._last, None
        if last is not None and not last.query():
            last.synchronize()


@cache
def make_transfers(device: torch.device, pin: bool) -> Transfers:
    """Returns the ones that all groups on `device` share."""
    return Transfers(device, pin)
