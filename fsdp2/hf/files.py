"""Reads and writes the parts of safetensors files that are not tensors: headers, the index, names of files.

A file is 8 bytes with the length of the header, the header (JSON: name -> dtype, shape, offsets), and the tensors, one
behind the other. fsdp2 reads and writes the ranges of tensors itself, by `pread` and `pwrite` at these offsets: they
can be counted, need no more memory than one bucket, and no memory map of the file stays in the process.
"""

from __future__ import annotations

import itertools
import json
import math
import operator
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..checkpoint.folders import require_regular

# What safetensors calls the dtypes of torch, in the order in which it lays tensors out, the last ones first: no tensor
# then needs padding.
_NAMES = (
    "BOOL bool, U8 uint8, I8 int8, F8_E5M2 float8_e5m2, F8_E4M3 float8_e4m3fn, F8_E8M0 float8_e8m0fnu, "
    "F8_E4M3FNUZ float8_e4m3fnuz, F8_E5M2FNUZ float8_e5m2fnuz, I16 int16, U16 uint16, F16 float16, BF16 bfloat16, "
    "I32 int32, U32 uint32, F32 float32, C64 complex64, F64 float64, I64 int64, U64 uint64"
)
DTYPES: dict[str, torch.dtype] = {
    code: getattr(torch, name) for code, name in (each.split() for each in _NAMES.split(", "))
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
_ORDER = {dtype: i for i, dtype in enumerate(DTYPES.values())}
# safetensors refuses longer headers.
_MOST_HEADER_NBYTES = 100_000_000
_MOST_DIMS = 64  # as torch can compute with
_METADATA = "__metadata__"


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
    """All tensors of a checkpoint, in the order of its files.

    Args:
        tensors: name -> tensor.
        sizes: path of a file -> its bytes.
        quantization: the `quantization_config` of the config.json beside the files, if they have tensors of one byte
            an element; else empty.
    """

    tensors: dict[str, FileTensor]
    sizes: dict[str, int]
    quantization: dict[str, Any]


# ---- reading


def read_checkpoint(folder: Path) -> Checkpoint:
    """Reads the headers of all files of a checkpoint: a folder, one file, or an index.

    Raises:
        FileNotFoundError: there is no such folder or file, or none that the index names.
        ValueError: a file, or the index, is damaged, or they contradict each other.
    """
    index, files = _files_of(folder)
    listed = None if index is None else _read_index(index)
    tensors: dict[str, FileTensor] = {}
    sizes = {}
    for path in files if listed is None else dict.fromkeys(listed.values()):
        found, sizes[str(path)] = _read_header(path)
        for each in found:
            other = tensors.setdefault(each.name, each)
            if other is not each:
                raise ValueError(f"{each.name}: expected it in one file, got it in {other.file} and {each.file}")
    for name, where in (listed or {}).items():
        if name not in tensors or tensors[name].file != str(where):
            place = "no file has it" if name not in tensors else f"it is in {tensors[name].file}"
            raise ValueError(f"{name}: {index} says that {where.name} has it, but {place}. One of them is stale.")
    if listed is not None and (more := next((each for each in tensors if each not in listed), None)):
        raise ValueError(f"{more}: {tensors[more].file} has it, but {index} does not list it. One of them is stale.")
    config = (folder if folder.is_dir() else folder.parent) / "config.json"
    has_config = config.is_file() and any(each.dtype.itemsize == 1 for each in tensors.values())
    settings = _read_json(config, config.read_bytes()).get("quantization_config") if has_config else None
    return Checkpoint(tensors, sizes, settings if isinstance(settings, dict) else {})


def _files_of(folder: Path) -> tuple[Path | None, list[Path]]:
    """Returns the index of a checkpoint; or None, and its files."""
    if folder.is_file():
        return (folder, []) if folder.name.endswith(".json") else (None, [folder])
    if not folder.is_dir():
        left = folder.with_name(f"{folder.name}.previous")
        advice = f". An interrupted save has left the previous one as {left}: rename it." if left.is_dir() else ""
        raise FileNotFoundError(f"{folder}: expected a folder with safetensors files, found none{advice}")
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file() and single.is_file():
        raise ValueError(f"{folder}: expected {single.name} or {index.name}, got both. Remove the stale one.")
    if index.is_file():
        return index, []
    files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder}: expected safetensors files, found none")
    return None, files


