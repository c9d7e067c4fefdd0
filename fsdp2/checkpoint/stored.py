"""Reads checkpoints: of fsdp2, whose layout is computed again, and of torch.distributed.checkpoint, by `.metadata`.

Nothing of a file is run: its pickles are read by an unpickler that finds a few names only.
"""

from __future__ import annotations

import io
import json
import math
import os
import struct
import zipfile
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from .folders import require_regular
from .layout import FORMAT, LAYOUT, METADATA, TAIL_ROOM, Kind, Layout, Parts, file_of
from .metadata import damaged, read_metadata
from .parts import PIECE_NBYTES, Crc, PageSums, bytes_in, checksum_at, file_head
from .state import GROUPS, OPTIMIZER, STATES

_READ_NBYTES = 1 << 30


class _Values(NamedTuple):
    """The place of the values of a part in a file; or the values, if the file does not hold them as they are.

    `checksum`: that of the class `kind`; 0 if it is not known.
    """

    path: Path
    offset: int
    values: Tensor | None
    checksum: int = 0
    kind: type[Crc] = Crc


def open_checkpoint(folder: Path) -> Checkpoint:
    """Returns the checkpoint in a folder, of which only the index was read.

    Raises:
        FileNotFoundError: the folder has no checkpoint.
        OSError: its index can't be read.
        ValueError: its index is damaged, is of another release, or names what could run code.
    """
    if not (folder / METADATA).is_file():
        found = "a folder without it" if folder.is_dir() else "no such folder"
        raise FileNotFoundError(
            f"{folder}: expected the folder of a checkpoint, with a file {METADATA}; got {found}. It is written "
            "last: a save that was interrupted has none. fsdp2.checkpoint.latest finds the last complete one."
        )
    return _Ours(folder) if (folder / LAYOUT).is_file() else _Torchs(folder)


