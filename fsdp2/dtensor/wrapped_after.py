"""Says what to write where code that a user can't change meets a sharded parameter: DDP, FSDP1, pruning, optimizers.

Such code fails at the first operation that a ShardedDTensor refuses. The error then says what to do about the caller,
which is found on the stack. Nothing here runs unless there is an error.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from ..engine.callers import optimizer_that_calls
from ..engine.owners import owners_by_id, sharded_owner, some_of

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
_NO_DTENSORS = (
    "This operation of {} takes no DTensors. Call fsdp2.flatten_optimizer(optimizer) before the first step; if that "
    "refuses it, use an optimizer that takes DTensors, as those of torch.optim and torchao do, or have it step on this "
    "rank's shards, as examples/guides/lora.md shows."
)


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


def advice_about_optimizer() -> str | None:
    """Returns what to do if a step of an optimizer calls this; else None."""
    optimizer = optimizer_that_calls()
    if optimizer is None:
        return None
    names = []
    for param in (param for entry in optimizer.param_groups for param in entry["params"]):
        owned = sharded_owner(param) if isinstance(param, DTensor) else None
        if owned is None:
            continue
        names.append(owned.param.name)
        if not isinstance(param.grad, (DTensor, type(None))):
            return (
                f"The gradient of {owned.param.name} is a plain tensor: something has assigned it to .grad. Assign "
                "distribute_tensor(gradient, p.device_mesh, p.placements) of the whole gradient, on every rank; a hook "
                "of the parameter may return the whole gradient as it is."
            )
    return _NO_DTENSORS.format(type(optimizer).__name__) + (f" DTensors are {some_of(names)}." if names else "")


def _managed(module: Any) -> str:
    """Returns which parameters of `module` fully_shard manages."""
    if not isinstance(module, nn.Module):
        return ""
    owners = owners_by_id()
    names = [name for name, param in module.named_parameters() if id(param) in owners]
    return f"fully_shard manages {names[0]} ({len(names)} parameters in all). " if names else ""
