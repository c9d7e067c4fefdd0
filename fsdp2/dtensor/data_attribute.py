"""`p.data` of a sharded parameter, and of any DTensor: what is written to it, or assigned, is seen. So is what is
written to the local tensor of a sharded parameter's view, such as state dicts hold.

Torch's own `.data` is that of a plain tensor. It replaces what the DTensor says of itself, and leaves the local tensor
that all operations use; so an assignment does nothing, without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import dtensor_compat, torch_compat
from ..ext.owners import sharded_owner
from .sharded_dtensor import replace_attribute
from ..ext.unsharded_versions import sharded_in, share_count

_PLAIN: Any = torch.Tensor.data


def follow_data() -> None:
    """`.data` of a ShardedDTensor can be assigned another DTensor, and that of a sharded parameter a whole tensor,
    of which it keeps its part, as `vector_to_parameters` does; and counts what is written to it.
    """
    replace_attribute("data", lambda _: property(_get, _set))


def count_local_writes() -> None:
    """What is written to the local tensor of a view of a sharded parameter counts as written to that."""
    replace_attribute("to_local", _counted)


def detach_in_inference() -> None:
    """A view, also in inference mode, of what was made outside it: state dicts have such. Torch has an error there."""
    replace_attribute("detach", _outside_inference)


def _counted(to_local: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(to_local)
    def counted(self: DTensor, **options: Any) -> Tensor:
        share_count(self)
        return to_local(self, **options)

    return counted


def _outside_inference(detach: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(detach)
    def detached(self: DTensor) -> Tensor:
        if not torch.is_inference_mode_enabled():
            return detach(self)
        with torch.inference_mode(self.is_inference()):
            return detach(self)

    return detached


@torch_compat.untraced
def _get(self: DTensor) -> Tensor:
    if sharded_in(dtensor_compat.local_of(self)) is None:
        data: Tensor = _PLAIN.__get__(self)
        return data
    return self.detach()


@torch_compat.untraced
def _set(self: DTensor, value: Tensor) -> None:
    """
    Raises:
        TypeError: it is no DTensor, and not all of a sharded parameter either.
    """
    value = _part_of_whole(self, value)
    if not isinstance(value, DTensor):
        advice = "Assign one that is distributed like it, or write to what is there: p.data.copy_(...)."
        if value.shape != self.shape:
            advice = (
                "A sharded parameter keeps its shape: resize it before fully_shard, or build the model anew with the "
                "other shape, apply fully_shard, and load the rest."
            )
        raise TypeError(
            f"the .data of a DTensor of global shape {tuple(self.shape)}: expected a DTensor, got "
            f"{type(value).__name__} of shape {tuple(value.shape)}, which would change nothing. {advice}"
        )
    before, local = torch_compat.storage_id(self), dtensor_compat.local_of(value)
    _PLAIN.__set__(self, value)
    dtensor_compat.set_local(self, local, value)
    owner = sharded_owner(self) if torch_compat.storage_id(local) != before else None
    if owner is not None and not (owner.state.running or owner.state.context.is_in_backward()):
        owner.state.group.note_assigned(owner.param)


@torch.no_grad()
def _part_of_whole(self: DTensor, value: Tensor) -> Tensor:
    """What `self` keeps of `value`, if that is all of a sharded parameter, on every rank; else `value` itself."""
    is_whole = value.shape == self.shape and (not isinstance(value, DTensor) or _is_on_each_rank(value, self))
    if not is_whole or type(dtensor_compat.local_of(self)) is not Tensor or sharded_owner(self) is None:
        return value
    whole = dtensor_compat.local_if_any(value).detach()
    return dtensor_compat.cut(whole, self.device_mesh, self.placements)


def _is_on_each_rank(value: DTensor, like: DTensor) -> bool:
    return value.device_mesh == like.device_mesh and all(each.is_replicate() for each in value.placements)
