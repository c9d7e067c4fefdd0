"""Finds what peft saves of an adapter: parameters, and parts of them.

It also gives values to adapters on meta, around a model that is loaded.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from .skeleton import SAVE_IN_FULL, make_parts, make_skeleton
from .tensors import ModelTensor
from .trace import Tracer
from .views import View


def find_adapter(model: nn.Module, tensors: Sequence[ModelTensor], adapter_name: str) -> dict[str, View]:
    """Returns what peft's own function saves of an adapter: names in the file, and views of parameters.

    The function runs on a skeleton of the model, without a collective.

    Raises:
        NotImplementedError: it computes values: the embeddings of prompt tuning, for example.
    """
    tracer, parts = Tracer(), make_parts(tensors)
    for name, part in parts.items():
        tracer.follow(name, part)
    try:
        with tracer:
            found = _call_peft(model, tensors, parts, adapter_name)
        views = {name: tracer.view_of(each) for name, each in found.items()}
        computed = ", ".join(name for name, view in views.items() if not isinstance(view, View))
    except (RuntimeError, NotImplementedError) as error:  # there are no values on meta
        computed = f"it ({error})"
    if computed:
        raise NotImplementedError(f"save_adapter: peft computes {computed}, and fsdp2.hf moves values. {SAVE_IN_FULL}.")
    return {name: view for name, view in views.items() if isinstance(view, View)}


def _call_peft(
    model: nn.Module, tensors: Sequence[ModelTensor], parts: Mapping[str, Tensor], adapter_name: str
) -> dict[str, Tensor]:
    """Returns what peft would save of a model with these parts, under the names of its file."""
    from peft import get_peft_model_state_dict

    skeleton = make_skeleton(model, tensors, parts)
    state = skeleton.state_dict(keep_vars=True)
    found: Any = get_peft_model_state_dict(skeleton, state_dict=state, adapter_name=adapter_name)
    prefix = "" if hasattr(skeleton, "get_base_model") else "base_model.model."  # of add_adapter of Transformers
    return {name if name.startswith("base_model.") else prefix + name: each for name, each in sorted(found.items())}


def add_copies(model: nn.Module, tensors: Sequence[ModelTensor], sources: dict[str, View]) -> None:
    """Adds sources for the trained copies of modules (`modules_to_save`) on meta: they begin as the originals."""
    if "peft" not in sys.modules:
        return
    from peft.utils import ModulesToSaveWrapper

    by_slot = {(slot.module, slot.name): each for each in tensors for slot in each.slots}
    for wrapper in model.modules():
        copies: Any = wrapper._modules["modules_to_save"] if isinstance(wrapper, ModulesToSaveWrapper) else {}
        for copied in copies.values():
            for path, module in copied.named_modules():
                original = wrapper._modules["original_module"].get_submodule(path)  # type: ignore[union-attr]
                for name in (*module._parameters, *module._buffers):
                    own, other = by_slot.get((module, name)), by_slot.get((original, name))
                    found = next((each for each in other.names if each in sources), None) if other is not None else None
                    if own is not None and own.tensor.is_meta and found is not None:
                        sources[own.name] = sources[found]


def initialise(model: Any, places: Iterable[tuple[nn.Module, str]]) -> set[nn.Module]:
    """Has peft initialise the adapters that have got memory at these places; returns the modules that it has cared for.

    Raises:
        NotImplementedError: fsdp2 can't: it is no LoRA, or one that begins with a function of the weights.
    """
    if "peft" not in sys.modules:
        return set()
    from peft.tuners.tuners_utils import BaseTunerLayer

    left = {module for module, _ in places}
    cared: set[nn.Module] = set()
    for name, layer in model.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        base = layer._modules.get("base_layer")
        own = {*layer.modules()} - ({*base.modules()} if base is not None else set())
        if not own & left:
            continue
        for adapter, config in model.peft_config.items():
            kind = getattr(config, "init_lora_weights", None)
            if not hasattr(layer, "reset_lora_parameters") or kind not in (True, "gaussian") or config.use_dora:
                raise NotImplementedError(
                    f"load_model: {name}: expected LoRA, without DoRA, with init_lora_weights=True or 'gaussian' for "
                    f"adapters on meta, got {config.peft_type.value} with {kind!r}. Build the model with memory, not "
                    "on meta: from_pretrained, then get_peft_model, then fully_shard."
                )
            layer.reset_lora_parameters(adapter, kind)
        cared |= own
    return cared
