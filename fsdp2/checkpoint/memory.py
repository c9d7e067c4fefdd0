"""Finds the place in this machine's memory for the checkpoints of a folder.

A checkpoint in memory is a checkpoint in a folder of `/dev/shm`: it stays when the ranks that saved it are killed, and
is gone when the machine restarts. A folder on the disk has one such place. Its file `.fsdp2-memory` has the name of the
place, so that no job finds the place by a new folder of the same path, or by a copy of the folder.

Memory does not grow without bound: a place has one checkpoint, and the next save into the folder, to memory or the
disk, removes it. A job that makes a place removes this user's places that belong to no folder, and those that no job
has used for a day.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import time
from pathlib import Path

from .folders import HOST, JobLock

ROOT = Path("/dev/shm")
"""The file system of this machine that is in memory."""
_TOKEN, _HOME = ".fsdp2-memory", ".home"
_UNUSED_S = 24 * 60 * 60


def memory_of(folder: Path) -> Path | None:
    """Returns the place in memory that belongs to a folder on the disk; None if this machine has none."""
    try:
        place = _place_of(folder)
        return place if place.is_dir() and place.stat().st_uid == os.getuid() else None
    except OSError:
        return None


def make_memory(folder: Path) -> Path:
    """Returns the place in memory that belongs to a folder on the disk, and makes it if there is none.

    Raises:
        OSError: this system has no file system in memory, or the folder can't be written to.
    """
    if not ROOT.is_dir():
        raise FileNotFoundError(
            f"{ROOT}: in_memory=True needs a file system in memory, got none. Save with in_memory=False."
        )
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / _TOKEN).exists():
        (folder / _TOKEN).write_text(secrets.token_hex(8))
    _remove_unused()
    place = _place_of(folder)
    place.mkdir(mode=0o700, exist_ok=True)
    (place / _HOME).write_text(str(folder.resolve()))
    return place


def machine() -> str:
    """Returns a text that is equal in processes that share this memory."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{boot.read_text() if boot.exists() else HOST} {ROOT} {ROOT.stat().st_dev if ROOT.exists() else 0}"


def home_of(place: Path) -> Path | None:
    """Returns the folder on the disk to which a place in memory belongs; None for another folder."""
    try:
        return Path((place / _HOME).read_text())
    except OSError:
        return None


def _place_of(folder: Path) -> Path:
    """Returns where a folder's place would be. A copy of the folder has another one, as its file has another inode."""
    token = folder / _TOKEN
    return ROOT / f"fsdp2-{os.getuid()}-{re.sub('[^0-9a-f]', '', token.read_text())[:16]}-{token.stat().st_ino}"


def _remove_unused() -> None:
    """Removes this user's places that belong to no folder any more, or that are a day old, if no job uses them."""
    for place in ROOT.glob(f"fsdp2-{os.getuid()}-*"):
        home = home_of(place)
        is_owned = home is None or memory_of(home) == place  # without a home, it is being made
        try:
            if is_owned and time.time() - max(each.stat().st_mtime for each in (place, *place.iterdir())) < _UNUSED_S:
                continue
            JobLock(place).release()
            shutil.rmtree(place)
        except (OSError, RuntimeError):  # another job uses it, or removes it now
            continue
