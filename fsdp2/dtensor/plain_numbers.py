"""Makes `loss + penalty`, where the penalty is computed from sharded parameters, mean `loss + penalty.full_tensor()`.

Torch assumes that all ranks have the same plain number, and gives it a gradient that is a DTensor: backward fails where
that reaches plain tensors. Where the number comes from this rank's own batch (`loss.detach() * temperature`), the
parameter would silently get a gradient from that batch alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .crossings import owner_of
from .differing_numbers import differ
from .sharded_dtensor import replace_attribute

_OPERATORS = ("add", "sub", "mul", "truediv")


def use_full_tensors_with_plain_numbers() -> None:
    """Makes `+ - * /` of a plain tensor without dims and a DTensor that is computed from sharded parameters return a
    plain tensor, if the plain one has a graph or differs between ranks, and grad is enabled.
    """
    for name in _OPERATORS:
        function, direct, reflected = getattr(operator, name), f"__{name}__", f"__r{name}__"
        replace_attribute(direct, partial(_direct, function))
        replace_attribute(reflected, partial(_reflected, function))


def _direct(function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def operate(self: DTensor, other: Any) -> Any:
        full = _full_if_needed(self, other) if type(other) is Tensor else None
        return original(self, other) if full is None else function(full, other)

    return operate


def _reflected(function: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the operator of the right operand, which Python calls first because its class is a subclass."""

    @wraps(original)
    def operate(self: DTensor, other: Any) -> Any:
        if type(other) is not Tensor:
            return original(self, other)
        full = _full_if_needed(self, other)
        return NotImplemented if full is None else function(other, full)

    return operate


def _full_if_needed(tensor: DTensor, number: Tensor) -> Tensor | None:
    """Returns the full tensor, or None if it is not needed, on all ranks alike. All of them must call it."""
    if number.dim() or not (tensor.requires_grad and torch.is_grad_enabled()) or torch.compiler.is_compiling():
        return None
    owner = owner_of(tensor)
    if owner is None or not (number.requires_grad or differ([number], owner)):
        return None
    return tensor.full_tensor()
