"""What follows each step of any torch optimizer."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from . import torch_compat
from .param import SHARDED_AS


@cache
def follow_optimizer_steps() -> None:
    """From now on a step shows in the versions of the DTensors that it changes, and raises if it can't change anything.

    A step that takes parameters one by one leaves a trace there anyway; foreach and fused ones, on plain tensors only.
    """
    register_optimizer_step_post_hook(_after_step)


@torch_compat.untraced
def _after_step(optimizer: Optimizer, *_: Any) -> None:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    increment_version([param for param in params if isinstance(param, DTensor) and param.grad is not None])
    replaced = [name for param in params if param.grad is None and (name := vars(param).get(SHARDED_AS))]
    if replaced:
        others = f" and {len(replaced) - 3} more" if len(replaced) > 3 else ""
        raise RuntimeError(
            f"{type(optimizer).__name__} steps what was {', '.join(replaced[:3])}{others} before fully_shard, and is "
            "no parameter of the model any more: the optimizer was built before fully_shard. Build it afterwards, "
            "from model.parameters()."
        )
