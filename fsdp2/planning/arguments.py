"""Reads the arguments of `plan`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn

from ..engine.nested import tensors_in
from ..engine.policy import MixedPrecisionPolicy
from .clocks import Machine
from .network import NCCL_LATENCY, NO_LATENCY
from .policies import OPTIONS
from .settings import Setting, candidates, read_bytes, read_latency

_BACKENDS = {"cpu": "gloo"}
# Bytes per second: 80 % of what the memory of an H100 can move.
MEMORY_LINK = 0.8 * 3.35e12


def read_ranks(ranks: Any) -> list[Any]:
    """Returns numbers of ranks, of one or of several."""
    found = [ranks] if isinstance(ranks, int) else [*ranks] if isinstance(ranks, (list, tuple, range)) else None
    if found is None:
        raise TypeError(f"ranks: expected an int, or a list of them, got {ranks!r}")
    if not found:
        raise ValueError("ranks: expected one number or more, got none")
    return found


def read_precision(param_dtype: Any, mp_policy: Any) -> MixedPrecisionPolicy:
    """Returns the dtypes of compute and reduction."""
    if mp_policy is None:
        return MixedPrecisionPolicy(param_dtype=param_dtype)
    if param_dtype is not None:
        raise ValueError(
            "expected param_dtype or mp_policy, got both. Write mp_policy=MixedPrecisionPolicy(param_dtype=...)"
        )
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        raise TypeError(f"mp_policy: expected a MixedPrecisionPolicy, got {type(mp_policy).__name__}")
    return mp_policy


def read_backend(backend: str | None, device: str) -> str:
    """Returns the backend that a device usually has, if none is given."""
    if not isinstance(device, str):
        raise TypeError(f'device: expected the type of a device, "cuda" for example, got {device!r}')
    if backend is not None and not isinstance(backend, str):
        raise TypeError(f"backend: expected a str or None, got {backend!r}")
    found = backend or _BACKENDS.get(device, "nccl")
    if found not in ("nccl", "gloo", "other"):
        raise ValueError(f'backend: expected "nccl", "gloo", "other" or None, got {backend!r}')
    return found


def read_machine(
    device: str,
    backend: str | None,
    speeds: Mapping[str, Any],
    latency: Any,
    ranks_per_machine: Any,
    cards_per_machine: Any,
) -> Machine:
    """Returns what each rank computes and communicates with. `speeds`: by the names that Machine has for them.

    What NCCL and the memory of a device take is known where a device trains over NCCL; elsewhere it counts as nothing,
    unless it is given.
    """
    counts = {"ranks_per_machine": ranks_per_machine}
    if cards_per_machine is not None:
        counts["cards_per_machine"] = cards_per_machine
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: expected an int of 1 or more, got {value!r}")
    over = read_backend(backend, device)
    read = {name: read_bytes(name, value) for name, value in speeds.items()}
    is_on_device = torch.device(device) != torch.device("cpu")
    if read.get("memory_link") is None and is_on_device:
        read["memory_link"] = MEMORY_LINK
    is_nccl = over == "nccl" and is_on_device
    return Machine(
        device,
        over,
        latency=read_latency(latency, NCCL_LATENCY if is_nccl else NO_LATENCY),
        **counts,
        **read,  # type: ignore[arg-type]
    )


def read_headroom(value: Any, memory: float | None, machine: Machine) -> float:
    """Returns the bytes of a device's memory to keep: of a number, a text such as "4GB", or a share of it, "5%".

    Raises:
        TypeError, ValueError: it is none of these, or not less than the memory.
    """
    if value is None:
        value = "10%" if machine.can_offload else 0
    found: float | None
    if isinstance(value, str) and value.strip().endswith("%"):
        try:
            found = float(value.strip()[:-1]) / 100 * (memory or 0)
        except ValueError:
            raise ValueError(f'headroom: expected bytes or a share such as "5%", got {value!r}') from None
    else:
        found = 0.0 if value == 0 and not isinstance(value, (bool, str)) else read_bytes("headroom", value)
    kept = found or 0.0
    if memory is not None and not 0 <= kept < memory:
        raise ValueError(f"headroom: expected less than the memory, {memory:.0f} bytes, got {value!r}")
    return kept


def read_price(value: Any) -> float | None:
    """Returns what a second of an optimizer's step costs the computation beside it.

    Raises:
        TypeError, ValueError: it is no number from 0 to 1.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"beside_price: expected a number from 0 to 1 or None, got {value!r}")
    if not 0 <= value <= 1:
        raise ValueError(f"beside_price: expected a number from 0 (it hides) to 1 (they take turns), got {value}")
    return float(value)


def read_policies(model: nn.Module, policy: Any) -> dict[str, Any]:
    """Returns policies by name: "" if there is one only."""
    if not isinstance(policy, Mapping) or not policy or not all(isinstance(name, str) for name in policy):
        return {"": policy}
    # Names of classes are no names of policies, and have arguments of fully_shard.
    classes = {type(module).__name__ for module in model.modules()} if isinstance(model, nn.Module) else set()
    has_options = all(isinstance(each, Mapping) and {*each} <= {*OPTIONS} for each in policy.values())
    return {"": policy} if has_options or classes & {*policy} else dict(policy)


def read_settings(settings: Any, worlds: Sequence[Any], policies: Sequence[str], machine: Machine) -> list[Setting]:
    """Returns the settings to compare."""
    if settings is None:
        for world in worlds:
            Setting(world)  # which checks it
        joins = machine.has_speeds and machine.latency != NO_LATENCY
        return candidates(worlds, policies, machine.can_offload, machine.ranks_per_machine, joins)
    if not isinstance(settings, Iterable) or isinstance(settings, str | Mapping):
        raise TypeError(f"settings: expected a list of Settings or dicts, got {settings!r}")
    found, names = [], {each.name for each in fields(Setting)}
    for each in settings:
        if isinstance(each, Setting):
            found.append(each)
        elif isinstance(each, Mapping):
            if unknown := {*each} - names:
                raise ValueError(f"settings: expected {', '.join(sorted(names))}, got {', '.join(sorted(unknown))}")
            found += [Setting(**{"ranks": world, "policy": policies[0], **each}) for world in worlds]
        else:
            raise TypeError(f"settings: expected Settings or dicts, got {type(each).__name__}")
    if unknown := {each.policy for each in found} - {*policies}:
        raise ValueError(f"settings: expected policies among {', '.join(policies)}, got {', '.join(sorted(unknown))}")
    if not found:
        raise ValueError("settings: expected one or more, got none")
    return found


def default_loss(output: Any) -> Tensor:
    """Returns the loss that an output has, or a sum of its tensors."""
    found = getattr(output, "loss", None)
    if isinstance(found, Tensor):
        return found
    found = getattr(output, "logits", output)
    tensors = [t for t in tensors_in(found) if t.is_floating_point() and t.requires_grad]
    if not tensors:
        raise TypeError("loss: the output has no floating-point tensor with a gradient. Pass a function of the output")
    return torch.stack([tensor.float().sum() for tensor in tensors]).sum() if len(tensors) > 1 else tensors[0].sum()
