"""Computes checksums of tensors, to find out whether ranks hold the same bits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..torch_private.internals import inner_tensors, local_if_any

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # wider elements count as several of 8 bytes
# 8 bytes of each element are computed with, so not of all at once; on CPU as many as stay in a core's cache.
_CHUNK_NUMEL, _CHUNK_NUMEL_CPU = 1 << 20, 1 << 16
_OF_BITS, _OF_POSITIONS = 0x1E3779B97F4A7C15, 0x2545F4914F6CDD1D  # odd: nothing is lost
_LOW = 0xFFFFFFFF
PART = 1 << 40
"""Positions of the parts of one digest begin at multiples of this."""


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


def digest(tensor: Tensor, first: int = 0, width: int = 0, pitch: int = 0) -> Tensor:
    """Returns the sum, modulo 2^64, of a hash of the bits and the position of each element of a plain tensor: an int64
    without dims, where the tensor lies.

    So digests of the parts of a tensor add up to that of the whole, however it is cut. One changed element always
    changes it.

    Args:
        tensor: a plain tensor of any dtype.
        first: the position of its first element.
        width: behind so many elements, positions go on `pitch` behind the first of these. 0: they follow each other.
    """
    bits = bits_of(tensor)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    size = _CHUNK_NUMEL_CPU if bits.device.type == "cpu" else _CHUNK_NUMEL
    for i, chunk in enumerate(bits.split(size)):
        positions = torch.arange(i * size, i * size + len(chunk), device=bits.device)
        if width:
            positions = positions // width * pitch + positions % width
        mixed = positions.add_(first).mul_(_OF_POSITIONS)
        mixed += chunk.to(torch.int64) * _OF_BITS
        mixed ^= (mixed >> 32).bitwise_and_(_LOW)  # the high half, without a sign: what differs still does
        total += mixed.sum()
    return total


def checksum(tensor: Tensor) -> Tensor:
    """Returns the digest of what this rank holds of any tensor, an int64 without dims."""
    parts = values_of(tensor)
    sums = [digest(part, i * PART) for i, part in enumerate(parts)]
    return torch.stack(sums).sum() if sums else torch.zeros((), dtype=torch.int64)


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
    sums = [digest(whole, i * PART) for i, whole in enumerate(wholes)]
    return torch.stack([each.to(sums[0].device) for each in sums]).sum()


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
