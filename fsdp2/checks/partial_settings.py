"""Finds settings that reach only a part of a model: divisors of some groups only, functions that no group calls."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.optim import Optimizer

from ..engine.collectives import choice_of
from ..engine.group import FSDPParamGroup
from ..engine.owners import some_of
from ..engine.root import Root
from .due import Check

# By the method that sets it: a user's function, which a group without parameters never calls.
_FUNCTIONS = {
    "set_custom_all_gather": lambda group: choice_of(group).all_gather,
    "set_custom_reduce_scatter": lambda group: choice_of(group).reduce_scatter,
    "set_all_reduce_hook": lambda group: group.settings.reduce_hook,
}
_ADVICE = {
    "divided apart": "The gradients of one model are divided in several ways ({}), which scales some of them against "
    "others. Call model.set_gradient_divide_factor(factor, recurse=True) on the root, or give each sharded module the "
    "same factor.",
    "never called": "A function is never called ({}): the module has no parameters of its own, and no module that has "
    "some was given one. Call the method on the sharded modules that hold the parameters.",
}


class _Changes:
    """Counts how often settings of groups, or which parameters are trainable, have changed in this process."""

    number = 0


class PartialSettings(Check):
    """Notes when settings change, or which parameters are trainable: the next step of an optimizer checks them."""

    def __init__(self) -> None:
        self._before: dict[FSDPParamGroup, Any] = {}

    def attached(self, root: Root) -> None:
        _Changes.number += 1

    def settings_changed(self, group: FSDPParamGroup) -> None:
        functions = [get(group) for get in _FUNCTIONS.values()]
        now = (group.settings.divide_factor, functions, [*group.parameters.trainable])
        if self._before.get(group) != now:  # others are changed in each step of an accumulation
            self._before[group] = now
            _Changes.number += 1


# By the identity of an optimizer, while it is alive: the number of changes when the settings of its model were checked,
# and of how many groups it stepped on parameters then. It is not kept on the optimizer, which users may pickle.
_checked: dict[int, tuple[int, int]] = {}


def check_settings(optimizer: Optimizer, groups: Sequence[FSDPParamGroup], in_backward: bool = False) -> None:
    """Checks the settings of all groups under the roots of `groups`, on whose parameters `optimizer` is about to step,
    if any setting has changed since the optimizer's last step.

    Raises:
        RuntimeError: `find_partial` finds something. Settings are alike on all ranks, so all of them raise.
    """
    # A step in backward is one on a few parameters, of the same model.
    now = _Changes.number, 0 if in_backward else len(groups)
    if _checked.get(id(optimizer)) == now:
        return
    roots = [root for root in dict.fromkeys([g.root for g in groups]) if root.events.of(PartialSettings) is not None]
    for kind, found in find_partial(group for root in roots for group in root.groups).items():
        if found:
            raise RuntimeError(f"{type(optimizer).__name__}.step: {_ADVICE[kind].format(some_of(found))}")
    if id(optimizer) not in _checked:
        weakref.finalize(optimizer, _checked.pop, id(optimizer), None)
    _checked[id(optimizer)] = now


def find_partial(groups: Iterable[FSDPParamGroup]) -> dict[str, list[str]]:
    """Returns descriptions, by kind, of settings that reach only a part of `groups`, the groups of one model.

    Groups on different meshes (experts, for example) may divide their gradients differently, and so may frozen ones.
    """
    groups = list(dict.fromkeys(groups))
    return {"divided apart": [*_divided_apart(groups)], "never called": [*_never_called(groups)]}


def _divisor_of(group: FSDPParamGroup) -> float:
    return group.settings.divide_factor or group.mesh.num_ranks


def _is_divided(group: FSDPParamGroup) -> bool:
    """Returns True if the group has gradients, or was given a divisor for them."""
    return group.settings.divide_factor is not None or any(param.sharded.requires_grad for param in group.params)


def _divided_apart(groups: Sequence[FSDPParamGroup]) -> Iterator[str]:
    of_mesh: dict[Any, dict[float, list[str]]] = {}
    for group in filter(_is_divided, groups):
        mesh = group.mesh
        axes = mesh.mesh, frozenset(mesh.shard_axes + mesh.replicate_axes)
        of_mesh.setdefault(axes, {}).setdefault(_divisor_of(group), []).append(group.name)
    for of_divisor in of_mesh.values():
        if len(of_divisor) > 1:
            yield from (f"{some_of(names)} by {divisor:g}" for divisor, names in of_divisor.items())


def _never_called(groups: Sequence[FSDPParamGroup]) -> Iterator[str]:
    for method, get in _FUNCTIONS.items():
        having = [group for group in groups if get(group) is not None]
        if having and not any(group.params for group in having):
            yield f"{method} on {some_of([group.name for group in having])}"
