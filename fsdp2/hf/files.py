"""Reads and writes the parts of safetensors files that are not tensors: headers, the index, names of files.

A file is 8 bytes with the length of the header, the header (JSON: name -> dtype, shape, offsets), and the tensors, one
behind the other. fsdp2 reads and writes the ranges of tensors itself, by `pread` and `pwrite` at these offsets: they
can be counted, need no more memory than one bucket, and no memory map of the file stays in the process.
"""

from __future__ import annotations

import glob
import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

# In the order in which safetensors lays tensors out, the last ones first: no tensor then needs padding.
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_ORDER = {dtype: i for i, dtype in enumerate(DTYPES.values())}
# safetensors refuses longer headers.
_MOST_HEADER_NBYTES = 100_000_000
_METADATA = "__metadata__"
INDEX_SUFFIX = ".safetensors.index.json"


class FileTensor(NamedTuple):
    """Describes a tensor in a file: `start` counts bytes from the beginning of the file."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    file: str
    start: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Checkpoint(NamedTuple):
    """Describes all tensors of a checkpoint. `sizes`: the bytes of each of its files, by their paths."""

    tensors: dict[str, FileTensor]
    sizes: dict[str, int]


# ---- reading


def read_checkpoint(folder: Path) -> Checkpoint:
    """Reads the headers of all files of a checkpoint: a folder, one file, or an index.

    Raises:
        FileNotFoundError: there is no such folder or file, or none that the index names.
        ValueError: a file, or the index, is damaged, or they contradict each other.
    """
    index, files = _files_of(folder)
    tensors: dict[str, FileTensor] = {}
    sizes = {}
    for path in files:
        found, sizes[str(path)] = _read_header(path)
        for each in found:
            other = tensors.setdefault(each.name, each)
            if other is not each:
                raise ValueError(
                    f"{each.name}: expected it in one file, got it in {other.file} and {each.file}. Remove the file "
                    "that does not belong to this checkpoint."
                )
    if index is not None:
        _compare_with_index(index, tensors)
    return Checkpoint(tensors, sizes)


def _files_of(folder: Path) -> tuple[Path | None, list[Path]]:
    """Returns the index, or None, and the files of a checkpoint."""
    if folder.is_file():
        if folder.name.endswith(".json"):
            return folder, _files_in_index(folder)
        return None, [folder]
    if not folder.is_dir():
        left = sorted(folder.parent.glob(f".{glob.escape(folder.name)}.previous-*")) if folder.parent.is_dir() else []
        advice = f" An interrupted save has left the previous one as {left[0]}: rename it." if left else ""
        raise FileNotFoundError(f"{folder}: expected a folder with safetensors files, found none.{advice}")
    index, single = folder / f"model{INDEX_SUFFIX}", folder / "model.safetensors"
    if index.is_file() and single.is_file():
        raise ValueError(
            f"{folder}: expected {single.name} or {index.name}, got both, of which one is of another checkpoint. "
            "Remove that one, or pass the path of the other."
        )
    if index.is_file():
        return index, _files_in_index(index)
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder}: expected safetensors files, found none")
    return None, files


def _read_json(path: Path, text: bytes) -> Any:
    """Returns what a JSON text says. A name that comes twice in one object is an error."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"{path}: {twice}: expected each name once, got it twice")
        return found

    try:
        return json.loads(text.decode(), object_pairs_hook=unique)
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path}: expected JSON, got something else ({error}). The file is damaged.") from error


def _files_in_index(index: Path) -> list[Path]:
    names = dict.fromkeys(_weight_map(index).values())
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise ValueError(f"{index}: expected names of files beside it, got {name!r}")
        if not (index.parent / name).is_file():
            raise FileNotFoundError(f"{index.parent / name}: {index.name} names this file, which is not there")
    return [index.parent / name for name in names]


def _weight_map(index: Path) -> dict[str, str]:
    found = _read_json(index, index.read_bytes())
    weights = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(weights, dict):
        raise ValueError(f'{index}: expected an object "weight_map" (name -> file), found none')
    return weights


