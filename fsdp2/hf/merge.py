"""Writes a distributed checkpoint as safetensors files, in one process without ranks (`python -m fsdp2 merge`)."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..checkpoint.folders import check_path
from ..checkpoint.layout import Parts
from ..checkpoint.stored import Checkpoint, open_checkpoint
from .files import Box, parse_size
from .ranks import Ranks
from .save import Turns, plan_save, write_files
from .tensors import ModelTensor, some
from .views import NameTable

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class MergeReport(NamedTuple):
    """Says what `merge_checkpoint` has written.

    `files`: names of the files of tensors. `num_tensors`, `nbytes`: of all of these. `left_out`: what was in the
    checkpoint beside the model, or is no tensor: names of its keys.
    """

    files: tuple[str, ...]
    num_tensors: int
    nbytes: int
    left_out: tuple[str, ...]


def merge_checkpoint(
    checkpoint: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "5GB",
    *,
    key: str | None = None,
    names: Mapping[str, str] | Callable[[str], str | None] | None = None,
) -> MergeReport:
    """Writes the model of a checkpoint, of fsdp2 or `torch.distributed.checkpoint`, as safetensors files.

    It runs in one process, with no process group and no device, and needs no model. Any number of ranks may have saved
    the checkpoint. Memory holds pieces of one tensor. The files are those of `save_model`: `model.safetensors`, or
    several and their index. They take the place of `folder` in one step, when all are written; other files in it, such
    as `config.json` and tokenizers, stay.

    Example:
        ```python
        fsdp2.hf.merge_checkpoint("checkpoints/step-1000", "trained", torch.bfloat16)
        ```

    Args:
        checkpoint: a folder with `.metadata`.
        folder: is made, with its parents, or replaced.
        dtype: the dtype of floating-point tensors in the files. None: that of the checkpoint.
        max_shard_size: bytes of tensors in a file, as a number or a text such as "5GB".
        key: under which key of the saved dict the model's state dict is: "model", or "app.model" for a dict in a dict.
            None: the only one that is called "model"; or the whole dict, if it has no dicts inside.
        names: names in the checkpoint -> names in the files; None or "" leaves a tensor out, and others keep their
            names. In the first ones `{x}` is one part between dots, and `{x*}` any number: {"module.{x*}": "{x}"}.

    Raises:
        FileNotFoundError: `checkpoint` is no folder of a checkpoint, or lacks a file.
        ValueError: there is no model under `key`, or several may be it; two tensors get one name; a name in `names`
            that no tensor has; a size. `checkpoint` is damaged, or its `.metadata`, which is a pickle, names something
            that could run code: that is not called.
        RuntimeError: another save into `folder` runs.
        NotImplementedError: a dtype that safetensors lacks.
        TypeError: an argument. All errors leave `folder` as it was.
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype: expected a floating-point torch.dtype or None, got {dtype!r}")
    check_path("checkpoint", checkpoint)
    check_path("folder", folder)
    if key is not None and not isinstance(key, str):
        raise TypeError(f"key: expected a str or None, got {key!r}")
    most, table = parse_size(max_shard_size), NameTable(names)
    reader = open_checkpoint(Path(checkpoint))
    try:
        chosen, left_out = _model_of(reader, key)
        stored = _named(chosen, table, left_out)
        sources: list[ModelTensor] = [_Stored(reader, name, each) for name, each in stored.values()]
        names_of = {new: name for new, (name, _) in stored.items()}
        plan = plan_save(sources, names_of, dtype, most, "model", only=True)
        reader.check(names_of.values())
        turns = dict.fromkeys(sources, Turns(0, 1))
        nbytes = write_files(plan, Path(folder), Ranks(None), turns, "model", lambda _: None)
    finally:
        reader.close()
    return MergeReport((*plan.files.headers,), len(stored), nbytes, tuple(left_out))


class _Stored(ModelTensor):
    """A tensor of a checkpoint, all of which this process can read."""

    def __init__(self, reader: Checkpoint, name: str, stored: Parts) -> None:
        super().__init__(torch.empty(stored.shape, dtype=stored.dtype, device="meta"), None)
        self.names, self._reader = [name], reader

    def locate(self, to_save: bool = False) -> None:
        """Does nothing: this process has all of it."""

    def values(self, box: Box) -> Tensor:
        """Returns the values of a box, which it reads."""
        found = torch.empty(box.sizes, dtype=self.dtype)
        self._reader.read(self.name, found, box.starts)
        return found


