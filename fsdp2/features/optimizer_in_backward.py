"""Steps the optimizer in backward: on a few parameters at a time, as soon as their gradients are reduced."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..calls.user_code import run_shown
from ..devices import streams
from ..devices.write_notices import notices
from ..engine.gradients import GroupGradients
from ..engine.group import GATHERING, FSDPParamGroup
from ..engine.parameter import FSDPParam
from ..engine.placeholders import SteppedGrad, put_placeholder, take_placeholder
from ..engine.reduce import Pending
from ..engine.root import Root
from .passes import finalize
from .vocab_parallel import refuse_rows


class StepsInBackward:
    """Steps `optimizer` on parameters as they get their gradients, and clears these.

    torch's optimizers keep their state per parameter, so that it is the same as after one step on all of them.

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
        if getattr(optimizer, "overlaps_forward", False):
            raise ValueError(
                f"optimizer: {name} takes steps that overlap the next forward (flatten_optimizer(..., "
                "overlap_with_forward=True)), which one that steps in backward can't. Call flatten_optimizer without "
                "it."
            )
        for i, parameter in enumerate(each for group in optimizer.param_groups for each in group["params"]):
            if parameter not in own:
                raise ValueError(
                    f"optimizer: expected sharded parameters of this model only, got a {type(parameter).__name__} of "
                    f"shape {tuple(parameter.shape)} as number {i} of {name}. Build the optimizer after fully_shard; "
                    "step other parameters by one of their own, after backward."
                )
        self.optimizer = optimizer
        # Steps run one after the other, beside the thread that computes. A new thread begins on the first device: each
        # rank would take memory there.
        on_device = partial(torch.accelerator.set_device_index, device) if streams.exist_on(device) else None
        self._thread = ThreadPoolExecutor(1, "fsdp2-step", on_device)
        # After an error another thread may step with what an earlier pass has left.
        self._stepping = Lock()

    def step(self, parameters: Collection[nn.Parameter]) -> list[nn.Parameter]:
        """Steps those of `parameters` that the optimizer has, and returns them, without their gradients."""
        with self._stepping:
            return self._step(parameters)

    def _step(self, parameters: Collection[nn.Parameter]) -> list[nn.Parameter]:
        wanted, groups = set(map(id, parameters)), self.optimizer.param_groups
        whole = [group["params"] for group in groups]
        chosen = [[each for each in params if id(each) in wanted] for params in whole]
        if not any(chosen):
            return []  # users' hooks on steps shall not run for nothing
        stepped = [each for params in chosen for each in params]
        try:
            for group, params in zip(groups, chosen, strict=True):
                group["params"] = params
            # No copy to the device reads them, see `deliver`. A gather on the device may, where a gradient came before
            # backward needed a weight of the group: nothing computes with these values any more, and the next pass
            # gathers again, since the versions differ.
            with notices.quiet():
                self.optimizer.step()
        finally:
            for group, params in zip(groups, whole, strict=True):
                group["params"] = params
            for parameter in stepped:  # after an error, too: the next pass would add to what this one has left
                parameter.grad = None
        return stepped

    def run_beside(self, task: Callable[..., None], *args: Any) -> Future[None]:
        """Runs `task` on a thread of its own, after the tasks before it."""
        return self._thread.submit(task, *args)


def steps_of(group: FSDPParamGroup) -> StepsInBackward | None:
    """Returns the steps of the optimizer in backward that a group has, or None."""
    steps: Any = group.settings.optimizer_in_backward
    return steps  # type: ignore[no-any-return]


def use_in_backward(root: Root, optimizer: Optimizer | None) -> None:
    """Has backward passes of a root step `optimizer` from now on. None: they step no more.

    Raises:
        NotImplementedError: an embedding is vocabulary-parallel.
    """
    if optimizer is not None:
        refuse_rows(root, "set_optimizer_in_backward", "autograd delivers its gradient, not the engine.")
    for group in root.groups:
        group.adopt_replacements()
    params = [param.sharded for group in root.groups for param in group.params]
    steps = None if optimizer is None else StepsInBackward(optimizer, params, root.group.mesh.device)
    finalize(root)  # what is in flight belongs to the one before
    for group in root.groups:
        group.set(optimizer_in_backward=steps)
    step_in_backward(root)


