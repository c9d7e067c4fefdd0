"""Prepares and follows each step of any torch optimizer: runs checks, averages a closure's loss, counts writes."""

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

from ..calls.user_code import hides_modes
from ..engine.group import UNSHARDED, FSDPParamGroup
from ..engine.owners import SHARDED_AS, all_groups, sharded_owner, some_of
from ..engine.state import FSDPState
from ..features.optimizer_in_backward import steps_of
from ..ranks.rank_facts import all_reduce_over, moves_data
from .local_steps import end_local_step, local_optimizer
from .optimizer_states import cut_loaded_states, follow_state_dicts, refuse_lost_states
from .sharded_dtensor import ShardedDTensor

Groups = Sequence[FSDPParamGroup]

before_step: list[Callable[[Optimizer, Groups, bool], None]] = []
"""Functions, of checks, that are called before each step on sharded parameters: (optimizer, the groups of these, True
if it is a step in backward, on some of the parameters). They may raise, on all ranks alike.
"""

after_step: list[Callable[[Optimizer, Groups], None]] = []
"""Functions, of checks, that are called after each step on sharded parameters that has not raised."""

stepped_beside: list[Callable[[Optimizer, Groups, Mapping[int, Tensor]], None]] = []
"""Functions, of checks, that are called once when an optimizer is about to step on plain parameters with gradients:
(optimizer, the groups of sharded ones that it steps on, too, number of a parameter -> plain parameter).
"""


class _Inspected(NamedTuple):
    """What was found when the parameters of an optimizer were last inspected.

    `counts`: the number of its parameters, and of fully_shard calls in this process, and the identity of its states.
    `groups`: the groups of the sharded parameters that it has. `has_stale`: True if it steps on parameters that
    fully_shard has replaced since, or on unsharded ones.
    """

    counts: tuple[int, int, int]
    groups: list[ref[FSDPParamGroup]]
    has_stale: bool

    def alive(self) -> list[FSDPParamGroup]:
        """Returns the groups that have not been freed."""
        return [group for each in self.groups if (group := each()) is not None]


# The identity of each optimizer that is alive -> the facts about it, which are not kept on the optimizer, because users
# may pickle it. A WeakKeyDictionary takes longer than all else.
_inspected: dict[int, _Inspected] = {}


class _Calls:
    """Counts the fully_shard calls in this process."""

    counter = count(1)  # not `number += 1`, because other threads may be ranks
    number = 0


def note_call(_: FSDPState) -> None:
    """Counts a fully_shard call: after each, optimizers are inspected again."""
    _Calls.number = next(_Calls.counter)


def follow_optimizer_steps() -> None:
    """Makes a step increment the versions of the DTensors that it changes, and raise if it can't change anything. The
    loss that a closure returns is averaged over the ranks, so that a line search does the same on all of them.

    A step on one parameter at a time increments versions anyway; foreach and fused steps do so for plain tensors only.
    """
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return None if _has_only_other_parameters(optimizer) else _prepare(optimizer, args, kwargs)


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    if not _has_only_other_parameters(optimizer):
        _follow(optimizer)


def _has_only_other_parameters(optimizer: Optimizer) -> bool:
    """Returns True if it was inspected, and steps on no parameter of fsdp2. Such an optimizer costs this call only."""
    facts = _inspected.get(id(optimizer))
    return facts is not None and not (facts.groups or facts.has_stale) and facts.counts == _counts_of(optimizer)


def _counts_of(optimizer: Optimizer) -> tuple[int, int, int]:
    """Returns the number of its parameters, that of fully_shard calls in this process, the identity of its states."""
    number = sum([len(group["params"]) for group in optimizer.param_groups])
    return number, _Calls.number, id(vars(optimizer).get("state"))


