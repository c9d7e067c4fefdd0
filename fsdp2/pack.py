"""Views into byte buffers and copies between layouts. No process group, no allocation, no parameter.

Shape legend:  W ranks,  S elements of one padded shard,  P elements of one rank's packed segment.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from . import torch_compat
from .layout import BucketLayout, ParamSpec


def view_bytes(buffer: Tensor, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
    """`numel` elements of `dtype` that start at byte `offset` of a uint8 buffer; 1-D, shares memory and versions."""
    return buffer[offset : offset + numel * dtype.itemsize].view(dtype)


def leaf_over(buffer: Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor over `buffer`'s storage with a version counter of its own: to autograd, refilling is no change."""
    leaf = torch.empty(0, dtype=dtype, device=buffer.device)
    stride = torch.empty(shape, device="meta").stride()
    return leaf.set_(buffer.untyped_storage(), offset // dtype.itemsize, shape, stride)


def pack_gradients(
    gradients: Mapping[int, Tensor], specs: tuple[ParamSpec, ...], layout: BucketLayout, out_WP: Tensor
) -> None:
    """Copy the bucket's packed gradients into one segment per receiving rank, casting to `out_WP.dtype`.

    Elements that are padding keep whatever they held: the sums made of them are never read.
    """
    slots, sources = list(out_WP.split_with_sizes(layout.packed_sizes, 1)), []
    for place, i in enumerate(layout.packed):
        spec, gradient = specs[i], gradients[i]
        if spec.is_even:
            sources.append(gradient.reshape(spec.world_size, spec.shard_numel))
            continue
        whole = gradient.shape[0] // spec.chunk_rows
        rest = gradient[whole * spec.chunk_rows :].reshape(-1)
        if rest.numel():
            slots[place][whole, : rest.numel()].copy_(rest)
        sources.append(gradient[: whole * spec.chunk_rows].reshape(whole, spec.shard_numel))
        slots[place] = slots[place][:whole]
    torch_compat.copy_all(slots[: len(sources)], sources)