class Checkpoint(ABC):
    """A checkpoint in a folder.

    Attributes:
        folder: the folder.
        tensors: key -> a tensor.
        objects: the keys of values that are no tensors.
        paths: key -> the keys and indices on the way to it in the state dict.
        sharded: the keys of tensors that were DTensors, or may have been.
        members: the ranks that saved it, as far as it is known.
        save_id: the name of the save; a text that no other has. Empty for one of torch.distributed.checkpoint.
    """

    tensors: Mapping[str, Parts]
    objects: Mapping[str, Any]
    paths: Mapping[str, tuple[Any, ...]]
    sharded: Container[str]
    members: Sequence[int] = ()
    save_id = ""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[Path, int] = {}

    def close(self) -> None:
        """Closes all files."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    @abstractmethod
    def check(self, names: Iterable[str], index: int = 0, size: int = 1) -> None:
        """Checks that files have what the index says of these tensors.

        Args:
            names: the keys of the tensors.
            index: the number of this rank among those that share the work.
            size: the number of these ranks.

        Raises:
            FileNotFoundError: a file is missing.
            ValueError: a file is shorter, or of another save.
        """

    @abstractmethod
    def _object_at(self, name: str) -> tuple[Path, int, int]:
        """Returns the file of a value that is no tensor, its first byte there, and the number of its bytes."""

    @abstractmethod
    def _values_of(self, name: str, index: int) -> _Values:
        """Returns where the values of a part of a tensor are."""

    def object(self, name: str) -> Any:
        """Returns a value that is no tensor.

        Raises:
            OSError: it can't be read.
            ValueError: it is damaged, or could run code.
        """
        path, offset, nbytes = self._object_at(name)
        data = bytearray(nbytes)
        self._read(path, offset, memoryview(data), name)
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                if archive.testzip() is not None:
                    raise ValueError("other bytes than were saved")
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except Exception as error:
            raise ValueError(
                f"{path}: {name}: expected numbers, texts, tensors, lists and dicts, got something else, and nothing "
                f"was run: {str(error).splitlines()[0]}. If the file is your own, torch.serialization.safe_globals "
                "allows classes."
            ) from error

    def read(self, name: str, target: Tensor, starts: Sequence[int]) -> None:
        """Fills a plain tensor, on any device, with a part of a stored tensor, and converts its dtype.

        Args:
            name: the key of the stored tensor.
            target: the tensor.
            starts: where it begins in the whole tensor.

        Raises:
            OSError: a file can't be read.
            ValueError: a file is damaged, or lacks a part.
        """
        if not target.numel():
            return
        stored, missing = self.tensors[name], target.numel()
        first = torch.tensor([*starts], dtype=torch.int64)
        end = first + torch.tensor(target.shape, dtype=torch.int64)
        low, high = torch.maximum(stored.starts, first), torch.minimum(stored.starts + stored.sizes, end)
        for index in (low < high).all(1).nonzero()[:, 0].tolist():
            begin, sizes = stored.starts[index].tolist(), tuple(stored.sizes[index].tolist())
            box = [*zip(low[index].tolist(), high[index].tolist(), strict=True)]
            region = target[tuple(slice(a - start, b - start) for (a, b), start in zip(box, starts, strict=True))]
            inside = tuple(slice(a - start, b - start) for (a, b), start in zip(box, begin, strict=True))
            self._read_part(name, index, stored.dtype, sizes, inside, region)
            missing -= region.numel()
        if missing:
            raise ValueError(
                f"{self.folder}: {name}: expected {target.numel()} values from {[*starts]} on, got "
                f"{target.numel() - missing}. The checkpoint is not whole."
            )

    def _read_part(
        self,
        name: str,
        index: int,
        dtype: torch.dtype,
        sizes: tuple[int, ...],
        inside: tuple[slice, ...],
        region: Tensor,
    ) -> None:
        """Fills `region` with the elements `inside` of the part with that index."""
        at = self._values_of(name, index)
        if at.values is not None:
            region.copy_(at.values[inside])
            return
        if not inside:
            sizes, inside, region = (1,), (slice(0, 1),), region.view(1)
        row, rows = math.prod(sizes[1:]) * dtype.itemsize, inside[0]
        # Of those who read of this part, the one that has its first element compares the checksum of all of it.
        end = sizes[0] if all(each.start == 0 for each in inside) else rows.stop
        is_place = region.is_cpu and region.dtype == dtype and region.is_contiguous() and region.shape[1:] == sizes[1:]
        place, bucket = bytes_in(region) if is_place else None, torch.empty(0, dtype=torch.uint8)
        is_checked = at.checksum and end == sizes[0] and not rows.start
        start, most, checksum = rows.start, max(1, PIECE_NBYTES // max(1, row)), at.kind()
        while start < end:
            is_wanted = start < rows.stop
            count, first = min((rows.stop if is_wanted else end) - start, most), start - rows.start
            if is_wanted and place is not None:
                memory = place[first * row : (first + count) * row]
            else:
                if not bucket.numel():
                    bucket = torch.empty(min(most, end - start) * row, dtype=torch.uint8)
                memory = bytes_in(bucket[: count * row])
            self._read(at.path, at.offset + start * row, memory, name)
            if is_checked:
                checksum.add(memory)
            if is_wanted and place is None:
                columns = (slice(None), *inside[1:])
                values = bucket[: count * row].view(dtype).view(count, *sizes[1:])[columns]
                region[first : first + count].copy_(values)
            start += count
        if is_checked and (found := checksum.value()) != at.checksum:
            raise ValueError(
                f"{at.path}: {name}: expected values with the checksum {at.checksum:08x}, got {found:08x}: bytes of "
                "the file have changed since it was saved"
            )

    def _read(self, path: Path, offset: int, memory: memoryview, name: str) -> None:
        descriptor = self._descriptor(path)
        done = 0
        while done < len(memory):
            got = os.preadv(descriptor, [memory[done : done + _READ_NBYTES]], offset + done)
            if not got:
                raise ValueError(
                    f"{path}: {name}: expected {len(memory):,} bytes from byte {offset:,} on, got {done:,}. It is "
                    "truncated, or of another save."
                )
            done += got

    def _descriptor(self, path: Path) -> int:
        """Returns the open file of a path, which stays open until `close`."""
        if path not in self._files:
            require_regular(path)
            self._files[path] = os.open(path, os.O_RDONLY)
        return self._files[path]


class _Ours(Checkpoint):
    """A checkpoint of fsdp2. The parts follow from the kinds of ranks that saved."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        path = folder / LAYOUT
        require_regular(path)
        try:
            content = json.loads(path.read_bytes())
            found = content["format"]
            if found == FORMAT:
                kinds, of_rank = content["kinds"]
                members: list[int] = content["members"]
                self.save_id = str(content["save_id"])
                ranks = defaultdict[int, list[int]](list)
                for rank, index in zip(members, of_rank, strict=True):
                    ranks[index].append(rank)
                self._kinds = [(ranks[index], Kind.from_json(json.loads(kind))) for index, kind in enumerate(kinds)]
                self.objects = {name: tuple(map(int, at)) for name, at in content["objects"].items()}
                self.paths = {name: _nested(tuple(keys)) for name, keys in content["paths"].items()}
                self.members = [*map(int, members)]
                self._layout = Layout(self._kinds)
                self.tensors = self._layout.tensors
                self.sharded = {each.name for _, kind in self._kinds for each in kind.entries if each.mesh >= 0}
        except OSError:
            raise
        except Exception as error:  # whatever a damaged file makes of the lines above
            raise ValueError(f"{path}: expected what fsdp2 writes, got {type(error).__name__}: {error}") from error
        if found != FORMAT:
            raise ValueError(
                f"{path}: expected format {FORMAT}, got {found}: another release of fsdp2 has saved it. "
                "torch.distributed.checkpoint.load reads it, too."
            )

    @cached_property
    def _offsets(self) -> Mapping[str, Tensor]:
        return self._layout.offsets

    def check(self, names: Iterable[str], index: int = 0, size: int = 1) -> None:
        ends = torch.zeros(max((max(members) for members, _ in self._kinds), default=0) + 1, dtype=torch.int64)
        for name in names:
            parts, offsets = self._layout.tensors[name], self._offsets[name]
            ends.scatter_reduce_(0, parts.writers, offsets + parts.nbytes + 1, "amax")
        for writer in ends.nonzero()[index::size, 0].tolist():
            self._check_file(writer, int(ends[writer]))

    def _check_file(self, rank: int, end: int) -> None:
        path = self.folder / file_of(rank)
        if not path.exists():
            raise FileNotFoundError(f"{path}: a part of the checkpoint is in this file, which is not there")
        require_regular(path)
        head = file_head(self.save_id, rank)
        with path.open("rb") as file:
            found = file.read(len(head))
        if found != head:
            raise ValueError(
                f"{path}: expected the file that rank {rank} has written for save {self.save_id}, got one that begins "
                f"with {found.rstrip(bytes(1))[:80]!r}. It is of another save or rank, or damaged."
            )
        if path.stat().st_size < end:
            raise ValueError(f"{path}: expected {end:,} bytes at least, got {path.stat().st_size:,}. It is truncated.")

    def _object_at(self, name: str) -> tuple[Path, int, int]:
        rank, offset, nbytes = self.objects[name]
        self._check_file(rank, offset + nbytes)
        return self.folder / file_of(rank), offset, nbytes

    def _values_of(self, name: str, index: int) -> _Values:
        parts = self._layout.tensors[name]
        path, offset = self.folder / file_of(int(parts.writers[index])), int(self._offsets[name][index])
        tail = os.pread(self._descriptor(path), TAIL_ROOM, offset + int(parts.nbytes[index]))
        if (at := checksum_at(tail)) is None:
            raise ValueError(f"{path}: {name}: expected the end of a tensor behind its values. It is truncated.")
        return _Values(path, offset, None, int.from_bytes(tail[at : at + 4], "little"), PageSums)


