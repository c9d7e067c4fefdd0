"""Finds what users have put in a parameter's place, by assignment or by loading, and refuses what can't be sharded."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Flag, auto
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..engine.parameter import FSDPParam
from ..torch_private.internals import local_of
from ..torch_private.rare_internals import is_wrapped
from .checksum import are_alike
from .tensor_parallel import TensorParallel

REPLACE_BEFORE = (
    "Replace modules before fully_shard; or build the model anew with the new one, apply fully_shard, and load the "
    "rest."
)


class Accept(Flag):
    """Which replacements of parameters are accepted: those by sharded ones, and these."""

    SHARDED = 0
    # Parameters on the meta device, or elsewhere than where the group needs them.
    META = auto()
    # Several objects in place of a tied parameter. They are left as they are, until the next call.
    UNTIED = auto()
    # Plain tensors of whole parameters, which are sharded.
    WHOLE = auto()


class Replacements(NamedTuple):
    """What users have put in the places of parameters."""

    # (param, what is registered in its place now)
    found: list[tuple[FSDPParam, nn.Parameter]]
    # Tied parameters that are several objects now, none of them among `found`.
    untied: list[FSDPParam]


def find_replacements(
    params: Sequence[FSDPParam], accepted: Accept, untied_before: Collection[FSDPParam]
) -> Replacements:
    """Returns what is registered in the places of `params`, those of one group.

    `untied_before`: the `untied` that the last call has returned.

    Raises:
        ValueError: one can't take its parameter's place, or that of several; nothing is changed then.
        NotImplementedError: one is computed from others, and gradients are to flow to these.
    """
    accept_whole, may_be_untied = Accept.WHOLE in accepted, Accept.UNTIED in accepted
    chosen = params if may_be_untied else ()
    untied = [param for param in chosen if _is_untied(param, accept_whole or param in untied_before)]
    found = [
        (param, param.sharded if param in untied else _find_replacement(param, accept_whole, may_be_untied))
        for param in params
    ]
    owners: dict[nn.Parameter, FSDPParam] = {}
    for param, parameter in found:
        other = owners.setdefault(parameter, param)
        if other is not param:
            raise ValueError(
                f"{param.name} and {other.name} are one parameter now, but were two when fully_shard was applied. "
                "Tie parameters before fully_shard."
            )
    if accept_whole:
        with torch.no_grad():
            for param in untied:
                _cut_whole(param)
    return Replacements([(param, parameter) for param, parameter in found if param not in untied], untied)


def _find_replacement(param: FSDPParam, accept_whole: bool, may_be_untied: bool) -> nn.Parameter:
    """Returns what is registered in place of `param` now.

    `accept_whole`: a plain tensor of the whole parameter, which is sharded then, is accepted, too. `may_be_untied`: a
    tied parameter may be several objects (loading with assign=True, and `to_empty`, make one for each name): the first
    one counts.

    Raises:
        ValueError: it is gone, has another shape or distribution, or is registered in some of several slots only.
        NotImplementedError: it is computed from others, and gradients are to flow to these.
    """
    for each in _registered(param):
        if each is not None and tuple(each.shape) != param.shape:
            raise ValueError(
                f"{param.name}: expected a parameter of global shape {param.shape}, got {tuple(each.shape)}. Only one "
                "of the same shape can replace it: resize it before fully_shard, or build the model anew with the "
                "other shape, apply fully_shard, and load the rest."
            )
    found = _find(param, may_be_untied)
    _refuse_computed(param, found)
    if isinstance(found, DTensor):
        _check_distribution(param, found, accept_whole)
    elif not accept_whole:
        raise ValueError(
            f"{param.name}: expected a DTensor, got a plain {type(found).__name__}. An optimizer that holds it would "
            "never see it change. Replace parameters (by quantized ones, for example) before fully_shard; or load "
            "whole tensors with load_state_dict(..., assign=True) of the module that fully_shard was applied to; or "
            "distribute it like the parameter it replaces."
        )
    return found


def _registered(param: FSDPParam) -> list[nn.Parameter | None]:
    """Returns what is registered in each slot now."""
    return [slot.module._parameters.get(slot.name) for slot in param.slots]


def _is_untied(param: FSDPParam, accept_whole: bool) -> bool:
    """Returns True if a tied parameter has been replaced under some of its names only, or by tensors of different
    values: a user who loads a model may tie it again afterwards.
    """
    found = [each for each in _registered(param) if each is not None]
    if len(found) < len(param.slots):
        return False  # one is gone
    if any(each is param.sharded for each in found):
        return any(each is not param.sharded for each in found)
    return accept_whole and not all(are_alike(found[0], each) for each in found)


def _cut_whole(param: FSDPParam) -> None:
    """Registers this rank's rows in place of whole tensors that were loaded under some names of `param`, which must be
    sharded before an optimizer is built. Grad must be off.
    """
    cut: dict[nn.Parameter, nn.Parameter] = {}
    for slot, found in zip(param.slots, _registered(param), strict=True):
        if found is not None and not isinstance(found, DTensor) and tuple(found.shape) == param.shape:
            if found not in cut:
                cut[found] = param.cut(found)
            setattr(slot.module, slot.name, cut[found])


def _find(param: FSDPParam, may_be_untied: bool) -> nn.Parameter:
    """Returns the parameter that all slots have registered now.

    Raises:
        ValueError: there is no such parameter.
    """
    found = _registered(param)
    kept = [name for name, each in zip(param.names, found, strict=True) if each is param.sharded]
    first = found[0]
    for name, each in zip(param.names, found, strict=True):
        if each is None or (each is not param.sharded and kept):
            if each is None:
                what = "is gone. fully_shard manages this parameter: take it away before fully_shard, or put it back"
            else:
                what = (
                    f"was replaced, but not {kept[0]}, to which it was tied. fully_shard manages this parameter: make "
                    f"such a change before fully_shard, or under each of its names: {_assignment(kept[0], name)}"
                )
            raise ValueError(f"{name} {what}.")
        if each is not first and not may_be_untied:
            raise ValueError(
                f"{name} was tied to {param.name} when fully_shard was applied, and is another parameter now. Give "
                f"both the same one, as in {_assignment(name, param.name)}; or untie them before fully_shard."
            )
    assert first is not None
    return first


def _assignment(target: str, source: str) -> str:
    return f"`model.{target} = model.{source}`"


def _refuse_computed(param: FSDPParam, found: nn.Parameter) -> None:
    if (found.grad_fn is not None and torch.is_grad_enabled()) or is_wrapped(found):
        raise NotImplementedError(
            f"{param.name}: expected a parameter, got a tensor that is computed from others, to which gradients would "
            "not flow. Detach it, or call a copy of the module that is not sharded; for torch.func.grad by parameters "
            "call backward() instead, and read .grad."
        )


def _check_distribution(param: FSDPParam, found: DTensor, accept_whole: bool) -> None:
    """Refuses what is distributed neither like the sharded parameter nor, if allowed, like the unsharded one."""
    kind = param.distribution
    is_whole = accept_whole and isinstance(kind, TensorParallel) and kind.is_of_full(found)
    if not kind.is_of_sharded(found) and not is_whole:
        raise ValueError(
            f"{param.name}: expected a DTensor with placements {kind.placements} on {kind.mesh}, got "
            f"{found.placements} on {found.device_mesh}. Distribute it like the parameter it replaces."
        )
    local, expected = local_of(found), tuple(param.local_shape)
    if kind.is_of_sharded(found) and tuple(local.shape) != expected:
        raise ValueError(
            f"{param.name}: expected a local tensor of shape {expected} on this rank, got {tuple(local.shape)}. Make "
            "the DTensor by distribute_tensor(whole, p.device_mesh, p.placements), or give "
            "DTensor.from_local those rows."
        )
