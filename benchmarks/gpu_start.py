"""Prints what a machine has, and trains one step beside a plain model: the first part of a session.

python -m benchmarks.gpu_start cuda
"""

import importlib.metadata
import platform
import subprocess
import sys
import time

import torch
from torch.distributed import is_nccl_available

from .jobs import ROOT

PACKAGES = ("torch", "triton", "numpy", "pytest", "pytest-timeout", "nvidia-nccl-cu13")


def describe(kind: str) -> list[str]:
    """Returns the facts of a machine, one a line."""
    facts = [f"Python {platform.python_version()}", *(f"{name} {_version(name)}" for name in PACKAGES)]
    if kind == "cuda":
        device = torch.cuda.get_device_properties(0)
        facts += [
            f"CUDA {torch.version.cuda}",
            f"GPU {device.name}, {device.total_memory / 2**30:.0f} GiB, {device.multi_processor_count} processors",
            f"NCCL {'.'.join(map(str, torch.cuda.nccl.version())) if is_nccl_available() else 'none'}",
            f"nvidia-smi {_ask_driver()}",
        ]
    return facts


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _ask_driver() -> str:
    query = [
        "nvidia-smi",
        "--query-gpu=name,driver_version,memory.total,clocks.sm,power.limit",
        "--format=csv,noheader",
    ]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=5).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"gives no answer: {type(error).__name__}"


def main(kind: str) -> None:
    print("\n".join(describe(kind)), flush=True)
    sys.path.insert(0, str(ROOT / "tests"))
    import one_of_many

    for world in one_of_many.WORLDS:
        start = time.perf_counter()
        one_of_many.run(kind, world, "bf16/fp32")
        print(f"{world}: three steps as the plain model's, {time.perf_counter() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
