"""What is to become of each parameter that a call shards, and in which group: asked, and refused, before anything is
changed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from . import checks, torch_compat
from .mesh import DataMesh, DataParallelMeshDims, Distribution
from .param import SHARDED_AS, FSDPParam, Slot
from .policy import MixedPrecisionPolicy, OffloadPolicy
from .torch_compat import Memory


class Arguments(NamedTuple):
    """Of one call of `fully_shard` or `replicate`."""

    mesh: DeviceMesh | None
    dp_mesh_dims: DataParallelMeshDims | None
    reshard_after_forward: bool | int | None
    shard_placement_fn: Callable[[nn.Parameter], Any] | None
    mp_policy: MixedPrecisionPolicy
    offload_policy: OffloadPolicy
    ignored_params: set[nn.Parameter] | None
    conditional: bool


class Plan(NamedTuple):
    """What is to become of one parameter."""

    name: str
    slots: list[Slot]
    mesh: DataMesh
    distribution: Distribution
    keeps_dtype: bool
    memory: Memory | None

    def shard(self, rest: torch.device, root: str) -> FSDPParam:
        original, name = self.slots[0].get(), f"{root}'s {self.name}"
        param = FSDPParam(self.slots, self.name, self.mesh, self.distribution, rest, self.keeps_dtype, self.memory)
        setattr(original, SHARDED_AS, name)
        if original.requires_grad:
            torch_compat.replace_hooks(original, partial(_refuse_gradient, name))
        return param


def _refuse_gradient(name: str, _: Tensor) -> None:
    """Hook on what was a parameter before it was sharded."""
    raise RuntimeError(
        f"something has computed with what {name} was before fully_shard (a list or view of parameters, another module "
        "that shares it, a loss from before?), which is no parameter of the model any more. Use what modules have now."
    )


def plan_parameter(name: str, slots: list[Slot], memory: Memory | None, shared: DataMesh, given: Arguments) -> Plan:
    """Ask the user's functions about one parameter, and check what they say."""
    parameter, reshard, policy = slots[0].get(), given.reshard_after_forward, given.mp_policy
    dim, own = checks.choose_placement(name, parameter, given.shard_placement_fn, shared)
    mesh = own or shared
    if own is not None:
        checks.check_device_type(name, own, shared)
        checks.check_reshard(reshard, own)
    checks.check_wire(name, policy, mesh)
    checks.check_frequencies(name, slots, mesh)
    checks.check_extension(name, parameter, reshard, mesh)
    distribution = checks.choose_distribution(name, parameter, mesh, dim)
    return Plan(name, slots, mesh, distribution, checks.choose_dtype(name, parameter, policy), memory)


class Share(NamedTuple):
    """What one group is made of: parameters on one mesh; those of one unit, or those that belong to none."""

    mesh: DataMesh
    unit: nn.Module | None


def share_out(plans: list[Plan], units: dict[str, nn.Module], shared: DataMesh) -> dict[Share, list[Plan]]:
    """The plans of each group: of that of the call's own modules first, though there may be none; of units' last."""
    found: dict[tuple[DataMesh, nn.Module | None], list[Plan]] = {}
    for plan in plans:
        found.setdefault((plan.mesh, units.get(plan.name)), []).append(plan)
    shares = {Share(*key): members for key, members in found.items()}
    if all(share.unit is not None for share in shares):
        shares[Share(shared, None)] = []
    return dict(sorted(shares.items(), key=lambda item: item[0].unit is not None))
