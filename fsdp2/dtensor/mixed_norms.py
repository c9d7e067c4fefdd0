"""Makes torch's own norm of gradients on several meshes raise an error that names the function to call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from ..engine.torch_names import wrap_total_norm
from .sharded_dtensor import ShardedDTensor
from .switches import switched


def refuse_mixed_norms() -> None:
    """Makes torch's total norm raise. It can't stack norms on several meshes, or plain and distributed norms."""
    wrap_total_norm(_refusing)


def _refusing(total_norm: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def refusing(tensors: Tensor | Iterable[Tensor], *args: Any, **options: Any) -> Tensor:
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if ShardedDTensor in set(map(type, tensors)) and _lie_on_several_meshes(tensors):
            raise RuntimeError(
                "torch can't compute the norm of gradients on several meshes, or of plain and sharded ones together. "
                "Call fsdp2.clip_grad_norm_(parameters, max_norm): it returns the norm, too."
            )
        return total_norm(tensors, *args, **options)

    return switched("mixed-norms", total_norm, refusing)


def _lie_on_several_meshes(tensors: Iterable[Tensor]) -> bool:
    return len({each.device_mesh if isinstance(each, DTensor) else None for each in tensors}) > 1
