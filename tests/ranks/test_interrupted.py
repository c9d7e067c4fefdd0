"""Tests Ctrl-C, or a signal handler that raises, at each line of the engine's code that notes what runs.

The kind: an exception between two lines that belong together leaves half of a change behind, and every later step
fails.
"""

import copy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fsdp2 import fully_shard
from fsdp2.engine import autograd, root, step
from fsdp2.engine.state import require_state
from helpers import assert_same, full, run_ranks, shard_batch
from models import TanhBlock

# Their lines are interrupted, where a step comes to them first and last.
CODES = {
    each.__code__
    for each in (
        root.Root.enter,
        root.Root.leave,
        step.run_forward,
        autograd.SavedTensors.activate,
        autograd.SavedTensors.deactivate,
    )
}


class Lines:
    """Notes the lines of CODES in their order, or raises KeyboardInterrupt at one of them, by its number."""

    def __init__(self, fatal: int = -1) -> None:
        self.seen: list[tuple[str, int]] = []
        self._fatal = fatal

    @contextmanager
    def traced(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(lambda frame, *_: self._line if frame.f_code in CODES else None)
        try:
            yield
        finally:
            sys.settrace(before)

    def _line(self, frame: Any, event: str, _: Any) -> Any:
        if event == "line":
            self.seen.append((frame.f_code.co_name, frame.f_lineno))
            if len(self.seen) - 1 == self._fatal:
                raise KeyboardInterrupt
        return self._line


class Model:
    """A sharded model and the plain one, which train together."""

    def __init__(self, rank: int, ranks: int) -> None:
        torch.manual_seed(0)
        self._own = rank, ranks
        self.plain: Any = nn.Sequential(nn.Linear(5, 5), TanhBlock(5, 7), nn.Linear(5, 3)).double()
        self.model: Any = copy.deepcopy(self.plain)
        fully_shard(self.model[1], reshard_after_forward=True)
        fully_shard(self.model)
        self._optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (self.model, self.plain)]

    def backward(self, number: int, model: nn.Module) -> None:
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        model(shard_batch(x, *self._own) if model is self.model else x).square().mean().backward()

    def step(self, number: int) -> None:
        for model, optimizer in zip((self.model, self.plain), self._optimizers, strict=True):
            optimizer.zero_grad()
            self.backward(number, model)
            optimizer.step()
        for (name, param), expected in zip(self.model.named_parameters(), self.plain.parameters(), strict=True):
            assert_same(full(param), expected, 1e-9, 1e-9, name)

    def error(self, number: int) -> str:
        """Returns which error ends a forward and a backward."""
        try:
            self.backward(number, self.model)
        except (KeyboardInterrupt, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return ""


def interrupted(trained: Model, lines: Lines, is_alone: bool) -> str:
    """Interrupts a pass, and returns the error if no step is exact from then on.

    Where one rank is interrupted alone, it or its next pass tells the others, which end that step with it. A pass that
    had not begun is run again.
    """
    root = require_state(trained.model).root
    before = root.forward
    with lines.traced():
        is_interrupted = trained.error(2).startswith("KeyboardInterrupt")
    if is_alone and is_interrupted and root.forward is before:
        trained.error(2)
    for may_fail in (is_alone, False):
        try:
            trained.step(3)
            return ""
        except (AssertionError, RuntimeError) as error:
            if not (may_fail and "out of step" in str(error)):
                return f"{type(error).__name__}: {error}"
    return ""


def test_the_step_after_an_interrupt_at_any_line_is_exact() -> None:
    """On all ranks; and on one, whose next pass tells the others."""

    def body(rank: int, ranks: int) -> list[str]:
        trained, lines, wrong = Model(rank, ranks), Lines(), []
        trained.step(0)
        with lines.traced():
            trained.backward(1, trained.model)
        last = {line: i for i, line in enumerate(lines.seen)}
        assert {name for name, _ in last} == {code.co_name for code in CODES}
        for line, number in last.items():
            for fatal, is_alone in ((lines.seen.index(line), False), (number, False), (number, True)):
                error = interrupted(trained, Lines(-1 if is_alone and rank else fatal), is_alone)
                if error:
                    wrong.append(f"{line}, {is_alone=}: {error[:200]}")
                    trained = Model(rank, ranks)
                    trained.step(0)
        return wrong

    for wrong in run_ranks(2, body, timeout=120):
        assert not wrong, "\n".join(wrong)
