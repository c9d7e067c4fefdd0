"""Tests `python -m fsdp2 script.py`, with a script that Lightning starts again in a second process, and `torchrun -m
fsdp2`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fsdp2

pytest.importorskip("lightning.fabric")
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]

SCRIPT = """
import sys
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

def parallelize(model, mesh):
    return fully_shard(model, mesh=mesh["data_parallel"])

strategy = ModelParallelStrategy(parallelize, data_parallel_size=2, tensor_parallel_size=1)
fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
fabric.launch()
torch.manual_seed(0)
model = fabric.setup_module(nn.Linear(3, 3))
fabric.backward(model(torch.ones(2, 3)).sum())
total = model.module.weight.grad.full_tensor().sum().item()
is_sharded = isinstance(model.module, FSDPModule)
# In one piece: the ranks write to the same pipe.
sys.stdout.write(f"rank {fabric.global_rank} {sys.argv[1:]} {FSDPModule.__module__} {is_sharded} {total}\\n")
"""
PRINTED = ["rank 0 ['--option', '1'] fsdp2.module True 18.0", "rank 1 ['--option', '1'] fsdp2.module True 18.0"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.parametrize("launcher", [["-m", "fsdp2"], [*TORCHRUN, "-m", "fsdp2"]])
def test_unedited_script(launcher: list[str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    root = str(Path(fsdp2.__file__).parents[1])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *launcher, str(script), "--option", "1"]
    finished = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr[-4000:]
    assert sorted(line for line in finished.stdout.splitlines() if line.startswith("rank ")) == PRINTED
