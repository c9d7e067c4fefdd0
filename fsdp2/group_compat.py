"""Private names of torch's process groups that fsdp2 uses, each with its reason, and what a group may lack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def backend_name(group: dist.ProcessGroup, device: torch.device) -> str:
    """'gloo', 'nccl', 'fake', ...: `get_backend` names the default device's backend only, a group may have several.

    '': a group that is written in Python, if it has no backend, or gloo: messages between pairs of ranks, in which we
    communicate over gloo, would go around the collectives that the group has of its own.

    Raises:
        RuntimeError: any other group, if it has no backend for `device`.
    """
    is_python = is_python_group(group)
    try:
        name = group._get_backend(device).name().lower()
    except RuntimeError as error:
        if is_python:
            return ""
        has = ", ".join(each.type for each in group._device_types)
        raise RuntimeError(
            f"expected a process group with a backend for {device.type}, got one for {has or 'no device'}. Initialise "
            "it with one for each device: init_process_group('cpu:gloo,cuda:nccl'), say."
        ) from error
    return "" if is_python and name == "gloo" else name


def is_python_group(group: dist.ProcessGroup) -> bool:
    """Whether `group` is of a class written in Python: torch's threads as ranks, or a fault-tolerant library's."""
    return isinstance(group, dist.ProcessGroup) and type(group) is not dist.ProcessGroup


def size_may_change(group: dist.ProcessGroup) -> bool:
    """Whether `group` computes its own size: ranks may join and leave, as in a fault-tolerant library's groups."""
    return is_python_group(group) and type(group).size is not dist.ProcessGroup.size


def size_at_first(group: dist.ProcessGroup) -> int:
    """The number of ranks that torch was told of when `group` was made, whatever it says now."""
    return dist.ProcessGroup.size(group)


def coalesces(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the group's backend for `device` says that it launches several collectives at once, as NCCL does."""
    return bool(getattr(group._get_backend(device), "supports_coalescing", False))


def has_backend(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether `group` says that it can communicate tensors on `device`. One that is written in Python may not."""
    try:
        group._get_backend(device)
    except RuntimeError:
        return False
    return True


def single_tensor_collectives(group: dist.ProcessGroup) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The group's all-gather and reduce-scatter of one tensor: (output, input) -> asynchronous Work.

    The public functions around them changed name in torch 2.13 and cost as much again; the public coalesced methods
    take three times as long to issue where there is but one tensor.
    """
    return group._allgather_base, group._reduce_scatter_base


# The functions of one tensor, which changed name in torch 2.13: (output, input, group=..., async_op=...) -> Work.
all_gather_one: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_one: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# What the processes share from `init_process_group` on, whoever gave it. torch has no public way to it.
default_store: Callable[[], dist.Store] = dist.distributed_c10d._get_default_store
