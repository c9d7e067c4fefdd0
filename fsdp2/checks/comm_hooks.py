"""Refuses hooks for `register_comm_hook` that have another shape than is called, or that sum over other ranks."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist

from ..collectives.choose import choice_of
from ..engine.group import FSDPParamGroup
from ..torch_private.checks import HOOKS_OF_FSDP1

_OF_DDP = "torch.distributed.algorithms.ddp_comm_hooks"
# Of FSDP1's: they note on which stream memory is used, which tensors on the CPU can't.
_OF_DEVICES = ("bf16_compress_hook", "fp16_compress_hook")


def check_comm_hook(group: FSDPParamGroup, state: Any, hook: Any) -> None:
    """Checks that a group can reduce by a user's hook.

    Raises:
        ValueError: a hook of torch is given a process group of other ranks; or the group is to reduce otherwise, too.
        NotImplementedError: the hook has the other shape; the mesh has an outer_shard; a hook of torch for devices.
    """
    mesh, replicas = group.mesh, group.comms.replicas
    if mesh.has_outer_shard:
        raise NotImplementedError(
            f"{group.name}: register_comm_hook on {mesh.topology}: replicas that share one set of shards scatter "
            "their sums, and a hook in the shape of DDP's returns all of a sum. Use Compression(all_reduce=...)."
        )
    if replicas is None and mesh.size > 1 and not mesh.replicate_axes:
        _check_scatter(group, hook)
    elif mesh.replicate_axes and not _takes(hook, 2):
        raise NotImplementedError(
            f"{group.name}: register_comm_hook between replicas: expected a hook in the shape of DDP's, hook(state, "
            f"bucket), which returns a future of the mean, got {_described(hook)}. Hooks in the shape of "
            "FSDP1's, hook(state, gradient, shard), are for ranks that shard, and have no replicas."
        )
    _check_device(group, hook)
    comm = replicas if replicas is not None else group.comms.reduces
    if comm.size > 1:
        _check_ranks(group, state, hook, comm.group)


def is_of_fsdp1(hook: Any) -> bool:
    """Returns True if it is one of torch's hooks for FSDP1."""
    return getattr(hook, "__module__", None) is not None and hook.__module__.startswith(HOOKS_OF_FSDP1)


def _check_scatter(group: FSDPParamGroup, hook: Any) -> None:
    """Checks a hook of ranks that shard."""
    if not _takes(hook, 3):
        raise NotImplementedError(
            f"{group.name}: register_comm_hook on a mesh without replicas: its {group.mesh.size} ranks scatter sums, "
            f"of which each keeps its shard, and a hook in the shape of DDP's, as {_described(hook)}, returns all of a "
            "sum. Pass one in the shape of FSDP1's, hook(state, gradient, shard), which fills shard; or use "
            "fsdp2.compression.Compression(reduce_scatter=...), with torch.bfloat16 or Int8() for example; or a "
            "mesh of replicas (HSDP, replicate)."
        )
    chosen = {
        "compression of reduce_scatter": group.settings.policy.compression.reduce_scatter,
        "custom reduce-scatter": choice_of(group).reduce_scatter,
    }
    for what, value in chosen.items():
        if value is not None:
            raise ValueError(
                f"{group.name}: register_comm_hook: expected no {what} where a hook reduces gradients, got "
                f"{value!r}. Both say how they are reduced: leave one out."
            )


def _check_device(group: FSDPParamGroup, hook: Any) -> None:
    if not is_of_fsdp1(hook) or _name(hook) not in _OF_DEVICES or group.mesh.device.type != "cpu":
        return
    try:
        torch.empty(0).record_stream(torch.cpu.current_stream())  # type: ignore[arg-type]
    except RuntimeError:
        raise NotImplementedError(
            f"{group.name}: register_comm_hook: torch's {_name(hook)} for FSDP1 calls Tensor.record_stream, which "
            "fails on the CPU. Use Compression(reduce_scatter=torch.bfloat16), or reduce_dtype."
        ) from None


def _check_ranks(group: FSDPParamGroup, state: Any, hook: Any, expected: dist.ProcessGroup | None) -> None:
    is_of_torch = getattr(hook, "__module__", "").startswith((_OF_DDP, HOOKS_OF_FSDP1))
    has_group = isinstance(state, dist.ProcessGroup) or hasattr(state, "process_group")
    if not (has_group or (state is None and is_of_torch)):
        return
    given = state if isinstance(state, dist.ProcessGroup) else getattr(state, "process_group", None)
    given = given or dist.group.WORLD
    assert given is not None, "there is one where parameters are sharded"
    assert expected is not None, "several ranks reduce"
    ranks = [dist.get_process_group_ranks(each) for each in (given, expected)]
    if ranks[0] != ranks[1]:
        whose = "the replicas" if group.comms.replicas is not None else "the shards"
        raise ValueError(
            f"{group.name}: register_comm_hook: expected a state with the process group of {whose}, ranks {ranks[1]}, "
            f"got one of ranks {ranks[0]}. Pass mesh.get_group(NAME) of the axis that "
            f"{'replicates' if group.comms.replicas is not None else 'shards'}."
        )


def _takes(hook: Any, number: int) -> bool:
    """Returns True if the hook can be called with so many arguments, as far as Python knows."""
    try:
        inspect.signature(hook).bind(*[None] * number)
    except TypeError:
        return False
    except ValueError:  # it is not written in Python
        return True
    return True


def _name(hook: Any) -> str:
    return getattr(hook, "__name__", type(hook).__name__)


def _described(hook: Any) -> str:
    try:
        return f"{_name(hook)}{inspect.signature(hook)}"
    except (TypeError, ValueError):
        return _name(hook)
