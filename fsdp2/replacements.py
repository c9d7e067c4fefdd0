"""What users put in a parameter's place, by assignment or by loading: looked up in its slots, and refused where it
can't become the sharded face.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from . import torch_compat
from .dtensor_compat import local_of
from .guards.checksum import are_alike
from .param import FSDPParam


def find_replacement(param: FSDPParam, accept_whole: bool) -> nn.Parameter:
    """What is registered now: users may replace the sharded face by assignment or loading.

    `accept_whole`: also a plain tensor of the whole parameter, to be sharded.

    Raises:
        ValueError: it is gone, has another shape or distribution, or stands in some of several slots only.
        NotImplementedError: it is computed from others, and gradients are to flow to these.
    """
    found = _find(param, is_loaded=accept_whole)
    _refuse_computed(param, found)
    if tuple(found.shape) != param.shape:
        raise ValueError(
            f"{param.name}: expected a parameter of global shape {param.shape}, got {tuple(found.shape)}. Only "
            "one of the same shape can replace it. For another, build the model anew with that, apply fully_shard, and "
            "load the rest."
        )
    if isinstance(found, DTensor):
        _check_distribution(param, found, accept_whole)
    elif not accept_whole:
        raise ValueError(
            f"{param.name}: expected a DTensor, got a plain {type(found).__name__}. An optimizer that holds it would "
            "never see it change. Load whole tensors with load_state_dict(..., assign=True) of the module that "
            "fully_shard was applied to, or distribute it like the parameter it replaces."
        )
    return found


def _find(param: FSDPParam, is_loaded: bool) -> nn.Parameter:
    """What is registered now, in all slots alike."""
    found = [slot.module._parameters.get(slot.name) for slot in param.slots]
    kept = [name for name, each in zip(param.names, found, strict=True) if each is param.sharded]
    first = found[0]
    for name, each in zip(param.names, found, strict=True):
        if each is None or (each is not param.sharded and kept):
            what = "is gone" if each is None else f"was replaced, but not {kept[0]}, to which it was tied"
            raise ValueError(
                f"{name} {what}. fully_shard manages this parameter: make such a change before fully_shard, or "
                "everywhere the parameter is used."
            )
        # Loading with assign=True gives each slot of a tied parameter an object of its own; so does `to_empty`.
        if is_loaded and first is not None and not are_alike(first, each):
            raise ValueError(
                f"{name} was tied to {param.name} when fully_shard was applied, and has been given other values. "
                "Give both the same ones; or load them, or untie them, before fully_shard."
            )
    assert first is not None
    return first


def _refuse_computed(param: FSDPParam, found: nn.Parameter) -> None:
    if (found.grad_fn is not None and torch.is_grad_enabled()) or torch_compat.is_wrapped(found):
        raise NotImplementedError(
            f"{param.name}: expected a parameter, got a tensor that is computed from others, to which gradients would "
            "not flow. Detach it, or call a copy of the module that is not sharded; for torch.func.grad by parameters "
            "call backward() instead, and read .grad."
        )


def _check_distribution(param: FSDPParam, found: DTensor, accept_whole: bool) -> None:
    """Whether `found` lies like the sharded face or, with `accept_whole`, like the parameter of tensor parallelism."""
    kind = param.distribution
    if not kind.is_of_sharded(found) and not (accept_whole and kind.is_of_full(found)):
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
