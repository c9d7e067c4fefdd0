"""Views into byte buffers and copies between layouts. No process group, no allocation, no parameter.

Shape legend:  W ranks,  S elements of one padded shard,  P elements of one rank's packed segment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from . import torch_compat
from .layout import BucketLayout, ParamSpec


def view_bytes(buffer: Tensor, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
    """`numel` elements of `dtype` that start at byte `offset` of a uint8 buffer; 1-D, shares memory and versions."""
    return buffer[offset : offset + numel * dtype.itemsize].view(dtype)


def alias(buffer: Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Like `view_bytes`, but with a storage of its own that shares `buffer`'s memory.

    A DTensor whose local tensor begins inside a storage can't be deep-copied, staged or saved on its own.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype, device=buffer.device)
    storage = buffer.untyped_storage()[offset : offset + nbytes]
    return torch.empty(0, dtype=dtype, device=buffer.device).set_(storage, 0, shape, contiguous_stride(shape))


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def leaf_over(buffer: Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor over `buffer`'s storage with a version counter of its own: to autograd, refilling is no change."""
    leaf = torch.empty(0, dtype=dtype, device=buffer.device)
    return leaf.set_(buffer.untyped_storage(), offset // dtype.itemsize, shape, contiguous_stride(shape))


def pack_gradients(
    gradients: Mapping[int, Tensor], specs: tuple[ParamSpec, ...], layout: BucketLayout, out_WP: Tensor
) -> None:
    """Copy the bucket's packed gradients into one segment per receiving rank, casting to `out_WP.dtype`.

    Elements that are padding keep whatever they held: the sums made of them are never read.
    """
    *slots_WS, _ = out_WP.split_with_sizes(layout.packed_sizes, 1)
    wholes = []
    for place, (i, (whole, rows)) in enumerate(zip(layout.packed, layout.whole_chunks, strict=True)):
        gradient, slot_WS = gradients[i], slots_WS[place]
        if whole < out_WP.shape[0]:
            slots_WS[place] = slot_WS[:whole]
            if rows < gradient.shape[0]:
                rest = gradient[rows:].reshape(-1)
                slot_WS[whole, : rest.numel()].copy_(rest)
                gradient = gradient[:rows]
        wholes.append(gradient.reshape(slots_WS[place].shape))
    torch_compat.copy_all(slots_WS, wholes)
