"""Replaces operations that keep other tensors for backward on an accelerator than on the CPU.

A plan records the model on tensors of the CPU, because a CPU build of torch knows no other device. Most operations
keep the same tensors everywhere. These do not: on an accelerator `rms_norm` and `dropout` are one kernel each, where
the CPU runs several operations that keep their results; and attention has other kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

# torch's fused attention on CUDA takes heads of at most this size if several of them share keys and values.
MAX_HEAD_OF_GROUPED_QUERIES = 256


def of_device(device: str) -> AbstractContextManager[Any]:
    """Returns a context in which operations keep what those of this type of device keep."""
    return nullcontext() if torch.device(device).type == "cpu" else _OfAccelerator()


class _OfAccelerator(TorchFunctionMode):
    """Calls the stand-ins of this module."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        stand_in = _STAND_INS.get(func)
        return (stand_in or func)(*args, **(kwargs or {}))


class _FusedRMSNorm(torch.autograd.Function):
    """Keeps its input, its weight and one number for each row, as CUDA's kernel does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, num_dims: int) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[: x.dim() - num_dims], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None


def _rms_norm(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    if weight is not None and weight.dtype != input.dtype:
        return torch.rms_norm(input, normalized_shape, weight, eps)  # several operations on CUDA, too
    found: Tensor = _FusedRMSNorm.apply(input, weight, len(normalized_shape))
    return found


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if inplace or not training or not 0 < p < 1:
        return F.dropout(input, p, training, inplace)
    found: Tensor = torch.native_dropout(input, p, training)[0]
    return found


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """CUDA's fused kernels drop elements without keeping a mask. Where heads share keys and values, no kernel of torch
    takes float32, a mask or large heads: it then computes attention step by step. cuDNN may have a kernel for a mask.
    """
    shares = enable_gqa and query.shape[-3] != key.shape[-3]
    is_large = query.shape[-1] > MAX_HEAD_OF_GROUPED_QUERIES
    is_unfused = shares and (query.dtype == torch.float32 or attn_mask is not None or is_large)
    with sdpa_kernel(SDPBackend.MATH) if is_unfused else nullcontext():
        dropped = dropout_p if is_unfused else 0.0
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropped, is_causal, scale=scale, enable_gqa=enable_gqa
        )


def _multi_head_attention(*args: Any, **kwargs: Any) -> Any:
    """Torch calls no stand-in inside of this function, whose attention without weights drops elements as above."""
    call = _arguments_of_attention.bind(*args, **kwargs)
    call.apply_defaults()
    if not call.arguments["need_weights"]:
        call.arguments["dropout_p"] = 0.0
    return F.multi_head_attention_forward(*call.args, **call.kwargs)


_arguments_of_attention = signature(F.multi_head_attention_forward)
_STAND_INS: dict[Any, Callable[..., Any]] = {
    F.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    F.dropout: _dropout,
    torch.dropout: _dropout,
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _multi_head_attention,
}
