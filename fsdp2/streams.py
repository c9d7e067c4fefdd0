"""A stream beside the one that computes, for what must wait in the middle of a reduction; and the streams on which one
group computes, if a model has several. Nothing of the kind on CPU.

Lifetime rule: what a collective, or this stream, reads or writes stays alive until the stream that computes has waited
for a collective that was issued later. Then that stream may free it and take the memory again, in the order of its own
work, and nobody calls `record_stream`. Memory that was allocated on this stream goes back to it, and is in order, too:
whatever is issued here comes behind all that the stream that computes was given before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


def exist_on(device: torch.device) -> bool:
    """Whether work on `device` is queued on streams, so that waiting does not hold up the caller."""
    return device.type not in ("cpu", "meta")


@contextmanager
def beside(device: torch.device) -> Iterator[None]:
    """Have what is issued inside run behind all that the current stream was given, and beside what it is given later.

    See the lifetime rule. Without streams: like anything else.
    """
    if not exist_on(device):
        yield
        return
    stream = _stream_of(device)
    stream.wait_stream(torch.accelerator.current_stream(device))
    with stream:
        yield


class GroupStreams:
    """The stream on which a group's memory was taken, its home, and others on which its gradients were computed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._home: torch.Stream | None = None
        self._others: list[torch.Stream] = []

    @classmethod
    def of(cls, device: torch.device) -> GroupStreams | None:
        """None: `device` has no streams."""
        return cls(device) if exist_on(device) else None

    def take_memory(self) -> None:
        """The current stream is home."""
        self._home = torch.accelerator.current_stream(self._device)

    def note(self) -> None:
        """The current stream computes a gradient."""
        stream = torch.accelerator.current_stream(self._device)
        if stream != self._home and stream not in self._others:
            self._others.append(stream)

    @contextmanager
    def at_home(self) -> Iterator[None]:
        """Have what is issued inside run behind all that the others were given so far, at home: what it reads is there,
        and nobody reads what it frees.
        """
        home, others, self._others = self._home, self._others, []
        current = torch.accelerator.current_stream(self._device)
        if home is None or (current == home and not others):
            yield
            return
        for stream in {*others, current} - {home}:
            home.wait_stream(stream)
        with home:
            yield
        current.wait_stream(home)


@cache
def _stream_of(device: torch.device) -> torch.Stream:
    return torch.Stream(device)