# ---- the checkpoint


def _model_of(stored: Checkpoint, key: str | None) -> tuple[dict[str, tuple[str, Parts]], list[str]]:
    """Returns the model's names -> names in the checkpoint, and what is stored there; and the names of all else.

    Raises:
        ValueError: see `merge_checkpoint`.
    """
    paths = stored.paths
    parents = dict.fromkeys(".".join(map(str, paths[name][:-1])) for name in paths if name in stored.tensors)
    if key is None:
        models = [each for each in parents if each.rpartition(".")[2] == "model"]
        whole = [each for each in parents if not each]
        key = models[0] if len(models) == 1 else ("" if whole and not models else None)
        if key is None:
            what = "the keys under which there are tensors are" if parents else "it has no tensors"
            raise ValueError(f'key: expected one dict that is called "model", {what} {some(parents)}. Pass key=.')
    depth = len(key.split(".")) if key else 0
    found, left_out = {}, []
    for name, path in paths.items():
        parts = [*map(str, path)]
        if name in stored.tensors and ".".join(parts[:depth]) == key and len(parts) > depth:
            found[".".join(parts[depth:])] = name, stored.tensors[name]
        else:
            left_out.append(name)
    if not found:
        raise ValueError(f"key: expected a key of a dict with tensors, got {key!r}; there are {some(parents)}")
    return found, left_out


def _named(
    chosen: Mapping[str, tuple[str, Parts]], names: NameTable, left_out: list[str]
) -> dict[str, tuple[str, Parts]]:
    """Returns the names in the files -> names in the checkpoint, and what is stored there."""
    found: dict[str, tuple[str, Parts]] = {}
    for name, stored in chosen.items():
        new = names.find(name)
        if not new:
            left_out.append(stored[0])
        elif not isinstance(new, str):
            raise TypeError(f"names: expected a name or None for {name}, got {type(new).__name__}")
        elif new in found:
            raise ValueError(f"names: expected another name for each tensor, got {new!r} for {name} and another one")
        else:
            found[new] = stored
    names.refuse_unused()
    if not found:
        raise ValueError("names: expected names for some tensors, got none for all of them")
    return found


# ---- the command


def main(arguments: Sequence[str]) -> int:
    """Merges as the arguments say, and prints what was written. Returns 0.

    Raises:
        SystemExit: 2, for wrong arguments, and what `merge_checkpoint` refuses; 0, for --help.
    """
    parser = argparse.ArgumentParser(
        prog="python -m fsdp2 merge",
        description="Writes the model of a folder that torch.distributed.checkpoint has saved, on any number of ranks, "
        "as safetensors files for from_pretrained. It needs one process, no device, and little memory.",
        epilog="For example: python -m fsdp2 merge checkpoints/step-1000 trained --dtype bfloat16 "
        "--rename 'module.{x*}={x}'",
    )
    add = parser.add_argument
    add("checkpoint", help="the folder that torch.distributed.checkpoint has saved")
    add("out", help="the folder for the files, which is made, or replaced when all is written")
    add("--dtype", choices=_DTYPES, help="of floating-point tensors in the files; else that of the checkpoint")
    add("--max-shard-size", default="5GB", help="bytes of tensors in a file (%(default)s)")
    add("--key", help='of the model\'s state dict in what was saved; else the one that is called "model"')
    add(
        "--rename",
        action="append",
        default=[],
        metavar="OLD=NEW",
        help="the name in the files; in OLD {x} is one part between dots, {x*} any number; without NEW, it is left out",
    )
    given = parser.parse_args([*arguments])
    if wrong := [each for each in given.rename if "=" not in each]:
        parser.error(f"--rename: expected OLD=NEW, got {wrong[0]!r}")
    try:
        report = merge_checkpoint(
            given.checkpoint,
            given.out,
            _DTYPES.get(given.dtype),
            given.max_shard_size,
            key=given.key,
            names=dict(each.split("=", 1) for each in given.rename) or None,
        )
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError is also NotImplementedError
        parser.error(f"{error}")
    print(f"{report.num_tensors} tensors, {report.nbytes:,} bytes, in {given.out}: {', '.join(report.files)}")
    if report.left_out:
        print(f"left out: {some(report.left_out)}")
    return 0
