"""Decides whether the parameters of a call rest on the CPU: as a policy or a budget of bytes says."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import nn

from ..engine.mesh import Distribution
from ..engine.policy import OffloadBudget, OffloadPolicy

OffloadChoice = OffloadPolicy | OffloadBudget
"""What `offload_policy` may be, see `fully_shard`."""


def is_policy(value: Any) -> bool:
    """Returns True if `value` is an OffloadPolicy, ours or torch's own."""
    is_ours = isinstance(value, OffloadPolicy) or type(value).__name__ == "OffloadPolicy"
    is_other = isinstance(value, (type, OffloadBudget))
    return not is_other and (is_ours or isinstance(getattr(value, "pin_memory", None), bool))


def check_offload(value: Any) -> None:
    """Raises TypeError if `value` is nothing that `offload_policy` may be."""
    if not is_policy(value) and not isinstance(value, OffloadBudget):
        raise TypeError(f"offload_policy: expected an OffloadPolicy or an OffloadBudget, got {value!r}")


def shard_nbytes(parameter: nn.Parameter, distribution: Distribution) -> int:
    """Returns the bytes of the largest shard that a rank has of a parameter."""
    shape = [*parameter.shape]
    for axis, placement in enumerate(distribution.placements):
        dim = getattr(placement, "dim", None)
        if dim is not None and shape:
            shape[dim] = -(-shape[dim] // distribution.mesh.size(axis))
    itemsize: int = parameter.dtype.itemsize
    numel: int = prod(shape)
    return numel * itemsize


def storage_place(policy: OffloadPolicy, device: torch.device) -> tuple[torch.device, bool]:
    """Returns where shards live, and whether in page-locked memory. A policy of torch's own is accepted, too."""
    cpu = torch.device("meta" if device.type == "meta" else "cpu")
    if not hasattr(policy, "pin_memory") or device == cpu:
        return device, False
    return cpu, bool(policy.pin_memory) and torch.accelerator.is_available()
