"""Tests checkpoints in memory: a rank is killed, and the job goes on from the memory of the machine.

The oracle is a run that nothing has interrupted: each step trains on the same global batch, on any number of ranks.
"""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp2 import checkpoint, fully_shard
from fsdp2.checkpoint import memory
from helpers import RankError, full, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:torch")

STEPS, ROWS = 6, 12


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Returns a folder on the disk, and removes what belongs to it in memory."""
    yield tmp_path / "runs"
    place = memory.memory_of(tmp_path / "runs")
    if place is not None:
        shutil.rmtree(place)


def make(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3)).double()
    return fully_shard(model), torch.optim.AdamW(model.parameters(), lr=0.1)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """Trains on this rank's rows of a global batch. Returns the loss over all of it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    batch = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(step)).double()
    loss = model(batch[rank * ROWS // size : (rank + 1) * ROWS // size]).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    loss = loss.detach() / size
    dist.all_reduce(loss)
    return loss.item()


def train(folder: Path, wait: bool, dies_at: int | None) -> tuple[Path | None, list[float], float]:
    """Resumes, and trains to the end. Returns where it has resumed, its losses, and the seconds of resuming."""
    model, optimizer = make()
    began, last, first = time.perf_counter(), checkpoint.latest(folder), 0
    if last is not None:
        first = checkpoint.load(last, model, optimizer)["step"]
    seconds, losses = time.perf_counter() - began, []
    for step in range(first, STEPS):
        if step == dies_at and dist.get_rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        losses.append(step_of(model, optimizer, step))
        saving = checkpoint.save(
            folder / f"step-{step + 1}", model, optimizer, extra={"step": step + 1}, in_memory=True, wait=wait
        )
        saving.wait()  # so that the test knows from which step the next run goes on
    return last, losses, seconds


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("ranks", [4, 3])
def test_a_killed_rank(ranks: int, wait: bool, folder: Path) -> None:
    expected = run_ranks(4, lambda *_: train(folder.with_name("other"), wait, None)[1])[0]
    with pytest.raises(RankError, match=r"rank 2"):
        run_ranks(4, lambda *_: train(folder, wait, 4))
    assert not [*folder.glob("step-*")], "nothing on the disk"
    found = run_ranks(ranks, lambda *_: train(folder, wait, None))
    for last, losses, _ in found:
        assert last is not None
        assert last.parent == memory.memory_of(folder)
        assert last.name == "step-4"
        torch.testing.assert_close(losses, expected[4:], rtol=1e-12, atol=0)
    print(f"resumed on {ranks} ranks in {max(seconds for *_, seconds in found):.3f} s")
    left = memory.memory_of(folder.with_name("other"))
    assert left is not None
    assert [path.name for path in left.iterdir() if not path.name.startswith(".")] == [f"step-{STEPS}"], "one is kept"
    shutil.rmtree(left)


def test_memory_and_disk(folder: Path) -> None:
    """The last of both counts; a save to the disk frees the memory; a copy or a new folder does not find it."""

    def body(rank: int, _: int) -> None:
        model, optimizer = made = make()
        held = []
        for name, in_memory in (("a", False), ("b", True), ("c", True), ("d", False), ("e", True)):
            step_of(*made, 0)
            held.append([full(p).detach().clone() for p in model.parameters()])
            saving = checkpoint.save(folder / name, model, optimizer, in_memory=in_memory, keep_last=1)
            dist.barrier()
            last = checkpoint.latest(folder)
            assert last == saving.path
            assert last is not None
            assert (last.parent != folder) == in_memory
            place = memory.memory_of(folder)
            there = [] if place is None else [path.name for path in place.iterdir() if path.name[0] != "."]
            assert there == ([name] if in_memory else []), "one checkpoint, and none that is older than one on the disk"
            other, states = make(1)
            checkpoint.load(last, other, states)
            for one, two in zip(other.parameters(), held[-1], strict=True):
                assert torch.equal(full(one), two)
            dist.barrier()
        assert [path.name for path in folder.iterdir() if path.name[0] != "."] == ["d"]

    run_ranks(2, body)
    last = checkpoint.latest(folder)
    assert last is not None
    assert last.name == "e"
    shutil.copytree(folder, folder.with_name("copy"))
    assert checkpoint.latest(folder.with_name("copy")) == folder.with_name("copy") / "d"
    shutil.rmtree(folder)
    assert checkpoint.latest(folder) is None

    def another_job(rank: int, _: int) -> None:
        checkpoint.save(folder.with_name("new") / "a", nn.Linear(2, 2), in_memory=True)

    run_ranks(1, another_job)
    assert not last.parent.exists(), "what belongs to no folder was removed"
    place = memory.memory_of(folder.with_name("new"))
    assert place is not None
    shutil.rmtree(place)


def test_errors(folder: Path) -> None:
    def body(rank: int, _: int) -> None:
        model: Any = fully_shard(nn.Linear(4, 4))
        for root, kind, text in (
            (f"/dev/shm/machine-{rank}", NotImplementedError, "in_memory: expected ranks on one machine"),
            ("/none", FileNotFoundError, "/none: in_memory=True needs"),
        ):
            with mock.patch.object(memory, "ROOT", Path(root)), pytest.raises(kind, match=text):
                checkpoint.save(folder / "a", model, in_memory=True)
        checkpoint.save(folder / "a", model, in_memory=True)
        assert checkpoint.latest(folder) is not None

    run_ranks(2, body)
