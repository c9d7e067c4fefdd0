"""Shards a model as a row of a plan says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from ..api import embed_by_rows, fully_shard
from ..engine.compat import backend_name
from ..engine.meshes import DataParallelMeshDims
from ..engine.policy import MixedPrecisionPolicy
from ..tools.padding import cheapest_placement
from .clocks import Machine
from .outline import row_policy, usual_offload
from .policies import WrapGroup
from .settings import Setting


def check_mesh(mesh: Any, setting: Setting) -> None:
    """
    Raises:
        TypeError, ValueError: `mesh` is not one on which the model can be sharded so.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: expected a DeviceMesh, got {type(mesh).__name__}")
    expected = (setting.ranks,) if setting.replicas == 1 else (setting.replicas, setting.num_shards)
    if tuple(mesh.shape) != expected:
        raise ValueError(
            f"mesh: the plan is for {_shape(expected)}, got a mesh of shape {tuple(mesh.shape)}. Write "
            f"init_device_mesh({mesh.device_type!r}, {expected}), or plan with other ranks."
        )
    if setting.shard_at_rest and mesh.mesh_dim_names is None:
        raise ValueError(
            f"mesh: replicas are to share what rests, and the axes have no names. Write init_device_mesh("
            f"{mesh.device_type!r}, {expected}, mesh_dim_names=('replicate', 'shard'))."
        )


def _shape(sizes: tuple[int, ...]) -> str:
    return f"{sizes[0]} ranks" if len(sizes) == 1 else f"{sizes[0]} replicas of {sizes[1]} ranks"


def machine_of(mesh: DeviceMesh, planned: Machine) -> Machine:
    """Returns what a mesh communicates with, at the speeds of the plan. Its last axis shards."""
    name = backend_name(mesh.get_group(mesh.ndim - 1), torch.device(mesh.device_type))
    return replace(planned, device=mesh.device_type, backend={"gloo": "gloo", "": "other"}.get(name, "nccl"))


def shard(
    model: nn.Module, calls: Sequence[WrapGroup], policy: MixedPrecisionPolicy, setting: Setting, mesh: DeviceMesh
) -> Any:
    """Shards `model`, in place, and returns it. Every rank must call it."""
    options: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": setting.reshard_after_forward,
        "mp_policy": setting.chosen(policy),
        "offload_policy": usual_offload(setting),
    }
    if setting.shard_at_rest:
        assert mesh.mesh_dim_names is not None, "check_mesh has seen them"
        replicas, shards = mesh.mesh_dim_names
        options["dp_mesh_dims"] = DataParallelMeshDims(shard=shards, shard_at_rest=replicas)
    if setting.cheapest_dims:
        options["shard_placement_fn"] = cheapest_placement(mesh, options.get("dp_mesh_dims"))
    if setting.checkpointing:
        for module in blocks(calls):
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)
    for call in calls:
        if call.by_rows:
            dims = options.get("dp_mesh_dims")
            embed_by_rows(call.module, mesh=mesh, mp_policy=row_policy(policy), dp_mesh_dims=dims)  # type: ignore[arg-type]
            continue
        own = dict(call.options)
        if "mp_policy" in own:
            own["mp_policy"] = setting.chosen(own["mp_policy"])
        fully_shard(call.module, **{**options, **own})
    return fully_shard(model, **options)


def blocks(calls: Sequence[WrapGroup]) -> list[nn.Module]:
    """Returns the modules that checkpointing runs again: wrapped ones that have submodules, but none of that kind."""
    wrapped = [m for call in calls for m in call.modules if next(m.children(), None) is not None]
    return [m for m in wrapped if not any(each is not m and each in wrapped for each in m.modules())]
