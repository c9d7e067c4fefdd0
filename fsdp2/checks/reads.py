"""Reads numbers from the device for the host to judge: all those of one pass at once, when the pass ends.

Each read makes the host wait until the device has done all that it was given before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

NO_NUMBERS = torch.zeros(0, dtype=torch.int64, device="cpu")


class PassReads:
    """Holds what the checks of one root have computed in the pass that runs, until `judge` reads it."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Tensor, Callable[[list[int]], None]]] = []

    def add(self, numbers: Tensor, judge: Callable[[list[int]], None]) -> None:
        """Calls `judge` with `numbers`, a flat int64 tensor, when the pass ends. It may raise."""
        self.waiting.append((numbers, judge))

    def drop(self) -> None:
        """Judges nothing: the pass has failed."""
        self.waiting.clear()

    def judge(self) -> None:
        """Calls every judge; then raises what the first one has raised, if any has."""
        waiting, self.waiting = self.waiting, []
        errors = []
        for (_, judge), numbers in zip(waiting, read_all([numbers for numbers, _ in waiting]), strict=True):
            try:
                judge(numbers)
            except RuntimeError as error:
                errors.append(error)
        if errors:
            raise errors[0]


def read_all(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Returns what flat int64 tensors hold. The host waits once for each device on which some of them lie."""
    values = {}
    for device in dict.fromkeys(tensor.device for tensor in tensors if tensor.numel()):
        values[device] = iter(torch.cat([tensor for tensor in tensors if tensor.device == device]).tolist())
    return [[next(values[tensor.device]) for _ in range(tensor.numel())] for tensor in tensors]
