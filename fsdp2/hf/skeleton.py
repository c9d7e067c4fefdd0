"""Builds the skeleton of a model: what other libraries may look at and call without a collective."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..shards.find import WRAPPERS, attributes_of, original_class
from .tensors import ModelTensor

# What an error says where other libraries compute what is saved.
SAVE_IN_FULL = (
    "On every rank, write `with fsdp2.full_params(model, offload_to_cpu=True):`, and in it call "
    "model.save_pretrained(folder) on the first rank"
)
# Skeletons of parameters and buffers, by their first name.
Parts = Mapping[str, Tensor]


def make_parts(tensors: Sequence[ModelTensor]) -> dict[str, Tensor]:
    """Returns what stands for each parameter and buffer in a skeleton: tensors of the whole shapes on meta."""
    parts = {}
    for each in tensors:
        made = torch.empty(each.shape, dtype=each.dtype, device="meta")
        needs_grad = each.is_parameter and each.tensor.requires_grad
        parts[each.name] = nn.Parameter(made, requires_grad=needs_grad) if each.is_parameter else made
    return parts


def make_skeleton(
    model: nn.Module, tensors: Sequence[ModelTensor], parts: Parts, *, without_adapters: bool = False
) -> Any:
    """Returns modules of the same classes and attributes as those of a model, as it was before it was sharded.

    They have no hooks, belong to no group, and have `parts` in the place of their parameters and persistent buffers.
    Wrappers of torch (checkpoints, compiled modules) are left out. The model itself is not changed.
    `without_adapters`: leave out what peft has put around modules, too.
    """
    by_slot = {(slot.module, slot.name): parts[each.name] for each in tensors for slot in each.slots}
    made: dict[nn.Module, Any] = {}
    without_hooks = {name: value for name, value in vars(nn.Module()).items() if "hooks" in name}

    def copy(module: nn.Module) -> Any:
        module = inside(module, without_adapters)
        if isinstance(module, torch.jit.ScriptModule):
            return module
        if module in made:
            return made[module]
        cls: Any = original_class(module)
        new: Any = object.__new__(cls)  # the class may want arguments
        made[module] = new
        attributes = attributes_of(module)
        for name, value in without_hooks.items():
            attributes[name] = type(value)() if isinstance(value, dict) else value
        kinds: Any = {"_parameters": module._parameters, "_buffers": module._buffers}
        for kind, entries in kinds.items():
            attributes[kind] = {name: by_slot.get((module, name), tensor) for name, tensor in entries.items()}
        attributes["_modules"] = {name: child and copy(child) for name, child in module._modules.items()}
        vars(new).update({name: [*value] if type(value) is list else value for name, value in attributes.items()})
        if isinstance(new, nn.RNNBase):  # it has a list of its parameters, besides
            for name, part in new._parameters.items():
                setattr(new, name, part)
        return new

    return copy(model)


def inside(module: nn.Module, without_adapters: bool) -> nn.Module:
    """Returns the module around which wrappers of torch are; and adapters of peft, which may be left out, too."""
    while True:
        inner: Any = next((module._modules[name] for name in WRAPPERS if name in module._modules), None)
        if inner is None and without_adapters:
            inner = base_of(module)
        if inner is None:
            return module
        module = inner


def base_of(module: nn.Module) -> nn.Module | None:
    """Returns the module around which peft has put this one; None if it is none of peft's."""
    if "peft" not in sys.modules:
        return None
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    base: nn.Module | None = None
    if isinstance(module, PeftModel):
        base = module.get_base_model()
    elif isinstance(module, BaseTunerLayer):
        base = module._modules.get("base_layer")
    elif isinstance(module, AuxiliaryTrainingWrapper):
        base = module._modules["original_module"]
    return base
