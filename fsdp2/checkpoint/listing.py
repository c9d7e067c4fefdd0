"""Finds the checkpoints in a folder and in memory, and removes old ones."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path

from .folders import check_path, remove_folder
from .layout import LAYOUT, METADATA
from .memory import memory_of


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """Returns the checkpoint in a folder that was saved last; None if there is none, or no such folder.

    It reads the folder and does not communicate. A checkpoint is there only when it is complete, and may be of
    torch.distributed.checkpoint, too. One that `save(in_memory=True)` has left in the memory of this machine counts as
    one in the folder. If it is passed to `load`, ranks compare it.

    Args:
        folder: the folder in which checkpoints are, each in a folder of its own.

    Raises:
        TypeError: `folder` is no path.
    """
    check_path("folder", folder)
    memory = memory_of(Path(folder))
    found = checkpoints_in(Path(folder), *([] if memory is None else [memory]))
    return found[-1] if found else None


def checkpoints_in(*folders: Path) -> list[Path]:
    """Returns the complete checkpoints in folders, the one that was saved last at the end."""
    paths = [path for folder in folders if folder.is_dir() for path in folder.iterdir()]
    found = [path for path in paths if not path.name.startswith(".") and (path / METADATA).is_file()]
    return sorted(found, key=lambda path: (_saved_at(path), [int(each) for each in re.findall(r"\d+", path.name)]))


def saved_after(folder: Path) -> float:
    """Returns a time behind the last save into a folder, also to memory: this machine's clock may be behind, or have
    been set back.
    """
    last = latest(folder)
    return 0.0 if last is None else _saved_at(last) + 1e-3


def _saved_at(path: Path) -> float:
    """Returns the time of a save: of ours, what its first rank has noted, which copies of the folder have, too."""
    try:
        with (path / LAYOUT).open("rb") as file:
            found = re.search(rb'"time":([0-9.]+)', file.read(200))
        if found is not None:
            return float(found[1])
    except OSError:
        pass
    return (path / METADATA).stat().st_mtime


def remove_old(folder: Path, keep_last: int, run_id: str) -> None:
    """Removes checkpoints of fsdp2 in a folder but the last ones."""
    ours = [path for path in checkpoints_in(folder) if (path / LAYOUT).is_file()]
    for path in ours[: max(0, len(ours) - keep_last)]:
        try:
            remove_folder(path, run_id)
        except OSError as error:
            warnings.warn(f"{path}: this old checkpoint can't be removed: {error}", stacklevel=3)
