"""A stream beside the one that computes, for what must wait in the middle of a reduction. Nothing of the kind on CPU.

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


@cache
def _stream_of(device: torch.device) -> torch.Stream:
    return torch.Stream(device)
