"""Finds the groups that `fully_shard` calls would make of a model, without making them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..engine.layout import ParamSpec, param_spec
from ..engine.parameter import Slot, fqn
from ..engine.policy import MixedPrecisionPolicy
from ..engine.state import modules_below
from ..engine.subclasses import is_packed
from ..features.large_submodules import plan_large_submodules
from .policies import WrapGroup


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
    def needs_no_weight_in_backward(self) -> bool:
        return self.is_part and isinstance(self.modules[0], nn.Embedding)

    @property
    def numel(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters)

    def on_meta(self) -> PlannedGroup:
        """Returns the same group with parameters on meta, which keep no memory alive."""
        light = [torch.empty_like(p, device="meta", requires_grad=p.requires_grad) for p in self.parameters]
        return replace(self, parameters=tuple(light))

    def specs(self, num_shards: int) -> tuple[ParamSpec, ...]:
        """Returns what the layout must know of each parameter, cut along dim 0 among so many ranks."""
        return tuple(
            param_spec(tuple(p.shape) or (num_shards,), p.dtype, dtype, num_shards, 0, False)
            for p, dtype in zip(self.parameters, self.compute_dtypes, strict=True)
        )

    @property
    def casts(self) -> tuple[torch.dtype | None, torch.dtype | None]:
        """The dtypes to which floating-point inputs and outputs of its modules are cast."""
        if self.is_part:
            return None, None
        return self.policy.param_dtype if self.policy.cast_forward_inputs else None, self.policy.output_dtype


def find_groups(model: nn.Module, wrapped: Sequence[WrapGroup], policy: MixedPrecisionPolicy) -> list[PlannedGroup]:
    """Returns the groups of these calls and of the one on `model`, the outermost first, as a root has them.

    Raises:
        NotImplementedError: a parameter is a DTensor, of tensor parallelism.
    """
    names = modules_below(model)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise NotImplementedError(
                f"{name}: expected plain parameters, got a DTensor. Plan before parallelize_module."
            )
    states: dict[nn.Module, list[PlannedGroup]] = {}
    for call in [*wrapped, WrapGroup("", (model,))]:
        own = call.options.get("mp_policy", policy)
        groups = _groups_of_call(call, names, states, own)
        for module in call.modules:
            states[module] = groups
    found = dict.fromkeys(group for module in names for group in states.get(module, ()))
    return [*found]


def _groups_of_call(
    call: WrapGroup, names: dict[nn.Module, str], states: dict[nn.Module, list[PlannedGroup]], policy: Any
) -> list[PlannedGroup]:
    managed = _managed(call.modules, states)
    slots: dict[Tensor, list[Slot]] = {}
    for module in managed:
        for name, parameter in module._parameters.items():
            if parameter is not None:
                slots.setdefault(parameter, []).append(Slot(module, name))
    planned = {fqn(names[of[0].module], of[0].name): of for of in slots.values()}
    below = dict.fromkeys(g for root in call.modules for m in root.modules() for g in states.get(m, ()))
    parts = _large_submodules(call, planned, [*below])
    apart = {name for own in parts.values() for name in own}
    rest = [name for name in planned if name not in apart]
    groups: list[PlannedGroup] = []
    for name, modules, own in [
        (call.name or "root", call.modules, rest),
        *((names[m], (m,), n) for m, n in parts.items()),
    ]:
        parameters = tuple(planned[each][0].get() for each in own)
        dtypes = tuple(_compute_dtype(p, policy) for p in parameters)
        groups.append(PlannedGroup(name, modules, parameters, dtypes, policy, call.options, is_part=bool(groups)))
    return groups


def _compute_dtype(parameter: nn.Parameter, policy: MixedPrecisionPolicy) -> torch.dtype:
    keeps = is_packed(parameter) or policy.keeps_dtype(parameter)
    return parameter.dtype if keeps else policy.compute_dtype(parameter.dtype)


def _large_submodules(
    call: WrapGroup, planned: dict[str, list[Slot]], below: list[PlannedGroup]
) -> dict[nn.Module, list[str]]:
    """Asks the function that decides it in `fully_shard`, which reads these attributes of a Plan."""
    inside = [
        SimpleNamespace(groups=[SimpleNamespace(params=[SimpleNamespace(sharded=p) for p in group.parameters])])
        for group in below
    ]
    parameters = {name: SimpleNamespace(slots=slots) for name, slots in planned.items()}
    plan: Any = SimpleNamespace(inside=inside, parameters=parameters, roots=[*call.modules], submodules={})
    plan_large_submodules(plan)
    found: dict[nn.Module, list[str]] = plan.submodules
    return found


def _managed(roots: Iterable[nn.Module], states: dict[nn.Module, Any]) -> list[nn.Module]:
    """Returns `roots` and the modules below that no inner call manages, outermost first."""
    found: dict[nn.Module, None] = {}
    waiting = [*reversed([*roots])]
    while waiting:
        module = waiting.pop()
        if module not in found and module not in states:
            found[module] = None
            waiting += reversed([child for child in module._modules.values() if child is not None])
    return [*found]
