"""Puts placeholders for unsynchronized gradients into `.grad`: `zero_grad` clears them, and nothing else may use them.

Without them `zero_grad` would not reach unsynchronized gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..calls.callers import function_that_calls, optimizer_that_calls
from ..torch_private.internals import local_of, new_dtensor, no_torch_function, set_local, spec_of
from ..torch_private.rare_internals import ZERO_FUNCTIONS, ZERO_OPS, reads_metadata
from .events import extensions
from .parameter import FSDPParam

if TYPE_CHECKING:
    from .group import FSDPParamGroup
    from .root import Root


# What users call, and what then reads gradients by other names.
_CLIPPING = ("clip_grad_norm_", "clip_grad_value_", "get_total_norm")


class UnsynchronizedGrad(DTensor):
    """Stands in `.grad` while a gradient is unsynchronized: its value isn't known before it is reduced.

    Set to zero, it becomes a plain DTensor of zeros. It refuses every other use.
    """

    why = (
        "this gradient is not synchronised between ranks yet. Call set_requires_gradient_sync(True) before the last "
        "backward of an accumulation, and use .grad (clip, step, ...) after it. Inside of fsdp2.accumulate it is "
        "complete when the block ends."
    )
    shown = "is not synchronised between ranks yet: the next backward after set_requires_gradient_sync(True) reduces it"
    # The gradient that had been reduced before, if there was one.
    reduced: Tensor | None = None
    # The unsynchronized gradient was included in a backward pass that failed.
    is_lost = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuses, too: torch 2.11 calls `__torch_dispatch__` of a subclass of DTensor only where a rule says so."""
        if func in ZERO_FUNCTIONS:
            return _set_to_zero(args[0])
        if func is Tensor.__repr__:
            return repr(args[0])
        if not reads_metadata(func):
            cls.refuse(torch.overrides.resolve_name(func) or str(func))
        with no_torch_function():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func not in ZERO_OPS:
            cls.refuse(str(func))
        return _set_to_zero(args[0])

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<gradient of shape {tuple(self.shape)} that {self.shown}>"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def to_local(self, **_: Any) -> Any:
        self.refuse("to_local")

    def full_tensor(self, **_: Any) -> Any:
        self.refuse("full_tensor")

    def redistribute(self, *_: Any, **__: Any) -> Any:
        self.refuse("redistribute")

    @classmethod
    def refuse(cls, what: str) -> NoReturn:
        optimizer = optimizer_that_calls()
        where = function_that_calls(_CLIPPING) or what if optimizer is None else f"{type(optimizer).__name__}.step"
        raise RuntimeError(f"{where}: {cls.why}")


class SteppedGrad(UnsynchronizedGrad):
    """Stands in `.grad` of parameters that were stepped in backward, until the next backward: clipping or stepping
    afterwards, as usual, would do nothing.
    """

    why = (
        "the optimizer has stepped with this gradient in backward, and cleared it (set_optimizer_in_backward). What "
        "needs all gradients before a step (clipping by norm, GradScaler) can't be combined with that."
    )
    shown = "the optimizer has stepped with in backward, and cleared"


def _set_to_zero(gradients: Any) -> Any:
    """Does what `zero_grad(set_to_none=False)` does, to one gradient or to a list in which others may stand."""
    several = not isinstance(gradients, Tensor)
    for gradient in gradients if several else [gradients]:
        if isinstance(gradient, UnsynchronizedGrad):
            zeros = torch.zeros_like(local_of(gradient), memory_format=torch.contiguous_format)
            set_local(gradient, zeros)
            gradient.__class__ = extensions().tensor_class  # type: ignore[assignment]
        elif isinstance(gradient, DTensor):
            local_of(gradient).zero_()
        else:
            gradient.zero_()
    return None if several else gradients


