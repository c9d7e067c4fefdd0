"""When to look at what takes time to look at: often at first, when a program is written, and then now and again."""

import torch

_PERIOD = 128


def is_time_to_look(number: int, always: bool = False) -> bool:
    """At time number 1, 2, 4, ..., 64, and every 128th, to find what has changed since, or `always`; never while a CUDA
    graph is recorded, for the host would wait for the device.
    """
    is_time = always or not (number % _PERIOD and number & (number - 1))
    return is_time and not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
