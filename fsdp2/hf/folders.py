"""Replaces a folder by another one in one step, so that either the old or the new one is there, and whole."""

from __future__ import annotations

import ctypes
import errno
import glob
import os
import re
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
# What a save replaces. All else in the folder stays: tokenizers, other adapters.
_OWN = r"{stem}(-\d{{5}}-of-\d{{5}})?\.safetensors|{stem}\.safetensors\.index\.json"


def check_path(name: str, value: Any) -> None:
    """Raises TypeError if `value`, of the argument `name`, is no path."""
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{name}: expected a path, got {value!r}")


class NewFolder:
    """A folder beside `final`, in which files are written, and which takes its place then.

    Raises:
        ValueError: `final` can't be replaced: it is a mount, or the program works in it.
        FileExistsError: it is a file.
    """

    def __init__(self, final: Path) -> None:
        self.final = final.resolve()
        if self.final.exists() and not self.final.is_dir():
            raise FileExistsError(f"{final}: expected a folder, got a file")
        if self.final.is_mount() or self.final in (Path.cwd(), *Path.cwd().parents):
            raise ValueError(
                f"{final}: a save replaces the whole folder in one step, which a mount, or the folder that the program "
                "works in, does not allow. Pass a folder inside it."
            )
        self.final.parent.mkdir(parents=True, exist_ok=True)
        for left in self.final.parent.glob(f".{glob.escape(self.final.name)}.saving-*"):
            shutil.rmtree(left, ignore_errors=True)  # of a save that was killed
        self.path = self.final.parent / f".{self.final.name}.saving-{secrets.token_hex(4)}"
        self.path.mkdir()

    def remove(self) -> None:
        """Removes the new folder: the save has failed."""
        shutil.rmtree(self.path, ignore_errors=True)

    def publish(self, stem: str) -> None:
        """Puts the new folder in the place of the final one.

        What else was in that is in the new one, too, as links to the same files where links are possible.
        """
        for path in self.path.iterdir():
            _sync(path)
        own = re.compile(_OWN.format(stem=re.escape(stem)))
        if self.final.exists():
            there = {path.name for path in self.path.iterdir()}
            for path in self.final.iterdir():
                if path.name not in there and not own.fullmatch(path.name):
                    _carry_over(path, self.path / path.name)
        for folder, _, _ in os.walk(self.path):
            _sync(Path(folder))
        if not self.final.exists():
            self.path.rename(self.final)
        elif _exchange(self.path, self.final):
            self.remove()
        else:
            previous = self.path.with_name(self.path.name.replace(".saving-", ".previous-"))
            self.final.rename(previous)
            self.path.rename(self.final)
            shutil.rmtree(previous, ignore_errors=True)
        _sync(self.final.parent)


def _carry_over(source: Path, target: Path) -> None:
    if source.is_dir() and not source.is_symlink():
        shutil.copytree(source, target, symlinks=True, copy_function=_link)
    else:
        _link(source, target)


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # not on this filesystem
        shutil.copy2(source, target, follow_symlinks=False)


def _sync(path: Path) -> None:
    """Has a file, or the names in a folder, reach the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):  # not for folders, on this filesystem
            raise
    finally:
        os.close(descriptor)


def _exchange(one: Path, other: Path) -> bool:
    """Exchanges two folders in one step. Returns False if the system, or this filesystem, can't do that."""
    function: Callable[..., int] | None = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    return function(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0
