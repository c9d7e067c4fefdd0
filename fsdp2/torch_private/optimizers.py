"""Private names of torch that the flat optimizer uses, each with its reason."""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from .lookup import optional

_FLAT = "flatten_optimizer and clip_grad_norm_ of fsdp2"
# The kernels of fused steps. The public functions around them (`torch.optim.adam.adam`) group their lists by device and
# dtype in each call, and expect a step count for each tensor: that takes longer than the kernels do.
fused_adam: Callable[..., None] = optional("torch._fused_adam_", _FLAT)
fused_adamw: Callable[..., None] = optional("torch._fused_adamw_", _FLAT)
fused_sgd: Callable[..., None] = optional("torch._fused_sgd_", _FLAT)
fused_adagrad: Callable[..., None] = optional("torch._fused_adagrad_", _FLAT)
add_to_each: Callable[..., None] = optional("torch._foreach_add_", _FLAT)
subtract_from_each: Callable[..., None] = optional("torch._foreach_sub_", _FLAT)
zero_each: Callable[[list[Tensor]], None] = optional("torch._foreach_zero_", _FLAT)

# (tensors of one dtype and device) -> their elements, one tensor behind the other. It calls no function for each.
flatten: Callable[[list[Tensor]], Tensor] = optional("torch._utils._flatten_dense_tensors", _FLAT)
SMALL_NUMEL = 16 * 1024
"""Up to so many elements, on the CPU, a copy costs less than the call of a norm, or of a step's operations: some ten of
them, each about 1 us beside its work. So small tensors are copied together first."""


_norms: Callable[..., Any] = optional("torch._foreach_norm", _FLAT)
_scale: Callable[..., None] = optional("torch._foreach_mul_", _FLAT)


def norm_each(tensors: list[Tensor], order: float, dtype: torch.dtype) -> list[Tensor]:
    """Returns the norm of each, computed in `dtype`; one launch where the device allows it."""
    return list(_norms(tensors, order, dtype=dtype))


def scale_each(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiplies each by `factor`, a tensor without dims on their device; one launch where the device allows it."""
    _scale(tensors, factor)


grad_of: Callable[[Tensor], Tensor | None] = attrgetter("grad")


def without_hooks(cls: type[Optimizer]) -> Callable[..., Any]:
    """Returns the step of an optimizer's class without what torch wraps around it, which runs hooks."""
    step: Any = cls.step
    own: Callable[..., Any] = step.__wrapped__ if getattr(step, "hooked", False) else step
    return own


def with_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a step that runs the hooks of an optimizer, as torch's constructor wraps it once for each class."""
    hooked: Any = Optimizer.profile_hook_step(step)
    hooked.hooked = True
    wrapped: Callable[..., Any] = hooked
    return wrapped


def zero_grad_label(optimizer: Optimizer) -> str:
    """Returns how profilers are told of `zero_grad`."""
    return optimizer._zero_grad_profile_name


def follow_step_of_class(optimizer: Optimizer) -> bool:
    """Has an optimizer whose class has changed call the `step` of that class, also behind a scheduler's wrapper, which
    has kept the one of the class before. Returns False if something else was put in the place of its `step`.
    """
    own: Any = vars(optimizer).get("step")
    if own is None:
        return True
    if not hasattr(own, "_wrapped_by_lr_sched"):
        return False

    reference = ref(optimizer)

    def step(*args: Any, **kwargs: Any) -> Any:
        now: Any = reference()
        now._opt_called = True
        return type(now).step(now, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign]
    return True
