"""Reads the `.metadata` of a distributed checkpoint, and runs nothing from it.

The file is a pickle, and a pickle can name any function of the process. `FileSystemReader.read_metadata` of torch calls
what it names. Here only the classes that torch writes into it are found, and all others are refused by name.
"""

from __future__ import annotations

import importlib
import pickle
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

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
        raise damaged(path, f"got something else ({type(error).__name__}: {error})") from error
    if not isinstance(found, Metadata):
        raise damaged(path, f"got {type(found).__name__}")
    stored, paths = found.state_dict_metadata, found.planner_data or {}
    if not isinstance(stored, dict) or not all(type(each) in _KINDS for each in stored.values()):
        raise damaged(path, "got no dict of tensors and objects")
    if not isinstance(paths, dict) or not all(isinstance(each, tuple) for each in paths.values()):
        raise damaged(path, "got no keys of dicts")
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


def damaged(path: Path, what: str) -> ValueError:
    """Returns an error that says what was found instead of a whole `.metadata`."""
    written = f"what torch.distributed.checkpoint of torch {torch.__version__} writes"
    return ValueError(f"{path}: expected {written}, {what}. The file is damaged, or of a newer release of torch.")
