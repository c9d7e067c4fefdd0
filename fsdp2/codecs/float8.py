"""A codec of one byte an element: float8 numbers, with a scale for each rank's shard.

Shape legend:  W ranks,  P elements of a segment,  n = 16 + P bytes of an encoded one, rounded up to a multiple of 16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..engine.codec import Rows, sum_decoded
from ..engine.layout import RANK_ALIGNMENT, align

_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Float8:
    """Weights, or gradients, are sent as float8, with one float32 scale for each rank's shard of a parameter.

    A shard is scaled so that its largest absolute value is the largest number of `dtype`, and rounded to nearest: to 3
    bits of mantissa, or 2, over 2^15 or 2^30 in range. Of a shard with an infinite value or NaN nothing finite arrives.
    Of gradients the segment of a bucket has one scale, and may be of several parameters: Int8 has scales for blocks.

    Args:
        dtype: torch.float8_e4m3fn, or torch.float8_e5m2.

    Raises:
        ValueError: another dtype.
    """

    dtype: torch.dtype = torch.float8_e4m3fn

    exchanges: ClassVar[bool] = True
    feedback: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ValueError(f"Float8.dtype: expected one of {_DTYPES}, got {self.dtype!r}")

    def packed_dtype(self, summed: torch.dtype) -> torch.dtype:
        return summed

    def sent_nbytes(self, numel: int, summed: torch.dtype) -> int:
        return align(RANK_ALIGNMENT + numel, RANK_ALIGNMENT)

    def encode(self, numbers: Tensor, seed: int) -> Tensor:
        """Returns uint8 [W, n]: of each segment its scale, 12 zeros, its P elements, and up to 15 zeros."""
        rows, numel = numbers.shape
        wire = numbers.new_zeros(rows, self.sent_nbytes(numel, numbers.dtype), dtype=torch.uint8)
        if numel:
            scales, elements = self._views(wire, numel)
            largest = torch.finfo(self.dtype).max
            wide = numbers if numbers.dtype == torch.float64 else numbers.float()
            scales.copy_(torch.linalg.vector_norm(wide, torch.inf, dim=1, keepdim=True) / largest)
            elements.copy_((wide / scales.where(scales != 0, 1)).clamp_(-largest, largest))
        return wire

    def decode(self, wire: Tensor, numbers: Tensor) -> None:
        scales, elements = self._views(wire, numbers.size(1))
        numbers.copy_(elements).mul_(scales)

    def sum(self, rows: Rows, total: Tensor) -> None:
        sum_decoded(self, rows, total)

    def _views(self, wire: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Returns views of encoded segments: their scales, [R, 1] float32, and their elements, [R, P]."""
        elements = wire[:, RANK_ALIGNMENT : RANK_ALIGNMENT + numel].view(self.dtype)
        return wire[:, :4].view(torch.float32), elements
