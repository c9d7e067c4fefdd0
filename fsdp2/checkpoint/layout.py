"""Computes where each byte of a checkpoint lies, from names, shapes, dtypes, meshes and ranks, without communication.

A `Kind` lists what ranks of one kind hold. All ranks of a plain run are of one kind; tensor parallelism, pipelines and
experts make several. From the kinds alone, `Layout` computes which rank writes which part of which tensor, and at which
byte of its file. Ranks that know the same kinds compute the same layout, and so does a program that loads it later.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..shards.tensors import some_of

# The two indices of a checkpoint: that of torch.distributed.checkpoint, which is written last, and the kinds of ranks.
METADATA, LAYOUT = ".metadata", ".fsdp2_layout"
FORMAT = 2
# Bytes at the start of each file, which name the save and the rank.
FILE_HEAD = 512
# Bytes before and behind the values of each part, for the head and the tail that torch.save puts around them.
HEAD_ROOM = TAIL_ROOM = 1024
_ALIGNMENT = 64


class Mesh(NamedTuple):
    """A device mesh: the sizes of its axes, and its global ranks in row-major order."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]


class Entry(NamedTuple):
    """One tensor of a checkpoint.

    Args:
        name: its key in the flat state dict.
        dtype: the name of its dtype in torch, such as "bfloat16".
        shape: the shape of the whole tensor.
        mesh: the index of its mesh in the kind; -1 if each rank of the kind holds all of it.
        cuts: pairs of a mesh axis and a dim, in the order in which these axes cut the tensor into chunks.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    mesh: int
    cuts: tuple[tuple[int, int], ...]


class Kind(NamedTuple):
    """The tensors and objects that ranks of one kind hold. `objects`: the keys of values that are no tensors."""

    meshes: tuple[Mesh, ...]
    entries: tuple[Entry, ...]
    objects: tuple[str, ...]

    def to_json(self) -> str:
        """Returns a text that is equal for equal kinds."""
        return json.dumps(self, separators=(",", ":"))

    @staticmethod
    def from_json(value: Any) -> Kind:
        """Returns the kind of a value that `json.loads` has made of `to_json`."""
        meshes, entries, objects = value
        return Kind(
            tuple(Mesh(tuple(shape), tuple(ranks)) for shape, ranks in meshes),
            tuple(
                Entry(name, dtype, tuple(shape), mesh, tuple((axis, dim) for axis, dim in cuts))
                for name, dtype, shape, mesh, cuts in entries
            ),
            tuple(objects),
        )


class Parts(NamedTuple):
    """The parts in which one tensor is written. All but the first two are int64, with one row for each part.

    Args:
        dtype: the dtype of the tensor.
        shape: the shape of the whole tensor.
        starts: the first index of each part, shape (parts, dims).
        sizes: the shape of each part, (parts, dims).
        writers: the rank that writes each part. Empty where torch has written them.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    starts: Tensor
    sizes: Tensor
    writers: Tensor

    @property
    def nbytes(self) -> Tensor:
        """The bytes of the values of each part."""
        return self.sizes.prod(1) * self.dtype.itemsize


class Place(NamedTuple):
    """A part that one rank writes. `offset`: the first byte of its values in the file of the rank."""

    name: str
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    offset: int
    nbytes: int


def file_of(rank: int) -> str:
    """Returns the name of a rank's file, as torch.distributed.checkpoint would call it."""
    return f"__{rank}_0.distcp"


