"""Finds settings that reach only a part of a model: divisors of some groups only, callables that no group calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.optim import Optimizer

from ..core.gradients import GroupGradients
from ..core.state import FSDPState, data_mesh_of, some_of

# By the method that sets it: a user's callable, which a group without parameters never calls.
_CALLABLES = {
    "set_custom_all_gather": lambda group: group._choice.all_gather,
    "set_custom_reduce_scatter": lambda group: group._choice.reduce_scatter,
    "set_all_reduce_hook": lambda group: group.gradients.reduction.hook,
}
_ADVICE = {
    "divided apart": "The gradients of one model are divided in several ways ({}), which scales some of them against "
    "others. Call model.set_gradient_divide_factor(factor, recurse=True) on the root, or give each sharded module the "
    "same factor.",
    "never called": "A function is never called ({}): the module has no parameters of its own, and no module that has "
    "some was given one. Call the method on the sharded modules that hold the parameters.",
}


class CheckedSettings:
    """Remembers, for one optimizer, that the settings of the model that it steps on have been checked."""

    def __init__(self) -> None:
        self._changes = -1

    def check(self, optimizer: Optimizer, states: Sequence[FSDPState]) -> None:
        """Checks the settings of all groups under the roots of `states`, if any setting has changed since the last
        check.

        Raises:
            RuntimeError: `find_partial` finds something. Settings are alike on all ranks, so all of them raise.
        """
        changes = GroupGradients.changes
        if changes == self._changes:
            return
        for kind, found in find_partial(other for state in states for other in state.context.states).items():
            if found:
                raise RuntimeError(f"{type(optimizer).__name__}.step: {_ADVICE[kind].format(some_of(found))}")
        self._changes = changes


def find_partial(states: Iterable[FSDPState]) -> dict[str, list[str]]:
    """Finds what reaches only a part of `states`, the groups of one model: descriptions by kind.

    Groups on different meshes (experts, say) may divide their gradients differently, and so may frozen ones.
    """
    states = list(dict.fromkeys(states))
    return {"divided apart": [*_divided_apart(states)], "never called": [*_never_called(states)]}


def common_divisor(states: Sequence[FSDPState]) -> float:
    """Returns what the gradients of those on the mesh of most ranks are divided by, once `find_partial` finds none."""
    mesh = data_mesh_of(states)
    divisors = [_divisor_of(state) for state in states if state.group.mesh == mesh and _is_divided(state)]
    return divisors[0] if divisors else mesh.num_ranks


def _divisor_of(state: FSDPState) -> float:
    return state.group.gradients.reduction.divisor or state.group.mesh.num_ranks


def _is_divided(state: FSDPState) -> bool:
    """Returns whether the group has gradients, or was given a divisor for them."""
    is_chosen = state.group.gradients.reduction.divisor is not None
    return is_chosen or any(param.sharded.requires_grad for param in state.group.params)


def _divided_apart(states: Sequence[FSDPState]) -> Iterator[str]:
    of_mesh: dict[Any, dict[float, list[str]]] = {}
    for state in filter(_is_divided, states):
        mesh = state.group.mesh
        axes = mesh.mesh, frozenset(mesh.shard_axes + mesh.replicate_axes)
        of_mesh.setdefault(axes, {}).setdefault(_divisor_of(state), []).append(str(state))
    for of_divisor in of_mesh.values():
        if len(of_divisor) > 1:
            yield from (f"{some_of(names)} by {divisor:g}" for divisor, names in of_divisor.items())


def _never_called(states: Sequence[FSDPState]) -> Iterator[str]:
    for method, get in _CALLABLES.items():
        having = [state for state in states if get(state.group) is not None]
        if having and not any(state.group.params for state in having):
            yield f"{method} on {some_of([str(state) for state in having])}"
