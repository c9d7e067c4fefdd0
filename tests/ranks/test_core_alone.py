"""Tests that the core is independent: without the rest of the package, plain programs train exactly."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = Path(__file__).with_name("core_alone.py")


@pytest.fixture(scope="module")
def core_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a package fsdp2 that has an empty `__init__.py` and core, and nothing else."""
    folder = tmp_path_factory.mktemp("alone")
    package = folder / "fsdp2"
    package.mkdir()
    (package / "__init__.py").touch()
    shutil.copytree(ROOT / "fsdp2" / "core", package / "core", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def run(folder: Path, *arguments: str) -> str:
    """Runs Python where `folder` is the only place to import fsdp2 from; returns what it printed.

    Raises:
        AssertionError: it failed.
    """
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_plain_programs_train_exactly(core_alone: Path) -> None:
    """Sixteen ways: nested wraps, mixed precision, accumulation, HSDP, offload, checkpointing, DCP and others."""
    assert "16 ways train exactly" in run(core_alone, str(PROGRAM))