class _Torchs(Checkpoint):
    """A checkpoint of torch.distributed.checkpoint."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        metadata = read_metadata(folder / METADATA)
        stored, paths = metadata.state_dict_metadata, metadata.planner_data or {}
        self.paths = {name: _nested(tuple(paths.get(name, (name,)))) for name in stored}
        self.tensors = tensors = {}
        self.objects = {name: None for name, each in stored.items() if not isinstance(each, TensorStorageMetadata)}
        self._at: dict[str, dict[tuple[int, ...], Any]] = defaultdict(dict)
        self._sizes: dict[Path, int] = {}
        self._plain: set[Any] = set()
        """Descriptions of tensors by torch.save that are contiguous and as the index says: many are equal."""
        try:
            for index, info in metadata.storage_data.items():
                self._at[index.fqn][tuple(index.offset or ())] = (
                    PurePath(info.relative_path),
                    info.offset,
                    info.offset + info.length,
                    getattr(info, "transform_descriptors", None),
                )
            for name, each in stored.items():
                if isinstance(each, TensorStorageMetadata):
                    rows = [(chunk.offsets, chunk.sizes) for chunk in each.chunks]
                    boxes = torch.tensor(rows, dtype=torch.int64).view(len(rows), 2, len(each.size))
                    tensors[name] = Parts(
                        each.properties.dtype, tuple(each.size), boxes[:, 0], boxes[:, 1], torch.empty(0)
                    )
            self.sharded = {name for name, each in tensors.items() if each.shape}
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise damaged(folder / METADATA, f"got something else ({error})") from error

    def check(self, names: Iterable[str], index: int = 0, size: int = 1) -> None:
        for name in [*names][index::size]:
            dtype, shape, starts, sizes, _ = self.tensors[name]
            is_inside = bool(((starts >= 0) & (sizes >= 0) & (starts + sizes <= torch.tensor(shape))).all())
            found = int(sizes.prod(1).sum()) if is_inside else 0
            parts = [(*row,) for row in starts.tolist() if (*row,) in self._at[name]]
            held = sum(end - offset for _, offset, end in (self._place(name, part) for part in parts))
            numel = math.prod(shape)
            if found < numel or held < numel * dtype.itemsize:
                what = f"{numel} elements for shape {[*shape]}, got {found} in {held} bytes of files"
                raise damaged(self.folder / METADATA, f"{name}: expected {what}")

    def _place(self, name: str, starts: tuple[int, ...]) -> tuple[Path, int, int]:
        """Returns the file of a part, and its first and last byte there, which the file has."""
        if starts not in self._at[name]:
            raise damaged(self.folder / METADATA, f"got no file for the part of {name} at {[*starts]}")
        relative, offset, end, packed = self._at[name][starts]
        path = self.folder / relative
        if packed:
            raise NotImplementedError(
                f"{self.folder}: {name}: expected values as they are, got {packed}, which only "
                "torch.distributed.checkpoint reads"
            )
        if path not in self._sizes:
            if ".." in relative.parts or self.folder not in path.parents:
                raise damaged(self.folder / METADATA, f"got a file outside of the folder for {name}, {path}")
            if not path.exists():
                raise FileNotFoundError(f"{path}: {name} is in this file, which is not there")
            require_regular(path)
            self._sizes[path] = path.stat().st_size
        if not 0 <= offset <= end <= self._sizes[path]:
            what = f"expected it at bytes {offset} to {end}, but the file has {self._sizes[path]}"
            raise ValueError(f"{path}: {name}: {what}. It is truncated, or of another save.")
        return path, offset, end

    def _object_at(self, name: str) -> tuple[Path, int, int]:
        path, offset, end = self._place(name, ())
        return path, offset, end - offset

    def _values_of(self, name: str, index: int) -> _Values:
        dtype, _, starts, every, _ = self.tensors[name]
        sizes = torch.Size(every[index].tolist())
        path, offset, end = self._place(name, (*starts[index].tolist(),))
        view: Any = _View(self._descriptor(path), offset, end - offset)
        try:
            with zipfile.ZipFile(view) as archive:
                records = {info.filename.partition("/")[2]: info for info in archive.infolist()}
                data, order = records["data/0"], records.get("byteorder")
                is_plain = not data.compress_type and (order is None or archive.read(order) == b"little")
                described = archive.read(records["data.pkl"]), dtype, sizes, data.file_size
            if is_plain and described not in self._plain:  # its dtype, shape and strides, without values
                view.seek(0)
                found = torch.load(view, map_location="meta", weights_only=True)
                is_plain = isinstance(found, Tensor) and found.dtype == dtype and found.shape == sizes
                is_plain = is_plain and found.is_contiguous() and data.file_size == found.nbytes
                if is_plain:
                    self._plain.add(described)
            if is_plain:
                view.seek(data.header_offset + 26)
                start = data.header_offset + 30 + sum(struct.unpack("<HH", view.read(4)))
                return _Values(path, offset + start, None, data.CRC)
            view.seek(0)
            values = torch.load(io.BytesIO(view.read()), map_location="cpu", weights_only=True)
            if not isinstance(values, Tensor) or values.shape != sizes:
                raise ValueError(f"{type(values).__name__} of shape {[*getattr(values, 'shape', ())]}")
        except Exception as error:
            raise ValueError(
                f"{path}: {name}: expected a tensor of shape {[*sizes]} as torch.save writes it, got something else "
                f"({type(error).__name__}: {error})"
            ) from error
        return _Values(path, 0, values)


def _nested(path: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns the path of a value in nested state dicts. Torch may have joined the keys in an optimizer."""
    first, *keys = path
    if not keys and str(first).startswith(f"{OPTIMIZER}."):
        first, keys = OPTIMIZER, [str(first).removeprefix(f"{OPTIMIZER}.")]
    if first != OPTIMIZER or not keys:
        return path
    kind, _, below = str(keys[0]).partition(".")
    if kind in (STATES, GROUPS) and below:
        fqn, _, key = below.rpartition(".")
        keys = [kind, fqn, key, *keys[1:]]
    if keys[0] == GROUPS and len(keys) > 1:
        keys[1] = str(keys[1])
    return (OPTIMIZER, *keys)


class _View(io.RawIOBase):
    """Some bytes of an open file, as a file."""

    def __init__(self, descriptor: int, offset: int, nbytes: int) -> None:
        self._descriptor, self._offset, self._nbytes, self._at = descriptor, offset, nbytes, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, offset + (0, self._at, self._nbytes)[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, memory: Any) -> int:
        view = memoryview(memory).cast("B")[: max(0, self._nbytes - self._at)]
        count = os.preadv(self._descriptor, [view], self._offset + self._at)
        self._at += count
        return count
