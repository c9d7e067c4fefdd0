"""What a user may choose for one `fully_shard` call: frozen descriptions, checked when they are built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """In which dtypes a group computes and communicates. The stored (sharded) parameters keep their own dtype.

    Args:
        param_dtype: dtype of the gathered parameters, hence of the all-gather and of compute. None: the stored dtype.
            Parameters that are not floating point are never cast.
        reduce_dtype: dtype of the gradient reduction. None: the dtype of the stored parameter (so fp32 parameters
            that compute in bf16 are reduced in fp32), as in torch from 2.15 on; torch 2.13 reduced in `param_dtype`.
        output_dtype: floating-point tensors in the module's output are cast to it. None: they are left alone.
        cast_forward_inputs: cast floating-point tensors in the module's inputs to `param_dtype`, if that is set (else
            there is nothing to cast to, and True casts nothing). Whole
            numbers that this makes others of (positions, time steps) raise a RuntimeError on every rank.
        param_dtype_override_fn: called once with each parameter. If it returns the parameter's own dtype, that is
            gathered and used as it is stored; None or `param_dtype`: as the others. Alike on all ranks.
        wire_dtype: dtype in which gradients travel between the ranks that share the parameters, where it is narrower
            than the one in which they are summed. None: they are cast to that one, and travel in it; but on gloo, where
            ranks sum what they receive, those that have not waited for others travel as autograd yields them, which
            changes no bit of the sums. The `reduce_dtype`: they are cast on gloo, too, as ranks must that accumulate
            different numbers of batches, and keep parameters meanwhile.
            Each rank's gradient is rounded to the wire dtype once (what stays on the rank, too, and all of it on one
            rank; beyond 65504 float16 is infinite). Ranks exchange the parts all to all, and sum and divide in the
            reduce dtype. With `param_dtype` bfloat16, gradients are bfloat16 already, so nothing is rounded: they go
            out from where autograd put them, and the sums differ from those of a reduction in float32 by their order
            at most. A step then sends (2 + 2 + 2) (N - 1) / N bytes per parameter in place of (2 + 2 + 4): two gathers
            and gradients over N ranks. Gradients that wait for synchronisation add up in the reduce dtype and are
            rounded when they are sent. Sums between replicas (HSDP) travel in the reduce dtype, so that `replicate`
            refuses it; with one rank in each replica, gradients are rounded all the same.

    Raises:
        TypeError: a dtype is not a torch.dtype.
        ValueError: a dtype is not a (real) floating-point dtype; `wire_dtype` is neither narrower than
            `reduce_dtype` nor that.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = field(default=None, kw_only=True)
    wire_dtype: torch.dtype | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.param_dtype_override_fn is not None and not callable(self.param_dtype_override_fn):
            raise TypeError(
                "MixedPrecisionPolicy.param_dtype_override_fn: expected a function or None, got "
                f"{self.param_dtype_override_fn!r}"
            )
        if not isinstance(self.cast_forward_inputs, bool):
            raise TypeError(
                f"MixedPrecisionPolicy.cast_forward_inputs: expected a bool, got {self.cast_forward_inputs!r}"
            )
        for name in ("param_dtype", "reduce_dtype", "output_dtype", "wire_dtype"):
            dtype = getattr(self, name)
            if dtype is None:
                continue
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"MixedPrecisionPolicy.{name}: expected a torch.dtype or None, got {dtype!r}")
            if not dtype.is_floating_point or dtype.itemsize < 2:
                raise ValueError(
                    f"MixedPrecisionPolicy.{name}: expected a floating-point dtype of 16 bits or more, got {dtype}"
                )
        wire, summed = self.wire_dtype, self.reduce_dtype
        if wire and summed and wire != summed and wire.itemsize >= summed.itemsize:
            raise ValueError(
                f"MixedPrecisionPolicy.wire_dtype: expected a dtype narrower than reduce_dtype, or that, {summed}, got "
                f"{wire}."
            )

    def keeps_dtype(self, parameter: nn.Parameter) -> bool:
        """Whether `parameter` is an exception that computes in the dtype in which it is stored.

        Raises:
            ValueError: the user's function returned another dtype than the two possible ones.
        """
        if self.param_dtype_override_fn is None:
            return False
        dtype = self.param_dtype_override_fn(parameter)
        if dtype not in (None, self.param_dtype, parameter.dtype):
            raise ValueError(
                f"expected param_dtype_override_fn to return {parameter.dtype}, {self.param_dtype} or None, got "
                f"{dtype!r}"
            )
        return dtype is not None and dtype == parameter.dtype

    def compute_dtype(self, stored: torch.dtype) -> torch.dtype:
        """The dtype in which a parameter stored as `stored` is gathered and used."""
        return self.param_dtype if self.param_dtype and stored.is_floating_point else stored

    def gradient_dtype(self, stored: torch.dtype) -> torch.dtype:
        """The dtype in which the gradient of a parameter stored as `stored` is reduced."""
        return self.reduce_dtype or stored

    def sent_dtype(self, stored: torch.dtype, comes_in: torch.dtype | None = None) -> torch.dtype:
        """The dtype in which that gradient travels: never one that is no narrower than the one it is summed in.

        `comes_in`: the one in which it is computed, where it may travel as it comes: no bit of it is lost.
        """
        summed = self.gradient_dtype(stored)
        wanted = self.wire_dtype or comes_in
        return wanted if wanted is not None and wanted.itemsize < summed.itemsize else summed


@dataclass(frozen=True)
class OffloadPolicy:
    """Where sharded parameters, gradients and optimizer states rest. This base class: on the mesh's device."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Sharded parameters, gradients and optimizer states rest on the CPU.

    Args:
        pin_memory: in page-locked memory, from which copies to an accelerator need not wait. On a mesh of CPUs nothing
            is copied, so that nothing waits, and no memory is locked.

    Raises:
        TypeError: `pin_memory` is not a bool.
    """

    pin_memory: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.pin_memory, bool):
            raise TypeError(f"CPUOffloadPolicy.pin_memory: expected a bool, got {self.pin_memory!r}")
