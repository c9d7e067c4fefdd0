"""Holds gradients between backward and step while ranks have run out of batches, and says what has become of them.

A rank that has joined (`join_consensus.py`) can't do to its gradients what the program does to those of the others. So
these have placeholders from backward to step, and each parameter's gradient has a *fate*, which a rank that has joined
meets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..engine import compat
from ..engine.compat import local_of, no_torch_function
from ..engine.group import FSDPParamGroup
from ..engine.parameter import FSDPParam
from ..engine.placeholders import UnsynchronizedGrad, put_placeholder, take_placeholder
from ..engine.root import Root

HOW = (
    "Pass what all ranks are to do for a step, clipping and schedulers included, as a function: "
    "`with fsdp2.join(model, step=step) as joined:`, and call joined.step() in the loop."
)


class Fate(IntEnum):
    """Says what has become of a gradient on a rank that is present. If ranks differ, the last one counts."""

    NONE = 0  # there is none
    CLEARED = 1  # it was cleared since backward
    ZEROS = 2  # it was set to zero
    UNSURE = 3  # it was set to zero, or is as backward has left it
    KEPT = 4  # it is as backward has left it
    CHANGED = 5  # it is anything else


class HeldGrad(UnsynchronizedGrad):
    """Stands in `.grad` between backward and step, while some ranks have joined: they can't change theirs alike."""

    why = (
        "some ranks have run out of batches, and can't do to their part of this gradient what this rank does. An "
        f"optimizer's own step() and zero_grad() are followed, and nothing else is. {HOW}"
    )
    shown = "is held until the step, which ranks that have run out of batches take as well"


class HeldGradients:
    """Holds the gradients of one root between backward and step on a rank that is present, and finds their fates; on a
    rank that has joined, gives gradients the fates of the others'.

    JoinConsensus owns it, and has ranks exchange the fates. `unsure`: parameters whose gradients are zeros on this
    rank, of before the first rank had joined: this step may have set them to zero, or backward has left them so.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        self._held: set[FSDPParam] = set()
        self.unsure: set[FSDPParam] = set()

    def hold(self) -> None:
        """Puts placeholders into `.grad` until the next step or backward."""
        with no_torch_function():
            for param in self._with_gradients():
                self._hold_one(param)

    def hold_first(self, optimizers: Iterable[Optimizer]) -> None:
        """Holds gradients of before the first rank had joined. `optimizers`: those that have stepped.

        This step, which a rank that has joined does not begin, may have begun with setting them to zero: all of an
        optimizer at once, and then they are zeros.
        """
        index = {id(param): k for k, each in enumerate(optimizers) for param in _params_of(each)}
        of_optimizer: dict[int | None, list[FSDPParam]] = {}
        with no_torch_function():
            for param in self._with_gradients():
                of_optimizer.setdefault(index.get(id(param.sharded)), []).append(param)
            for k, params in of_optimizer.items():
                filled = {param for param in params if _local_gradient(param).numel()}
                zeros = {param for param in params if not _local_gradient(param).count_nonzero()}
                if filled and filled <= zeros:
                    continue
                if k is None or not filled:
                    self.unsure |= zeros
                for param in params:
                    self._hold_one(param)

    def release(self) -> None:
        """Puts the gradients back."""
        held, self._held = self._held, set()
        with no_torch_function():
            for param in held:
                if isinstance(param.sharded.grad, HeldGrad):
                    take_placeholder(param)

    def find_fates(self) -> list[Fate]:
        """Returns what has become of each parameter's gradient since the last backward."""
        with no_torch_function():
            return [self._find_fate(group, i) for group in self._root.groups for i in range(len(group.params))]

    def meet(self, fates: Sequence[int]) -> None:
        """Does to the gradients of a rank that has joined what was done to those of the others: `fates`, those of all
        parameters. Other numbers are for gradients of which no rank that is present has told anything.
        """
        params = [param for group in self._root.groups for param in group.params]
        with no_torch_function():
            for param, fate in zip(params, fates, strict=True):
                _meet_fate(param, fate)

    def _with_gradients(self) -> Iterator[FSDPParam]:
        """Yields the parameters that have a gradient in `.grad`, and no placeholder."""
        for group in self._root.groups:
            for param in group.params:
                if param.sharded.grad is not None and not _is_placeholder(param.sharded.grad):
                    yield param

    def _hold_one(self, param: FSDPParam) -> None:
        put_placeholder(param, HeldGrad)
        self._held.add(param)

    def _find_fate(self, group: FSDPParamGroup, i: int) -> Fate:
        param = group.params[i]
        gradient: Any = param.sharded.grad
        if _is_placeholder(gradient):
            return Fate.UNSURE if param in self.unsure else Fate.KEPT
        was_there = i in group.placeholders or param in self._held
        if gradient is None:
            return Fate.CLEARED if was_there else Fate.NONE
        if not was_there and not self._root.settings.finalize_backward:
            return Fate.KEPT  # it was delivered before others, which are still in flight
        return Fate.CHANGED if local_of(gradient).count_nonzero() else Fate.ZEROS


def has_more_than_zeros(param: FSDPParam) -> bool:
    """Returns True if `.grad` of `param` has an element that is not zero."""
    gradient: Any = param.sharded.grad
    return gradient is not None and not _is_placeholder(gradient) and bool(local_of(gradient).count_nonzero())


def _local_gradient(param: FSDPParam) -> Tensor:
    gradient: Any = param.sharded.grad
    return local_of(gradient)


def _is_placeholder(gradient: Tensor | None) -> bool:
    return isinstance(gradient, UnsynchronizedGrad)


def _meet_fate(param: FSDPParam, fate: int) -> None:
    gradient: Any = param.sharded.grad
    is_waiting = _is_placeholder(gradient)
    if fate == Fate.CLEARED or (fate == Fate.NONE and not is_waiting):
        param.sharded.grad = None
    elif fate == Fate.ZEROS:
        if is_waiting:
            param.sharded.grad = None
        local = torch.zeros_like(param.local, dtype=param.delivered_dtype)
        param.sharded.grad = compat.new_dtensor(param.tensor_class, local, param.gradient_spec)


def _params_of(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]
