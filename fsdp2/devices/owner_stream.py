"""Models that compute on several streams: the order of the streams that use one group's memory.

`record_stream` is called only for gradients that are delivered while several streams are in use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class GroupStreams:
    """Orders the streams that use one group's memory. One of them is its owner stream.

    The engine's own work with a group's memory (gather, pack, reduce, deliver, free) runs on the owner stream, behind
    all work that the other streams were given so far. Any other stream first waits for the owner stream. So nobody
    reads memory before it is filled, and memory that is given back, to any stream's pool, is no longer in use.

    While a model computes on one stream, that stream is the owner, and nobody waits. If a group's modules run on
    another stream than the one that gathers ahead, the owner is the stream on which they ran last time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = device.index  # by which a stream is found in a third of the time
        self._owner: torch.Stream | None = None
        self._others: list[torch.Stream] = []
        # Streams that have waited for the owner stream since the last gather.
        self._readers: list[torch.Stream] = []
        # Streams for which work runs on the owner stream now. None: no work does.
        self._waiting_streams: list[torch.Stream] | None = None
        # Stream that began a gather -> the stream that first used what was gathered, the last time.
        self._used_on: dict[torch.Stream, torch.Stream] = {}
        self._began_on: torch.Stream | None = None

    def choose_owner(self, ahead: bool, holds_memory: Callable[[], bool]) -> bool:
        """Notes that a gather is about to begin on the current stream. Returns True if that stream is not the owner.

        `ahead`: before the modules that need it run, perhaps on another stream. The owner stays the same while the
        group `holds_memory` there, gradients in flight for example.
        """
        self._readers.clear()
        if self._waiting_streams is not None:
            return False
        current = torch.accelerator.current_stream(self._index)
        wanted = self._used_on.get(current, current) if ahead else current
        if self._owner is None:
            self._owner = wanted
        elif wanted != self._owner and self._is_captured(current) and not self._is_captured(self._owner):
            # A captured graph can't wait for work outside it, all of which ends before a capture begins.
            self._owner = wanted
            self._others.clear()
        elif (wanted != self._owner or self._others) and not holds_memory():
            if wanted != self._owner:
                wanted.wait_stream(self._owner)
            self._owner = wanted
            self._others.clear()
        self._began_on = current
        return self.are_apart()

    def _is_captured(self, stream: torch.Stream) -> bool:
        """Returns True while what `stream` is given becomes part of a CUDA graph."""
        if self._device.type != "cuda":
            return False
        with stream:
            return torch.cuda.is_current_stream_capturing()

    def wait_here(self) -> None:
        """Makes the current stream, which is about to read unsharded parameters, wait for the owner stream."""
        if self._waiting_streams is not None:
            return
        current = torch.accelerator.current_stream(self._index)
        if self._began_on is not None:
            self._used_on[self._began_on] = current
            self._began_on = None
        if current != self._owner and current not in self._readers and self._owner is not None:
            current.wait_stream(self._owner)
            self._readers.append(current)
            self.note()

    def note(self) -> None:
        """Notes that the current stream computes a gradient, or reads parameters."""
        stream = torch.accelerator.current_stream(self._index)
        if stream != self._owner and stream not in self._others:
            self._others.append(stream)

    def record_streams(self, tensor: Tensor) -> None:
        """Records the waiting streams on `tensor`, which the owner stream has made: they free it in their own order."""
        if tensor.device == self._device:
            for stream in self._waiting_streams or ():
                tensor.record_stream(stream)

    def are_apart(self) -> bool:
        """Returns True if `on_owner_stream` makes a difference."""
        return (
            self._waiting_streams is None
            and self._owner is not None
            and (bool(self._others) or torch.accelerator.current_stream(self._index) != self._owner)
        )

    @contextmanager
    def on_owner_stream(self, joins: bool = True) -> Iterator[None]:
        """Context: what is issued inside runs on the owner stream, behind all work that the streams in use were given.

        `joins`: all of them wait for it afterwards. Otherwise, a reader waits by `wait_here`.
        """
        if not self.are_apart():
            yield
            return
        owner = self._owner
        assert owner is not None, "are_apart says so"
        users = [*dict.fromkeys([*self._others, torch.accelerator.current_stream(self._index)])]
        users = [stream for stream in users if stream != owner]
        for stream in users:
            owner.wait_stream(stream)
        self._waiting_streams = users
        try:
            with owner:
                yield
        finally:
            self._waiting_streams = None
            if joins:
                for stream in users:
                    stream.wait_stream(owner)
