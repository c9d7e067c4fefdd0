"""`weight[mask] = rows`, `p.grad * mask`, `p.data.copy_(plain)`: torch refuses to mix plain tensors with DTensors, and
says neither which parameter it is nor what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, wraps
from typing import Any

from torch.distributed.tensor import DTensor

from ..dtensor_compat import local_of
from ..owners import all_states
from ..versions import sharded_in
from .full_tensor import owner_of

_OPERATORS = ("add", "sub", "mul", "truediv", "matmul", "pow")
_METHODS = (
    *(f"__{name}__" for name in (*_OPERATORS, "getitem", "setitem", "eq", "ne", "lt", "le", "gt", "ge")),
    *("__rmatmul__", "__rpow__"),
    *("add_", "sub_", "mul_", "div_", "copy_", "lerp_", "lerp", "addcmul_", "addcdiv_", "where"),
    *("masked_fill_", "masked_fill", "index_fill_", "index_copy_", "index_add_", "index_select"),
)


@cache
def explain_mixed_operands() -> None:
    """From now on the error of a DTensor's own methods begins with the parameter's name, if it is one, or its gradient,
    and with what to do.
    """
    for name in _METHODS:
        setattr(DTensor, name, _explained(name, getattr(DTensor, name)))


def _explained(name: str, plainly: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(plainly)
    def operate(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        try:
            return plainly(self, *args, **kwargs)
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" in str(error):
                error.args = (
                    f"{describe((self, *args))}: each rank holds a part of it, which {name} can't mix with a plain "
                    "tensor. On every rank, read the whole by full_tensor(); or make the plain tensor a DTensor, too, "
                    f"by distribute_tensor(plain, p.device_mesh, p.placements). Torch says: {error}",
                )
            raise

    return operate


def describe(operands: Iterable[Any]) -> str:
    """Says which the first DTensor is: a parameter, or part of one, or computed of one; or its gradient. Communicates
    nothing.
    """
    first = next(each for each in operands if isinstance(each, DTensor))
    param, owner = sharded_in(local_of(first)), owner_of(first)
    if param is not None or owner is not None:
        return (param or owner.param).name  # type: ignore[union-attr]
    params = (param for state in all_states() for param in state.group.params)
    names = (f"the gradient of {param.name}" for param in params if param.sharded.grad is first)
    return next(names, f"a DTensor of global shape {tuple(first.shape)}")
