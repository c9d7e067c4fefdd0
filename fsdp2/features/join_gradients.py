"""Holds gradients between backward and step while ranks have run out of batches, and says what has become of them.

A rank that has joined (`join.py`) can't do to its gradients what the program does to those of the others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..engine import compat
from ..engine.parameter import FSDPParam
from ..engine.placeholders import UnsynchronizedGrad

# What has become of the gradient of a parameter on the ranks that are present: there is none; it was cleared since
# backward; it was set to zero; that, or it is as backward has left it; it is so; it is anything else. If ranks differ,
# the last one counts.
_NONE, _CLEARED, _ZEROS, _UNSURE, _KEPT, _CHANGED = range(6)


_HOW = (
    "Pass what all ranks are to do for a step, clipping and schedulers included, as a function: "
    "`with fsdp2.join(model, step=step) as joined:`, and call joined.step() in the loop."
)


class HeldGrad(UnsynchronizedGrad):
    """Stands in `.grad` between backward and step, while some ranks have joined: they can't change theirs alike."""

    why = (
        "some ranks have run out of batches, and can't do to their part of this gradient what this rank does. An "
        f"optimizer's own step() and zero_grad() are followed, and nothing else is. {_HOW}"
    )
    shown = "is held until the step, which ranks that have run out of batches take as well"


def _is_placeholder(gradient: Tensor | None) -> bool:
    return isinstance(gradient, UnsynchronizedGrad)


def _meet_fate(param: FSDPParam, fate: int) -> None:
    """Does to the gradient of a rank that has joined what was done to those of the others."""
    gradient: Any = param.sharded.grad
    is_waiting = _is_placeholder(gradient)
    if fate == _CLEARED or (fate == _NONE and not is_waiting):
        param.sharded.grad = None
    elif fate == _ZEROS:
        if is_waiting:
            param.sharded.grad = None
        local = torch.zeros_like(param.local, dtype=param.delivered_dtype)
        param.sharded.grad = compat.new_dtensor(param.tensor_class, local, param.gradient_spec)


def _params_of(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]
