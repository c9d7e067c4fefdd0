"""Tests an unedited program with torch's names, run by `python -m fsdp2`: each of its processes uses fsdp2."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from helpers import NIGHTLY, alone

ROOT = Path(__file__).parents[2]
STEPS, ROWS = 3, 4

# It sets an environment variable before it imports torch, and takes names from three places.
PROGRAM = """
import os, sys, time
os.environ["OMP_NUM_THREADS"] = "1"
assert "torch" not in sys.modules
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.fsdp import MixedPrecisionPolicy
from torch.distributed._composable.fsdp.fully_shard import fully_shard
from torch.distributed.fsdp import FSDPModule


def train(rank, store):
    if store is None:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    for module in (model[0], model):
        fully_shard(module, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    assert isinstance(model, FSDPModule)
    optimizer, lines = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(3):
        batch = torch.randn(4, 5, generator=torch.Generator().manual_seed(step)).chunk(world_size)[rank]
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean := loss.detach() / world_size)
        lines.append(f"loss {mean.item()}\\n")
    on_ranks = [None] * world_size
    dist.all_gather_object(on_ranks, f"{rank}: {fully_shard.__module__} {sys.argv[1:]}\\n")
    if rank == 0:
        print(*on_ranks, *lines, sep="", end="", flush=True)
    dist.destroy_process_group()
    time.sleep(0.3)  # gloo's threads let go of the last tensors late, which an interpreter that ends does not survive


if __name__ == "__main__":
    if "--spawn" in sys.argv:
        import torch.multiprocessing
        torch.multiprocessing.spawn(train, (os.path.abspath("store"),), nprocs=2)
    else:
        train(None, None)
"""


def plain_losses() -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        loss = model(torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(step))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
COMMANDS = {
    "inside torchrun, and spawns": [*TORCHRUN, "1", "-m", "fsdp2", "program.py", "--spawn"],
    "around torchrun": ["-m", "fsdp2", *TORCHRUN, "1", "-m", "program", "argument"],
}


# Inside torchrun, and in processes that a program spawns, it takes 14 s.
@pytest.mark.parametrize("command", COMMANDS if NIGHTLY else ["around torchrun"])
def test_program_trains_as_in_one_process(command: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    options = COMMANDS[command]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    finished = subprocess.run(
        [sys.executable, *options], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    lines = finished.stdout.splitlines()
    ranks = 2 if "--spawn" in options else 1
    assert lines[:ranks] == [f"{rank}: fsdp2.api {options[-1:]}" for rank in range(ranks)]
    assert [float(line.removeprefix("loss ")) for line in lines[ranks:]] == pytest.approx(alone(plain_losses), abs=1e-6)