class _TwiceError(ValueError):
    """Says which name comes twice in a JSON text."""


def _read_json(path: Path, text: bytes) -> dict[str, Any]:
    """Returns the object that a JSON text describes. A name that comes twice in it is an error."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = [name for name, _ in pairs]
        if len({*names}) < len(names):
            twice = max(names, key=names.count)
            raise _TwiceError(f"{path}: {twice}: expected each name once, got it twice")
        return dict(pairs)

    try:
        found = json.loads(text.decode(), object_pairs_hook=unique)
    except _TwiceError:
        raise
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected JSON, got something else ({error}). The file is damaged.") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected an object in JSON, got {type(found).__name__}")
    return found


def _read_index(index: Path) -> dict[str, Path]:
    """Returns name -> file."""
    weights = _read_json(index, index.read_bytes()).get("weight_map")
    if not isinstance(weights, dict):
        raise ValueError(f'{index}: expected an object "weight_map" (name -> file), found none')
    for name, file in weights.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{index}: {name}: expected the name of a file beside it, got {file!r}")
    for file in dict.fromkeys(weights.values()):
        if not (index.parent / file).is_file():
            raise FileNotFoundError(f"{index.parent / file}: {index.name} names this file, which is not there")
    return {name: index.parent / file for name, file in weights.items()}


def _read_header(path: Path) -> tuple[list[FileTensor], int]:
    """Returns the tensors of a file, and its size."""
    require_regular(path)
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _MOST_HEADER_NBYTES):
            what = f"expected a header of {length} bytes, got a file of {size}"
            raise ValueError(f"{path}: {what}. It is truncated, or no safetensors file.")
        header = _read_json(path, file.read(length))
    header.pop(_METADATA, None)
    found = [_parse(path, name, entry, 8 + length) for name, entry in header.items()]
    end = 8 + length
    for each in (tensors := sorted(found, key=lambda each: each.start)):
        if each.start != end:
            raise ValueError(f"{path}: {each.name}: expected it at byte {end}, got {each.start}: a gap, or an overlap")
        end += each.nbytes
        if end > size:
            raise ValueError(f"{path}: {each.name} ends at byte {end}, but the file has {size}: it is truncated")
    if end != size:
        raise ValueError(f"{path}: tensors end at byte {end}, but the file has {size}: it was appended to")
    return tensors, size


def _parse(path: Path, name: str, entry: Any, data_start: int) -> FileTensor:
    try:
        code, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        are_numbers = all(type(number) is int and 0 <= number < 1 << 63 for number in (*shape, start, end))
    except (KeyError, TypeError, ValueError):
        are_numbers = False
    if not are_numbers or len(shape) > _MOST_DIMS:
        got = f"{entry!r:.200}"
        raise ValueError(f"{path}: {name}: expected dtype, shape and data_offsets in the header, got {got}")
    if not isinstance(code, str) or code not in DTYPES:
        raise ValueError(f"{path}: {name}: expected a dtype among {', '.join(DTYPES)}, got {code!r:.200}")
    found = FileTensor(name, DTYPES[code], shape, str(path), data_start + start)
    if end - start != found.nbytes:
        what = f"{found.nbytes} bytes for shape {list(shape)} and dtype {code}"
        raise ValueError(f"{path}: {name}: expected {what}, got {end - start}")
    return found


# ---- writing


class NewFiles(NamedTuple):
    """Describes files that are to be written. `headers`: file -> header; `index_text`: None if one file has all."""

    checkpoint: Checkpoint
    headers: dict[str, bytes]
    index_text: bytes | None


class Layout(NamedTuple):
    """Describes what decides in which files tensors are, besides their sizes.

    `blocks`: name -> the number of the block that the tensor is part of, and the elements of that block. All tensors of
    a block are in one file. `num_parameters`: the number of elements that the index says.
    """

    blocks: Mapping[str, tuple[int, int]]
    num_parameters: int


def plan_files(
    tensors: Sequence[FileTensor], stem: str, most_nbytes: int | None, layout: Layout | None = None
) -> NewFiles:
    """Returns the files for these tensors, of which `file` and `start` are to be found.

    The tensors are distributed as the libraries of Hugging Face do it: in their order, each file up to `most_nbytes` of
    tensors, and a larger tensor in a file of its own. Inside a file they lie as safetensors lays them out.
    """
    found: dict[Any, list[FileTensor]] = {}
    for each in tensors:
        key: Any = each.name if layout is None else layout.blocks[each.name][0]
        found.setdefault(key, []).append(each)
    parts: list[list[FileTensor]] = []
    current: list[FileTensor] = []
    used = total_nbytes = 0
    for block in found.values():
        first = block[0]
        nbytes = first.nbytes if layout is None else layout.blocks[first.name][1] * first.dtype.itemsize
        total_nbytes += nbytes
        if most_nbytes is not None and nbytes > most_nbytes:
            parts.append(block)
            continue
        if most_nbytes is not None and used + nbytes > most_nbytes:
            parts.append(current)
            current, used = [], 0
        current = [*current, *block]
        used += nbytes
    if current or not parts:
        parts.append(current)
    names = [f"{stem}-{i:05d}-of-{len(parts):05d}.safetensors" for i in range(1, len(parts) + 1)]
    made = NewFiles(Checkpoint({}, {}, {}), {}, None)
    for name, part in zip(names if len(parts) > 1 else [f"{stem}.safetensors"], parts, strict=True):
        _plan_file(name, part, made)
    if len(parts) == 1:
        return made
    numel = sum(math.prod(each.shape) for each in tensors) if layout is None else layout.num_parameters
    total = {"total_parameters": numel, "total_size": total_nbytes}
    weights = {name: each.file for name, each in made.checkpoint.tensors.items()}
    text = json.dumps({"metadata": total, "weight_map": weights}, indent=2, sort_keys=True) + "\n"
    return made._replace(index_text=text.encode())


def _plan_file(file: str, tensors: Sequence[FileTensor], made: NewFiles) -> None:
    """Adds a file to `made`."""
    ordered = sorted(tensors, key=lambda each: (-_ORDER[each.dtype], each.name))
    offsets = [0, *itertools.accumulate(each.nbytes for each in ordered)]
    entries: dict[str, Any] = {_METADATA: {"format": "pt"}}
    for each, span in zip(ordered, itertools.pairwise(offsets), strict=True):
        entries[each.name] = {"dtype": CODES[each.dtype], "shape": [*each.shape], "data_offsets": [*span]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    made.headers[file] = len(text).to_bytes(8, "little") + text
    made.checkpoint.sizes[file] = len(made.headers[file]) + offsets[-1]
    for each, start in zip(ordered, offsets, strict=False):
        made.checkpoint.tensors[each.name] = each._replace(file=file, start=len(made.headers[file]) + start)


def parse_size(size: int | str) -> int:
    """Returns a number of bytes: `5_000_000_000`, or "5GB", "5GiB".

    Raises:
        ValueError: it is something else.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]?)(I?)B?", str(size).strip().upper())
    number = int(float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2] or " ")) if found else 0
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

    def replaced(self, dim: int, start: int, size: int) -> Box:
        """Returns a box with another range along `dim`."""
        ranges = [*zip(self.starts, self.sizes, strict=True)]
        ranges[dim] = start, size
        return Box(*map(tuple, zip(*ranges, strict=True)))

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
            size = min(rows, self.sizes[dim] - first)
            yield from self.replaced(dim, self.starts[dim] + first, size).pieces(most)

    def runs(self, shape: Sequence[int]) -> tuple[Iterator[int], int]:
        """Returns where the runs of its elements begin in a contiguous tensor of this shape, and their length."""
        dim = _inner_dim(shape, self.sizes)
        strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        first = sum(map(operator.mul, self.starts, strides))
        outer = [range(0, size * stride, stride) for size, stride in zip(self.sizes[:dim], strides, strict=False)]
        return (first + sum(offsets) for offsets in itertools.product(*outer)), math.prod(self.sizes[dim:])

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
