"""Views into byte buffers and copies between layouts. No process group, no allocation, no parameter.

Shape legend:  W ranks,  S elements of one padded shard,  P elements of one rank's packed segment.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .layout import BucketLayout, ParamSpec


def view_bytes(buffer: Tensor, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
    """`numel` elements of `dtype` that start at byte `offset` of a uint8 buffer; 1-D, shares memory and versions."""
    return buffer[offset : offset + numel * dtype.itemsize].view(dtype)


def leaf_over(buffer: Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor over `buffer`'s storage with a version counter of its own: refilling the storage is no in-place change."""
    leaf = torch.empty(0, dtype=dtype, device=buffer.device)
    stride = torch.empty(shape, device="meta").stride()
    return leaf.set_(buffer.untyped_storage(), offset // dtype.itemsize, shape, stride)


def pack_gradients(
    gradients: Mapping[int, Tensor], specs: tuple[ParamSpec, ...], layout: BucketLayout, out_WP: Tensor
) -> None:
    """Copy the bucket's packed gradients into one segment per receiving rank, casting to `out_WP.dtype`.

    Elements that are padding keep whatever they held: the sums made of them are never read.
    """
    for i in layout.packed:
        spec, first = specs[i], layout.offsets[i] - layout.packed_start
        slot_WS = out_WP[:, first : first + spec.shard_numel]
        gradient = gradients[i].reshape(-1)
        whole = gradient.numel() // max(spec.shard_numel, 1)
        split = whole * spec.shard_numel
        slot_WS[:whole].copy_(gradient[:split].view(whole, spec.shard_numel))
        if split < gradient.numel():
            slot_WS[whole, : gradient.numel() - split].copy_(gradient[split:])