def boxes_of(shape: Sequence[int], cuts: Sequence[tuple[int, int]], coordinates: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the first indices and the shapes of the chunks of a tensor.

    Args:
        shape: the shape of the whole tensor.
        cuts: pairs of the number of chunks and a dim, in the order of cutting.
        coordinates: which chunk of each cut, shape (boxes, cuts), int64.

    Returns:
        Two int64 tensors of shape (boxes, dims).
    """
    count = len(coordinates)
    starts = torch.zeros(count, len(shape), dtype=torch.int64)
    sizes = torch.tensor([*shape], dtype=torch.int64).expand(count, -1).clone()
    for index, (number, dim) in enumerate(cuts):
        length = sizes[:, dim]
        chunk = (length + number - 1) // number
        first = torch.minimum(coordinates[:, index] * chunk, length)
        sizes[:, dim] = torch.minimum(first + chunk, length) - first
        starts[:, dim] += first
    return starts, sizes


class Layout:
    """The layout of a checkpoint that ranks of several kinds write together.

    Args:
        kinds: pairs of the ranks of a kind, and the kind. Equal on all ranks, in one order.

    Raises:
        ValueError: two kinds have a tensor of one name, and share it among ranks in different ways; or not all ranks
            of a tensor's mesh have it.
    """

    def __init__(self, kinds: Sequence[tuple[Sequence[int], Kind]]) -> None:
        self.kinds = kinds
        self._boxes: dict[Any, tuple[Tensor, Tensor]] = {}
        self._holders: dict[Any, Tensor] = {}
        holders: dict[str, dict[Any, Tensor]] = {}
        first: dict[str, tuple[Entry, tuple[tuple[int, int], ...]]] = {}
        present: dict[tuple[str, Mesh], tuple[int, ...]] = {}
        self.objects: dict[str, int] = {}
        """Key of a value that is no tensor -> the rank that writes it."""
        for index, (members, kind) in enumerate(kinds):
            for key in kind.objects:
                self.objects[key] = min(self.objects.get(key, members[0]), *members)
            for entry in kind.entries:
                mesh = kind.meshes[entry.mesh] if entry.mesh >= 0 else Mesh((len(members),), tuple(members))
                cuts = tuple((mesh.shape[axis], dim) for axis, dim in entry.cuts)
                known, known_cuts = first.setdefault(entry.name, (entry, cuts))
                if (known.dtype, known.shape, known_cuts) != (entry.dtype, entry.shape, cuts):
                    raise ValueError(
                        f"{entry.name}: expected one dtype, shape and way to shard it on all ranks, got "
                        f"{known.dtype} {[*known.shape]} in chunks {known_cuts} and {entry.dtype} {[*entry.shape]} in "
                        f"chunks {cuts} (chunks, dim). Give what differs between ranks another name."
                    )
                present[entry.name, mesh] = (*present.get((entry.name, mesh), ()), index)
                holders.setdefault(entry.name, {})[mesh] = self._holders_of(mesh, tuple(a for a, _ in entry.cuts))
        self._require_whole_meshes(present)
        self.tensors = {name: self._parts_of(*each, [*holders[name].values()]) for name, each in first.items()}
        """Key of a tensor -> its parts, in the order in which each rank writes its own."""

    def _require_whole_meshes(self, present: dict[tuple[str, Mesh], tuple[int, ...]]) -> None:
        """Checks that each tensor is on all ranks of its mesh. `present`: the indices of the kinds that have it."""
        names = {(mesh, indices): name for (name, mesh), indices in reversed(present.items())}
        for (mesh, indices), name in names.items():
            have = {rank for index in indices for rank in self.kinds[index][0]}
            if lacking := {*mesh.ranks} - have:
                there, missing = (some_of(map(str, sorted(ranks))) for ranks in (have, lacking))
                raise ValueError(
                    f"{name}: expected it on all ranks of its mesh, got it on ranks {there}, and not on {missing}. "
                    "Before the save, step the optimizer on all of them, or on none."
                )

    def _holders_of(self, mesh: Mesh, axes: tuple[int, ...]) -> Tensor:
        """Returns the ranks that hold each chunk, shape (chunks, replicas), when these axes of a mesh cut a tensor."""
        found = self._holders.get((mesh, axes))
        if found is None:
            others = [axis for axis in range(len(mesh.shape)) if axis not in axes]
            grid = torch.tensor(mesh.ranks, dtype=torch.int64).view(mesh.shape).permute(*axes, *others)
            found = grid.reshape(math.prod(mesh.shape[axis] for axis in axes), -1)
            self._holders[mesh, axes] = found
        return found

    def _parts_of(self, entry: Entry, cuts: tuple[tuple[int, int], ...], holders: list[Tensor]) -> Parts:
        key = entry.shape, cuts
        if key not in self._boxes:
            grid = [torch.arange(number) for number, _ in cuts]
            coordinates = torch.cartesian_prod(*grid).view(-1, len(cuts)) if cuts else torch.zeros(1, 0).long()
            self._boxes[key] = boxes_of(entry.shape, cuts, coordinates)
        starts, sizes = self._boxes[key]
        held = holders[0] if len(holders) == 1 else torch.cat(holders, 1)
        # Replicas share the work: another one writes each part of each tensor.
        chosen = (zlib.crc32(entry.name.encode()) + torch.arange(len(held))) % held.shape[1]
        writers = held.gather(1, chosen[:, None])[:, 0]
        full = sizes.prod(1) > 0
        if not bool(full.all()):
            starts, sizes, writers = starts[full], sizes[full], writers[full]
        return Parts(getattr(torch, entry.dtype), entry.shape, starts, sizes, writers)

    def places_of(self, rank: int) -> list[Place]:
        """Returns the parts that `rank` writes, in the order of its file."""
        places, end = [], FILE_HEAD
        for name, parts in self.tensors.items():
            for index in (parts.writers == rank).nonzero()[:, 0].tolist():
                sizes = tuple(parts.sizes[index].tolist())
                nbytes = math.prod(sizes) * parts.dtype.itemsize
                places.append(Place(name, tuple(parts.starts[index].tolist()), sizes, end + HEAD_ROOM, nbytes))
                end += _slot(nbytes)
        return places

    @staticmethod
    def end_of(places: Sequence[Place]) -> int:
        """Returns the byte behind the tensors of a file, from which its objects follow."""
        return places[-1].offset - HEAD_ROOM + _slot(places[-1].nbytes) if places else FILE_HEAD

    @cached_property
    def offsets(self) -> dict[str, Tensor]:
        """Key of a tensor -> for each part the first byte of its values in the file of its writer, int64."""
        every = [*self.tensors.values()]
        if not every:
            return {}
        writers = torch.cat([parts.writers for parts in every])
        slots = _slot(torch.cat([parts.nbytes for parts in every]))
        order = torch.argsort(writers, stable=True)
        ends = slots[order].cumsum(0)
        begins = ends - slots[order]
        counts = torch.bincount(writers)
        counts = counts[counts > 0]
        first = begins[counts.cumsum(0) - counts]
        offsets = torch.empty_like(begins)
        offsets[order] = begins - first.repeat_interleave(counts) + FILE_HEAD + HEAD_ROOM
        return dict(zip(self.tensors, offsets.split([len(parts.writers) for parts in every]), strict=True))


def _slot(nbytes: Any) -> Any:
    """Returns the bytes of a file that a part takes, with what is around its values."""
    return (nbytes + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT + HEAD_ROOM + TAIL_ROOM
