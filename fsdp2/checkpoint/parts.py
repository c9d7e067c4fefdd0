"""Writes the file of one rank: each part of a tensor between the head and the tail that torch.save puts around it."""

from __future__ import annotations

import ctypes
import io
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .layout import FILE_HEAD, HEAD_ROOM, TAIL_ROOM, Layout, Parts, Place

_MAGIC = b"fsdp2 checkpoint\n"
# Buffers that one system call writes together: Linux takes 1,024. It releases the interpreter for so many bytes.
_MOST_BUFFERS, _MOST_NBYTES = 1000, 64 * 1024 * 1024


def bytes_in(tensor: Tensor) -> memoryview:
    """Returns the memory of a contiguous CPU tensor of any dtype, as bytes. The tensor lives as long as these."""
    nbytes = tensor.numel() * tensor.element_size()
    if not nbytes:
        return memoryview(b"")
    array: Any = (ctypes.c_char * nbytes).from_address(tensor.data_ptr())
    array.tensor = tensor
    return memoryview(array).cast("B")


class _Pieces(io.RawIOBase):
    """Takes what torch.save writes, and notes where it leaves out the values."""

    def __init__(self) -> None:
        self.pieces = [b""]

    def write(self, data: Any) -> int:
        self.pieces[-1] += bytes(data)
        return len(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.pieces.append(b"")
        return 0


@lru_cache(maxsize=1 << 14)
def head_and_tail(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Returns the bytes that torch.save writes before and behind the values of a contiguous tensor."""
    file: Any = _Pieces()
    with torch.serialization.skip_data():
        torch.save(torch.empty(shape, dtype=dtype), file)
    head, *rest = file.pieces
    tail = b"".join(rest)
    if len(head) > HEAD_ROOM or len(tail) > TAIL_ROOM or len(rest) != 1:
        raise NotImplementedError(
            f"expected torch.save to write at most {HEAD_ROOM} bytes before and {TAIL_ROOM} behind a tensor, got "
            f"{len(head)} and {len(tail)} from torch {torch.__version__}, which this fsdp2 does not know"
        )
    return head, tail


def checksum_at(tail: bytes) -> int | None:
    """Returns where the CRC-32 of the values stands in what torch.save writes behind them; None in anything else.

    torch.save has a place for it in the directory of its zip archive. torch.load does not look at it; zipfile does.
    """
    start = tail.find(b"PK\x01\x02")
    while start >= 0:
        length = int.from_bytes(tail[start + 28 : start + 30], "little")
        if tail[start + 46 : start + 46 + length].endswith(b"data/0"):
            return start + 16
        start = tail.find(b"PK\x01\x02", start + 4)
    return None


def lengths_around(tensors: Mapping[str, Parts]) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns the name of a tensor -> for each of its parts the bytes of the head, and of the tail (int64)."""
    known: dict[Any, tuple[Tensor, Tensor]] = {}  # tensors of one shape share the memory of `sizes`
    found = {}
    for name, parts in tensors.items():
        key = parts.dtype, parts.sizes.data_ptr(), parts.sizes.shape
        if key not in known:
            rows, which = parts.sizes[:1], torch.zeros(len(parts.sizes), dtype=torch.int64)
            if parts.sizes.numel():
                rows, which = torch.unique(parts.sizes, dim=0, return_inverse=True)
            pairs = [head_and_tail(parts.dtype, tuple(row)) for row in rows.tolist()]
            lengths = torch.tensor([(len(head), len(tail)) for head, tail in pairs]).view(-1, 2)[which]
            known[key] = lengths[:, 0], lengths[:, 1]
        found[name] = known[key]
    return found


def file_head(save_id: str, rank: int) -> bytes:
    """Returns the first bytes of a rank's file, by which a load tells that it is of this save."""
    return (_MAGIC + f"{save_id}\nrank {rank}\n".encode()).ljust(FILE_HEAD, b"\0")


class FileWriter:
    """Writes a file from its start to its end, by few system calls, which release the interpreter.

    `position`: the bytes that were added.
    """

    def __init__(self, descriptor: int) -> None:
        self.position = 0
        self._descriptor = descriptor
        self._waiting: list[memoryview] = []
        self._nbytes = 0

    def add(self, data: bytes | memoryview) -> None:
        """Adds bytes, which must not change until they are written."""
        if len(data):
            self._waiting.append(memoryview(data))
            self.position += len(data)
            self._nbytes += len(data)
        if len(self._waiting) >= _MOST_BUFFERS or self._nbytes >= _MOST_NBYTES:
            self.flush()

    def pad_to(self, offset: int) -> None:
        """Adds zeros up to a byte of the file."""
        self.add(bytes(offset - self.position))

    def flush(self) -> None:
        """Writes what waits."""
        waiting = self._waiting
        while waiting:
            written = os.writev(self._descriptor, waiting[:_MOST_BUFFERS])
            while waiting and written >= len(waiting[0]):
                written -= len(waiting.pop(0))
            if written:
                waiting[0] = waiting[0][written:]
        self._nbytes = 0


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Writes a new file, and has it reach the disk."""

    def fill(file: FileWriter) -> None:
        for each in chunks:
            file.add(each)

    _write(path, fill)


def write_parts(
    path: Path,
    head: bytes,
    places: Sequence[Place],
    values: Callable[[Place], Tensor],
    dtypes: Mapping[str, torch.dtype],
    more: bytes,
) -> int:
    """Writes the file of a rank, and has it reach the disk. Returns its bytes.

    Args:
        path: a new file.
        head: its first bytes.
        places: the parts, in order.
        values: returns the values of a part, as a contiguous CPU tensor.
        dtypes: the name of a tensor -> its dtype.
        more: bytes behind the parts.
    """

    def fill(file: FileWriter) -> None:
        file.add(head)
        for place in places:
            before, behind = head_and_tail(dtypes[place.name], place.sizes)
            file.pad_to(place.offset - len(before))
            data, at = bytes_in(values(place)), checksum_at(behind)
            assert at is not None
            file.add(before)
            file.add(data)
            file.add(behind[:at] + zlib.crc32(data).to_bytes(4, "little") + behind[at + 4 :])
        file.pad_to(Layout.end_of(places))
        file.add(more)

    return _write(path, fill)


def _write(path: Path, fill: Callable[[FileWriter], Any]) -> int:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        file = FileWriter(descriptor)
        fill(file)
        file.flush()
        os.fsync(descriptor)
        return file.position
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}, at byte {file.position:,} of the file", str(path)) from error
    finally:
        os.close(descriptor)
