"""Prints what a report of a bug needs to say: releases, devices, backends, variables, switches (`python -m fsdp2
env`).
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterator, Sequence
from importlib import metadata

import torch
import torch.distributed as dist

from .checks.level import level
from .dtensor import fixes
from .tools.columns import aligned, terminal_width

# Libraries that train with fsdp2, or that it reads files of.
_LIBRARIES = (
    "accelerate",
    "bitsandbytes",
    "deepspeed",
    "lightning",
    "numpy",
    "peft",
    "safetensors",
    "torchao",
    "torchtitan",
    "transformers",
    "triton",
    "trl",
    "verl",
)
# What the variables begin with that change how ranks start, communicate and allocate.
_PREFIXES = (
    "FSDP2_",
    "TORCH",
    "NCCL_",
    "GLOO_",
    "UCC_",
    "PYTORCH_",
    "CUDA_",
    "HIP_",
    "OMP_",
    "MKL_",
    "SLURM_",
    "MASTER_",
)
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "LD_PRELOAD")
_BACKENDS = {
    "gloo": dist.is_gloo_available,
    "nccl": dist.is_nccl_available,
    "mpi": dist.is_mpi_available,
    "ucc": dist.is_ucc_available,
    "xccl": dist.is_xccl_available,
}


def facts(version: str) -> list[tuple[str, str]]:
    """Returns names and values, of this machine and of the environment of this process.

    Args:
        version: the release of fsdp2.
    """
    return [
        ("fsdp2", version),
        ("torch", f"{torch.__version__} ({_built_for()})"),
        ("Python", f"{platform.python_version()}, {platform.platform()}"),
        ("backends", ", ".join(_backends())),
        ("devices", "; ".join(_devices()) or "no accelerator"),
        ("CPU", f"{os.cpu_count()} cores, {torch.get_num_threads()} threads of torch"),
        ("libraries", ", ".join(_libraries()) or "none of those that are known to train with fsdp2"),
        ("checks", level()),
        ("fixes", "in force" if fixes.are_on() else "off"),
        *_variables(),
    ]


def _built_for() -> str:
    for name in ("cuda", "hip", "xpu"):
        if (release := getattr(torch.version, name, None)) is not None:
            return f"{name.upper()} {release}"
    return "built for CPUs"


def _backends() -> Iterator[str]:
    for name, is_available in _BACKENDS.items():
        if is_available():
            yield f"nccl {_nccl_release()}" if name == "nccl" else name


def _nccl_release() -> str:
    return ".".join(map(str, torch.cuda.nccl.version()))


def _devices() -> Iterator[str]:
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        found = torch.cuda.get_device_properties(index)
        yield f"{index}: {found.name}, {found.total_memory / 2**30:.1f} GiB"
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and accelerator.type != "cuda":
        yield f"{torch.accelerator.device_count()} of type {accelerator.type}"


def _libraries() -> Iterator[str]:
    for name in _LIBRARIES:
        try:
            yield f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue


def _variables() -> Iterator[tuple[str, str]]:
    return ((name, os.environ[name]) for name in sorted(os.environ) if name.startswith(_PREFIXES) or name in _NAMES)


def main(arguments: Sequence[str], version: str) -> None:
    """Prints what a report of a bug needs to say (`python -m fsdp2 env`).

    Args:
        arguments: those behind `env`.
        version: the release of fsdp2.

    Raises:
        SystemExit: 2, for wrong arguments; 0, for --help.
    """
    parser = argparse.ArgumentParser(
        prog="python -m fsdp2 env",
        description="Prints releases, devices, backends, the environment variables that change how ranks start, "
        "communicate and allocate memory, the level of checks, and if fixes are in force: for reports of bugs. It has "
        "the names of your machines if variables have them.",
    )
    parser.parse_args([*arguments])
    for line in aligned(facts(version), width=terminal_width()):
        print(line)
