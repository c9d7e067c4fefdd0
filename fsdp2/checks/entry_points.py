"""Refuses calls of modules whose parameters another module gathers, while these are sharded: errors say what gathers.

What is here costs next to nothing while modules have unsharded parameters. An operation on a sharded parameter and a
plain tensor, in a method of the user's own for example, is refused by dtensor/refusals.py.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import ParametrizationList

from ..calls.nested import tensors_in
from ..calls.served_calls import serve_call
from ..engine.group import UNSHARDED, FSDPParamGroup
from ..engine.owners import sharded_owner
from ..engine.state import FSDPState, names_below, state_of
from ..parameters.replacements import REPLACE_BEFORE
from ..torch_private.checks import watch_calls

_KEY = "fsdp2"


def watch_calls_inside(state: FSDPState) -> None:
    """Refuses calls of modules inside those of a call, and of those that share parameters with them, from now on."""
    for group in (*state.tied_to, *(group for each in (state, *state.parts) for group in each.groups)):
        _unwatch(group)
        inside = dict.fromkeys([slot.module for param in group.params for slot in param.slots])
        for module in inside:
            if module not in group.modules:
                _watch(group, module)


def stop_watching_calls(state: FSDPState) -> None:
    """Refuses no calls inside the modules of a call any more."""
    for group in state.groups:
        _unwatch(group)


def _watch(group: FSDPParamGroup, module: nn.Module) -> None:
    hooks = watch_calls(module, _KEY)
    group.registration.while_sharded.append((hooks, _KEY, refuse_call))
    if group.phase is not UNSHARDED:
        hooks[_KEY] = refuse_call


def _unwatch(group: FSDPParamGroup) -> None:
    entries = group.registration.while_sharded
    for hooks, key, value in entries:
        if value is refuse_call:
            hooks.pop(key, None)
    entries[:] = [each for each in entries if each[2] is not refuse_call]


def leave_fast_path(state: FSDPState) -> None:
    """Has torch's transformer layers call what is sharded inside them: in evaluation they would read the parameters,
    except from modules that have hooks. It is no check, and always in force.
    """
    for layer in [each for own in (state, *state.parts) for each in own.own_modules()]:
        for module in layer.modules() if isinstance(layer, nn.TransformerEncoderLayer) else ():
            is_sharded = module is not layer and state_of(module) is not None
            if is_sharded and _do_nothing not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(_do_nothing)


def _do_nothing(module: nn.Module, args: Any) -> None:
    pass


# ---- calls of modules


def refuse_call(module: nn.Module, args: Any, kwargs: Any) -> None:
    """Refuses a call of a module whose parameters, which another module gathers, are sharded. It is a forward pre-hook.

    Raises:
        RuntimeError: unless the call computes on shards, with DTensors, or unsharded parameters that stay serve it.
    """
    groups = _groups_of_own_parameters(module)
    if not groups or any(isinstance(tensor, DTensor) for tensor in tensors_in(args, kwargs)):
        return
    if all(serve_call(module, group) for group in groups):
        return
    if isinstance(module, ParametrizationList):  # a parametrized weight is read: most compute with DTensors
        return
    owner = groups[0].state
    outer, inner = _expression(owner.modules[0], owner), _expression(module, owner)
    if owner.modules[0] not in names_below(owner.outermost.modules):
        raise RuntimeError(
            f"{inner} ({type(module).__name__}) was called while its parameters are sharded: they are gathered in the "
            f"forward of a {outer} that is no part of the model any more. {REPLACE_BEFORE}"
        )
    if not hasattr(owner.modules[0], "unshard"):  # a method of FSDPModule, which no user's class may have
        raise RuntimeError(
            f"{inner} ({type(module).__name__}) was called while its parameters are sharded: the class of {outer}, "
            f"which fully_shard had made, was replaced by {type(owner.modules[0]).__name__}, which gathers nothing. "
            "Set __class__ before fully_shard."
        )
    by = inner if owner is owner.outermost else outer  # of the root's parameters, few may be meant
    raise RuntimeError(
        f"{inner} ({type(module).__name__}) was called while its parameters are sharded: they are gathered in the "
        f"forward of {outer}. On every rank, call it inside `with fsdp2.full_params({by}):`; or register the method of "
        f"{outer} that calls it, by fsdp2.register_fsdp_forward_method({outer}, name); or apply fully_shard to "
        f"{inner}, too, before {outer}."
    )


def _groups_of_own_parameters(module: nn.Module) -> list[FSDPParamGroup]:
    """Returns the groups of the sharded parameters that `module` itself has."""
    sharded: list[Any] = [each for each in module._parameters.values() if isinstance(each, DTensor)]
    return list(dict.fromkeys(each.group for each in map(sharded_owner, sharded) if each is not None))


def _expression(module: nn.Module, owner: FSDPState) -> str:
    """Returns what a user writes for `module`: `model.blocks[0]`."""
    for root in owner.outermost.modules:
        for name, each in root.named_modules(prefix="model"):
            if each is module:
                return re.sub(r"\.(\d+)", r"[\1]", name)
    return type(module).__name__
