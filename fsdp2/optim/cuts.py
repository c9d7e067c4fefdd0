"""Finds the matrices in a parameter, and which rows or columns of each a rank holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..shards.dtensors import device_of
from ..shards.find import shard_of
from ..shards.protocol import ShardParam
from ..shards.tensors import local_if_any


class Cut(NamedTuple):
    """Says how the ranks of `process_group` share one parameter.

    `shape`: of what they share, [rows, columns] or [matrices, rows, columns]; that is the whole parameter, or under
        expert parallelism the matrices of some experts.
    `dim`: the dimension of that along which they cut it, into chunks as `Tensor.chunk` makes them.
    `size`, `rank`: their number, and the index of this rank; 1 and 0 where each rank has all of it.
    `device`: where matrices travel and are computed.
    `owner`: the sharded parameter; None for a plain tensor.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    size: int
    rank: int
    process_group: dist.ProcessGroup | None
    device: torch.device
    owner: ShardParam | None

    def bounds(self, rank: int) -> tuple[int, int]:
        """Returns the first index along `dim` that `rank` holds, and the one after its last."""
        length = self.shape[self.dim]
        chunk = self.chunk
        return min(rank * chunk, length), min((rank + 1) * chunk, length)

    @property
    def chunk(self) -> int:
        return -(-self.shape[self.dim] // self.size)

    def holders(self, first: int, last: int) -> range:
        """Returns the ranks that hold indices from `first` to before `last` along `dim`."""
        return range(first // self.chunk, (last - 1) // self.chunk + 1) if last > first else range(0)


class Matrix(NamedTuple):
    """Describes one matrix of a parameter, or several of equal shape that one rank has as a whole.

    `param`: the number of the parameter. `stack`: the numbers of its matrices. `first`:
    the row of the parameter with which it begins. `holders`: the ranks that hold a part of it.
    """

    param: int
    stack: range
    first: int
    rows: int
    cols: int
    holders: range

    @property
    def numel(self) -> int:
        return len(self.stack) * self.rows * self.cols

    @property
    def is_local(self) -> bool:
        return len(self.holders) == 1

    def axis(self, cut: Cut) -> int:
        """Returns the axis along which ranks cut the matrix: 0 rows, 1 columns, -1 none."""
        return cut.dim - len(cut.shape) + 2

    def part_shape(self, cut: Cut, rank: int) -> tuple[int, int]:
        """Returns the shape of what `rank`, one of several holders, has of the matrix."""
        first, last = cut.bounds(rank)
        if self.axis(cut) == 0:
            return min(last, self.first + self.rows) - max(first, self.first), self.cols
        return self.rows, last - first

    def view(self, local: Tensor, cut: Cut) -> Tensor:
        """Returns the part of a local tensor that belongs to it: [rows, columns], or [matrices, rows, columns] of a
        parameter of 3 dimensions that this rank has as a whole.
        """
        axis, start = self.axis(cut), cut.bounds(cut.rank)[0]
        if axis == -1:
            return local[self.stack.start - start : self.stack.stop - start]
        if local.dim() == 3:
            return local[self.stack.start]
        first, last = self.first, self.first + self.rows
        if axis == 0:
            first, last = (min(max(each - start, 0), len(local)) for each in (first, last))
        return local[first:last]


def find_cut(param: Tensor, name: str) -> Cut:
    """Returns how `param`, of 2 or 3 dimensions, is cut. It communicates nothing. `name`: if nothing manages it.

    Raises:
        NotImplementedError: ranks cut its matrices along two axes of a mesh, of which one is that of tensor
            parallelism, or hold values that are still to be summed.
    """
    local, shape, shard = local_if_any(param), tuple(param.shape), shard_of(param)
    if shard is None:
        return Cut(name, shape, 0, 1, 0, None, local.device, None)
    name = shard.names[0] if shard.slots else name
    device = local.device if local.is_meta else device_of(param)
    try:
        cuts = shard.cuts
    except NotImplementedError:
        cuts = None
    if cuts is not None and not cuts:
        return Cut(name, shape, 0, 1, 0, None, device, shard)
    # Outer cuts may leave matrices whole: experts that are sharded by expert.
    if cuts is not None and all(each.dim < len(shape) - 2 for each in cuts[1:]):
        inner = cuts[0]
        return Cut(name, inner.shape, inner.dim, inner.size, inner.rank, inner.group, device, shard)
    placements = param.placements if isinstance(param, DTensor) else ()
    raise NotImplementedError(
        f"{name}: expected a matrix that data-parallel ranks alone cut, got placements {placements}. Leave it to an "
        f"elementwise optimizer: split_matrices(..., exclude=({name!r},))."
    )


def block_sizes(blocks: int | Sequence[int], shape: Sequence[int], name: str) -> list[int]:
    """Returns the numbers of rows of the blocks that a parameter consists of. `blocks`: how many of equal size, or
    these numbers.

    Raises:
        ValueError: they do not make up the parameter.
    """
    rows = shape[0]
    sizes = [rows // max(blocks, 1)] * blocks if isinstance(blocks, int) else list(blocks)
    if len(shape) != 2 or sum(sizes) != rows or any(size < 1 for size in sizes):
        expected = f"a divisor of its {rows} rows, or sizes that add up to them"
        raise ValueError(f"{name}: blocks: expected {expected}, got {blocks} for shape {tuple(shape)}")
    return sizes


def find_matrices(param: int, cut: Cut, blocks: int | Sequence[int] | None) -> Iterator[Matrix]:
    """Yields all matrices of a parameter, those that other ranks have included, in the same order on all ranks."""
    *lead, rows, cols = cut.shape
    if rows * cols == 0:
        return
    if not lead:
        first = 0
        for size in [rows] if blocks is None else block_sizes(blocks, cut.shape, cut.name):
            holders = cut.holders(first, first + size) if cut.dim == 0 else cut.holders(0, cols)
            yield Matrix(param, range(1), first, size, cols, holders)
            first += size
    elif cut.dim == 0:
        for rank in range(cut.size):
            stack = range(*cut.bounds(rank))
            if stack:
                yield Matrix(param, stack, 0, rows, cols, range(rank, rank + 1))
    else:
        holders = cut.holders(0, cut.shape[cut.dim])
        yield from (Matrix(param, range(i, i + 1), 0, rows, cols, holders) for i in range(lead[0]))
