"""Says what to write where code of torch that a user can't change meets a sharded parameter: DDP, FSDP1, pruning.

Such code fails at the first operation that a ShardedDTensor refuses. The error then says what to do about the caller,
which is found on the stack. Nothing here runs unless there is an error.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch import nn

from ..engine.owners import owners_by_id

# Class whose `__init__` is on the stack -> what to do about it.
_AROUND = {
    "DistributedDataParallel": "Remove DistributedDataParallel: fully_shard averages the gradients. Of a model that is "
    "sharded in part, apply fully_shard or fsdp2.replicate to the whole, too.",
    "FullyShardedDataParallel": "Remove FullyShardedDataParallel, and apply fully_shard to the whole model, too; or "
    "pass what is sharded as ignored_states.",
}
# Module of torch that is on the stack -> what to do instead.
_INSIDE = {
    "torch.nn.utils.prune": "Prune before fully_shard, or inside `with fsdp2.full_params(module, writeback=True):`, "
    "then prune.remove.",
    "torch.nn.utils.parametrize": "On every rank, use the parametrized weight inside `with "
    "fsdp2.full_params(module):`.",
    "torch.nn.utils.clip_grad": "torch can't clip gradients on several meshes, or plain and sharded ones together. "
    "Call fsdp2.clip_grad_norm_(parameters, max_norm): it returns the norm, too.",
}


def advice_about_caller() -> str | None:
    """Returns what to do if such code calls this, with the parameters that are meant; else None."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        inside = _INSIDE.get(frame.f_globals.get("__name__", ""))
        if inside is not None:
            return inside
        if frame.f_code.co_name == "__init__":
            name = type(frame.f_locals.get("self")).__name__
            if name in _AROUND:
                return f"{name}: {_managed(frame.f_locals.get('module'))}{_AROUND[name]}"
        frame = frame.f_back
    return None


def _managed(module: Any) -> str:
    """Returns which parameters of `module` fully_shard manages."""
    if not isinstance(module, nn.Module):
        return ""
    owners = owners_by_id()
    names = [name for name, param in module.named_parameters() if id(param) in owners]
    return f"fully_shard manages {names[0]} ({len(names)} parameters in all). " if names else ""
