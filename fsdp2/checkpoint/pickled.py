"""Writes the `.metadata` of a checkpoint: the pickle of `torch.distributed.checkpoint.metadata.Metadata`.

Llama 8B with AdamW on 4,096 ranks has 2.9 million parts. To make an object for each, and to pickle them, takes a minute
and gigabytes. But the opcodes of two parts differ in a few numbers only, so that a tensor's parts are rows of bytes:
copies of one row, into which whole columns of numbers are written.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ..torch_private.checkpoints import STORAGE_INFO
from .layout import Parts, file_of
from .parts import bytes_in

# Pickles that are embedded whole number what they remember from 0 on. These numbers are out of their way.
_MEMO = 1 << 16
_KEYS = ("offsets", "sizes", "fqn", "offset", "index", "relative_path", "length")


class StoredObject(NamedTuple):
    """Where a value that is no tensor lies: the rank that wrote it, and its bytes in the file of the rank."""

    rank: int
    offset: int
    nbytes: int


def metadata_chunks(
    tensors: Mapping[str, Parts],
    offsets: Mapping[str, Tensor],
    wraps: Mapping[str, tuple[Tensor, Tensor]],
    objects: Mapping[str, StoredObject],
    paths: Mapping[str, tuple[Any, ...]],
    save_id: str,
) -> Iterator[bytes | memoryview]:
    """Yields the bytes of `.metadata` in order.

    Args:
        tensors: key -> its parts.
        offsets: key -> the first byte of the values of each part.
        wraps: key -> bytes before and behind the values of each part that belong to it.
        objects: key -> where its bytes are.
        paths: key -> the keys of the dicts on the way to it.
        save_id: the name of the save.
    """
    writer = _Writer(tensors)
    yield from writer.prelude()
    yield _new(Metadata) + b"}(" + _embed("state_dict_metadata") + b"}("
    for name, parts in tensors.items():
        yield _embed(name) + _new(TensorStorageMetadata) + b"}(" + _embed("properties")
        yield _embed(TensorProperties(dtype=parts.dtype)) + _embed("size") + _embed(torch.Size(parts.shape))
        yield _embed("chunks") + b"]("
        yield from writer.chunk_rows(parts)
        yield b"eub"
    yield b"".join(_embed(name) + _embed(BytesStorageMetadata()) for name in objects) + b"u"
    yield _embed("planner_data") + _embed(dict(paths)) + _embed("storage_data") + b"}("
    for name, parts in tensors.items():
        head, tail = wraps[name]
        yield from writer.place_rows(name, parts, offsets[name] - head, head + parts.nbytes + tail)
    for name, at in objects.items():
        yield _embed(MetadataIndex(name)) + _embed(STORAGE_INFO(file_of(at.rank), at.offset, at.nbytes))
    yield b"u" + _embed("storage_meta") + _embed(StorageMeta(save_id=save_id)) + b"ub."


class _Writer:
    """Makes rows of opcodes that refer to classes, keys and names of files by their numbers in the pickle's memo."""

    def __init__(self, tensors: Mapping[str, Parts]) -> None:
        self._known: dict[Any, bytes] = {}
        self._prelude = [b"\x80\x02"]
        for each in (torch.Size, ChunkStorageMetadata, MetadataIndex, STORAGE_INFO, *_KEYS):
            self._remember(each)
        ranks = torch.cat([parts.writers for parts in tensors.values()]).unique().tolist() if tensors else []
        self._files = torch.full((max(ranks, default=0) + 1,), -1, dtype=torch.int64)
        for rank in ranks:
            self._files[rank] = _MEMO + len(self._known)
            self._remember(file_of(rank))

    def prelude(self) -> list[bytes]:
        """Returns opcodes that remember what rows refer to, and leave the stack empty."""
        return self._prelude

    def _remember(self, value: Any) -> None:
        number = struct.pack("<I", _MEMO + len(self._known))
        self._known[value] = b"j" + number
        self._prelude.append((_global(value) if isinstance(value, type) else _embed(value)) + b"r" + number + b"0")

    def _size(self, row: _Row, columns: Sequence[Tensor]) -> None:
        """Adds a torch.Size."""
        row.add(self._known[torch.Size] + b"(")
        for column in columns:
            row.add_number(column)
        row.add(b"t\x85R")

    def chunk_rows(self, parts: Parts) -> Iterable[bytes | memoryview]:
        """Returns a ChunkStorageMetadata for each part."""
        if not len(parts.writers):
            return ()
        row, known = _Row(len(parts.writers)), self._known
        row.add(known[ChunkStorageMetadata] + b")\x81}(" + known["offsets"])
        self._size(row, parts.starts.unbind(1))
        row.add(known["sizes"])
        self._size(row, parts.sizes.unbind(1))
        row.add(b"ub")
        return row.chunks()

    def place_rows(self, name: str, parts: Parts, offset: Tensor, length: Tensor) -> Iterable[bytes | memoryview]:
        """Returns a MetadataIndex and a _StorageInfo for each part."""
        if not len(parts.writers):
            return ()
        row, known = _Row(len(parts.writers)), self._known
        number = struct.pack("<I", _MEMO - 1)
        row.add(known[MetadataIndex] + b")\x81}(" + known["fqn"] + b"j" + number + known["offset"])
        self._size(row, parts.starts.unbind(1))
        row.add(known["index"])
        row.add_number(torch.arange(len(parts.writers)))
        row.add(b"ub" + known[STORAGE_INFO] + b")\x81}(" + known["relative_path"])
        row.add_number(self._files[parts.writers], b"j")
        row.add(known["offset"])
        row.add_number(offset)
        row.add(known["length"])
        row.add_number(length)
        row.add(b"ub")
        return (_embed(name) + b"r" + number + b"0", *row.chunks())


class _Row:
    """`count` rows of equal length that differ in numbers only."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._text = bytearray()
        self._numbers: list[tuple[int, int, Tensor]] = []

    def add(self, opcodes: bytes) -> None:
        self._text += opcodes

    def add_number(self, column: Tensor, opcode: bytes | None = None) -> None:
        """Adds one number a row, little-endian, behind its opcode. None: BININT, or LONG1 if one has over 31 bits."""
        least, most = (int(each) for each in column.aminmax())
        if opcode is None and least == most:
            self._text += _embed(most)
            return
        nbytes = 4 if opcode is not None or most < 1 << 31 else 8
        self._text += opcode if opcode is not None else (b"J" if nbytes == 4 else b"\x8a\x08")
        self._numbers.append((len(self._text), nbytes, column))
        self._text += bytes(nbytes)

    def chunks(self) -> tuple[bytes | memoryview, ...]:
        rows = torch.frombuffer(self._text, dtype=torch.uint8).repeat(self._count, 1)
        for at, nbytes, column in self._numbers:
            rows[:, at : at + nbytes] = column.contiguous().view(torch.uint8).view(self._count, 8)[:, :nbytes]
        return (bytes_in(rows),)


def _embed(value: Any) -> bytes:
    """Returns opcodes that leave `value` on the stack."""
    return pickle.dumps(value, 2)[2:-1]


def _global(cls: type) -> bytes:
    return f"c{cls.__module__}\n{cls.__qualname__}\n".encode()


def _new(cls: type) -> bytes:
    """Returns opcodes that make an object of a class without calling its constructor."""
    return _global(cls) + b")\x81"
