"""`torch._foreach_*`, and fused steps of optimizers, on lists of DTensors, among which plain tensors may be: ignored
parameters, buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from .compat import (
    DTensorSpec,
    dtensor,
    dtensor_spec,
    local_if_any,
    spec_of,
)
from .sharded_dtensor import call_unhandled, handle_operations

_aten = torch.ops.aten
# What an element of their results is made of is not one element only.
_OTHERS = ("_foreach_norm", "_foreach_max", "_foreach_powsum", "_foreach_mm")
# Of those of SGD and Adagrad torch has no rule for DTensors.
_FUSED = ("_fused_sgd_", "_fused_adagrad_", "_fused_adam_", "_fused_adamw_")


def operate_on_lists() -> None:
    """These are possible where plain tensors are among ShardedDTensors, as in an optimizer's step; and those in
    place show in the DTensors' versions, as those on plain tensors do.
    """
    names = [name for name in dir(torch) if name.startswith("_foreach_") and name not in _OTHERS]
    written = [*_FUSED, *(name for name in names if name.endswith("_"))]
    handle_operations(overloads(written), _in_place)
    handle_operations(overloads(name for name in names if name not in written), _out_of_place)


def overloads(names: Iterable[str]) -> list[Any]:
    packets = [getattr(_aten, name) for name in names]
    return [getattr(packet, name) for packet in packets for name in packet.overloads()]


def _in_place(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """On the lists in `args`, the first of which `op` writes to."""
    local_args = _local_arguments(args)
    if local_args is None or any(isinstance(each, DTensor) for each in kwargs.values()):
        call_unhandled(op, args, kwargs)
    else:
        op(*local_args, **kwargs)
    increment_version(args[0])


def _out_of_place(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    is_mixed = isinstance(args[0], list | tuple) and None in (specs := specs_of(args[0]))
    local_args = _local_arguments(args) if is_mixed else None
    if local_args is None:
        return call_unhandled(op, args, kwargs)
    return [_like(spec, each) for spec, each in zip(specs, op(*local_args, **kwargs), strict=True)]


def _like(spec: DTensorSpec | None, local: Tensor) -> Tensor:
    """`local`, distributed as `spec` says."""
    if spec is None:
        return local
    return dtensor(local, dtensor_spec(spec.mesh, spec.placements, tuple(spec.shape), local.dtype))


def _local_arguments(args: tuple[Any, ...]) -> list[Any] | None:
    """The same for local tensors, if all that happens to an element happens to it there, too: where tensors that meet
    are distributed alike. To plan that takes DTensor longer than to compute.
    """
    found, specs = [], specs_of(args[0])
    if any(spec is not None and any(each.is_partial() for each in spec.placements) for spec in set(specs)):
        return None
    for arg in args:
        if isinstance(arg, DTensor):
            return None
        if isinstance(arg, list | tuple) and arg and isinstance(arg[0], Tensor) and not _are_numbers(arg):
            if any(spec != other for spec, other in set(zip(specs, specs_of(arg), strict=False))):
                return None
            arg = list(map(local_if_any, arg))
        found.append(arg)
    return found


def _are_numbers(tensors: Sequence[Tensor]) -> bool:
    """Such as the steps that an optimizer counts, one for each parameter."""
    return all(type(each) is Tensor and each.dim() == 0 for each in tensors)


def specs_of(tensors: Sequence[Tensor]) -> list[DTensorSpec | None]:
    """None in place of those that are plain."""
    try:
        return list(map(spec_of, tensors))
    except AttributeError:
        return [spec_of(each) if isinstance(each, DTensor) else None for each in tensors]
