"""An optimizer that steps in backward, on some of its parameters at a time, and what a group knows of that."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from . import streams
from ..core.parameter import FSDPParam
from ..checks.unsynchronized import SteppedGrad, put_stand_in, take_stand_in
from ..dtensor.write_notices import notices


class Stepper:
    """Steps `optimizer` on parameters as they get their gradients, and clears these.

    What torch's optimizers keep, they keep per parameter, and so it is as after one step on all of them.

    Args:
        sharded: the parameters whose gradients will come.
        device: where these are computed.

    Raises:
        TypeError: not an optimizer.
        ValueError: its step needs a closure, or it has a parameter that is none of these.
    """

    def __init__(self, optimizer: Optimizer, sharded: Collection[nn.Parameter], device: torch.device) -> None:
        if not isinstance(optimizer, Optimizer):
            raise TypeError(f"optimizer: expected a torch.optim.Optimizer or None, got {optimizer!r}")
        name, own = type(optimizer).__name__, set(sharded)
        closure = inspect.signature(optimizer.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ValueError(f"optimizer: expected one whose step needs no closure, got {name}: step after backward.")
        for i, parameter in enumerate(each for group in optimizer.param_groups for each in group["params"]):
            if parameter not in own:
                raise ValueError(
                    f"optimizer: expected sharded parameters of this model only, got a {type(parameter).__name__} of "
                    f"shape {tuple(parameter.shape)} as number {i} of {name}. Build the optimizer after fully_shard; "
                    "step other parameters by one of their own, after backward."
                )
        self._optimizer = optimizer
        # One step after the other, beside the thread that computes. A new thread's device is the first: what it waits
        # for, or frees, there would take memory of every rank.
        on_device = partial(torch.accelerator.set_device_index, device) if streams.exist_on(device) else None
        self._thread = ThreadPoolExecutor(1, "fsdp2-step", on_device)
        # After an error another thread may step with what an earlier pass has left.
        self._stepping = Lock()

    def step(self, parameters: Collection[nn.Parameter]) -> list[nn.Parameter]:
        """Step those of `parameters` that the optimizer has, and return them, without their gradients."""
        with self._stepping:
            return self._step(parameters)

    def _step(self, parameters: Collection[nn.Parameter]) -> list[nn.Parameter]:
        wanted, groups = set(map(id, parameters)), self._optimizer.param_groups
        whole = [group["params"] for group in groups]
        chosen = [[each for each in params if id(each) in wanted] for params in whole]
        if not any(chosen):
            return []  # users' hooks on steps shall not run for nothing
        stepped = [each for params in chosen for each in params]
        try:
            for group, params in zip(groups, chosen, strict=True):
                group["params"] = params
            # Their gradients have come, behind the gather that has read them.
            with notices.quiet():
                self._optimizer.step()
        finally:
            for group, params in zip(groups, whole, strict=True):
                group["params"] = params
            for parameter in stepped:  # after an error, too: the next pass would add to what this one has left
                parameter.grad = None
        return stepped

    def run_beside(self, task: Callable[..., None], *args: Any) -> Future[None]:
        """Run `task` on a thread of its own, after the tasks before it."""
        return self._thread.submit(task, *args)


class GroupSteps:
    """The steps in backward on the parameters of one group, if the user wants that (`stepper`).

    `under_way`: those that may not have ended, on the stepper's thread.
    """

    def __init__(self) -> None:
        self.stepper: Stepper | None = None
        self.under_way: list[Future[None]] = []
        # Of which backward pass the last gradient was that a parameter was stepped with.
        self._last: dict[FSDPParam, object] = {}

    def start(self, task: Callable[..., None], *args: Any) -> Future[None] | None:
        """Run `task`, which ends in a step, beside this thread; None: it doesn't."""
        if self.stepper is None:
            return None
        self.under_way.append(self.stepper.run_beside(task, *args))
        return self.under_way[-1]

    def wait(self) -> None:
        """Until no shard is being stepped on. Whoever finishes the reductions gets the errors."""
        wait(self.under_way)
        self.under_way.clear()

    def step(self, params: Iterable[FSDPParam], of_pass: object) -> None:
        """
        Raises:
            RuntimeError: one was stepped on before in this backward pass.
        """
        assert self.stepper is not None, "somebody wants that"
        found = {param.sharded: param for param in params}
        again = [param.name for param in found.values() if self._last.get(param) is of_pass]
        if again:
            raise RuntimeError(
                f"{', '.join(again)}: got a second gradient in one backward pass, after the optimizer had stepped with "
                "the first. Checkpoint with use_reentrant=False, or step after backward."
            )
        self._last.update((found[parameter], of_pass) for parameter in self.stepper.step(found))

    def mark(self, of_pass: object) -> None:
        """The pass is over: put stand-ins into `.grad` of the parameters that were stepped on."""
        for param, last in self._last.items():
            if last is of_pass:
                put_stand_in(param, SteppedGrad)

    def unmark(self) -> None:
        """Another pass begins."""
        for param in self._last:
            if isinstance(param.sharded.grad, SteppedGrad):
                take_stand_in(param)
