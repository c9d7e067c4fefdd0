"""Replaces a folder by another one in one step, so that either the old or the new one is there, and whole.

Where two processes save one folder of safetensors files (`NewFolder`) at a time, the last one wins. A job keeps others
from saving checkpoints into the folder around its own (`JobLock`) from its first save to its end.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
HOST = re.sub(r"[^\w.]+", "-", platform.node())[:40] or "unknown"
# Another machine may write to a folder that is younger, where the filesystem has locks of one machine only.
_DAY_S = 24 * 60 * 60
# What a save replaces. All else in the folder stays: tokenizers, other adapters.
_OWN = r"{stem}(-\d{{5}}-of-\d{{5}})?\.safetensors|{stem}\.safetensors\.index\.json"
# Folders of saves and removals that have not ended.
_LEFT = re.compile(r"\..+\.fsdp2-([0-9a-f]+)-\w+")


def check_path(name: str, value: Any) -> None:
    """Raises TypeError if `value`, of the argument `name`, is no path."""
    if not isinstance(value, str | os.PathLike):
        raise TypeError(f"{name}: expected a path, got {value!r}")


def path_text(value: Any) -> str:
    """Returns a text that is equal on all ranks that have the same path; of what is no path, too."""
    return str(Path(value)) if isinstance(value, str | os.PathLike) else repr(value)


def require_regular(path: Path) -> None:
    """Raises ValueError if something else than a file has this path, such as a FIFO, which has no end."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
        raise ValueError(f"{path}: expected a regular file, got {kinds.get(stat.S_IFMT(mode), 'a device')}")


@contextmanager
def naming(folder: Path, nbytes: int) -> Iterator[None]:
    """Context: adds a folder and the bytes for it to what the system raises without a path, such as a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        text = f"{error.strerror}; the files of this save need {nbytes:,} bytes in"
        raise OSError(error.errno, text, str(folder)) from error


class NewFolder:
    """A folder beside `final`, in which files are written, and which takes its place then.

    What a killed save of this machine has left is removed; what one of another machine has left, after a day.

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
        kind = re.compile(rf"\.{re.escape(self.final.name)}\.saving-(.+)-(\d+)-[0-9a-f]{{8}}")
        for left in [*self.final.parent.iterdir()]:
            found = kind.fullmatch(left.name)
            if found and ((found[1] == HOST and not _is_alive(int(found[2]))) or _age_s(left) > _DAY_S):
                shutil.rmtree(left, ignore_errors=True)
        name = f".{self.final.name}.saving-{HOST}-{os.getpid()}-{secrets.token_hex(4)}"
        self.path = self.final.with_name(name)
        self.path.mkdir()

    def remove(self) -> None:
        """Removes the new folder, if it has not taken the place of the final one: the save has failed."""
        shutil.rmtree(self.path, ignore_errors=True)

    def publish(self, stem: str) -> None:
        """Puts the new folder in the place of the final one.

        What else was in that is in the new one, too, as links to the same files where links are possible.
        """
        for path in self.path.iterdir():
            sync(path)
        own = re.compile(_OWN.format(stem=re.escape(stem)))
        if self.final.exists():
            there = {path.name for path in self.path.iterdir()}
            for path in self.final.iterdir():
                if path.name not in there and not own.fullmatch(path.name):
                    _carry_over(path, self.path / path.name)
        for folder, _, _ in os.walk(self.path):
            sync(Path(folder))
        replace_folder(self.path, self.final)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is of another user
        pass
    return True


class JobLock:
    """The right of one job to save checkpoints into a folder, from its first save to the end of this process.

    Record locks are not inherited by forked processes, such as workers of a data loader, which may outlive the job.

    Raises:
        RuntimeError: another process has it.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / ".fsdp2-lock"
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.pread(self._descriptor, 200, 0).decode(errors="replace")
            os.close(self._descriptor)
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise RuntimeError(
                    f"{folder}: expected a folder into which no other job saves, got one that belongs to {owner}. Wait "
                    "until that process has ended, or pass a folder of this job's own."
                ) from error
            self.is_held = False  # a filesystem without locks
            return
        self.is_held = True
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"host {HOST}, process {os.getpid()}".encode(), 0)

    def release(self) -> None:
        """Lets other jobs save there."""
        if self.is_held:
            os.close(self._descriptor)
            self.is_held = False

    def clean(self, folder: Path, run_id: str) -> None:
        """Removes what other jobs have left in the folder that were killed: no other runs."""
        for left in [*folder.iterdir()] if self.is_held else ():
            found = _LEFT.fullmatch(left.name)
            if found is not None and found[1] != run_id:
                shutil.rmtree(left, ignore_errors=True)


def replace_folder(new: Path, final: Path) -> None:
    """Puts a folder in the place of `final`, in one step where the system can, and has its name reach the disk."""
    sync(new)
    if not final.exists():
        new.rename(final)
    elif exchange(new, final):
        shutil.rmtree(new, ignore_errors=True)
    else:
        old = final.with_name(f"{final.name}.previous")  # the last one, if this process is killed here
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
        new.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    sync(final.parent)


def remove_folder(folder: Path, run_id: str) -> None:
    """Removes a folder. If this process is killed meanwhile, the next job removes the rest: see `JobLock.clean`."""
    old = folder.with_name(f".{folder.name.lstrip('.')}.fsdp2-{run_id}-{secrets.token_hex(4)}")
    folder.rename(old)
    shutil.rmtree(old)


def _age_s(folder: Path) -> float:
    """Returns the seconds since something was last written in a folder; 0 if it is gone meanwhile."""
    try:
        return time.time() - max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except OSError:
        return 0.0


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


def sync(path: Path) -> None:
    """Has a file, or the names in a folder, reach the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):  # not for folders, on this filesystem
            raise
    finally:
        os.close(descriptor)


def exchange(one: Path, other: Path) -> bool:
    """Exchanges two folders in one step. Returns False if the system, or this filesystem, can't do that."""
    function: Callable[..., int] | None = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    return function(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0
