"""How often optimizers have stepped on a model's sharded parameters, and with what settings.

Each rank steps on its own part of every parameter: one that leaves a step out, or has another learning rate, makes no
error and no mismatch, only weights whose parts are of different models.
"""

from __future__ import annotations

import zlib
from numbers import Real
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


class StepHistory:
    """Of one rank, since ranks have last begun to compare it."""

    def __init__(self) -> None:
        self.count = self.settings = 0

    def note(self, optimizer: Optimizer) -> None:
        """A step is about to be taken."""
        self.count += 1
        self.settings = zlib.crc32(repr(_settings_of(optimizer)).encode(), self.settings)


def _settings_of(optimizer: Optimizer) -> list[list[tuple[str, Any]]]:
    """The numbers among the options of each of its parameter groups."""
    return [
        sorted((name, value) for name, value in map(_as_number, group.items()) if value is not None)
        for group in optimizer.param_groups
    ]


def _as_number(option: tuple[str, Any]) -> tuple[str, Any]:
    name, value = option
    if type(value) is Tensor and value.numel() == 1 and value.device.type == "cpu":  # elsewhere the host would wait
        return name, value.item()
    several = value if isinstance(value, (tuple, list)) and name != "params" else (value,)
    return name, tuple(map(float, several)) if all(isinstance(each, Real) for each in several) else None


def refuse_different_steps(who: str, counts: tuple[int, int], settings: tuple[int, int]) -> None:
    """`counts`, `settings`: the least and the greatest of all ranks.

    Raises:
        RuntimeError: they differ.
    """
    apart = "so each rank's part is of another model now. Have all ranks"
    if counts[0] != counts[1]:
        raise RuntimeError(
            f"{who}: since ranks last compared it, optimizers have stepped {counts[0]} times on some rank and "
            f"{counts[1]} times on another, {apart} decide alike whether to step (all-reduce what that depends on), "
            "and load a checkpoint of before."
        )
    if settings[0] != settings[1]:
        raise RuntimeError(
            f"{who}: since ranks last compared it, optimizers have stepped with other settings on some rank than on "
            f"others (lr, of a scheduler that follows each rank's own loss?), {apart} choose alike (all-reduce what "
            "that depends on), and load a checkpoint of before."
        )
