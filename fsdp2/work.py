"""Collectives in flight, and what is left to do with what they bring, which is done when they are waited for."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import torch
from torch import Tensor

from . import streams, torch_compat


class Work(Protocol):
    """A collective in flight."""

    def wait(self) -> object:
        """Make the caller's stream (on CPU: the caller) wait until the outputs are there."""


class AllWork:
    """Several works as one. Owns them, and the tensors that are sent from and received into, as long as it lives."""

    def __init__(self, works: Sequence[Work], tensors: Sequence[Tensor] = ()) -> None:
        self._works = works
        self._owned: tuple[Tensor | Work, ...] = (*tensors,)

    def wait(self) -> None:
        works, self._works = self._works, ()  # gloo hangs if one is waited for twice
        for work in works:
            work.wait()
        self._owned = (*self._owned, *works)

    def __del__(self) -> None:
        # Given up unfinished, with a model that is deleted say: others still write to the memory, which may belong to
        # any stream.
        if self._works:
            with suppress(RuntimeError):
                AllWork.wait(self)
            for device in {each.device for each in self._owned if isinstance(each, Tensor)}:
                if streams.exist_on(device):
                    torch.accelerator.current_stream(device).synchronize()


class DividedWork(AllWork):
    """Divides what arrived, all of it by one operation."""

    def __init__(self, works: Sequence[Work], outputs: Sequence[Tensor], divisor: float) -> None:
        super().__init__(works, outputs)
        self._outputs, self._divisor = outputs, divisor

    def wait(self) -> None:
        super().wait()
        outputs, self._outputs = self._outputs, ()
        _divide(outputs, self._divisor)


class SumWork(AllWork):
    """Adds up what arrived, in rank order whichever rank that is computed on, and divides it."""

    def __init__(
        self,
        works: Sequence[Work],
        tensors: Sequence[Tensor],
        outputs: Sequence[Tensor],
        parts: Sequence[Sequence[Tensor] | Tensor],
        divisor: float,
    ) -> None:
        super().__init__(works, tensors)
        self._outputs, self._parts, self._divisor = outputs, parts, divisor

    def wait(self) -> None:
        super().wait()
        waiting, self._parts = self._parts, []
        for output, parts in zip(self._outputs, waiting):  # noqa: B905  the second wait finds no parts
            _sum(parts, output, self._divisor)
        # Those in fp16 are divided as they are summed.
        _divide([output for output in self._outputs if output.dtype != torch.float16] if waiting else [], self._divisor)


class CopyWork(AllWork):
    """Copies what arrived elsewhere."""

    def __init__(
        self, works: Sequence[Work], copies: Sequence[tuple[Tensor, Tensor]], tensors: Sequence[Tensor] = ()
    ) -> None:
        super().__init__(works, [*tensors, *(source for _, source in copies)])
        self._copies = copies

    def wait(self) -> None:
        super().wait()
        copies, self._copies = self._copies, ()
        for target, source in copies:
            target.copy_(source)


def _divide(tensors: Sequence[Tensor], divisor: float) -> None:
    if tensors and divisor != 1:
        torch_compat.divide_each([*tensors], divisor)


def _sum(parts: Sequence[Tensor] | Tensor, output: Tensor, divisor: float) -> None:
    """output := the sum of `parts`, tensors or rows of one. Added up in the dtype of `output`, or if that is fp16 in
    fp32, and then divided by `divisor`.
    """
    if output.dtype == torch.float16:  # the sum of many ranks' gradients could pass 65504
        total = parts[0].float()
        for part in parts[1:]:
            total.add_(part)
        output.copy_(total.div_(divisor))
        return
    if isinstance(parts, Tensor) and parts.device.type != "cpu":
        # One launch. On CPU it would first cast all parts.
        torch.sum(parts, 0, dtype=output.dtype, out=output)
    else:
        first, *rest = parts
        if rest and first.dtype == output.dtype:
            torch.add(first, rest.pop(0), out=output)
        else:
            output.copy_(first)  # the sum of two in a narrower dtype would be rounded to that
        for part in rest:
            output.add_(part)
