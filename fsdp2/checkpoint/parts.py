"""Writes the file of one rank: each part of a tensor between the head and the tail that torch.save puts around it."""

from __future__ import annotations

import ctypes
import io
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .layout import FILE_HEAD, HEAD_ROOM, TAIL_ROOM, Layout, Parts, Place

_MAGIC = b"fsdp2 checkpoint\n"
PIECE_NBYTES = 1024 * 1024
"""Bytes that are read or written at a time: their checksum is computed while they are in the cache."""
_PAGE_NBYTES = 4096


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


class Crc:
    """The CRC-32 of bytes that come in pieces, as torch.save writes it."""

    def __init__(self) -> None:
        self._value = 0

    def add(self, data: memoryview) -> None:
        """Adds the next bytes."""
        self._value = zlib.crc32(data, self._value)

    def value(self) -> int:
        """Returns the checksum of all bytes."""
        return self._value


class PageSums(Crc):
    """A checksum of bytes that come in pieces: the CRC-32 of the sums of the words in each 4 KiB, and of the rest.

    It takes a tenth of the time of a CRC-32 of all bytes. It changes with each bit, and with each page that is lost,
    stale or elsewhere. Two changes in one page may cancel each other.
    """

    def __init__(self) -> None:
        super().__init__()
        self._rest = b""

    def add(self, data: memoryview) -> None:
        """Adds the next bytes."""
        if self._rest:
            missing = _PAGE_NBYTES - len(self._rest)
            page, data = self._rest + bytes(data[:missing]), data[missing:]
            if len(page) < _PAGE_NBYTES:
                self._rest = page
                return
            self._add_pages(memoryview(bytearray(page)))
        end = len(data) // _PAGE_NBYTES * _PAGE_NBYTES
        if end:
            self._add_pages(data[:end])
        self._rest = bytes(data[end:])

    def _add_pages(self, data: memoryview) -> None:
        sums = torch.frombuffer(data, dtype=torch.int64).view(-1, _PAGE_NBYTES // 8).sum(1)
        super().add(bytes_in(sums))

    def value(self) -> int:
        """Returns the checksum of all bytes."""
        return zlib.crc32(self._rest, self._value)


def checksum_at(tail: bytes) -> int | None:
    """Returns where the checksum of the values stands in what torch.save writes behind them; None in anything else.

    torch.save has a place for a CRC-32 in the directory of its zip archive, which torch.load does not look at. fsdp2
    writes its `PageSums` there.
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
            # One number for each shape: torch.unique of rows takes twenty times as long.
            digits = [math.prod(n + 1 for n in parts.shape[dim + 1 :]) for dim in range(len(parts.shape))]
            numbers = (parts.sizes * torch.tensor(digits, dtype=torch.int64)).sum(1)
            values, which = torch.unique(numbers, return_inverse=True)
            rows = parts.sizes.new_empty(len(values), len(parts.shape))
            rows[which] = parts.sizes
            pairs = [head_and_tail(parts.dtype, tuple(row)) for row in rows.tolist()]
            lengths = torch.tensor([(len(head), len(tail)) for head, tail in pairs]).view(-1, 2)[which]
            known[key] = lengths[:, 0], lengths[:, 1]
        found[name] = known[key]
    return found


def file_head(save_id: str, rank: int) -> bytes:
    """Returns the first bytes of a rank's file, by which a load tells that it is of this save."""
    return (_MAGIC + f"{save_id}\nrank {rank}\n".encode()).ljust(FILE_HEAD, b"\0")


def write_file(path: Path, chunks: Iterable[bytes | memoryview]) -> int:
    """Writes a new file, and has it reach the disk. Returns its bytes."""
    nbytes = 0
    try:
        with path.open("xb", 1 << 16) as file:  # larger pieces go past this buffer
            for each in chunks:
                file.write(each)
                nbytes += len(each)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}, at byte {nbytes:,} of the file", str(path)) from error
    return nbytes


def part_chunks(
    head: bytes,
    places: Sequence[Place],
    values: Callable[[Place], Tensor],
    dtypes: Mapping[str, torch.dtype],
    more: bytes,
) -> Iterator[bytes | memoryview]:
    """Yields the bytes of the file of a rank in order.

    Args:
        head: its first bytes.
        places: the parts, in order.
        values: returns the values of a part, as a contiguous CPU tensor.
        dtypes: the name of a tensor -> its dtype.
        more: bytes behind the parts.
    """
    yield head
    end = len(head)
    for place in places:
        before, behind = head_and_tail(dtypes[place.name], place.sizes)
        yield bytes(place.offset - len(before) - end) + before
        checksum, at, data = PageSums(), checksum_at(behind), bytes_in(values(place))
        assert at is not None
        for start in range(0, len(data), PIECE_NBYTES):
            piece = data[start : start + PIECE_NBYTES]
            checksum.add(piece)
            yield piece
        yield behind[:at] + checksum.value().to_bytes(4, "little") + behind[at + 4 :]
        end = place.offset + place.nbytes + len(behind)
    yield bytes(Layout.end_of(places) - end) + more
