"""Dequantises tensors of files in FP8: the values times the scales of their blocks, in fp32, any box of them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .files import Box, FileTensor

# What follows the name of a tensor in that of its scales: of DeepSeek and Transformers; of compressed-tensors, FBGEMM.
_SUFFIXES = ("_scale_inv", "_scale")
_VALUES = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALES = (torch.float32, torch.bfloat16, torch.float16)
# How names of packed values end: of MXFP4, compressed-tensors, GPTQ and AWQ, bitsandbytes.
_PACKED = re.compile(r"(_blocks|_packed|\.qweight|\.absmax)$")
DEQUANTISE = (
    "Dequantise the files before: load them by from_pretrained with dequantize=True in the quantization_config, and "
    "save that."
)


class Scales(NamedTuple):
    """The scales of a quantised tensor.

    Args:
        file: the tensor of scales, with as many dims as the quantised one.
        block: how many indices of each dim share a scale. The last block of a dim may be shorter.
    """

    file: FileTensor
    block: tuple[int, ...]

    def around(self, box: Box) -> Box:
        """Returns the box of scales that a box of the quantised tensor needs."""
        starts = tuple(start // size for start, size in zip(box.starts, self.block, strict=True))
        ends = (-(-(start + n) // size) for start, n, size in zip(*box, self.block, strict=True))
        return Box(starts, tuple(end - start for start, end in zip(starts, ends, strict=True)))

    def multiply(self, values: Tensor, scales: Tensor, box: Box) -> Tensor:
        """Returns the values of a box in fp32. `scales`: those of `around(box)`, on any device."""
        scales = scales.to(values.device, torch.float32)
        for dim, (start, n, size) in enumerate(zip(*box, self.block, strict=True)):
            indices = torch.arange(start, start + n, device=values.device) // size - start // size
            scales = scales.index_select(dim, indices)
        return scales.mul_(values.float())


def find_scales(stored: FileTensor, files: Mapping[str, FileTensor], config: Mapping[str, Any]) -> Scales | None:
    """Returns the scales of a tensor in the files; None if it is not quantised.

    Args:
        stored: the tensor.
        files: all tensors in the files, by name.
        config: the `quantization_config` beside the files; empty if there is none.

    Raises:
        NotImplementedError: it is quantised in another way than FP8 with a scale for each block, row, or tensor.
        ValueError: its scales have the shape of no such way, or are missing.
    """
    if stored.dtype.itemsize > 1 or stored.dtype is torch.bool:
        return None
    found = next((files[stored.name + end] for end in _SUFFIXES if stored.name + end in files), None)
    what = f"{stored.file} has it quantised ({stored.dtype}"
    if found is None:
        if config and stored.dtype in _VALUES:
            raise ValueError(f"{stored.name}: {what}), expected its scales as {stored.name}_scale_inv, found none.")
        return None
    if stored.dtype not in _VALUES or found.dtype not in _SCALES:
        raise NotImplementedError(
            f"{stored.name}: {what}, with {found.name} in {found.dtype}), expected FP8 values with floating-point "
            f"scales. {DEQUANTISE}"
        )
    blocks = config.get("weight_block_size")
    for block in _blocks(stored.shape, blocks):
        grid = tuple(-(-size // n) for size, n in zip(stored.shape, block, strict=True))
        if found.shape == grid or (math.prod(grid) == 1 and math.prod(found.shape) == 1):
            return Scales(found._replace(shape=grid), block)
    raise ValueError(
        f"{stored.name}: {what}, with {found.name} of shape {list(found.shape)}). For shape {list(stored.shape)}, "
        f"expected a scale for the tensor, for each row, or for each block of weight_block_size={blocks} in the "
        "quantization_config of config.json beside the files. Correct config.json."
    )


def _blocks(shape: Sequence[int], blocks: Any) -> list[tuple[int, ...]]:
    """Returns the blocks that a tensor of this shape may be quantised in. All end dims but the last two are apart."""
    found = [tuple(shape)]
    if shape:
        found.append((*[1] * (len(shape) - 1), shape[-1]))
    if len(shape) >= 2 and isinstance(blocks, list) and len(blocks) == 2 and all(type(n) is int and n for n in blocks):
        found.insert(0, (*[1] * (len(shape) - 2), *blocks))
    return found


def find_packed(names: Sequence[str]) -> str | None:
    """Returns the first of these names that only files with packed values have (4 bits each, for example); or None."""
    return next((name for name in names if _PACKED.search(name)), None)
