"""Has `print(model)` show what `fully_shard` did to each module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..engine.state import STATE, FSDPState


def class_attributes(cls: Any) -> dict[str, Callable[..., Any]]:
    """Returns the method that has `print(model)` show what `fully_shard` did to a module."""

    def extra_repr(self: nn.Module) -> str:
        return ", ".join(filter(None, [cls.extra_repr(self), _note(self.__dict__.get(STATE))]))

    return {"extra_repr": extra_repr}


def _note(state: object) -> str:
    """Returns the share of this rank and the dtypes: the same text for equal blocks, which torch prints once. Nothing
    while a module is being copied.
    """
    if not isinstance(state, FSDPState) or not state.groups:
        return ""
    mesh, policy = state.groups[0].mesh, state.groups[0].settings.policy
    number = sum(len(group.params) for group in state.groups)
    others = f" with {len(state.modules) - 1} more modules" if len(state.modules) > 1 else ""
    notes = [f"fsdp2: group of {number} parameters{others}", f"shard {mesh.rank + 1}/{mesh.size}"]
    notes += [f"{mesh.num_ranks // mesh.size} replicas"] if mesh.num_ranks > mesh.size else []
    for name in ("param_dtype", "reduce_dtype"):
        dtype = getattr(policy, name)
        notes += [f"{name}={dtype_text(dtype)}"] if dtype is not None else []
    return ", ".join(notes)


def dtype_text(dtype: torch.dtype) -> str:
    """Returns "fp32", "bf16" and the like."""
    name = str(dtype).removeprefix("torch.")
    return name.replace("bfloat", "bf").replace("float", "fp")
