"""Makes `copy.deepcopy(p.grad)` and `torch.save(p.grad, ...)` work.

Torch can't copy a DTensor whose local tensor starts inside a storage, as those of gradients that are reduced together
do. Here a copy gets memory of its own, and a file holds no more than the gradient.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from ..parameters.cut_graphs import without_node
from ..torch_private.internals import chosen_grad_dtype, local_of, set_grad_dtype
from .sharded_dtensor import replace_attribute


def copy_gradients() -> None:
    """Makes it possible to deep-copy, pickle and save gradients that share a storage."""
    replace_attribute("__deepcopy__", _deepcopying)
    replace_attribute("__reduce_ex__", _reducing)


def _deepcopying(original: Callable[..., Any]) -> Callable[..., Any]:
    def deepcopy(self: DTensor, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        found = without_node(self)
        if _shares_storage(found):
            return memo.setdefault(id(self), found.clone())
        choice = chosen_grad_dtype(found) if found.is_leaf else None
        if choice is None:
            return original(found, memo)
        # Torch copies the gradient first, and not the dtype that lets the copy have it.
        gradient, found.grad = found.grad, None
        try:
            copied = original(found, memo)
        finally:
            found.grad = gradient
        set_grad_dtype(copied, choice.dtype)
        copied.grad = copy.deepcopy(gradient, memo)
        return copied

    return deepcopy


def _reducing(original: Callable[..., Any]) -> Callable[..., Any]:
    def reduce(self: DTensor, protocol: Any) -> Any:
        found = without_node(self)
        return original(found.clone() if _shares_storage(found) else found, protocol)

    return reduce


def _shares_storage(tensor: DTensor) -> bool:
    """Returns True if `tensor` fills only a part of its storage, and autograd need not know of its copies."""
    local = local_of(tensor)
    return not tensor.requires_grad and type(local) is Tensor and local.untyped_storage().nbytes() > local.nbytes
