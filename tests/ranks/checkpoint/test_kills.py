"""Tests that a kill at any moment loses nothing: the next run finds a whole checkpoint, and goes on from it.

A job of two ranks saves and removes checkpoints as fast as it can, waiting or not, and each third in memory. One of
its ranks, or both, get SIGKILL at a drawn moment. Behind each kill the last checkpoint must be one that was complete,
with all bits; the next job resumes from it, saves in the same folder, and finds nothing that the killed one has left.
"""

import os
import random
import shutil
import signal
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import distribute_tensor
from torch.multiprocessing import get_context

from fsdp2 import checkpoint, fully_shard
from fsdp2.checkpoint import memory
from helpers import NIGHTLY, full

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:torch")

KILLS = 200 if NIGHTLY else 12


def state_at(step: int) -> torch.Tensor:
    return torch.arange(600 * 70, dtype=torch.float32).view(600, 70) + step


def run(rank: int, folder: Path, store: Path, started: Path) -> None:
    """Resumes from the last checkpoint, whose values must be those of its step, and saves until it is killed."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = fully_shard(nn.Linear(70, 600))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step, last = 0, checkpoint.latest(folder)
    if last is not None:
        step = checkpoint.load(last, model, optimizer)["step"]
        assert last.name == f"step-{step}"
        assert torch.equal(full(model.weight).detach(), state_at(step)), "a mixture of steps"
    started.touch()
    while True:
        step += 1
        with torch.no_grad():
            model.weight.copy_(distribute_tensor(state_at(step), model.weight.device_mesh))
        wait, extra = step % 2 == 0, {"step": step}
        options: Any = {"wait": wait, "in_memory": step % 3 == 0}
        checkpoint.save(folder / f"step-{step}", model, optimizer, extra=extra, keep_last=2, **options)
        model(torch.ones(1, 70))


def job(folder: Path, after_s: float | None, victims: list[int], store: Path) -> None:
    """Runs two ranks, and kills some of them. None: as soon as both have resumed, and saved once more."""
    context = get_context("fork")
    started = [store.with_suffix(f".{rank}") for rank in range(2)]
    ranks = [context.Process(target=_quietly, args=(rank, folder, store, started[rank])) for rank in range(2)]
    before = checkpoint.latest(folder)
    for each in ranks:
        each.start()
    until = time.monotonic() + 60
    while not (all(path.exists() for path in started) and (after_s is not None or checkpoint.latest(folder) != before)):
        assert all(each.is_alive() for each in ranks), (folder.parent / "log").read_text()
        assert time.monotonic() < until, "the job does not save"
        time.sleep(0.005)
    time.sleep(after_s or 0)
    for rank in victims:
        os.kill(ranks[rank].pid or 0, signal.SIGKILL)
    for each in ranks:
        each.join(3)
        each.kill()  # what a launcher does with ranks that wait for one that is gone
        each.join()


def _quietly(rank: int, folder: Path, store: Path, started: Path) -> None:
    try:
        run(rank, folder, store, started)
    except BaseException:
        with (folder.parent / "log").open("a") as log:
            traceback.print_exc(file=log)
        os._exit(1)


def test_kills(tmp_path: Path) -> None:
    folder, draw = tmp_path / "run", random.Random(int.from_bytes(os.urandom(4), "little"))
    folder.mkdir()
    job(folder, None, [0, 1], tmp_path / "first")
    kills = []
    for number in range(KILLS):
        victims = draw.choice(([0], [1], [0, 1]))
        kills.append((victims, after_s := draw.uniform(0, 0.25)))
        job(folder, after_s, victims, tmp_path / f"store-{number}")
        last = checkpoint.latest(folder)
        assert last is not None, kills
        log = tmp_path / "log"
        assert "AssertionError" not in (log.read_text() if log.exists() else ""), kills
    before = checkpoint.latest(folder)
    job(folder, None, [0, 1], tmp_path / "last")
    assert checkpoint.latest(folder) != before, kills
    left = [path.name for path in folder.iterdir() if path.name.startswith(".") and path.name != ".fsdp2-lock"]
    assert len(left) <= 3, f"only what the last job has begun: {left}"
    assert len([path for path in folder.iterdir() if path.name.startswith("step-")]) <= 4
    place = memory.memory_of(folder)
    assert place is not None
    assert len([*place.iterdir()]) <= 6
    shutil.rmtree(place)
