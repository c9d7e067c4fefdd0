"""Tests what fsdp2.hf reads, writes and allocates on one of many simulated ranks: bytes are counted, and calls."""

import gc
import tracemalloc
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.meters import AllocationMeter
from fsdp2 import fully_shard, hf
from fsdp2.hf import load, save
from helpers import fake_world
from safetensors_files import calls_of

RANKS, LAYERS, DIM = 8, 6, 1024
NBYTES = LAYERS * DIM * DIM * 4
BUCKET = 256 * 1024
SLACK = 64 * 1024


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("hf") / "model"
    hf.save_model(Stack(), folder, torch.bfloat16)
    return folder


def test_a_rank_reads_and_writes_its_own_bytes(source: Path, tmp_path: Path) -> None:
    """In few calls: one for each parameter, or for each bucket of one that is larger."""
    with fake_world(RANKS):
        model = Stack()
        for layer in model.layers[:3]:
            fully_shard(layer)
        fully_shard(model)
        with calls_of("preadv") as reads:
            report = hf.load_model(model, source)
        assert sum(reads) == report.bytes_read == NBYTES // 2 // RANKS
        assert len(reads) == LAYERS
        with calls_of("pwrite") as writes, mock.patch.object(save, "_can_share_writes", return_value=True):
            assert hf.save_model(model, tmp_path / "out") == NBYTES // RANKS
        assert sum(writes) == NBYTES // RANKS
        assert len(writes) == LAYERS


def test_replicas_share_the_reads(source: Path) -> None:
    """Each byte is read once, whatever the number of replicas: by another one for each parameter and bucket."""
    with fake_world(RANKS):
        model = fully_shard(Stack(), mesh=init_device_mesh("cpu", (4, 2)))
        with calls_of("preadv") as reads, mock.patch.object(load, "BUCKET_NBYTES", DIM * DIM // 4):
            hf.load_model(model, source)
        assert sum(reads) == NBYTES // 2 // RANKS


def peaks(function: Any) -> tuple[int, int]:
    """Returns the most bytes that torch, and that Python, had allocated above those before.

    Python's are the fewest of three calls: in a process that has run other tests, a table of the interpreter may grow
    during any one of them, by half a MiB.
    """
    of_torch, of_python = [], []
    for _ in range(3):
        gc.collect()
        with AllocationMeter() as meter, meter.region("call"):
            tracemalloc.start()
            try:
                function()
                of_python.append(tracemalloc.get_traced_memory()[1])
            finally:
                tracemalloc.stop()
        of_torch.append(meter.peak_during("call") - meter.allocated_before("call"))
    return max(of_torch), min(of_python)


def test_memory_above_the_shards_is_one_bucket(source: Path, tmp_path: Path) -> None:
    """However large the model is: a load has its bucket of torch, and a save of Python. A load that converts no dtype
    reads values to their places, and needs none.
    """
    with (
        fake_world(RANKS),
        mock.patch.object(load, "BUCKET_NBYTES", BUCKET),
        mock.patch.object(save, "BUCKET_NBYTES", BUCKET),
        mock.patch.object(save, "_can_share_writes", return_value=True),
    ):
        model = fully_shard(Stack())
        hf.load_model(model, source)  # imports, and what torch keeps
        hf.save_model(model, tmp_path / "first", torch.bfloat16)
        hf.save_model(model, tmp_path / "as it is")
        of_torch, of_python = peaks(lambda: hf.load_model(model, source))
        assert BUCKET <= of_torch <= BUCKET + SLACK
        assert of_python <= 4 * SLACK
        of_torch, of_python = peaks(lambda: hf.load_model(model, tmp_path / "as it is"))
        assert of_torch <= SLACK
        assert of_python <= 4 * SLACK
        of_torch, of_python = peaks(lambda: hf.save_model(model, tmp_path / "out", torch.bfloat16))
        assert of_torch <= SLACK
        assert BUCKET <= of_python <= BUCKET + 4 * SLACK


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the kernel counts no peak of memory")
def test_resident_memory_of_a_model_on_meta(source: Path) -> None:
    """The shards, and the bucket. A group has its unsharded memory for a moment, of which no page is touched."""
    with fake_world(RANKS), mock.patch.object(load, "BUCKET_NBYTES", BUCKET):
        hf.load_model(fully_shard(Stack()), source)
        with torch.device("meta"):
            model = Stack()
        fully_shard(model)
        Path("/proc/self/clear_refs").write_text("5")
        before = status("VmRSS")
        hf.load_model(model, source)
        assert status("VmHWM") - before <= NBYTES // RANKS + BUCKET + 1024 * 1024


def status(name: str) -> int:
    """Returns a number of bytes of this process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
