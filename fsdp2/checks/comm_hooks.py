"""Refuses hooks in the shape of DDP's where there is no mean over replicas, or where the hook sums over other ranks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ..engine.group import FSDPParamGroup

_OF_TORCH = "torch.distributed.algorithms.ddp_comm_hooks"


def check_comm_hook(group: FSDPParamGroup, state: Any, hook: Any) -> None:
    """Checks that a group can have its replicas sum by a user's hook.

    Raises:
        ValueError: a hook of torch is given a process group of other ranks than the replicas.
        NotImplementedError: ranks shard, and there are no replicas, or these share what rests.
    """
    mesh, replicas = group.mesh, group.comms.replicas
    if mesh.shards_at_rest:
        raise NotImplementedError(
            f"{group.name}: register_comm_hook on {mesh.topology}: replicas that share what rests scatter their sums, "
            "and a hook in the shape of DDP's returns all of a sum. Use MixedPrecisionPolicy(replica_codec=...)."
        )
    if replicas is None and mesh.size > 1 and not mesh.replicate_axes:
        raise NotImplementedError(
            f"{group.name}: register_comm_hook on a mesh without replicas: its {mesh.size} ranks scatter sums, of "
            "which each keeps its shard, and a hook in the shape of DDP's returns all of a sum (bf16_compress_hook, "
            "powerSGD_hook and others alike). Use MixedPrecisionPolicy(gradient_codec=...), for example "
            "fsdp2.codecs.Cast(torch.bfloat16) or Int8(); set_custom_reduce_scatter for a function of yours; or a mesh "
            "of replicas (HSDP, replicate)."
        )
    if replicas is None or replicas.size == 1:
        return
    is_of_torch = getattr(hook, "__module__", "").startswith(_OF_TORCH)
    has_group = isinstance(state, dist.ProcessGroup) or hasattr(state, "process_group")
    if not (has_group or (state is None and is_of_torch)):
        return
    given = state if isinstance(state, dist.ProcessGroup) else getattr(state, "process_group", None)
    given, expected = given or dist.group.WORLD, replicas.group
    assert given is not None, "there is one where parameters are sharded"
    assert expected is not None, "several ranks are replicas"
    ranks = [dist.get_process_group_ranks(each) for each in (given, expected)]
    if ranks[0] != ranks[1]:
        raise ValueError(
            f"{group.name}: register_comm_hook: expected a state with the process group of the replicas, ranks "
            f"{ranks[1]}, got one of ranks {ranks[0]}. Pass mesh.get_group(NAME) of the axis that replicates."
        )
