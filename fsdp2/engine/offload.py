"""Decides which parameters of a call rest on the CPU: as one policy, a function, names or a budget of bytes says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from math import prod
from typing import Any

import torch
from torch import nn

from .mesh import Distribution
from .policy import CPUOffloadPolicy, OffloadBudget, OffloadPolicy

OffloadChoice = (
    OffloadPolicy | Callable[[str, nn.Parameter], OffloadPolicy | None] | Mapping[str, OffloadPolicy] | OffloadBudget
)
"""What `offload_policy` may be, see `fully_shard`."""

_ON_DEVICE = OffloadPolicy()


def is_policy(value: Any) -> bool:
    """Returns True if `value` is an OffloadPolicy, ours or torch's own."""
    is_ours = isinstance(value, OffloadPolicy) or type(value).__name__ == "OffloadPolicy"
    is_other = isinstance(value, (type, OffloadBudget))
    return not is_other and (is_ours or isinstance(getattr(value, "pin_memory", None), bool))


def check_offload(value: Any) -> None:
    """Raises TypeError if `value` is nothing that `offload_policy` may be."""
    if is_policy(value) or isinstance(value, OffloadBudget):
        return
    if isinstance(value, Mapping):
        for pattern, policy in value.items():
            if not isinstance(pattern, str) or not is_policy(policy):
                raise TypeError(
                    "offload_policy: expected a mapping of patterns of names to OffloadPolicies, got "
                    f"{pattern!r}: {policy!r}"
                )
    elif isinstance(value, type) or not callable(value):
        raise TypeError(
            "offload_policy: expected an OffloadPolicy, a function of a name and a parameter, a mapping of patterns of "
            f"names to OffloadPolicies, or an OffloadBudget, got {value!r}"
        )


def choose_offload(given: Any, parameters: Mapping[str, nn.Parameter]) -> dict[str, OffloadPolicy]:
    """Returns the policy of each parameter, by its FQN as seen from the modules of the call.

    `given`: a function, or a mapping of names.

    Raises:
        TypeError: the user's function returned something else.
        ValueError: a pattern matches no parameter.
    """
    if isinstance(given, Mapping):
        return _by_names(given, parameters)
    found = {}
    for name, parameter in parameters.items():
        policy = given(name, parameter)
        if policy is not None and not is_policy(policy):
            raise TypeError(f"{name}: expected offload_policy to return an OffloadPolicy or None, got {policy!r}")
        found[name] = _ON_DEVICE if policy is None else policy
    return found


def _by_names(given: Mapping[str, OffloadPolicy], parameters: Mapping[str, nn.Parameter]) -> dict[str, OffloadPolicy]:
    unused = [pattern for pattern in given if not any(fnmatchcase(name, pattern) for name in parameters)]
    if unused:
        some = ", ".join([*parameters][:4]) + (", ..." if len(parameters) > 4 else "")
        raise ValueError(
            f"offload_policy: {', '.join(map(repr, unused))} matches no parameter of this call. Its names are "
            f"{some or 'none'}, as seen from the module that is given to it."
        )
    return {
        name: next((policy for pattern, policy in given.items() if fnmatchcase(name, pattern)), _ON_DEVICE)
        for name in parameters
    }


def choose_by_budget(
    budget: OffloadBudget, shards: Mapping[str, tuple[nn.Parameter, Distribution]]
) -> tuple[dict[str, OffloadPolicy], int]:
    """Returns the policy of each parameter, and what is left of the budget then. It is alike on all ranks, because it
    depends on shapes alone.
    """
    sizes = {name: shard_nbytes(*shard) for name, shard in shards.items()}
    found: dict[str, OffloadPolicy] = {}
    left, fits = budget.left, not budget.is_spent
    for name in sorted(sizes, key=sizes.__getitem__):
        fits = fits and sizes[name] <= left
        found[name] = _ON_DEVICE if fits else CPUOffloadPolicy(pin_memory=budget.pin_memory)
        left -= sizes[name] if fits else 0
    return found, left if fits else -1


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