def put_placeholder(param: FSDPParam, kind: type[UnsynchronizedGrad], is_lost: bool = False) -> None:
    """Puts a placeholder into `.grad` of the sharded parameter, unless one is there: the one that was taken last, or a
    new one.
    """
    if not isinstance(param.sharded.grad, UnsynchronizedGrad):
        placeholder = param.placeholders.pop(kind, None)
        if type(placeholder) is not kind or spec_of(placeholder) is not param.gradient_spec:
            placeholder = _make_placeholder(param, kind)
        placeholder.reduced, placeholder.is_lost = param.sharded.grad, is_lost
        param.sharded.grad = placeholder


def _make_placeholder(param: FSDPParam, kind: type[UnsynchronizedGrad]) -> Any:
    with torch.inference_mode(False):  # it outlives it
        # Nothing reads the value: to fill it would be a launch.
        nothing = torch.empty((), dtype=param.delivered_dtype, device=param.local.device).expand(param.local.shape)
        return new_dtensor(kind, nothing, param.gradient_spec)


def take_placeholder(param: FSDPParam) -> bool:
    """Puts back the gradient that the placeholder has replaced. Returns True if there was a placeholder."""
    placeholder = param.sharded.grad
    if not isinstance(placeholder, UnsynchronizedGrad):
        return False
    param.sharded.grad, placeholder.reduced = placeholder.reduced, None
    param.placeholders[type(placeholder)] = placeholder
    return True


# ---- those of a root, in step with unsynchronized gradients


def leaves_gradients(group: FSDPParamGroup) -> bool:
    """Returns True if gradients of the group are unsynchronized, or will be after the next backward pass, or if there
    are placeholders.
    """
    settings = group.settings
    leaves = not (settings.reduce_gradients and settings.all_reduce)
    return leaves or bool(group.gradients.unsynchronized or group.placeholders)


def take_placeholders(root: Root) -> None:
    """Takes all placeholders out of `.grad` before a backward pass, and drops what the user has cleared or replaced
    since the last one.

    Raises:
        RuntimeError: a gradient was lost in a backward pass that failed, and not cleared since.
    """
    marked = [group for group in root.groups if group.placeholders]
    for group in marked:
        for param in (group.params[i] for i in group.placeholders):
            if isinstance(param.sharded.grad, UnsynchronizedGrad) and param.sharded.grad.is_lost:
                raise RuntimeError(
                    f"{param.name}: unsynchronized gradients were lost in a backward pass that failed. Call "
                    "zero_grad, and repeat the accumulation."
                )
    for group in marked:
        for i in group.placeholders:
            if not take_placeholder(group.params[i]):
                group.gradients.forget(i)
        group.placeholders.clear()


def put_placeholders(root: Root) -> None:
    """Puts a placeholder into `.grad` of each parameter whose gradient is unsynchronized."""
    for group in root.groups:
        if group.gradients.unsynchronized:
            _mark(group)
    root.find_left_gradients()


def _mark(group: FSDPParamGroup) -> None:
    gradients, marked = group.gradients, group.placeholders
    for i in gradients.unsynchronized.indices:
        if i in marked and not isinstance(group.params[i].sharded.grad, UnsynchronizedGrad):
            gradients.forget(i)  # the user has cleared it since
        else:
            marked.add(i)
            put_placeholder(group.params[i], UnsynchronizedGrad)


def mark_lost(root: Root) -> None:
    """Marks as lost what a backward pass that has failed had included of earlier passes."""
    for group in root.groups:
        for i in group.gradients.unsynchronized.included:
            group.placeholders.add(i)
            put_placeholder(group.params[i], UnsynchronizedGrad, is_lost=True)
    put_placeholders(root)


def drop_placeholders(root: Root) -> None:
    """Takes all placeholders out of `.grad`: the user has dropped what they stand for."""
    for group in root.groups:
        for i in group.placeholders:
            take_placeholder(group.params[i])
        group.placeholders.clear()
    root.find_left_gradients()


def forget_cleared(group: FSDPParamGroup) -> None:
    """Drops what the user has cleared, before parameters are replaced: what is left is known by the places of its
    parameters, which must stay.
    """
    for i in group.placeholders:
        if not isinstance(group.params[i].sharded.grad, UnsynchronizedGrad):
            group.gradients.forget(i)
