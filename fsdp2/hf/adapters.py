"""Finds what peft saves of an adapter: parameters, parts of them, and tensors that it computes from some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..core.parameter import Slot
from .skeleton import make_parts, make_skeleton
from .tensors import ModelTensor
from .trace import Tracer
from .views import View


class AdapterFile(NamedTuple):
    """Describes what is saved. `names`: name in the file -> a view of parameters. `computed`: what peft has computed
    besides. `missing`: parameters and buffers whose values it needs for that; then the others are not complete.
    """

    names: dict[str, View]
    computed: list[ModelTensor]
    missing: list[ModelTensor]


def find_adapter(
    model: nn.Module, tensors: Sequence[ModelTensor], adapter_name: str, values: Mapping[str, Tensor]
) -> AdapterFile:
    """Finds what peft's own function saves of an adapter. It runs on a skeleton of the model, without a collective.

    `values`: of whole parameters and buffers, by name, as far as they are known.

    Raises:
        NotImplementedError: it needs values, and which is unknown.
    """
    tracer, parts = Tracer(), make_parts(tensors, values)
    for name, part in parts.items():
        tracer.follow(name, part)
    failed: Exception | None = None
    found: dict[str, Tensor] = {}
    try:
        with tracer:
            found = _call_peft(model, tensors, parts, adapter_name)
    except (RuntimeError, NotImplementedError) as error:  # there are no values on meta
        failed = error
    computed = {name: each.detach() for name, each in found.items() if not isinstance(tracer.view_of(each), View)}
    missing = [each for each in tensors if each.name in tracer.read - {*values}]
    if failed is not None or any(each.is_meta for each in computed.values()):
        if missing:
            return AdapterFile({}, [], missing)
        raise NotImplementedError(
            f"save_adapter: peft computes {', '.join(computed) or 'tensors'} from values that fsdp2 does not find "
            f"({failed}). On every rank, write `with fsdp2.full_params(model):`, and in it call "
            "model.save_pretrained(folder) on the first rank."
        ) from failed
    views = {name: tracer.view_of(each) for name, each in found.items() if name not in computed}
    return AdapterFile({name: view for name, view in views.items() if isinstance(view, View)}, _hold(computed), [])


def _hold(computed: Mapping[str, Tensor]) -> list[ModelTensor]:
    """Returns computed tensors as buffers of a module: the first rank saves its own."""
    holder, made = nn.Module(), []
    for name, tensor in computed.items():
        holder._buffers[name] = tensor
        made.append(ModelTensor(tensor, None))
        made[-1].names.append(name)
        made[-1].slots.append(Slot(holder, name))
    return made


def gather(tensors: Sequence[ModelTensor]) -> dict[str, Tensor]:
    """Returns the whole values of parameters and buffers. Every rank must call it with the same tensors."""
    with torch.no_grad():
        return {
            each.name: each.tensor.full_tensor() if isinstance(each.tensor, DTensor) else each.tensor.detach()
            for each in tensors
        }


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
