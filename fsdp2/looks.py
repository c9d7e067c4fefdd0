"""When to look at what takes time to look at: often at first, when a program is written, and ever more seldom."""

import torch


def is_time_to_look(number: int) -> bool:
    """At time number 1, 2, 4, 8, ...; never while a CUDA graph is recorded, for the host would wait for the device."""
    if number & (number - 1):
        return False
    return not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
