"""Tests what only several GPUs can show: collectives of NCCL between ranks. They are skipped where there are fewer than
two.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).with_name("ranks_program.py")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("caches", [True, False])
def test_training_matches_the_plain_model(ranks: int, caches: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a caching allocator, memory that is freed too early is unmapped: whoever still uses it fails."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    if not caches:
        monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run([*launch, str(PROGRAM), "cuda"], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
