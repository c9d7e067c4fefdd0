"""What comes before and after each step of any torch optimizer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from weakref import finalize, ref

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Adafactor
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..core.comm import moves_data
from ..checks.partial_settings import CheckedSettings, common_divisor
from ..core.user_code import hides_modes
from ..ext.owners import sharded_owner
from ..core.parameter import SHARDED_AS, FSDPParam, names_of_full
from .sharded_dtensor import ShardedDTensor
from ..checks.small_collectives import all_reduce_over
from ..core.state import FSDPState, data_mesh_of, some_of
from .switches import is_on


class _Seen(NamedTuple):
    """What an optimizer had when it was looked at: how many parameters, and how many there were of sharded modules in
    all; the states whose parameters were among them, and whether their settings have been checked; whether it steps
    what is no parameter of a sharded module any more, or unsharded ones.
    """

    counts: tuple[int, int]
    states: list[ref[FSDPState]]
    settings: CheckedSettings
    has_stale: bool

    def alive(self) -> list[FSDPState]:
        return [state for each in self.states if (state := each()) is not None]


# By the identity of an optimizer, while it is alive: a WeakKeyDictionary takes longer than the look.
_seen: dict[int, _Seen] = {}


def follow_optimizer_steps() -> None:
    """From now on a step shows in the versions of the DTensors that it changes, and raises if it can't change anything.
    And what a closure returns is averaged over the ranks: who searches along a line goes equally far on all.

    A step that takes parameters one by one leaves a trace there anyway; foreach and fused ones, on plain tensors only.
    """
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return None if _is_known_to_be_of_others(optimizer) else _prepare(optimizer, args, kwargs)


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    if not _is_known_to_be_of_others(optimizer):
        _follow(optimizer)


def _is_known_to_be_of_others(optimizer: Optimizer) -> bool:
    """Returns True if it has been looked at, and steps nothing of ours: that is all the time that it loses."""
    seen = _seen.get(id(optimizer))
    return seen is not None and not (seen.states or seen.has_stale) and seen.counts == _counts_of(optimizer)


def _counts_of(optimizer: Optimizer) -> tuple[int, int]:
    return sum([len(group["params"]) for group in optimizer.param_groups]), FSDPParam.made


@hides_modes
def _prepare(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Looks at what is about to be stepped. `args` begin with the optimizer.

    Raises:
        NotImplementedError: it computes what torch has not for DTensors.
        RuntimeError: gradients are still on their way; or settings reach only a part of the model.
    """
    seen = _look_at(optimizer)
    if not seen.states or not is_on("optimizer-steps"):
        return None
    states = seen.alive()
    if isinstance(optimizer, Adafactor) and states:
        raise NotImplementedError(
            "Adafactor steps by means over rows and columns, and by norms, in place, which DTensors have not: it can't "
            "step sharded parameters. Use another optimizer; Adam's state, too, is cut among the ranks."
        )
    if states:
        seen.settings.check(optimizer, states)
    # What is stepped in backward is stepped as gradients come.
    if states and states[0].group.gradients.steps.stepper is None and not states[0].context.is_in_backward():
        states[0].context.rank_guard.steps.note(optimizer)  # which ranks compare when they look next
        _refuse_unfinished(optimizer, states)
    closure: Any = args[1] if len(args) > 1 else kwargs.get("closure")
    if not (states and callable(closure) and _may_use_loss(optimizer)):
        return None
    averaged = partial(_averaged_loss, closure, states)
    return ((args[0], averaged, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": averaged})


def _refuse_unfinished(optimizer: Optimizer, states: list[FSDPState]) -> None:
    unfinished = [state for state in states if not state.context.finalizes_by_itself]
    names = [str(state) for state in unfinished if state.group.gradients.are_under_way()]
    if names:
        raise RuntimeError(
            f"{type(optimizer).__name__}.step: gradients of {some_of(names)} are still on their way, after "
            "set_manual_backward_finalization(True). Call finalize_backward() on the root first; before clipping, too."
        )


def _look_at(optimizer: Optimizer) -> _Seen:
    """Finds the states whose parameters it steps on. If it is new, has ranks look after trainable plain parameters that
    it has beside them, and that each rank steps on as it likes.
    """
    counts, seen = _counts_of(optimizer), _seen.get(id(optimizer))
    if seen is None:
        finalize(optimizer, _seen.pop, id(optimizer), None)
    if seen is None or seen.counts != counts:
        params = _params_of(optimizer)
        owners = (sharded_owner(param) for param in params if isinstance(param, DTensor))
        states = [*dict.fromkeys(owner.state for owner in owners if owner is not None)]
        plain = {i: each for i, each in enumerate(params) if not isinstance(each, DTensor) and each.grad is not None}
        if states and plain:
            kind, guard = type(optimizer).__name__, states[0].context.rank_guard
            guard.note_beside({f"parameter {i} of {kind}, of shape {tuple(p.shape)}": p for i, p in plain.items()})
        # A step in backward is one of a few parameters, of the same model.
        in_backward = seen is not None and states and states[0].group.gradients.steps.stepper is not None
        settings = seen.settings if seen is not None and in_backward else CheckedSettings()
        has_stale = any(SHARDED_AS in vars(param) or names_of_full(param) for param in params)
        seen = _seen[id(optimizer)] = _Seen(counts, [ref(state) for state in states], settings, has_stale)
    return seen


def _may_use_loss(optimizer: Optimizer) -> bool:
    """Torch's own only return it, but for one. Trainers pass closures to all of them."""
    return isinstance(optimizer, LBFGS) or not type(optimizer).__module__.startswith("torch.optim.")


def _params_of(optimizer: Optimizer) -> list[Any]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _averaged_loss(closure: Callable[[], Any], states: list[FSDPState]) -> Any:
    """Returns the loss that gradients are of: its sum over the ranks, divided as they are. Every rank must call it."""
    loss, mesh = closure(), data_mesh_of(states)
    if (not isinstance(loss, float) and type(loss) is not Tensor) or not moves_data(mesh.axis_groups, mesh.device):
        return loss
    own = loss.detach() if isinstance(loss, Tensor) else torch.tensor(loss, dtype=torch.float64, device="cpu")
    total = own.to(mesh.device, torch.float64, copy=True)
    all_reduce_over(total, mesh.axis_groups, largest=False)
    total /= common_divisor(states)
    return total.to(loss) if isinstance(loss, Tensor) else total.item()


@hides_modes
def _follow(optimizer: Optimizer) -> None:
    """Counts what was stepped. Raises RuntimeError if that can't have changed a model."""
    seen = _look_at(optimizer)
    if not (seen.states or seen.has_stale) or not is_on("optimizer-steps"):
        return
    params = _params_of(optimizer)
    increment_version([param for param in params if isinstance(param, ShardedDTensor) and param.grad is not None])
    for state in seen.alive():
        if state.group.faces.installed and not state.running and not state.context.in_backward:
            state.group.unshard_again()  # behind unshard(): whoever reads them next finds the new ones
    kind = type(optimizer).__name__
    replaced = [name for param in params if param.grad is None and (name := vars(param).get(SHARDED_AS))]
    if replaced:
        raise RuntimeError(
            f"{kind} steps what was {some_of(replaced)} before fully_shard, and is no parameter of the model any more: "
            "the optimizer was built before fully_shard. Build it afterwards, from model.parameters()."
        )
    full = [names[0] for param in params if param.grad is None and (names := names_of_full(param))]
    if full:
        raise RuntimeError(
            f"{kind} steps full parameters, of {some_of(full)}, which get no gradients: the optimizer was built inside "
            "a forward, or behind unshard(). Build it outside, from model.parameters(), which are sharded there."
        )
