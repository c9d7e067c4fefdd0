"""`loss + penalty`, where torch computes the penalty on shards: as if it were `penalty.full_tensor()`.

Torch takes a plain number for the same on all ranks, and gives it a gradient that is a DTensor: backward fails where
that comes to what is plain. Where the number is of this rank's own batch (`loss.detach() * temperature`), the
parameter's gradient would be of that alone, without a word.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .sharded_dtensor import replace_attribute
from .full_tensor import owner_of
from .own_numbers import differ

_OPERATORS = ("add", "sub", "mul", "truediv")


def meet_plain_numbers() -> None:
    """From now on these operators, between a plain tensor of no dims and a DTensor that is computed of sharded
    parameters, return plain tensors, where the former has a graph, or other values on other ranks; with grad enabled.
    """
    for name in _OPERATORS:
        function, plainly, reflected = getattr(operator, name), f"__{name}__", f"__r{name}__"
        replace_attribute(plainly, partial(_beside, function))
        replace_attribute(reflected, partial(_behind, function))


def _beside(function: Callable[..., Any], plainly: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plainly)
    def operate(self: DTensor, other: Any) -> Any:
        whole = _whole_if_needed(self, other) if type(other) is Tensor else None
        return plainly(self, other) if whole is None else function(whole, other)

    return operate


def _behind(function: Callable[..., Any], plainly: Callable[..., Any]) -> Callable[..., Any]:
    """Python asks the right operand first, whose class is the narrower one."""

    @wraps(plainly)
    def operate(self: DTensor, other: Any) -> Any:
        if type(other) is not Tensor:
            return plainly(self, other)
        whole = _whole_if_needed(self, other)
        return NotImplemented if whole is None else function(other, whole)

    return operate


def _whole_if_needed(tensor: DTensor, number: Tensor) -> Tensor | None:
    """The same on all ranks, all of which must call it."""
    if number.dim() or not (tensor.requires_grad and torch.is_grad_enabled()) or torch.compiler.is_compiling():
        return None
    owner = owner_of(tensor)
    if owner is None or not (number.requires_grad or differ([number], owner)):
        return None
    return tensor.full_tensor()
