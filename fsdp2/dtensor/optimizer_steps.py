"""What happens before and after each step of any torch optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
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

from ..core.events import Observer
from ..core.group import UNSHARDED, FSDPParamGroup
from ..core.user_code import hides_modes
from ..ext.optimizer_in_backward import stepper_of
from ..ext.owners import SHARDED_AS, all_groups, sharded_owner, some_of
from ..ext.rank_facts import all_reduce_over, moves_data
from .sharded_dtensor import ShardedDTensor
from .switches import is_on

Groups = Sequence[FSDPParamGroup]

before_step: list[Callable[[Optimizer, Groups, bool], None]] = []
"""Functions, of checks, that are called before each step on sharded parameters: (optimizer, the groups of these,
whether it is a step in backward, on some of its parameters). They may raise, on all ranks alike.
"""

stepped_beside: list[Callable[[Optimizer, Groups, Mapping[int, Tensor]], None]] = []
"""Functions, of checks, that are called once when an optimizer is about to step on plain parameters that have
gradients, beside sharded ones: (optimizer, the groups of the sharded ones, number of a parameter -> plain parameter).
"""


class _Seen(NamedTuple):
    """What an optimizer had when it was looked at.

    `counts`: how many parameters, and how many fully_shard calls there had been in this process. `groups`: those of the
    sharded parameters among its own. `has_stale`: it steps on original parameters of before fully_shard, or on
    unsharded ones.
    """

    counts: tuple[int, int]
    groups: list[ref[FSDPParamGroup]]
    has_stale: bool

    def alive(self) -> list[FSDPParamGroup]:
        return [group for each in self.groups if (group := each()) is not None]


# By the identity of an optimizer, while it is alive: a WeakKeyDictionary takes longer than the look.
_seen: dict[int, _Seen] = {}


class _Calls:
    counter = count(1)  # not `number += 1`: other threads may be ranks of their own
    number = 0


class ShardingCalls(Observer):
    """Counts fully_shard calls: after each, optimizers are looked at anew."""

    def attached(self, root: Any) -> None:
        _Calls.number = next(_Calls.counter)


def follow_optimizer_steps() -> None:
    """Has a step count in the versions of the DTensors that it changes, and raise if it can't change anything. The loss
    that a closure returns is averaged over the ranks: a line search goes equally far on all of them.

    A step that takes parameters one by one counts anyway; foreach and fused ones count on plain tensors only.
    """
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return None if _is_known_to_be_of_others(optimizer) else _prepare(optimizer, args, kwargs)


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    if not _is_known_to_be_of_others(optimizer):
        _follow(optimizer)


def _is_known_to_be_of_others(optimizer: Optimizer) -> bool:
    """Returns True if it was looked at, and steps on none of fsdp2's parameters: to ask that is all that it costs."""
    seen = _seen.get(id(optimizer))
    return seen is not None and not (seen.groups or seen.has_stale) and seen.counts == _counts_of(optimizer)


def _counts_of(optimizer: Optimizer) -> tuple[int, int]:
    return sum([len(group["params"]) for group in optimizer.param_groups]), _Calls.number


