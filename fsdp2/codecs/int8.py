"""A codec of one byte an element: blocks of int8, each with a scale.

Shape legend:  W ranks,  P elements of a segment,  B = ceil(P / block) blocks,  n bytes of an encoded segment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..engine.codec import Rows, sum_decoded
from ..engine.layout import RANK_ALIGNMENT, align

# Elements that are encoded at a time: their temporary copies take a few times 64 MiB.
_ELEMENTS_AT_A_TIME = 16 * 1024 * 1024
_LARGEST = 127


@dataclass(frozen=True)
class Int8:
    """Gradients are sent as int8, with one float32 scale for each block: 1 + 4 / block bytes an element.

    A block is scaled so that its largest absolute value a is 127. Each element is then rounded to a whole number of
    steps of a / 127, by default at random, up or down so that its expected value is the element itself. So its error is
    less than a step; that of the mean of W ranks' gradients has the expectation zero, and a variance of at most
    (a / 127)^2 / (4 W). Of a block with an infinite value or NaN nothing finite arrives: a loss scaler notices.
    (Blocks: Dettmers et al., arXiv 2110.02861. Rounding at random: Alistarh et al., arXiv 1610.02132.)

    Args:
        block: elements that share a scale; of one rank's segment of a bucket, hence perhaps of several parameters.
        feedback: round to the nearest step, an error of at most half a step, and add what rounding has changed to the
            next gradient (error feedback: Karimireddy et al., arXiv 1901.09847). Each rank then keeps memory as
            large as the unsharded gradients of all groups, in the reduce dtype: for small models. What is kept has the
            scale of the loss; where a loss scaler changes that, one step's feedback is too large or too small.

    Raises:
        TypeError, ValueError: an argument is of another type, or `block` is not positive.
    """

    block: int = 128
    feedback: bool = False

    exchanges: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if isinstance(self.block, bool) or not isinstance(self.block, int):
            raise TypeError(f"Int8.block: expected a number of elements, got {self.block!r}")
        if self.block < 1:
            raise ValueError(f"Int8.block: expected a positive number of elements, got {self.block}")
        if not isinstance(self.feedback, bool):
            raise TypeError(f"Int8.feedback: expected a bool, got {self.feedback!r}")

    def packed_dtype(self, summed: torch.dtype) -> torch.dtype:
        return summed

    def sent_nbytes(self, numel: int, summed: torch.dtype) -> int:
        return align(4 * self._blocks(numel) + numel, RANK_ALIGNMENT)

    def encode(self, numbers: Tensor, seed: int) -> Tensor:
        """Returns uint8 [W, n]: of each segment its B scales, its P elements, and up to 15 zeros."""
        rows, numel = numbers.shape
        wire = numbers.new_zeros(rows, self.sent_nbytes(numel, numbers.dtype), dtype=torch.uint8)
        generator = None
        if not (self.feedback or numbers.is_meta):
            generator = torch.Generator(numbers.device).manual_seed(seed)
        at_a_time = max(1, _ELEMENTS_AT_A_TIME // max(numel, 1))
        for first in range(0, rows, at_a_time):
            self._encode(numbers[first : first + at_a_time], wire[first : first + at_a_time], generator)
        return wire

    def _encode(self, numbers: Tensor, wire: Tensor, generator: torch.Generator | None) -> None:
        scales, elements = self._views(wire, numbers.size(1))
        wide = numbers if numbers.dtype == torch.float64 else numbers.float()
        padding = scales.size(1) * self.block - numbers.size(1)
        if padding:
            wide = torch.nn.functional.pad(wide, (0, padding))
        blocks = wide.unflatten(1, (scales.size(1), self.block))
        scales.copy_(torch.linalg.vector_norm(blocks, torch.inf, dim=2) / _LARGEST)
        steps = blocks / scales.where(scales > 0, 1)[:, :, None]
        if self.feedback:
            steps.round_()
        else:
            steps.add_(torch.rand(steps.shape, dtype=steps.dtype, device=steps.device, generator=generator)).floor_()
        elements.copy_(steps.clamp_(-_LARGEST, _LARGEST).flatten(1)[:, : numbers.size(1)])

    def decode(self, wire: Tensor, numbers: Tensor) -> None:
        numel = numbers.size(1)
        scales, elements = self._views(wire, numel)
        whole = numel // self.block * self.block
        if whole:
            shape = whole // self.block, self.block
            steps = elements[:, :whole].unflatten(1, shape)
            torch.mul(steps, scales[:, : shape[0], None], out=numbers[:, :whole].unflatten(1, shape))
        if numel > whole:
            torch.mul(elements[:, whole:], scales[:, -1:], out=numbers[:, whole:])

    def sum(self, rows: Rows, total: Tensor) -> None:
        sum_decoded(self, rows, total)

    def _blocks(self, numel: int) -> int:
        return -(-numel // self.block)

    def _views(self, wire: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Returns views of encoded segments: their scales, [R, B] float32, and their elements, [R, P] int8."""
        nbytes = 4 * self._blocks(numel)
        return wire[:, :nbytes].view(torch.float32), wire[:, nbytes : nbytes + numel].view(torch.int8)
