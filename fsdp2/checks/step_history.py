"""Compares how often optimizers have stepped on a model's sharded parameters, and with what settings.

Each rank steps on its own part of every parameter: one that leaves a step out, or has another learning rate, makes no
error and no mismatch, only weights whose parts are of different models.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from numbers import Real
from operator import is_
from types import NoneType
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..core.group import FSDPParamGroup
from ..core.mesh import DataMesh
from ..ext.compat import stepped_on_accumulation
from ..ext.owners import some_of
from .check_times import Comparison, RankCheck
from .compare_ranks import ComparedNumbers

# The classes of options whose numbers can't change. A scheduler puts another object in their place.
_UNCHANGING = frozenset({bool, float, int, str, tuple, NoneType})


class StepHistory(RankCheck):
    """Compares the steps that ranks have taken since they last compared them, and what gradients are divided by."""

    def __init__(self) -> None:
        self.count = self.settings = 0
        # Identity of an optimizer -> its options in the last step, if all are unchanging, and their numbers as bytes.
        self._last: dict[int, tuple[list[Any], bytes]] = {}

    def note(self, optimizer: Optimizer) -> None:
        """Notes that `optimizer` is about to step."""
        self.count += 1
        options = [value for group in optimizer.param_groups for name, value in group.items() if name != "params"]
        before, encoded = self._last.get(id(optimizer), ([], b""))
        if len(options) != len(before) or not all(map(is_, options, before)):
            encoded = repr(_settings_of(optimizer)).encode()
            is_unchanging = _UNCHANGING.issuperset(map(type, options))
            self._last[id(optimizer)] = (options, encoded) if is_unchanging else ([], b"")
        self.settings = zlib.crc32(encoded, self.settings)

    def out_of_step(self, root: Any) -> None:
        self.count = self.settings = 0

    def numbers(self, comparison: Comparison) -> Iterator[tuple[DataMesh, ComparedNumbers]]:
        if comparison.mesh is None or comparison.mesh.num_ranks == 1 or comparison.number == 1:
            return
        root = comparison.root
        divisors = [group.settings.divide_factor for group in root.groups]
        count, settings = self.count, self.settings
        self.count = self.settings = 0

        def judge(bounds: Sequence[tuple[int, int]]) -> None:
            (least, most), counts, of_settings = bounds
            if least != most:
                raise RuntimeError(
                    f"{root.state}: gradients are divided by other numbers on some rank than on others. Call "
                    "set_gradient_divide_factor on all ranks, with the same factor."
                )
            names = [param.name for group in root.groups for param in group.params]
            _refuse_different_steps(some_of(names), counts, of_settings)

        numbers = (zlib.crc32(repr(divisors).encode()), count, settings)
        yield comparison.mesh, ComparedNumbers(f"optimizer steps of {root.state}", numbers, judge)


def note_step(optimizer: Optimizer, groups: Sequence[FSDPParamGroup], in_backward: bool) -> None:
    """Notes that `optimizer` is about to step on parameters of `groups`, which ranks compare the next time.

    `in_backward`: it steps on a few parameters at a time, which ranks do not compare.
    """
    history = groups[0].root.events.of(StepHistory)
    if history is not None and not in_backward:
        history.note(optimizer)


def _settings_of(optimizer: Optimizer) -> list[list[tuple[str, Any]]]:
    """Returns the numbers among the options of each of its parameter groups."""
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


def _refuse_different_steps(names: str, counts: tuple[int, int], settings: tuple[int, int]) -> None:
    """Raises RuntimeError if ranks differ. `counts`, `settings`: the least and the greatest of all ranks."""
    apart = "so each rank's part is of another model now. Have all ranks"
    if counts[0] != counts[1]:
        raise RuntimeError(
            f"{names}: since ranks last compared it, optimizers have stepped {counts[0]} times on some rank and "
            f"{counts[1]} times on another, {apart} decide alike whether to step (all-reduce what that depends on), "
            "and load a checkpoint of before."
        )
    if settings[0] != settings[1]:
        raise RuntimeError(
            f"{names}: since ranks last compared it, optimizers have stepped with other settings on some rank than on "
            f"others (lr, of a scheduler that follows each rank's own loss?), {apart} choose alike (all-reduce what "
            "that depends on), and load a checkpoint of before."
        )


class OptimizersOnAccumulation(RankCheck):
    """Refuses torch's `_apply_optimizer_in_backward`, which steps where autograd accumulates a parameter's gradient."""

    def refuse(self, root: Any) -> None:
        stepped = stepped_on_accumulation()
        for param in (param for group in root.groups if stepped for param in group.params):
            if param.sharded in stepped:
                raise NotImplementedError(
                    f"{param.name}: _apply_optimizer_in_backward would never step, for gradients of sharded parameters "
                    "come from reductions, not from autograd. Call model.set_optimizer_in_backward(optimizer), or step "
                    "in register_post_accumulate_grad_hook of each parameter."
                )
