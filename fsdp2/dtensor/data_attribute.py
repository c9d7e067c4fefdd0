"""Makes assignments to `p.data` of a DTensor take effect, and counts writes to it in the parameter's version.

Torch's own `.data` is that of a plain tensor. It replaces the tensor's metadata, and leaves the local tensor that all
operations use; so an assignment silently does nothing. Writes to the local tensor of a sharded parameter's view, which
state dicts hold, are counted here, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..engine.group import COPIED
from ..engine.owners import sharded_in, sharded_owner
from ..torch_private.dtensor import set_local_and_spec
from ..torch_private.internals import local_if_any, local_of, storage_id, untraced
from ..torch_private.rare_internals import share_versions
from .making import cut
from .sharded_dtensor import replace_attribute

_PLAIN: Any = torch.Tensor.data


def follow_data() -> None:
    """Makes assignments to `.data` of a ShardedDTensor take effect, and counts writes to `.data`, and to the local
    tensor of a view, in the version of the parameter. The assigned value may be a DTensor, or, for a sharded parameter,
    the full tensor, of which it takes its shard, as in `vector_to_parameters`.

    `detach` returns a view in inference mode, too, also of a tensor that was made outside it, which state dicts need.
    Torch raises an error there.
    """
    replace_attribute("data", lambda _: property(_get, _set))
    replace_attribute("to_local", _counted)
    replace_attribute("detach", _outside_inference)


def _counted(to_local: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(to_local)
    def counted(self: DTensor, **options: Any) -> Tensor:
        _share_version(self)
        return to_local(self, **options)

    return counted


def _share_version(view: DTensor) -> None:
    """Makes the local tensor of `view` share the version counter of the sharded parameter that it is a view of, if it
    is one. DTensor creates the local tensor below autograd, and so with a counter of its own.
    """
    local = local_of(view)
    param = sharded_in(local) if type(local) is Tensor else None
    if param is not None and param.local is not local:
        share_versions([(param.sharded, local)])


def _outside_inference(detach: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(detach)
    def detached(self: DTensor) -> Tensor:
        if not torch.is_inference_mode_enabled():
            return detach(self)
        with torch.inference_mode(self.is_inference()):
            return detach(self)

    return detached


@untraced
def _get(self: DTensor) -> Tensor:
    if sharded_in(local_of(self)) is None:
        data: Tensor = _PLAIN.__get__(self)
        return data
    return self.detach()


@untraced
def _set(self: DTensor, value: Tensor) -> None:
    """Assigns `value`.

    Raises:
        TypeError: it is no DTensor, and no full tensor of a sharded parameter either.
    """
    value = _shard_of_full(self, value)
    if not isinstance(value, DTensor):
        advice = "Assign one that is distributed like it, or write to the present one: p.data.copy_(...)."
        if value.shape != self.shape:
            advice = (
                "A sharded parameter keeps its shape: resize it before fully_shard, or build a new model with the "
                "other shape, apply fully_shard, and load the rest."
            )
        raise TypeError(
            f"the .data of a DTensor of global shape {tuple(self.shape)}: expected a DTensor, got "
            f"{type(value).__name__} of shape {tuple(value.shape)}, which would change nothing. {advice}"
        )
    before, local = storage_id(self), local_of(value)
    _PLAIN.__set__(self, value)
    set_local_and_spec(self, local, value)
    owner = sharded_owner(self) if storage_id(local) != before else None
    if owner is not None and not (owner.group.num_running or owner.group.root.is_in_backward()):
        group = owner.group
        if group.phase is not COPIED and group.parameters.note_assigned(owner.param):
            group.reshard()
            group.parameters.drop_memory()


@torch.no_grad()
def _shard_of_full(self: DTensor, value: Tensor) -> Tensor:
    """Returns this rank's shard of `value`, if that is the full tensor of a sharded parameter; else `value` itself."""
    is_full = value.shape == self.shape and (not isinstance(value, DTensor) or _is_on_each_rank(value, self))
    if not is_full or type(local_of(self)) is not Tensor or sharded_owner(self) is None:
        return value
    return cut(local_if_any(value).detach(), self.device_mesh, self.placements)


def _is_on_each_rank(value: DTensor, like: DTensor) -> bool:
    return value.device_mesh == like.device_mesh and all(each.is_replicate() for each in value.placements)