def _compare_with_index(index: Path, tensors: Mapping[str, FileTensor]) -> None:
    listed = _weight_map(index)
    for name, file in listed.items():
        if name not in tensors:
            raise ValueError(f"{name}: {index} says that {file} has it, but no file does. Files are missing or stale.")
    for name, each in tensors.items():
        if name not in listed:
            raise ValueError(f"{name}: {each.file} has it, but {index.name} does not list it. One of them is stale.")
        if listed[name] != Path(each.file).name:
            raise ValueError(f"{name}: {index} says that {listed[name]} has it, but it is in {each.file}")


def _read_header(path: Path) -> tuple[list[FileTensor], int]:
    """Returns the tensors of a file, and its size."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MOST_HEADER_NBYTES):
            raise ValueError(
                f"{path}: expected a header of {length} bytes, got a file of {size}. It is truncated, or no "
                "safetensors file."
            )
        header = _read_json(path, file.read(length))
    if not isinstance(header, dict):
        raise ValueError(f"{path}: expected an object in the header, got {type(header).__name__}")
    header.pop(_METADATA, None)
    tensors = sorted(
        (_parse(path, name, entry, 8 + length) for name, entry in header.items()), key=lambda each: each.start
    )
    end = 8 + length
    for each in tensors:
        if each.start != end:
            raise ValueError(f"{path}: {each.name}: expected it at byte {end}, got {each.start}: a gap, or an overlap")
        end += each.nbytes
    if end != size:
        name = next((each.name for each in tensors if each.start + each.nbytes > size), None)
        what = f"{name} ends at byte {end}" if name else f"tensors end at byte {end}"
        raise ValueError(f"{path}: {what}, but the file has {size} bytes: it is truncated, or was appended to")
    return tensors, size


def _parse(path: Path, name: str, entry: Any, data_start: int) -> FileTensor:
    try:
        dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        are_numbers = all(type(number) is int and number >= 0 for number in (*shape, start, end))
    except (KeyError, TypeError, ValueError):
        are_numbers = False
    if not are_numbers:
        raise ValueError(f"{path}: {name}: expected dtype, shape and data_offsets in the header, got {entry!r}")
    if dtype not in DTYPES:
        raise ValueError(f"{path}: {name}: expected a dtype among {', '.join(DTYPES)}, got {dtype!r}")
    found = FileTensor(name, DTYPES[dtype], shape, str(path), data_start + start)
    if end - start != found.nbytes:
        raise ValueError(
            f"{path}: {name}: expected {found.nbytes} bytes for shape {list(shape)} and dtype {dtype}, got "
            f"{end - start}"
        )
    return found


# ---- writing


class NewTensor(NamedTuple):
    """Describes a tensor that is to be saved."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class NewFile(NamedTuple):
    """Describes a file that is to be written: its header, its size in bytes, and where each tensor begins."""

    name: str
    header: bytes
    size: int
    starts: dict[str, int]


def plan_files(tensors: Sequence[NewTensor], stem: str, most_nbytes: int) -> tuple[list[NewFile], bytes | None]:
    """Returns the files for these tensors, and the text of the index, or None if one file has all.

    The tensors are distributed as save_pretrained does it: in their order, each file up to `most_nbytes` of tensors,
    and a larger tensor in a file of its own. Inside a file they lie as safetensors lays them out.
    """
    parts: list[list[NewTensor]] = []
    current: list[NewTensor] = []
    size = 0
    for each in tensors:
        if each.nbytes > most_nbytes:
            parts.append([each])
            continue
        if size + each.nbytes > most_nbytes:
            parts.append(current)
            current, size = [], 0
        current.append(each)
        size += each.nbytes
    if current or not parts:
        parts.append(current)
    if len(parts) == 1:
        return [_plan_file(f"{stem}.safetensors", parts[0])], None
    names = [f"{stem}-{i:05d}-of-{len(parts):05d}.safetensors" for i in range(1, len(parts) + 1)]
    files = [_plan_file(name, part) for name, part in zip(names, parts, strict=True)]
    total = {
        "total_parameters": sum(math.prod(each.shape) for each in tensors),
        "total_size": sum(each.nbytes for each in tensors),
    }
    weights = {name: file.name for file in files for name in file.starts}
    index = json.dumps({"metadata": total, "weight_map": weights}, indent=2, sort_keys=True) + "\n"
    return files, index.encode()


