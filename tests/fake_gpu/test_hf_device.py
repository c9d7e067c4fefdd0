"""Tests fsdp2.hf on a device: values pass from files through the host's bucket to the device and back."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fake_gpu
from fsdp2 import CPUOffloadPolicy, fully_shard, hf, replicate
from helpers import assert_same, full, run_checks
from models import TinyGPT
from safetensors_files import file_bytes


def round_trip(folder: Path, device: str, shard: Callable[[nn.Module], object]) -> None:
    torch.manual_seed(0)
    plain = TinyGPT()
    expected = file_bytes(plain.state_dict())
    if dist.get_rank() == 0:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(expected)
    dist.barrier()
    with torch.device("meta"):
        model: Any = TinyGPT()
    shard(model)
    hf.load_model(model, folder)
    assert {param.device.type for param in model.parameters()} == {device}
    hf.save_model(model, folder)
    assert (folder / "model.safetensors").read_bytes() == expected
    hf.save_model(model, folder, torch.bfloat16)
    hf.load_model(model, folder)
    for name, param in plain.named_parameters():
        assert_same(full(model.get_parameter(name)).cpu(), param.bfloat16().float(), 0, 0, name)
    model(plain.example(rows=2, seed=0).to(fake_gpu.KIND))


def test_files_to_a_device_and_back(tmp_path: Path) -> None:
    ways: dict[str, tuple[str, Callable[[Any], object]]] = {
        "sharded": (fake_gpu.KIND, fully_shard),
        "replicas": (fake_gpu.KIND, lambda m: fully_shard(m, mesh=init_device_mesh(fake_gpu.KIND, (2, 1)))),
        "replicated": (fake_gpu.KIND, replicate),
        "offloaded": ("cpu", partial(fully_shard, offload_policy=CPUOffloadPolicy(pin_memory=False))),
    }
    checks = [(name, partial(round_trip, tmp_path / name, *way)) for name, way in ways.items()]
    run_checks(2, checks, device=fake_gpu.KIND)
