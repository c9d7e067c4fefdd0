"""What stands in `.grad` where there is no gradient to use."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from . import dtensor_compat, torch_compat
from ..core.parameter import FSDPParam


class UnsyncedGrad(DTensor):
    """Stands in `.grad` while gradients wait, unreduced, for a backward pass that synchronises.

    It makes the waiting gradients visible to `zero_grad`, in both of its ways: set to zero, it becomes a plain DTensor
    of zeros. It refuses every other use, since the value isn't known before it is reduced.
    """

    why = (
        "this gradient is not synchronised between ranks yet. Call set_requires_gradient_sync(True) before the last "
        "backward of an accumulation, and use .grad (clip, step, ...) after it."
    )
    # What had been reduced before, if anything.
    reduced: Tensor | None = None
    # What waited went down with a backward pass that failed.
    is_lost = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """torch 2.11 handles subclasses of DTensor in C++ and doesn't ask `__torch_dispatch__`: ask here, too."""
        if func in torch_compat.ZERO_FUNCTIONS:
            return _set_to_zero(args[0])
        if not torch_compat.reads_metadata(func):
            cls._refuse(torch.overrides.resolve_name(func) or str(func))
        with dtensor_compat.no_torch_function():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func not in torch_compat.ZERO_OPS:
            cls._refuse(str(func))
        return _set_to_zero(args[0])

    def to_local(self, **_: Any) -> Any:
        self._refuse("to_local")

    def full_tensor(self, **_: Any) -> Any:
        self._refuse("full_tensor")

    def redistribute(self, *_: Any, **__: Any) -> Any:
        self._refuse("redistribute")

    @classmethod
    def _refuse(cls, what: str) -> NoReturn:
        raise RuntimeError(f"{what}: {cls.why}")


class SteppedGrad(UnsyncedGrad):
    """Stands in `.grad` of parameters that were stepped in backward, until the next: whoever clips or steps afterwards,
    as usual, would do nothing.
    """

    why = (
        "the optimizer has stepped with this gradient in backward, and cleared it (set_optimizer_in_backward). What "
        "needs all gradients before a step (clipping by norm, GradScaler) can't be combined with that."
    )


def _set_to_zero(gradients: Any) -> Any:
    """What `zero_grad(set_to_none=False)` does, to one gradient or to a list in which others may stand."""
    several = not isinstance(gradients, Tensor)
    for gradient in gradients if several else [gradients]:
        if isinstance(gradient, UnsyncedGrad):
            zeros = torch.zeros_like(dtensor_compat.local_of(gradient), memory_format=torch.contiguous_format)
            dtensor_compat.set_local(gradient, zeros)
            gradient.__class__ = DTensor  # type: ignore[assignment]
            dtensor_compat.of_chosen_class(gradient)
        elif isinstance(gradient, DTensor):
            dtensor_compat.local_of(gradient).zero_()
        else:
            gradient.zero_()
    return None if several else gradients


def put_stand_in(param: FSDPParam, kind: type[UnsyncedGrad], is_lost: bool = False) -> None:
    """Into `.grad` of the sharded parameter, unless one is there."""
    if not isinstance(param.sharded.grad, UnsyncedGrad):
        nothing = torch.zeros((), dtype=param.local.dtype, device=param.local.device).expand(param.local.shape)
        stand_in = kind(nothing, param.dtensor_spec, requires_grad=False)
        stand_in.reduced, stand_in.is_lost = param.sharded.grad, is_lost
        param.sharded.grad = stand_in


def take_stand_in(param: FSDPParam) -> bool:
    """Put back what the stand-in stands before. Return whether there was one."""
    stand_in = param.sharded.grad
    if not isinstance(stand_in, UnsyncedGrad):
        return False
    param.sharded.grad = stand_in.reduced
    return True