def _plan_file(name: str, tensors: Iterable[NewTensor]) -> NewFile:
    ordered = sorted(tensors, key=lambda each: (-_ORDER[each.dtype], each.name))
    entries: dict[str, Any] = {_METADATA: {"format": "pt"}}
    end = 0
    for each in ordered:
        offsets = [end, end + each.nbytes]
        entries[each.name] = {"dtype": _CODES[each.dtype], "shape": list(each.shape), "data_offsets": offsets}
        end += each.nbytes
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    starts = {each.name: start + entries[each.name]["data_offsets"][0] for each in ordered}
    return NewFile(name, len(text).to_bytes(8, "little") + text, start + end, starts)


def is_known(dtype: torch.dtype) -> bool:
    """Returns True if safetensors files can hold this dtype, and fsdp2 writes it."""
    return dtype in _CODES


def parse_size(size: int | str) -> int:
    """Returns a number of bytes: `5_000_000_000`, or "5GB", "5GiB".

    Raises:
        ValueError: it is something else.
    """
    units = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    units |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]?I?B?)", str(size).strip().upper())
    number = int(float(found[1]) * units[found[2]]) if found and found[2] in units else 0
    if number <= 0 or isinstance(size, bool):
        raise ValueError(f'max_shard_size: expected a number of bytes, or a text such as "5GB", got {size!r}')
    return number


# ---- boxes: what a rank holds of a tensor


class Box(NamedTuple):
    """Is a range of indices along each dim of a tensor: the first ones, and how many."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def intersection(self, other: Box) -> Box:
        """Returns the indices that both have; sizes of 0 if there are none."""
        starts = tuple(map(max, self.starts, other.starts))
        ends = (
            min(a + n, b + m) for a, n, b, m in zip(self.starts, self.sizes, other.starts, other.sizes, strict=True)
        )
        return Box(starts, tuple(max(0, end - start) for start, end in zip(starts, ends, strict=True)))

    def of(self, tensor: torch.Tensor, origin: Sequence[int]) -> torch.Tensor:
        """Returns the view of `tensor` that holds this box. `origin`: the index of the tensor's first element."""
        for dim, (start, size, first) in enumerate(zip(self.starts, self.sizes, origin, strict=True)):
            tensor = tensor.narrow(dim, start - first, size)
        return tensor

    def pieces(self, most: int) -> Iterator[Box]:
        """Yields boxes of at most `most` elements, one behind the other, that are together this one."""
        if not self.numel:
            return
        if self.numel <= most:
            yield self
            return
        dim = next(dim for dim, size in enumerate(self.sizes) if size > 1)
        rows = max(1, most * self.sizes[dim] // self.numel)
        for first in range(0, self.sizes[dim], rows):
            starts, sizes = list(self.starts), list(self.sizes)
            starts[dim] += first
            sizes[dim] = min(rows, self.sizes[dim] - first)
            yield from Box(tuple(starts), tuple(sizes)).pieces(most)

    def runs(self, shape: Sequence[int]) -> tuple[Iterator[int], int]:
        """Returns where the runs of its elements begin in a contiguous tensor of this shape, and their length."""
        dim = _inner_dim(shape, self.sizes)
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        first = sum(start * stride for start, stride in zip(self.starts, strides, strict=True))
        outer = [range(0, size * stride, stride) for size, stride in zip(self.sizes[:dim], strides, strict=False)]
        return _sums(first, outer), math.prod(self.sizes[dim:])

    def widened(self, shape: Sequence[int], least: int) -> Box:
        """Returns a box around this one whose runs have at least `least` elements, as far as the tensor has them."""
        starts, sizes = list(self.starts), list(self.sizes)
        while (dim := _inner_dim(shape, sizes)) > 0 and math.prod(sizes[dim:]) < least and math.prod(sizes[:dim]) > 1:
            starts[dim], sizes[dim] = 0, shape[dim]
        return Box(tuple(starts), tuple(sizes))


def whole_box(shape: Sequence[int]) -> Box:
    """Returns the box of a whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


def _inner_dim(shape: Sequence[int], sizes: Sequence[int]) -> int:
    """Returns the first dim from which on a box of these sizes is contiguous in a tensor of this shape."""
    dim = len(shape) - 1
    while dim > 0 and sizes[dim] == shape[dim]:
        dim -= 1
    return max(dim, 0)


def _sums(first: int, outer: Sequence[range]) -> Iterator[int]:
    if not outer:
        yield first
        return
    for offset in outer[0]:
        yield from _sums(first + offset, outer[1:])
