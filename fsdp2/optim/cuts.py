"""Finds the matrices in a parameter, and which rows or columns of each a rank holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..core.compat import local_if_any
from ..core.group import FSDPParamGroup
from ..ext.owners import sharded_owner


class Cut(NamedTuple):
    """Says how the ranks of `process_group` share one parameter.

    `shape`: of what they share, [rows, columns] or [matrices, rows, columns]; that is the whole parameter, or under
        expert parallelism the matrices of some experts.
    `dim`: the dimension of that along which they cut it, into chunks as `Tensor.chunk` makes them.
    `size`, `rank`: their number, and the index of this rank; 1 and 0 where each rank has all of it.
    `device`: where matrices travel and are computed.
    `owner`: the group of fsdp2 that manages the parameter, if one does.
    """

    name: str
    shape: tuple[int, ...]
    dim: int
    size: int
    rank: int
    process_group: dist.ProcessGroup | None
    device: torch.device
    owner: FSDPParamGroup | None

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

    `param`: the number of the parameter. `stack`: the first of its matrices, and the one after the last. `first`:
    the row of the parameter with which it begins. `holders`: the ranks that hold a part of it.
    """

    param: int
    stack: tuple[int, int]
    first: int
    rows: int
    cols: int
    holders: range

    @property
    def number(self) -> int:
        """How many matrices it is."""
        return self.stack[1] - self.stack[0]

    @property
    def numel(self) -> int:
        return self.number * self.rows * self.cols

    @property
    def is_local(self) -> bool:
        return len(self.holders) == 1

    def axis(self, cut: Cut) -> int:
        """Returns the axis along which ranks cut the matrix: 0 rows, 1 columns, -1 none."""
        return cut.dim - len(cut.shape) + 2

    def part(self, cut: Cut, rank: int) -> tuple[int, int]:
        """Returns the first of its rows, or columns, that `rank` holds, and the one after the last."""
        first, last = cut.bounds(rank)
        if self.axis(cut) == 0:
            first, last = (min(max(each - self.first, 0), self.rows) for each in (first, last))
        return first, last

    def part_shape(self, cut: Cut, rank: int) -> tuple[int, int]:
        """Returns the shape of what `rank`, one of several holders, has of the matrix."""
        first, last = self.part(cut, rank)
        return (last - first, self.cols) if self.axis(cut) == 0 else (self.rows, last - first)

    def view(self, local: Tensor, cut: Cut) -> Tensor:
        """Returns the part of a local tensor that belongs to it: [rows, columns], or [matrices, rows, columns] of a
        parameter of 3 dimensions that this rank has as a whole.
        """
        axis, start = self.axis(cut), cut.bounds(cut.rank)[0]
        if axis == -1:
            return local[self.stack[0] - start : self.stack[1] - start]
        if local.dim() == 3:
            return local[self.stack[0]]
        first, last = self.first, self.first + self.rows
        if axis == 0:
            first, last = (min(max(each - start, 0), len(local)) for each in (first, last))
        return local[first:last]


def find_cut(param: Tensor, name: str) -> Cut:
    """Returns how `param`, of 2 or 3 dimensions, is cut. It communicates nothing.

    Raises:
        NotImplementedError: ranks cut it along two axes of a mesh, of which one is that of tensor parallelism.
        ValueError: each rank holds a value that is still to be summed.
    """
    local = local_if_any(param)
    whole = Cut(name, tuple(param.shape), 0, 1, 0, None, local.device, None)
    if not isinstance(param, DTensor):
        return whole
    owned = sharded_owner(param)
    if owned is not None:
        mesh, shape = owned.param.mesh, owned.param.gathered_shape
        if shape[-2:] != tuple(param.shape[-2:]):
            raise _two_axes(param, name)
        whole = whole._replace(name=owned.param.name, shape=shape, owner=owned.group, device=mesh.device)
        if local.is_meta or mesh.size == 1:
            whole = whole._replace(device=local.device)
        if mesh.size == 1:
            return whole
        return whole._replace(dim=owned.param.dim, size=mesh.size, rank=mesh.rank, process_group=mesh.shard_group)
    on = param.device_mesh
    axes = [i for i, each in enumerate(param.placements) if not each.is_replicate() and on.size(i) > 1]
    if any(param.placements[axis].is_partial() for axis in axes):
        raise ValueError(f"{name}: expected a parameter that is sharded or replicated, got {param.placements}")
    if len(axes) > 1:
        raise _two_axes(param, name)
    if not axes:
        return whole
    placement = param.placements[axes[0]]
    dim = getattr(placement, "dim", 0) % param.dim()
    rank = on.get_local_rank(axes[0])
    return whole._replace(dim=dim, size=on.size(axes[0]), rank=rank, process_group=on.get_group(axes[0]))


def _two_axes(param: DTensor, name: str) -> NotImplementedError:
    return NotImplementedError(
        f"{name}: expected a matrix that data-parallel ranks alone cut, got placements {param.placements} on "
        f"{param.device_mesh}. Leave it to an elementwise optimizer: split_matrices(..., exclude=({name!r},))."
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
            yield Matrix(param, (0, 1), first, size, cols, holders)
            first += size
    elif cut.dim == 0:
        for rank in range(cut.size):
            stack = cut.bounds(rank)
            if stack[1] > stack[0]:
                yield Matrix(param, stack, 0, rows, cols, range(rank, rank + 1))
    else:
        holders = cut.holders(0, cut.shape[cut.dim])
        yield from (Matrix(param, (i, i + 1), 0, rows, cols, holders) for i in range(lead[0]))
