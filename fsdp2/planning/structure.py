"""Finds the groups that `fully_shard` calls would make of a model, without changing it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..engine.layout import ParamSpec, param_spec
from ..engine.parameter import grad_choice, with_grad_dtype
from ..engine.policy import MixedPrecisionPolicy
from .device import DeviceOfSizes
from .outline import Outline, copy_grad_dtypes, outline_of
from .policies import WrapGroup
from .settings import Setting
from .times import Machine


@dataclass(frozen=True, eq=False)
class PlannedGroup:
    """One group that `fully_shard` would make.

    Args:
        name: FQN of the first module, "root" for the model's own group.
        modules: the modules that gather it when they are called.
        parameters: its distinct parameters, as they are now; see `on_meta`.
        compute_dtypes: the dtype in which each of them computes.
        policy: dtypes of compute and reduction.
        indices: those of its modules, and of its parameters, in the outline.
        is_part: it is a large submodule of an outer call (see features/large_submodules.py), not a call of its own.
    """

    name: str
    modules: tuple[nn.Module, ...]
    parameters: tuple[Tensor, ...]
    compute_dtypes: tuple[torch.dtype, ...]
    policy: MixedPrecisionPolicy
    indices: tuple[tuple[int, ...], tuple[int, ...]]
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
        """Returns what the layout must know of each parameter, cut among so many ranks."""
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
        NotImplementedError: a parameter is a DTensor, of tensor parallelism; see also `outline_of`.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise NotImplementedError(
                f"{name}: expected plain parameters, got a DTensor. Plan before parallelize_module."
            )
    outline, modules, parameters = outline_of(model, calls, policy)
    device = DeviceOfSizes(Machine(device="cpu", backend="nccl"))
    with device.runs():
        root, options = outline.shard(device.mesh(Setting(1)), Setting(1), False, parameters)
    parts = {part for state in root.states for part in state.parts}
    groups, dtypes = [], [parameter.dtype for parameter in parameters]
    for group in root.groups:
        indices = tuple(map(outline.index_of, group.params))
        shells: Any = group.modules
        of_modules = tuple(shell.index for shell in shells)
        for i, param in zip(indices, group.params, strict=True):
            dtypes[i] = param.unsharded.dtype
        groups.append(
            PlannedGroup(
                group.name,
                tuple(modules[i] for i in of_modules),
                tuple(parameters[i] for i in indices),
                tuple(dtypes[i] for i in indices),
                options[group.state].get("mp_policy", policy),
                (of_modules, indices),
                is_part=group.state in parts,
            )
        )
    return replace(outline, compute_dtypes=tuple(dtypes)), groups


def modules_of(groups: Sequence[PlannedGroup]) -> Iterator[tuple[int, nn.Module, PlannedGroup]]:
    """Yields the modules of all groups, each with its index and its group."""
    for group in groups:
        for i, module in zip(group.indices[0], group.modules, strict=True):
            yield i, module, group


def compute_dtypes(groups: Sequence[PlannedGroup]) -> dict[Tensor, torch.dtype]:
    """Returns the dtype in which each parameter computes, in the order of the outline."""
    found = [
        (i, parameter, dtype)
        for group in groups
        for i, parameter, dtype in zip(group.indices[1], group.parameters, group.compute_dtypes, strict=True)
    ]
    return {parameter: dtype for _, parameter, dtype in sorted(found, key=lambda each: each[0])}
