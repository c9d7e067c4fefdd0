"""Tests saves on disks that are full or read-only, in earnest, and two jobs in one folder.

Each error must reach all ranks and name the file, and leave the checkpoint before it whole.
"""

import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing import get_context

from fsdp2 import checkpoint, fully_shard
from fsdp2.checkpoint import memory
from helpers import full, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:torch")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Returns a disk of 2 MB: a file system in memory that is mounted for the test."""
    path = tmp_path / "disk"
    path.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(path)], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def model_of(number: float, rows: int = 100) -> nn.Linear:
    """Returns a sharded model of 100 KB for 100 rows."""
    model = nn.Linear(256, rows)
    with torch.no_grad():
        model.weight.fill_(number)
    return fully_shard(model)


def fails(folder: Path, prevent: Callable[[], object], allow: Callable[[], object], text: str, **options: Any) -> None:
    """On two ranks: a save, one that fails, waiting or not, a load of the first, and a save that works again."""

    def body(rank: int, _: int) -> None:
        checkpoint.save(folder / "a", model_of(1), **options)
        prevent()
        dist.barrier()
        for wait in (True, False):
            with pytest.raises(OSError, match=text) as raised:
                checkpoint.save(folder / "b", model_of(2, 9000), wait=wait, **options).wait()
            assert "b" in str(raised.value)
            dist.barrier()
        last = checkpoint.latest(folder)
        assert last is not None
        assert last.name == "a"
        checkpoint.load(last, again := model_of(3))
        assert (full(again.weight) == 1).all()
        dist.barrier()
        allow()
        dist.barrier()
        checkpoint.save(folder / "b", model_of(4), **options)
        assert sorted(path.name for path in last.parent.iterdir() if path.name[0] != ".")[-1] == "b", "nothing is left"

    run_ranks(2, body)


def nothing() -> None:
    """There is nothing to change."""


def test_a_full_disk(disk: Path) -> None:
    fails(disk / "runs", nothing, nothing, r"No space left on device, at byte [\d,]+ of the file")


def test_full_memory(disk: Path, tmp_path: Path) -> None:
    with mock.patch.object(memory, "ROOT", disk):
        fails(tmp_path / "runs", nothing, nothing, "No space left on device", in_memory=True)


def test_a_read_only_disk(disk: Path) -> None:
    def run(*commands: str) -> None:
        for command in commands if dist.get_rank() == 0 else ():
            subprocess.run([*command.split(), str(disk)], check=True)

    prevent = lambda: run(f"mount --bind {disk}", "mount -o remount,bind,ro")  # noqa: E731
    fails(disk / "runs", prevent, lambda: run("umount -l"), "Read-only file system")


def test_a_limit_of_file_sizes(tmp_path: Path) -> None:
    """The system refuses more bytes in the middle of a file."""

    def limit(nbytes: int) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))

    lift = lambda: limit(resource.RLIM_INFINITY)  # noqa: E731
    fails(tmp_path / "runs", lambda: limit(1 << 20), lift, r"File too large, at byte [\d,]+ of the file")


@pytest.mark.parametrize("in_memory", [False, True])
def test_two_jobs_in_one_folder(in_memory: bool, tmp_path: Path) -> None:
    """The second one is told, and may save when the first one has ended, also by a kill."""
    folder, context = tmp_path / "runs", get_context("fork")
    has_saved = context.Event()

    def first() -> None:
        checkpoint.save(folder / "a", nn.Linear(2, 2))
        has_saved.set()
        signal.pause()

    def second(rank: int, _: int, is_alone: bool) -> None:
        model = fully_shard(nn.Linear(4, 4))
        if not is_alone:
            with pytest.raises(RuntimeError, match=f"no other job saves.* process {job.pid}"):
                checkpoint.save(folder / "b", model, in_memory=in_memory)
            return
        checkpoint.save(folder / "b", model, in_memory=in_memory)
        last = checkpoint.latest(folder)
        assert last is not None
        assert last.name == "b"

    job = context.Process(target=first)
    job.start()
    assert has_saved.wait(60)
    run_ranks(2, second, False)
    job.kill()
    job.join()
    run_ranks(2, second, True)
    place = memory.memory_of(folder)
    assert (place is not None) == in_memory
    if place is not None:
        subprocess.run(["rm", "-r", str(place)], check=True)
