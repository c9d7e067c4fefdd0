"""Reads the `.metadata` of a distributed checkpoint, and runs nothing from it.

The file is a pickle, and a pickle can name any function of the process. `FileSystemReader.read_metadata` of torch calls
what it names. Here only the classes that torch writes into it are found, and all others are refused by name.
"""

from __future__ import annotations

import importlib
import math
import pickle
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)

from ..torch_private.checkpoints import METADATA_NAMES
from .folders import require_regular

_KINDS = (TensorStorageMetadata, BytesStorageMetadata)


def read_metadata(path: Path) -> Metadata:
    """Returns the metadata of a checkpoint.

    Raises:
        OSError: the file can't be read.
        ValueError: it is damaged, or names something that torch does not write.
    """
    require_regular(path)
    try:
        with path.open("rb") as file:
            found = _Unpickler(file).load()
    except OSError:
        raise
    except _UnknownNameError as error:
        raise ValueError(f"{path.parent}: {error}") from None
    except Exception as error:  # a damaged pickle raises almost any class
        raise _damaged(path, f"got something else ({type(error).__name__}: {error})") from error
    if not isinstance(found, Metadata):
        raise _damaged(path, f"got {type(found).__name__}")
    stored, paths = found.state_dict_metadata, found.planner_data or {}
    kinds = (TensorStorageMetadata, BytesStorageMetadata)
    if not isinstance(stored, dict) or not all(
        isinstance(n, str) and type(each) in kinds for n, each in stored.items()
    ):
        raise _damaged(path, "got no dict of tensors and objects")
    if not isinstance(paths, dict) or not all(isinstance(each, tuple) for each in paths.values()):
        raise _damaged(path, "got no keys of dicts")
    if not isinstance(found.storage_data, dict):
        raise _damaged(path, "got no places in files")
    return found


class _UnknownNameError(ValueError):
    """Says which name of a pickle was refused."""


class _Unpickler(pickle.Unpickler):
    """Makes objects of torch's metadata from a pickle."""

    def find_class(self, module: str, name: str) -> Any:
        """Returns what a pickle calls `module.name`.

        Raises:
            ValueError: torch writes no such name.
        """
        if name in METADATA_NAMES.get(module, "").split():
            return getattr(importlib.import_module(module), name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if module in ("pathlib", "pathlib._local"):
            return _path
        if (module, name) == ("builtins", "getattr"):  # so some releases of Python write values of an Enum
            return _member
        raise _UnknownNameError(
            f".metadata names {module}.{name}, which torch.distributed.checkpoint does not write there, and which "
            "could run code: nothing was called. If the folder is your own, torch reads it, and calls what it names: "
            "torch.distributed.checkpoint.format_utils.dcp_to_torch_save(folder, file)."
        )


def _path(*parts: str) -> str:
    """Returns a path as a text: its class may be one of another system, and pickles can change classes of Python."""
    return "/".join(map(str, parts))


def _member(kind: Any, name: str) -> Enum:
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise _UnknownNameError(f".metadata names {name!r} of {kind!r}, which is no value of an Enum")
    return kind[name]


def _damaged(path: Path, what: str) -> ValueError:
    written = f"what torch.distributed.checkpoint of torch {torch.__version__} writes"
    return ValueError(f"{path}: expected {written}, {what}. The file is damaged, or of a newer release of torch.")


def check_tensors(folder: Path, metadata: Metadata, names: Iterable[str]) -> None:
    """Checks that the metadata of tensors is whole, and that the files have what it says.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is shorter, or no regular one; a tensor is not whole; the metadata contradicts itself.
    """
    try:
        _check_tensors(folder, metadata, {name: metadata.state_dict_metadata[name] for name in names})
    except (AttributeError, TypeError) as error:
        raise _damaged(folder / ".metadata", f"got something else ({error})") from error


def _check_tensors(folder: Path, metadata: Metadata, tensors: Mapping[str, Any]) -> None:
    sizes: dict[str, int] = {}
    held = dict.fromkeys(tensors, 0)
    for index, info in metadata.storage_data.items():
        if index.fqn not in tensors:
            continue
        path, end = folder / info.relative_path, info.offset + info.length
        if info.relative_path not in sizes:
            if ".." in PurePath(info.relative_path).parts or folder not in path.parents:
                raise _damaged(folder / ".metadata", f"got a file outside of the folder for {index.fqn}, {path}")
            if not path.exists():
                raise FileNotFoundError(f"{path}: {index.fqn} is in this file, which is not there")
            require_regular(path)
            sizes[info.relative_path] = path.stat().st_size
        if not 0 <= info.offset <= end <= sizes[info.relative_path]:
            what = f"expected it at bytes {info.offset} to {end}, but the file has {sizes[info.relative_path]}"
            raise ValueError(f"{path}: {index.fqn}: {what}. It is truncated, or of another save.")
        is_packed = bool(getattr(info, "transform_descriptors", None))
        held[index.fqn] += 1 << 62 if is_packed else info.length
    for name, each in tensors.items():
        numel = math.prod(each.size)
        parts = sum(_numel(folder, name, chunk, each.size) for chunk in each.chunks)
        if parts < numel or numel * each.properties.dtype.itemsize > held[name]:
            what = f"{numel} elements for shape {[*each.size]}, got {parts} in {held[name]} bytes of files"
            raise _damaged(folder / ".metadata", f"{name}: expected {what}")


def _numel(folder: Path, name: str, chunk: ChunkStorageMetadata, shape: Sequence[int]) -> int:
    """Returns the number of elements of a part of a tensor."""
    ends = [first + size for first, size in zip(chunk.offsets, chunk.sizes, strict=False)]
    is_inside = all(0 <= first <= end <= whole for first, end, whole in zip(chunk.offsets, ends, shape, strict=False))
    if not is_inside or not len(chunk.offsets) == len(chunk.sizes) == len(shape):
        what = f"got a part of {[*chunk.sizes]} at {[*chunk.offsets]} of {name}, which has the shape {[*shape]}"
        raise _damaged(folder / ".metadata", what)
    return math.prod(chunk.sizes)