@hides_modes
def _prepare(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Looks at what is about to be stepped. `args` begin with the optimizer.

    Raises:
        NotImplementedError: it computes what torch lacks for DTensors.
        RuntimeError: gradients are still in flight; or a check finds something.
    """
    groups = _look_at(optimizer).alive()
    if not groups or not is_on("optimizer-steps"):
        return None
    if isinstance(optimizer, Adafactor):
        raise NotImplementedError(
            "Adafactor steps by means over rows and columns, and by norms, in place, which DTensors have not: it can't "
            "step sharded parameters. Use another optimizer; Adam's state, too, is cut among the ranks."
        )
    in_backward = stepper_of(groups[0]) is not None or groups[0].root.is_in_backward()
    for check in before_step:
        check(optimizer, groups, in_backward)
    if not in_backward:
        _refuse_unfinished(optimizer, groups)
    closure: Any = args[1] if len(args) > 1 else kwargs.get("closure")
    if not (callable(closure) and _may_use_loss(optimizer)):
        return None
    averaged = partial(_averaged_loss, closure, groups)
    return ((args[0], averaged, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": averaged})


def _refuse_unfinished(optimizer: Optimizer, groups: Groups) -> None:
    unfinished = [group for group in groups if not group.root.settings.finalize_backward]
    names = [str(group) for group in unfinished if group.gradients.is_pending()]
    if names:
        raise RuntimeError(
            f"{type(optimizer).__name__}.step: gradients of {some_of(names)} are still on their way, after "
            "set_manual_backward_finalization(True). Call finalize_backward() on the root first; before clipping, too."
        )


def _look_at(optimizer: Optimizer) -> _Seen:
    """Finds the groups whose parameters it steps on. If it is new, reports trainable plain parameters that it has
    beside them, and that each rank steps on as it likes.
    """
    counts, seen = _counts_of(optimizer), _seen.get(id(optimizer))
    if seen is None:
        finalize(optimizer, _seen.pop, id(optimizer), None)
    if seen is None or seen.counts != counts:
        params = _params_of(optimizer)
        owners = [sharded_owner(param) if isinstance(param, DTensor) else None for param in params]
        groups = [*dict.fromkeys(owner.group for owner in owners if owner is not None)]
        plain = {i: each for i, each in enumerate(params) if not isinstance(each, DTensor) and each.grad is not None}
        if groups and plain:
            for report in stepped_beside:
                report(optimizer, groups, plain)
        others = [param for param, owner in zip(params, owners, strict=True) if owner is None]
        unsharded = _names_of_unsharded() if others else {}
        has_stale = any(SHARDED_AS in vars(param) or id(param) in unsharded for param in others)
        seen = _seen[id(optimizer)] = _Seen(counts, [ref(group) for group in groups], has_stale)
    return seen


def _names_of_unsharded() -> dict[int, str]:
    """Returns the identity of each unsharded parameter -> its name."""
    return {id(param.unsharded): param.name for group in all_groups() for param in group.params}


def _may_use_loss(optimizer: Optimizer) -> bool:
    """Returns True if it may use what a closure returns. All but one of torch's own only return that; and trainers pass
    closures to all of them.
    """
    return isinstance(optimizer, LBFGS) or not type(optimizer).__module__.startswith("torch.optim.")


def _params_of(optimizer: Optimizer) -> list[Any]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _averaged_loss(closure: Callable[[], Any], groups: Groups) -> Any:
    """Returns the loss that gradients are of: its sum over the ranks, divided as they are. Every rank must call it."""
    loss, mesh = closure(), max((group.mesh for group in groups), key=lambda mesh: mesh.num_ranks)
    if (not isinstance(loss, float) and type(loss) is not Tensor) or not moves_data(mesh.axis_groups, mesh.device):
        return loss
    own = loss.detach() if isinstance(loss, Tensor) else torch.tensor(loss, dtype=torch.float64, device="cpu")
    total = own.to(mesh.device, torch.float64, copy=True)
    all_reduce_over(total, mesh.axis_groups, largest=False)
    total /= _common_divisor([group for group in groups if group.mesh == mesh])
    return total.to(loss) if isinstance(loss, Tensor) else total.item()


def _common_divisor(groups: Groups) -> float:
    """Returns what the gradients of `groups`, on one mesh, are divided by: all by the same, or a check has raised."""
    for group in groups:
        if group.settings.divide_factor is not None:
            return group.settings.divide_factor
    return groups[0].mesh.num_ranks


@hides_modes
def _follow(optimizer: Optimizer) -> None:
    """Counts the step in the versions of sharded parameters.

    Raises:
        RuntimeError: it can't have changed a model.
    """
    seen = _look_at(optimizer)
    if not (seen.groups or seen.has_stale) or not is_on("optimizer-steps"):
        return
    if not getattr(optimizer, "counts_own_steps", False):
        params = _params_of(optimizer)
        increment_version([param for param in params if isinstance(param, ShardedDTensor) and param.grad is not None])
    for group in seen.alive():
        if group.phase is UNSHARDED and not group.state.running and group.root.backward is None:
            group.unshard_again()  # behind unshard(): whoever reads the parameters next finds the new values
    if seen.has_stale:
        params = _params_of(optimizer)
        _refuse_stale(type(optimizer).__name__, [param for param in params if param.grad is None])


def _refuse_stale(kind: str, params: Sequence[Tensor]) -> None:
    """Refuses parameters without gradients that are none of the model's."""
    replaced = [name for param in params if (name := vars(param).get(SHARDED_AS))]
    if replaced:
        raise RuntimeError(
            f"{kind} steps what was {some_of(replaced)} before fully_shard, and is no parameter of the model any "
            "more: the optimizer was built before fully_shard. Build it afterwards, from model.parameters()."
        )
    names = _names_of_unsharded()
    unsharded = [names[id(param)] for param in params if id(param) in names]
    if unsharded:
        raise RuntimeError(
            f"{kind} steps unsharded parameters, of {some_of(unsharded)}, which get no gradients: the optimizer was "
            "built inside a forward, or behind unshard(). Build it outside, from model.parameters(), which are sharded "
            "there."
        )
