"""The outline of a model: its modules and the sizes of its parameters. It shards copies of it.

A copy consists of modules that compute nothing, with parameters on meta: `fully_shard` makes the same groups of it as
of the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..engine.build import Arguments, apply
from ..engine.mesh import DataMesh
from ..engine.parameter import FSDPParam
from ..engine.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadBudget, OffloadPolicy
from ..engine.root import Root
from ..engine.state import FSDPState, modules_below, require_state
from ..module import sharded_class
from ..parameters.subclasses import is_packed
from ..torch_private.internals import chosen_grad_dtype, set_grad_dtype
from ..torch_private.plans import no_dispatch
from .policies import WrapGroup
from .settings import Setting


class Shell(nn.Module):
    """Stands for a module of the model, by its index. `play` is called in its forward, and returns what it returns."""

    def __init__(self, index: int) -> None:
        nn.Module.__init__(self)
        self.index = index
        self.play: Callable[[], Any] = lambda: None

    def forward(self, inputs: Tensor) -> Any:
        return self.play()


class EmbeddingShell(Shell, nn.Embedding):
    """Stands for an embedding: its backward reads no weight."""


class UnusualShell(Shell):
    """Stands for a module whose class says itself how it is called: its parameters get no group of their own."""

    def __call__(self, inputs: Tensor) -> Any:
        return super().__call__(inputs)


def _kind_of(module: nn.Module) -> type[Shell]:
    cls = type(module)
    if cls.__call__ is not nn.Module.__call__ or cls.__getattr__ is not nn.Module.__getattr__:
        return UnusualShell
    return EmbeddingShell if isinstance(module, nn.Embedding) else Shell


class Call(NamedTuple):
    """One `fully_shard` call: the indices of its modules, and what the policy has chosen."""

    modules: tuple[int, ...]
    options: dict[str, Any]


@dataclass(frozen=True)
class Outline:
    """A model without its values, and the `fully_shard` calls on it.

    Args:
        kinds: of the shell of each module, the model first.
        children: the index of a module, a name in it, and the index of the module there.
        slots: the index of a module, a name in it, and the index of the parameter there.
        parameters: each distinct one, on meta.
        calls: in their order. The last call is on the model.
        policy: dtypes, for calls whose options have none.
        compute_dtypes: the dtype in which each parameter computes.
    """

    kinds: tuple[type[Shell], ...]
    children: tuple[tuple[int, str, int], ...]
    slots: tuple[tuple[int, str, int], ...]
    parameters: tuple[Tensor, ...]
    calls: tuple[Call, ...]
    policy: MixedPrecisionPolicy
    compute_dtypes: tuple[torch.dtype, ...] = ()

    def shard(
        self,
        mesh: Callable[[bool], DataMesh],
        setting: Setting,
        can_offload: bool,
        originals: Sequence[nn.Parameter] | None = None,
    ) -> tuple[Root, dict[FSDPState, dict[str, Any]]]:
        """Shards a new copy. Returns its root, and the options of each state.

        Args:
            mesh: returns the mesh of groups whose shards are on the CPU (True), or on the device.
            setting: what is chosen.
            can_offload: shards can be elsewhere than on the device.
            originals: the model's parameters, for functions of the user's that choose dtypes by parameter. None: they
                were asked before, and `compute_dtypes` is known.
        """
        shells = [kind(i) for i, kind in enumerate(self.kinds)]
        for parent, name, child in self.children:
            shells[parent]._modules[name] = shells[child]
        with no_dispatch():  # nobody counts them: they are gone when they are cut
            wholes = [torch.empty(p.shape, dtype=p.dtype, device="meta") for p in self.parameters]
        parameters = [nn.Parameter(w, p.requires_grad) for w, p in zip(wholes, self.parameters, strict=True)]
        copy_grad_dtypes(self.parameters, parameters)
        del wholes
        number = {id(parameter): i for i, parameter in enumerate(parameters)}
        for module, name, i in self.slots:
            shells[module]._parameters[name] = parameters[i]
        options: dict[FSDPState, dict[str, Any]] = {}

        def dtype_of(policy: MixedPrecisionPolicy, parameter: nn.Parameter) -> torch.dtype:
            i = number[id(parameter)]
            return self.compute_dtypes[i] if originals is None else _compute_dtype(originals[i], policy)

        for indices, chosen in self.calls:
            policy: MixedPrecisionPolicy = chosen.get("mp_policy", self.policy)
            offloads = setting.offload
            if "offload_policy" in chosen:
                offloads = hasattr(chosen["offload_policy"], "pin_memory")
            modules: list[Any] = [shells[i] for i in indices]
            apply(
                modules if len(modules) > 1 else modules[0],
                Arguments(
                    mesh(can_offload and offloads),
                    chosen.get("reshard_after_forward", setting.reshard_after_forward),
                    mp_policy=replace(fitting(policy, setting), param_dtype_override_fn=partial(dtype_of, policy)),
                    offload_policy=CPUOffloadPolicy(pin_memory=False) if offloads else OffloadPolicy(),
                ),
                sharded_class,
            )
            state = require_state(modules[0])
            options |= dict.fromkeys([state, *state.parts], chosen)
        root: Root = require_state(shells[0]).root
        return root, options

    def index_of(self, param: FSDPParam) -> int:
        """Returns the index of a copy's parameter."""
        slot = param.slots[0]
        place: tuple[Any, str] = slot.module.index, slot.name
        return next(i for module, name, i in self.slots if (module, name) == place)