@hides_modes
def _prepare(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Checks the parameters before a step, and returns the arguments of `step` to use instead, or None. `args` begin
    with the optimizer.

    Raises:
        NotImplementedError: the optimizer uses operations that torch lacks for DTensors.
        RuntimeError: gradients are still being reduced; or a check fails.
    """
    groups = _inspect(optimizer).alive()
    if not groups:
        return None
    if isinstance(optimizer, Adafactor):
        raise NotImplementedError(
            "Adafactor computes means over rows and columns, and norms, in place, for which DTensor has no rule: it "
            "can't step sharded parameters. Use another optimizer; the state of Adam, for example, is sharded, too."
        )
    in_backward = steps_of(groups[0]) is not None or groups[0].root.is_in_backward()
    closure: Any = args[1] if len(args) > 1 else kwargs.get("closure")
    for check in before_step:
        check(optimizer, groups, in_backward)
    if not in_backward:
        _refuse_unfinished(optimizer, groups)
    if closure is None and not in_backward:
        local = local_optimizer(optimizer)
        return None if local is None else ((local, *args[1:]), kwargs)
    if not (callable(closure) and _may_use_loss(optimizer)):
        return None
    averaged = partial(_averaged_loss, closure, groups)
    return ((args[0], averaged, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": averaged})


def _refuse_unfinished(optimizer: Optimizer, groups: Groups) -> None:
    unfinished = [group for group in groups if not group.root.settings.finalize_backward]
    names = [str(group) for group in unfinished if group.gradients.is_pending()]
    if names:
        raise RuntimeError(
            f"{type(optimizer).__name__}.step: gradients of {some_of(names)} are still being reduced, after "
            "set_manual_backward_finalization(True). Call finalize_backward() on the root first, also before clipping."
        )


def _inspect(optimizer: Optimizer) -> _Inspected:
    """Returns the groups whose parameters an optimizer steps on. If its parameters are new, it also reports plain ones
    that have gradients, for each rank steps on these by itself; it cuts full states that were loaded.
    """
    counts, facts = _counts_of(optimizer), _inspected.get(id(optimizer))
    if facts is None:
        finalize(optimizer, _inspected.pop, id(optimizer), None)
    if facts is None or facts.counts != counts:
        params = _params_of(optimizer)
        owners = [sharded_owner(param) if isinstance(param, DTensor) else None for param in params]
        groups = [*dict.fromkeys(owner.group for owner in owners if owner is not None)]
        plain = {i: each for i, each in enumerate(params) if not isinstance(each, DTensor) and each.grad is not None}
        others = [param for param, owner in zip(params, owners, strict=True) if owner is None]
        unsharded = _names_of_unsharded() if others else {}
        has_stale = any(SHARDED_AS in vars(param) or id(param) in unsharded for param in others)
        if plain and (groups or not has_stale):
            for report in stepped_beside:
                report(optimizer, groups, plain)
        if groups:
            refuse_lost_states(optimizer)
            cut_loaded_states(optimizer)
            follow_state_dicts(optimizer)
        facts = _inspected[id(optimizer)] = _Inspected(counts, [ref(group) for group in groups], has_stale)
    return facts


def _names_of_unsharded() -> dict[int, str]:
    """Returns the name of each unsharded parameter by its identity."""
    return {id(param.unsharded): param.name for group in all_groups() for param in group.params}


def _may_use_loss(optimizer: Optimizer) -> bool:
    """Returns True if an optimizer may use the loss that a closure returns. Of torch's own, only LBFGS does: the others
    return it, and trainers pass closures to all of them.
    """
    return isinstance(optimizer, LBFGS) or not type(optimizer).__module__.startswith("torch.optim.")


def _params_of(optimizer: Optimizer) -> list[Any]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _averaged_loss(closure: Callable[[], Any], groups: Groups) -> Any:
    """Returns the sum of a closure's loss over the ranks, divided like the gradients. Every rank must call it."""
    loss, mesh = closure(), max((group.mesh for group in groups), key=lambda mesh: mesh.num_ranks)
    if (not isinstance(loss, float) and type(loss) is not Tensor) or not moves_data(mesh.axis_groups, mesh.device):
        return loss
    own = loss.detach() if isinstance(loss, Tensor) else torch.tensor(loss, dtype=torch.float64, device="cpu")
    total = own.to(mesh.device, torch.float64, copy=True)
    all_reduce_over(total, mesh.axis_groups, largest=False)
    total /= _common_divisor([group for group in groups if group.mesh == mesh])
    return total.to(loss) if isinstance(loss, Tensor) else total.item()


def _common_divisor(groups: Groups) -> float:
    """Returns the divisor of the gradients of `groups`, on one mesh. If they had several, a check has raised."""
    for group in groups:
        if group.settings.divide_factor is not None:
            return group.settings.divide_factor
    return groups[0].mesh.num_ranks


@hides_modes
def _follow(optimizer: Optimizer) -> None:
    """Increments the versions of the sharded parameters that a step has changed.

    Raises:
        RuntimeError: the step can't have changed a model.
    """
    end_local_step(optimizer)
    facts = _inspect(optimizer)
    if not (facts.groups or facts.has_stale):
        return
    if not getattr(optimizer, "counts_own_steps", False):
        params = _params_of(optimizer)
        increment_version([param for param in params if isinstance(param, ShardedDTensor) and param.grad is not None])
    groups = facts.alive()
    for note in after_step if groups else ():
        note(optimizer, groups)
    for group in groups:
        if group.phase is UNSHARDED and not group.num_running and group.root.backward is None:
            group.unshard_again()  # after a call of unshard(): its parameters get the new values
    if facts.has_stale:
        params = _params_of(optimizer)
        _refuse_stale(type(optimizer).__name__, [param for param in params if param.grad is None])


def _refuse_stale(kind: str, params: Sequence[Tensor]) -> None:
    """Refuses parameters without gradients that are not parameters of the model."""
    replaced = [name for param in params if (name := vars(param).get(SHARDED_AS))]
    if replaced:
        raise RuntimeError(
            f"{kind}.step: the optimizer was built before fully_shard. It steps {some_of(replaced)} as they were then, "
            "which are no parameters of the model any more. Build it afterwards, from model.parameters()."
        )
    names = _names_of_unsharded()
    unsharded = [names[id(param)] for param in params if id(param) in names]
    if unsharded:
        raise RuntimeError(
            f"{kind} steps unsharded parameters, of {some_of(unsharded)}, which get no gradients: the optimizer was "
            "built inside a forward, or after unshard(). Build it outside, from model.parameters(), which are sharded "
            "there."
        )
