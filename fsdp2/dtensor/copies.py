"""`copy.deepcopy(p.grad)` and `torch.save(p.grad, ...)`: torch can't copy a DTensor that begins inside a storage.

Gradients do, which are reduced together. Their copies have memory of their own, and files hold no more than them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from .compat import local_of
from .sharded_dtensor import replace_attribute


def copy_gradients() -> None:
    """These can be deep-copied, pickled and saved."""
    replace_attribute("__deepcopy__", _deepcopying)
    replace_attribute("__reduce_ex__", _reducing)


def _deepcopying(plainly: Callable[..., Any]) -> Callable[..., Any]:
    def deepcopy(self: DTensor, memo: dict[int, Any]) -> Any:
        if id(self) in memo or not _lies_in_more(self):
            return plainly(self, memo)
        return memo.setdefault(id(self), self.clone())

    return deepcopy


def _reducing(plainly: Callable[..., Any]) -> Callable[..., Any]:
    def reduce(self: DTensor, protocol: Any) -> Any:
        return plainly(self.clone() if _lies_in_more(self) else self, protocol)

    return reduce


def _lies_in_more(tensor: DTensor) -> bool:
    """Whether it is a part of a storage; not if autograd has to know it."""
    local = local_of(tensor)
    return not tensor.requires_grad and type(local) is Tensor and local.untyped_storage().nbytes() > local.nbytes