def step_in_backward(root: Root) -> None:
    """Has a root step in backward on those of its groups that have an optimizer for that."""
    root.use_backward_stepper(OptimizerInBackward(root) if any(map(steps_of, root.groups)) else None)


class OptimizerInBackward:
    """Steps on the parameters of groups as soon as their gradients are delivered: the BackwardStepper of a root.

    Groups in conditional modules are stepped on when backward ends. Each rank reduces them when one of them is done, so
    what is delivered first may be the gradient of some ranks only, and others may still need the weights.
    """

    def __init__(self, root: Root) -> None:
        self._root = root
        # Steps that may not have ended, on their own thread.
        self._running: dict[FSDPParamGroup, list[Future[None]]] = {}
        # The backward pass of the last gradient that a parameter was stepped with.
        self._last: dict[FSDPParam, object] = {}
        # Parameters that were stepped on, and whose `.grad` does not say so yet.
        self._stepped: dict[FSDPParam, FSDPParamGroup] = {}
        # Parameters in conditional modules whose gradients have been delivered.
        self._waiting: dict[FSDPParamGroup, dict[FSDPParam, None]] = {}

    def wait_for_steps(self, group: FSDPParamGroup) -> None:
        """Waits until no step that was begun on another thread writes to shards of `group`."""
        running = self._running.get(group)
        if running:
            wait(running)  # errors are raised where the reductions are finished
            running.clear()

    def deliver(self, gradients: GroupGradients, pending: Pending, of_pass: object) -> Future[None] | None:
        """Delivers offloaded gradients, and steps, on the thread of the steps. Returns None if nothing steps."""
        group = gradients.group
        steps = steps_of(group)
        if steps is None:
            return None
        if group.phase is GATHERING:  # else the gradients have been computed behind the copy of the shards
            self._root.settle_transfers()
        step = steps.run_beside(gradients.receive, pending, of_pass)
        self._running.setdefault(group, []).append(step)
        return step

    def step(self, group: FSDPParamGroup, params: Sequence[FSDPParam], of_pass: object) -> None:
        """Steps on those of `params` that the optimizer of the group has, or notes them for the end of backward.

        Raises:
            RuntimeError: one was stepped on before in this backward pass.
        """
        if steps_of(group) is None:
            return
        consensus = self._root.consensus
        if consensus is not None and consensus.is_conditional(group):
            self._waiting.setdefault(group, {}).update(dict.fromkeys(params))
        else:
            self._step(group, params, of_pass)

    def _step(self, group: FSDPParamGroup, params: Iterable[FSDPParam], of_pass: object) -> None:
        steps = steps_of(group)
        assert steps is not None, "its optimizer steps in backward"
        found = {param.sharded: param for param in params}
        again = [param.name for param in found.values() if self._last.get(param) is of_pass]
        if again:
            raise RuntimeError(
                f"{', '.join(again)}: got a second gradient in one backward pass, after the optimizer had stepped with "
                "the first. Checkpoint with use_reentrant=False, or step after backward."
            )
        stepped = [found[parameter] for parameter in steps.step(found)]
        self._last.update(dict.fromkeys(stepped, of_pass))
        self._stepped.update(dict.fromkeys(stepped, group))

    def after_delivery(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for group, params in waiting.items():
            run_shown(self._step, group, params, group.gradients.backward_pass)
        stepped, self._stepped = self._stepped, {}
        for param, group in stepped.items():
            if self._last[param] is group.gradients.backward_pass:
                put_placeholder(param, SteppedGrad)

    def before_backward(self) -> None:
        if self._root.settings.finalize_backward:  # else they wait for `finalize`
            for param in (param for params in self._waiting.values() for param in params):
                param.sharded.grad = None  # the last pass has failed
            self._waiting.clear()
        for param in self._last:
            if isinstance(param.sharded.grad, SteppedGrad):
                take_placeholder(param)
