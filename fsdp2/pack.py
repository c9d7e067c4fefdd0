"""Views into byte buffers and copies between layouts. No process group, no allocation, no parameter.

Shape legend:  W ranks,  S elements of one padded shard,  P elements of one rank's packed segment.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

from .layout import ParamSpec


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


@cache
def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """In elements, as `torch.empty(shape)` has it."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def leaf_over(buffer: Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor over `buffer`'s storage with a version counter of its own: to autograd, refilling is no change."""
    leaf = torch.empty(0, dtype=dtype, device=buffer.device)
    return leaf.set_(buffer.untyped_storage(), offset // dtype.itemsize, shape, contiguous_stride(shape))


def costs_launches(device: torch.device) -> bool:
    """Whether few operations are worth more than few bytes: each is a kernel, which takes longer to launch than little
    takes to copy.
    """
    return device.type != "cpu"


# Pairs of a target and a source.
Copies = list[tuple[Tensor, Tensor]]


def group_copies(copies: Iterable[tuple[Tensor, Tensor]]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Targets and sources of foreach copies that together do `copies`.

    A foreach copy is one kernel on CUDA if its targets have one dtype, its sources have one, and each is laid out like
    the other; otherwise it is one for each pair. (Before torch 2.12, https://github.com/pytorch/pytorch/pull/173531, it
    also wrote wrong bytes where targets differed in dtype.)
    """
    groups: dict[object, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in copies:
        is_alike = target.is_contiguous() and source.is_contiguous()
        targets, sources = groups.setdefault((target.dtype, source.dtype, is_alike), ([], []))
        targets.append(target)
        sources.append(source)
    return [*groups.values()]


def split_chunks(whole: Tensor, spec: ParamSpec) -> list[Tensor]:
    """Views of `whole`: its whole chunks along `spec.dim`, stacked in a new first dim; then what is left over."""
    rows, dim = spec.whole_chunks * spec.chunk_rows, spec.dim
    chunks = whole.narrow(dim, 0, rows).unflatten(dim, (spec.whole_chunks, spec.chunk_rows)).movedim(dim, 0)
    return [chunks] if rows == spec.num_rows else [chunks, whole.narrow(dim, rows, spec.num_rows - rows)]


def pack_piece(gradient: Tensor, spec: ParamSpec, first: int, last: int, out_WP: Tensor) -> None:
    """Copy elements `first` to `last` of each rank's shard, along dim 0, of one gradient, casting to `out_WP.dtype`.

    What is padding keeps whatever it held.
    """
    flat, shard, last = gradient.reshape(-1), spec.shard_numel, min(last, spec.shard_numel)
    whole = spec.whole_chunks * shard
    out_WP[: spec.whole_chunks, : last - first] = flat[:whole].view(spec.whole_chunks, shard)[:, first:last]
    rest = flat[whole:][first:last]
    if rest.numel():
        out_WP[spec.whole_chunks, : rest.numel()] = rest
