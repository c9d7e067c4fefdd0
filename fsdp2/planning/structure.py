"""Finds the groups that `fully_shard` calls would make of a model, without changing it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..engine.layout import ParamSpec, param_spec
from ..engine.parameter import grad_choice, with_grad_dtype
from ..engine.policy import MixedPrecisionPolicy
from ..engine.subclasses import is_packed
from .clocks import Machine
from .device import DeviceOfSizes
from .outline import Outline, copy_grad_dtypes, outline_of
from .policies import WrapGroup
from .settings import Setting


@dataclass(frozen=True, eq=False)
class PlannedGroup:
    """Describes one group that `fully_shard` would make.

    Args:
        name: FQN of the first module, "root" for the model's own group.
        modules: the modules that gather it when they are called.
        parameters: its distinct parameters, as they are now; see `on_meta`.
        compute_dtypes: the dtype in which each of them computes.
        policy: dtypes of compute and reduction.
        options: what the wrap policy has chosen for it.
        is_part: it is a large submodule of an outer call (see features/large_submodules.py), not a call of its own.
    """

    name: str
    modules: tuple[nn.Module, ...]
    parameters: tuple[Tensor, ...]
    compute_dtypes: tuple[torch.dtype, ...]
    policy: MixedPrecisionPolicy
    options: dict[str, Any]
    is_part: bool = False

    @property
    def numel(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters)

    def on_meta(self) -> PlannedGroup:
        """Returns the same group with parameters on meta, which keep no memory alive."""
        light = [torch.empty_like(p, device="meta", requires_grad=p.requires_grad) for p in self.parameters]
        copy_grad_dtypes(self.parameters, light)
        return replace(self, parameters=tuple(light))

    def specs(self, num_shards: int) -> tuple[ParamSpec, ...]:
        """Returns what the layout must know of each parameter, cut along dim 0 among so many ranks."""
        specs = []
        for p, dtype in zip(self.parameters, self.compute_dtypes, strict=True):
            spec = param_spec(tuple(p.shape) or (num_shards,), p.dtype, dtype, num_shards, 0, False)
            choice = grad_choice(p, self.policy.grad_dtype)
            specs.append(spec if choice is None else with_grad_dtype(spec, choice, self.policy))
        return tuple(specs)

    @property
    def casts(self) -> tuple[torch.dtype | None, torch.dtype | None]:
        """The dtypes to which floating-point inputs and outputs of its modules are cast."""
        if self.is_part:
            return None, None
        return self.policy.param_dtype if self.policy.cast_forward_inputs else None, self.policy.output_dtype


def find_groups(
    model: nn.Module, calls: Sequence[WrapGroup], policy: MixedPrecisionPolicy
) -> tuple[Outline, list[PlannedGroup]]:
    """Returns the outline of the model with these calls and the one on itself, and the groups that they make, the
    outermost first, as a root has them.

    Raises:
        NotImplementedError: a parameter is a DTensor, of tensor parallelism.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise NotImplementedError(
                f"{name}: expected plain parameters, got a DTensor. Plan before parallelize_module."
            )
    outline, modules, parameters = outline_of(model, calls, policy)
    numbers = {(module, name): i for module, name, i in outline.slots}
    device = DeviceOfSizes(Machine("cpu", "nccl"))
    with device.runs():
        root, options = outline.shard(
            device.mesh(Setting(1)), Setting(1), False, lambda i, own: _compute_dtype(parameters[i], own)
        )
    parts = {part for state in root.states for part in state.parts}
    groups, dtypes = [], [parameter.dtype for parameter in parameters]
    for group in root.groups:
        indices = [numbers[param.slots[0].module.index, param.slots[0].name] for param in group.params]  # type: ignore[index]
        for i, param in zip(indices, group.params, strict=True):
            dtypes[i] = param.unsharded.dtype
        chosen = options[group.state]
        groups.append(
            PlannedGroup(
                group.name,
                tuple(modules[shell.index] for shell in group.modules),  # type: ignore[index]
                tuple(parameters[i] for i in indices),
                tuple(dtypes[i] for i in indices),
                chosen.get("mp_policy", policy),
                chosen,
                is_part=group.state in parts,
            )
        )
    return replace(outline, compute_dtypes=tuple(dtypes)), groups


def modules_of(groups: Sequence[PlannedGroup]) -> list[tuple[nn.Module, PlannedGroup]]:
    """Returns the modules of all groups, each with its group, in the order in which marks number them."""
    return [(module, group) for group in groups for module in group.modules]


def _compute_dtype(parameter: nn.Parameter, policy: MixedPrecisionPolicy) -> torch.dtype:
    keeps = is_packed(parameter) or policy.keeps_dtype(parameter)
    return parameter.dtype if keeps else policy.compute_dtype(parameter.dtype)
