"""Computes checksums of tensors, to find out whether ranks hold the same bits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..torch_private.internals import inner_tensors, local_if_any

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # wider elements count as several of 8 bytes
_CHUNK_NUMEL = 1 << 20  # 8 bytes of each element are computed with, so not of all at once
_FACTOR = 0x1E3779B97F4A7C15  # odd: nothing is lost


def values_of(tensor: Tensor) -> list[Tensor]:
    """Returns the plain, dense tensors on a device that `tensor` consists of, on this rank."""
    parts = (part.detach() for part in inner_tensors(tensor))
    return [part for part in parts if part.layout == torch.strided and not part.is_meta]


def bits_of(tensor: Tensor) -> Tensor:
    """Returns the memory of a plain tensor as flat integers: NaN equals itself."""
    return tensor.detach().reshape(-1).view(_INTEGERS.get(tensor.element_size(), torch.int64))


def are_alike(one: Tensor, other: Tensor) -> bool:
    """Returns True if two tensors hold the same bits on this rank, as far as that can be said."""
    if one is other:
        return True
    first, second = (local_if_any(each.detach()) for each in (one, other))
    if (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    return first.is_meta or second.is_meta or torch.equal(bits_of(first), bits_of(second).to(first.device))


def checksum(tensor: Tensor) -> Tensor:
    """Returns the checksum of the bits that this rank holds, an int64 without dims. Another value at one index, or two
    exchanged, change it.
    """
    parts = values_of(tensor)
    total = torch.zeros((), dtype=torch.int64, device=parts[0].device if parts else None)
    for part in parts:
        for chunk in bits_of(part).split(_CHUNK_NUMEL):
            mixed = chunk.to(torch.int64) * _FACTOR
            mixed ^= mixed >> 29
            total = total * _FACTOR + (mixed * (2 * torch.arange(len(chunk), device=chunk.device) + 1)).sum()
    return total


def joint_checksum(tensors: Iterable[Tensor]) -> Tensor | int:
    """Returns one checksum of the bits of all `tensors`, in order: an int64 without dims, where the first of them lies.

    Small ones of one element size are copied into one tensor, so that the device does little for each.
    """
    of_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for bits in (bits_of(part) for tensor in tensors for part in values_of(tensor)):
        of_kind.setdefault((bits.dtype, bits.device), []).append(bits)
    wholes = [large for parts in of_kind.values() for large in parts if len(large) > _CHUNK_NUMEL]
    for parts in of_kind.values():
        small = [each for each in parts if len(each) <= _CHUNK_NUMEL]
        if small:
            wholes.append(torch.cat(small))
    if not wholes:
        return 0
    sums = [checksum(whole) for whole in wholes]
    return checksum(torch.stack([each.to(sums[0].device) for each in sums])) if len(sums) > 1 else sums[0]


def word_sum(tensor: Tensor) -> Tensor:
    """Returns the sum of the bits of a plain tensor, an int64 without dims. Another value at one index changes it, an
    exchange of two does not. It runs at the speed of memory: words of 8 bytes are summed ten times as fast as others.
    """
    nbytes = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = nbytes.numel() // 8 * 8
    return nbytes[:whole].view(torch.int64).sum() + nbytes[whole:].sum()


def read(numbers: Sequence[Tensor]) -> list[int]:
    """Returns what tensors without dims hold, waiting for their device once."""
    return torch.stack([number.to(numbers[0].device, torch.int64) for number in numbers]).tolist() if numbers else []
