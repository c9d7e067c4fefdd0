"""Copies and pickles sharded modules: `copy.deepcopy` and `pickle`.

A copy holds copied modules with this rank's shards, and a description of what was built from them; groups and hooks are
built anew when all modules are there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from ..calls.user_code import hides_modes
from ..collectives.choose import follow
from ..engine.build import attach
from ..engine.group import COPIED, FSDPParamGroup
from ..engine.parameter import FSDPParam
from ..engine.policy import GroupSettings
from ..engine.state import STATE, FSDPState, groups_of, names_below, require_state, states_among
from ..parameters.saved_shards import refuse_others


class Description:
    """Describes a sharded module by plain data and modules. A copy holds it in place of the module's state.

    While modules are being copied, one that is not complete yet has no attributes.
    """

    def __init__(self, state: FSDPState) -> None:
        self.modules, self.policy, self.ignored = state.modules, state.policy, state.ignored
        self.casts = {} if state.cast_buffers is None else state.cast_buffers.casts
        self.groups = [_GroupDescription(group) for group in state.groups]
        self.parts = [Description(part) for part in state.parts]
        self.root_settings, self.prefetch = None, {}
        if state.outermost is state:
            root = state.root
            self.root_settings = root.settings
            # Prefetch lists name groups of the whole model: they come with its root, as indices.
            index = {group: i for i, group in enumerate(root.groups)}
            for i, group in enumerate(root.groups):
                lists = group.settings.forward_prefetch, group.settings.backward_prefetch
                self.prefetch[i] = [None if each is None else [index[g] for g in each if g in index] for each in lists]

    def is_complete(self) -> bool:
        """Returns True if all modules that have its parameters have been copied."""
        params = (param for group in self.groups for param in group.params)
        slots = (slot for param in params for slot in param["slots"])
        return all("_parameters" in vars(slot.module) for slot in slots) and all(
            part.is_complete() for part in self.parts
        )

    def build(self) -> FSDPState:
        """Builds the state of copied modules, and of their parts."""
        parts, ignored = [part.build() for part in self.parts], vars(self).get("ignored", set())  # older pickles: none
        state = FSDPState(self.modules, [each.build() for each in self.groups], self.policy, parts, ignored)
        if state.cast_buffers is not None:
            state.cast_buffers.take(vars(self).get("casts", {}))
        return state

    def set_root(self, state: FSDPState) -> None:
        """Gives the root of `state`, a copy of a root's, the original's settings."""
        if self.root_settings is None:
            return
        root = state.root
        names = ("finalize_backward", "unsharded_budget", "averages_running_stats")
        changes = {name: getattr(self.root_settings, name) for name in names}
        root.set(**changes)
        for i, (forward, backward) in self.prefetch.items():
            chosen = [None if each is None else tuple(root.groups[k] for k in each) for each in (forward, backward)]
            root.groups[i].set(forward_prefetch=chosen[0], backward_prefetch=chosen[1])


class _GroupDescription:
    def __init__(self, group: FSDPParamGroup) -> None:
        self.modules, self.mesh, self.name = group.modules, group.mesh, group.name
        self.settings: GroupSettings = replace(
            group.settings, optimizer_in_backward=None, forward_prefetch=None, backward_prefetch=None
        )
        if self.settings.divide_late is not None:  # inside of accumulate, which the copy is not
            self.settings = replace(self.settings, divide_late=None, reduce_gradients=True, all_reduce=True)
        self.params = [param.description() for param in group.params]

    def build(self) -> FSDPParamGroup:
        refuse_others([(each["names"][0], each["slots"][0].get()) for each in self.params])
        params = [FSDPParam.copied(each) for each in self.params]
        group = FSDPParamGroup(self.modules, params, self.mesh, self.settings, self.name)
        follow(group)
        return group


class _BeingCopied:
    """The descriptions of the states of one call that are being copied, weakly: a list of modules shares one."""

    def __init__(self) -> None:
        self.descriptions: WeakKeyDictionary[FSDPState, weakref.ref[Description]] = WeakKeyDictionary()


@hides_modes
def _describe(module: nn.Module) -> Description:
    """Registers the sharded parameters, which a copy starts from, and returns a description of the module."""
    state = require_state(module)
    descriptions = state.notes.of(_BeingCopied).descriptions
    reference = descriptions.get(state)
    described = None if reference is None else reference()
    if described is None:
        _refuse_while_used(state)
        for group in groups_of(module):
            group.reshard_if_idle()
            group.adopt_replacements()
        described = Description(state)
        descriptions[state] = weakref.ref(described)
    return described


def _refuse_while_used(state: FSDPState) -> None:
    is_lent = any(group.phase is COPIED for group in state.groups)
    if state.running or is_lent or state.root.is_in_backward():
        raise RuntimeError(
            f"{state}: a sharded module can't be copied or pickled while a forward or backward runs, nor inside "
            "full_params"
        )


@hides_modes
def _finish(module: nn.Module) -> None:
    """Builds the state of copied modules, once all of them are complete."""
    described: Any = module.__dict__[STATE]
    if not vars(described):
        return  # a list of modules shares the description, which is complete with the first of them
    found = dict.fromkeys(each.__dict__.get(STATE) for each in names_below(described.modules))
    waiting = [each for each in found if isinstance(each, Description)]
    if not all(each.is_complete() for each in waiting):
        return  # a parameter is tied to one of a module around this one, with which it is built
    for each in reversed(waiting):
        state = each.build()
        for own in each.modules:
            own.__dict__[STATE] = state
        names = names_below(state.modules)
        attach(state, states_among(names), [type(own) for own in state.modules])
        each.set_root(state)


def copying_methods(cls: Any, new_sharded: Callable[[type], nn.Module]) -> dict[str, Callable[..., Any]]:
    """Returns the methods by which Python copies and pickles a module of class `cls`, and slices it.

    `new_sharded`: makes an empty module of the sharded class of a class; Python finds it by its name.
    """

    def new(_: type, *args: Any, **kwargs: Any) -> nn.Module:
        # nn.Sequential[...] and the like build a new module of type(self): that one is not sharded.
        plain: nn.Module = cls(*args, **kwargs)
        return plain

    def reduce(self: nn.Module, protocol: int) -> Any:
        # For deepcopy and pickle, which can't find this class by name.
        described = _describe(self)
        if cls.__reduce__ is not object.__reduce__:
            # It builds another module of its own class, as that of torch.compile(module) does: take its state alone.
            get_state = getattr(cls, "__getstate__", vars)  # which `object` has since Python 3.11
            return new_sharded, (cls,), _with_description(get_state(self), described)
        _, _, state, *rest = cls.__reduce_ex__(self, protocol)
        return new_sharded, (cls,), _with_description(state, described), *rest

    def setstate(self: nn.Module, state: Any) -> None:
        cls.__setstate__(self, state)
        _finish(self)

    def shallow_copy(self: nn.Module) -> Any:
        raise NotImplementedError(
            f"copy.copy({cls.__name__}): two modules can't gather the parameters that they would share. Use "
            "copy.deepcopy."
        )

    def deepcopy(self: nn.Module, memo: Any) -> Any:
        raise NotImplementedError(
            f"{cls.__name__} has a __deepcopy__ of its own, which knows nothing of shards. Copy the model before "
            "fully_shard, or build a second one and load this one's state dict."
        )

    methods: dict[str, Callable[..., Any]] = {
        "__new__": new,
        "__reduce_ex__": reduce,
        "__setstate__": setstate,
        "__copy__": shallow_copy,
    }
    if hasattr(cls, "__deepcopy__"):
        methods["__deepcopy__"] = deepcopy
    return methods


def _with_description(state: Any, described: Description) -> Any:
    """Returns the state of a module with the description in place of its FSDPState. With slots the state is a pair."""
    if isinstance(state, tuple):
        return ({**(state[0] or {}), STATE: described}, *state[1:])
    return {**state, STATE: described}