def fitting(policy: MixedPrecisionPolicy, setting: Setting) -> MixedPrecisionPolicy:
    """Returns the policy of a call under this setting: there is no `all_reduce` without replicas."""
    if setting.replicas > 1:
        return policy
    return replace(policy, compression=replace(policy.compression, all_reduce=None))


def _compute_dtype(parameter: nn.Parameter, policy: MixedPrecisionPolicy) -> torch.dtype:
    keeps = is_packed(parameter) or policy.keeps_dtype(parameter)
    return parameter.dtype if keeps else policy.compute_dtype(parameter.dtype)


def _check_codecs(policy: MixedPrecisionPolicy) -> None:
    """Refuses codecs of which a plan cannot know what they allocate: those that read values, which tensors of a plan do
    not have.

    Raises:
        NotImplementedError: a codec has failed on a few numbers on meta.
    """
    for field in ("reduce_scatter", "all_gather", "all_reduce"):
        codec = getattr(policy.compression, field)
        if codec is None or not getattr(codec, "exchanges", False):
            continue
        try:
            numbers = torch.empty(2, 64, dtype=codec.packed_dtype(torch.float32), device="meta")
            wire = codec.encode(numbers, 0)
            codec.decode(wire, torch.empty_like(numbers))
            if field != "all_gather":
                codec.sum(wire, torch.empty(64, dtype=torch.float32, device="meta"))
        except Exception as error:  # whatever a user's codec raises without values
            text = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            in_its_place = "Plan with torch.bfloat16 in its place."
            advice = in_its_place if field == "reduce_scatter" else "Plan without it."
            raise NotImplementedError(
                f"plan: expected for {field} a codec that runs on the meta device, to count what it allocates, got "
                f"{codec!r}, which raises there: {text[:200]}. {advice}"
            ) from error


def _check_offload(call: WrapGroup) -> None:
    """Refuses budgets.

    Raises:
        NotImplementedError: the policy of a call is an OffloadBudget.
    """
    offload = call.options.get("offload_policy", OffloadPolicy())
    if isinstance(offload, OffloadBudget):
        raise NotImplementedError(
            f"plan: {call.name}: offload_policy: expected CPUOffloadPolicy() or OffloadPolicy(), for all parameters of "
            f"the call, got {offload!r}. Plan with one of these."
        )


def outline_of(
    model: nn.Module, calls: Sequence[WrapGroup], policy: MixedPrecisionPolicy
) -> tuple[Outline, list[nn.Module], list[nn.Parameter]]:
    """Returns the outline of a model with these calls and the one on itself, its modules, and its parameters.

    Raises:
        NotImplementedError: see `_check_codecs` and `_check_offload`.
    """
    for each in dict.fromkeys([*(call.options.get("mp_policy", policy) for call in calls), policy]):
        _check_codecs(each)
    for call in calls:
        _check_offload(call)
    modules = {module: i for i, module in enumerate(modules_below(model))}
    parameters: dict[nn.Parameter, int] = {}
    children, slots = [], []
    for module, i in modules.items():
        children += [(i, name, modules[child]) for name, child in module._modules.items() if child is not None]
        for name, parameter in module._parameters.items():
            if parameter is not None:
                slots.append((i, name, parameters.setdefault(parameter, len(parameters))))
    light = [
        torch.empty(tuple(p.shape), dtype=p.dtype, device="meta", requires_grad=p.requires_grad) for p in parameters
    ]
    copy_grad_dtypes([*parameters], light)
    found = [Call(tuple(modules[each] for each in call.modules), call.options) for call in calls]
    kinds, last = tuple(map(_kind_of, modules)), Call((0,), {})
    outline = Outline(kinds, tuple(children), tuple(slots), tuple(light), (*found, last), policy)
    return outline, [*modules], [*parameters]


def copy_grad_dtypes(parameters: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
    """Gives `copies` the `grad_dtype` of those parameters for which one was chosen."""
    for parameter, copied in zip(parameters, copies, strict=True):
        choice = chosen_grad_dtype(parameter)
        if choice is not None:
            set_grad_dtype(copied, choice.dtype)
