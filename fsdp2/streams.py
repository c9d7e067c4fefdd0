"""A stream beside each that computes, for what must wait in the middle of a reduction; and the streams on which one
group computes, if a model has several. Nothing of the kind on CPU.

Lifetime rule: what a collective, or this stream, reads or writes stays alive until the stream that computes has waited
for a collective that was issued later. Then that stream may free it and take the memory again, in the order of its own
work; `record_stream` is called for gradients alone that are delivered while several streams are in use. Memory that was
allocated on this stream goes back to it, and is in order, too: whatever is issued here comes behind all that the stream
that computes was given before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor


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
    current = torch.accelerator.current_stream(device)
    stream = _stream_beside(current, device)
    stream.wait_stream(current)
    with stream:
        yield


class GroupStreams:
    """The stream that a group's memory belongs to, its home, and the others that use it.

    What the engine itself does with a group's memory (gather, pack, reduce, deliver, free) is done at home, behind all
    that the others were given so far; whoever else uses the memory comes behind home first. So nobody reads what is not
    there yet, and whatever is given back, to whichever stream's pool it goes, is no longer in use.

    While a model computes on one stream, that is home, and nobody waits. If a group's modules run on another stream
    than the one that gathers it ahead, home is the one on which they ran last time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._home: torch.Stream | None = None
        self._others: list[torch.Stream] = []
        # Those that have come behind home since the last gather.
        self._readers: list[torch.Stream] = []
        # Those for which work is done at home now.
        self._guests: list[torch.Stream] = []
        # Stream that began a gather -> the one that first used what was gathered, the last time.
        self._used_on: dict[torch.Stream, torch.Stream] = {}
        self._began_on: torch.Stream | None = None
        self._is_inside = False

    @classmethod
    def of(cls, device: torch.device) -> GroupStreams | None:
        """None: `device` has no streams."""
        return cls(device) if exist_on(device) else None

    def choose_home(self, ahead: bool, holds_memory: Callable[[], bool]) -> bool:
        """A gather is about to begin on the current stream, `ahead` of the modules that need it or for them. Returns
        True if that is not home.

        Home stays where it is while the group `holds_memory` there, gradients in flight for example.
        """
        self._readers.clear()
        if self._is_inside:
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
        """The current stream is about to read the full parameters."""
        if self._is_inside:
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
        """The current stream computes a gradient, or reads parameters."""
        stream = torch.accelerator.current_stream(self._device)
        if stream != self._home and stream not in self._others:
            self._others.append(stream)

    def lend(self, tensor: Tensor) -> None:
        """Users get `tensor`, which was made at home, and free it on their own streams when they want."""
        if tensor.device == self._device:
            for stream in self._guests:
                tensor.record_stream(stream)

    def are_apart(self) -> bool:
        """Returns True if `at_home` makes a difference."""
        return (
            not self._is_inside
            and self._home is not None
            and (bool(self._others) or torch.accelerator.current_stream(self._device) != self._home)
        )

    @contextmanager
    def at_home(self, joins: bool = True) -> Iterator[None]:
        """Have what is issued inside run at home, behind all that the current stream and the others were given so far.

        `joins`: they all wait for it then. Without, who reads what it brings waits by `use`.
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
        self._is_inside, self._guests = True, users
        try:
            with home:
                yield
        finally:
            self._is_inside, self._guests = False, []
            if joins:
                for stream in users:
                    stream.wait_stream(home)


@cache
def _stream_beside(stream: torch.Stream, device: torch.device) -> torch.Stream:
    """One for each stream that computes: no other orders the memory that is allocated here."""
    return torch.Stream(device)
