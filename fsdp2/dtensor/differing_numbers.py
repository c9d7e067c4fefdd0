"""Refuses plain numbers that differ between ranks in operations on DTensors: `torch.mul(loss.detach(), p.norm())`.

Torch assumes that all ranks have the same plain number, and each rank's shard silently gets a gradient from that rank's
number alone. No code of fsdp2 runs in such an operation; but the graph saves the numbers on which gradients depend.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..engine.owners import Owned
from ..engine.rank_facts import all_reduce_over
from ..engine.torch_names import saved_by
from .graph import dtensor_nodes


def refuse_differing_numbers(tensor: DTensor, owner: Owned) -> None:
    """Refuses `tensor`, which is computed from `owner`, if its gradients depend on numbers that differ between ranks.
    All ranks that share `owner` must call it.

    Raises:
        RuntimeError: a number on which the gradient depends differs between them, on all of them.
    """
    saved = [each for node in dtensor_nodes([tensor.grad_fn]) for each in saved_by(node)]
    numbers = [each for each in saved if type(each) is Tensor and each.numel() == 1]
    if numbers and differ(numbers, owner):
        raise RuntimeError(
            f"{owner.param.name}: a plain number that differs between ranks is combined with a DTensor that is "
            "computed from this parameter; torch would use each rank's number as if it were that of all. Call "
            "full_tensor() on the DTensor, on every rank (`torch.mul(number, penalty.full_tensor())`)."
        )


def differ(numbers: Sequence[Tensor], owner: Owned) -> bool:
    """Returns True if the ranks that share `owner` have different numbers. All of them must call it."""
    mesh = owner.group.mesh
    own = torch.stack([each.detach().reshape(()).to(mesh.device, torch.float64) for each in numbers]).nan_to_num()
    extremes = torch.stack([own, -own])
    all_reduce_over(extremes, mesh.axis_groups, largest=True)
    return bool(extremes.sum(0).any())
