"""`copy.deepcopy(p.grad)` and `torch.save(p.grad, ...)`: torch can't copy a DTensor that begins inside a storage.

Gradients do, which are reduced together. Their copies have memory of their own, and files hold no more than them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from ..dtensor_compat import local_of


@cache
def copy_gradients() -> None:
    """From now on these can be deep-copied, pickled and saved."""
    DTensor.__deepcopy__ = _deepcopy  # type: ignore[method-assign, assignment]
    DTensor.__reduce_ex__ = _reduce  # type: ignore[method-assign, assignment]


def _deepcopy(self: DTensor, memo: dict[int, Any]) -> Any:
    if id(self) in memo or not _lies_in_more(self):
        return Tensor.__deepcopy__(self, memo)
    return memo.setdefault(id(self), self.clone())


def _reduce(self: DTensor, protocol: Any) -> Any:
    return Tensor.__reduce_ex__(self.clone() if _lies_in_more(self) else self, protocol)


def _lies_in_more(tensor: DTensor) -> bool:
    """Whether it is a part of a storage; not if autograd has to know it."""
    local = local_of(tensor)
    return not tensor.requires_grad and type(local) is Tensor and local.untyped_storage().nbytes() > local.nbytes
