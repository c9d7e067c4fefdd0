"""Tests fsdp2.hf.load_model on files in FP8 with scales: of blocks, rows and tensors.

The oracle dequantises whole tensors in one process: each scale repeated over its block, times the value, in fp32.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp2 import fully_shard, hf
from fsdp2.hf.load import LEAST_RUN_NBYTES
from helpers import assert_same, full, run_checks, world_sizes
from safetensors_files import calls_of, file_bytes

BLOCK = 128


class Quantised(nn.Module):
    """Two matrices whose blocks the borders of shards cut, a stack of experts, and what is not quantised."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(200, 390, bias=False, dtype=torch.bfloat16)
        self.down = nn.Linear(390, 200, bias=False)
        self.experts = nn.Parameter(torch.empty(3, 130, 140))
        self.row = nn.Parameter(torch.empty(33, 20))
        self.norm = nn.LayerNorm(7)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).float())


def quantised() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the tensors of the files, and those that a model has of them."""
    torch.manual_seed(0)
    blocks = {"up.weight": (BLOCK, BLOCK), "down.weight": (BLOCK, BLOCK), "experts": (1, BLOCK, BLOCK), "row": (1, 20)}
    stored, expected = {}, {}
    for name, value in Quantised().state_dict().items():
        if name not in blocks:
            stored[name] = expected[name] = torch.randn_like(value)
            continue
        stored[name] = (torch.randn(value.shape) * 100).to(torch.float8_e4m3fn)
        scales = torch.rand([-(-size // n) for size, n in zip(value.shape, blocks[name], strict=True)]) + 0.01
        stored[f"{name}_scale" if name == "row" else f"{name}_scale_inv"] = scales
        for dim, n in enumerate(blocks[name]):
            scales = scales.repeat_interleave(n, dim).narrow(dim, 0, value.shape[dim])
        expected[name] = (stored[name].float() * scales).to(value.dtype)
    return stored, expected


def write(folder: Path, tensors: dict[str, Tensor], blocks: Any = (BLOCK, BLOCK)) -> Path:
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(file_bytes(tensors))
        settings = {"quant_method": "fp8", "weight_block_size": blocks}
        (folder / "config.json").write_text(json.dumps({"quantization_config": settings}))
    dist.barrier()
    return folder


def rows(model: nn.Module) -> None:
    fully_shard(model)


def columns(model: nn.Module) -> None:
    fully_shard(model, shard_placement_fn=lambda p: Shard(p.dim() - 1))


def replicas(model: nn.Module) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(), 1)))


def both(model: Any) -> None:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("tp", "dp"))
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])


def of_torch(model: nn.Module) -> None:
    torch_fully_shard(model)


def any_cut(folder: Path) -> None:
    stored, expected = quantised()
    source = write(folder / "any cut", stored)
    ways = [rows, columns, replicas, of_torch] + [both] * (dist.get_world_size() % 2 == 0)
    for shard in ways:
        with torch.device("meta"):
            model = Quantised()
        shard(model)
        with calls_of("preadv") as reads:
            report = hf.load_model(model, source)
        assert sum(reads) == report.bytes_read
        assert (report.missing, report.unexpected) == ([], [])
        assert report.converted["up.weight"] == (torch.float8_e4m3fn, torch.bfloat16)
        state = model.state_dict()
        for name, value in expected.items():
            assert_same(full(state[name]), value, 0, 0, f"{shard.__name__}, {name}")
        if shard is rows:
            shards = sum(
                state[name].to_local().numel() * each.dtype.itemsize for name, each in stored.items() if name in state
            )
            most = 5 * (3 * 2 * 4 * 4 + 2 * LEAST_RUN_NBYTES)
            assert shards < report.bytes_read < shards + most, "the shard, and scales of the blocks that it touches"


def larger_than_a_piece(folder: Path) -> None:
    """A tensor is dequantised in several pieces, whose borders cut blocks."""
    torch.manual_seed(1)
    numbers, scales = torch.randn(1301, 1100).to(torch.float8_e4m3fn), torch.rand(11, 9)
    source = write(folder / "large", {"weight": numbers, "weight_scale_inv": scales})
    model = nn.Linear(1100, 1301, bias=False)
    fully_shard(model)
    hf.load_model(model, source)
    repeated = scales.repeat_interleave(BLOCK, 0)[:1301].repeat_interleave(BLOCK, 1)[:, :1100]
    assert_same(full(model.weight), numbers.float() * repeated, 0, 0, "weight")


def one_scale(folder: Path) -> None:
    numbers = torch.randn(9, 4).to(torch.float8_e5m2)
    for i, scale in enumerate((torch.tensor(0.3), torch.tensor([0.3]), torch.tensor([[0.3]], dtype=torch.bfloat16))):
        source = write(folder / f"one {i}", {"weight": numbers, "weight_scale": scale}, blocks=None)
        model = nn.Linear(4, 9, bias=False)
        fully_shard(model)
        hf.load_model(model, source)
        assert_same(full(model.weight), numbers.float() * scale.float().view(1, 1), 0, 0, "weight")


def values_as_they_are(folder: Path) -> None:
    """A model that has FP8 values and scales of its own gets both."""
    numbers, scales = torch.randn(9, 4).to(torch.float8_e4m3fn), torch.rand(2, 1)
    source = write(folder / "own", {"weight": numbers, "weight_scale_inv": scales}, blocks=(5, 5))
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(9, 4, dtype=torch.float8_e4m3fn), requires_grad=False)
    model.weight_scale_inv = nn.Parameter(torch.zeros(2, 1))
    hf.load_model(model, source)
    assert torch.equal(model.weight.view(torch.uint8), numbers.view(torch.uint8))
    assert torch.equal(model.weight_scale_inv, scales)


def refused(folder: Path) -> None:
    """On all ranks, and the model keeps its values."""
    model = nn.Linear(4, 9, bias=False)
    before = model.weight.detach().clone()
    fully_shard(model)
    numbers = torch.ones(9, 4, dtype=torch.float8_e4m3fn)
    packed = {"weight": torch.ones(9, 2, dtype=torch.uint8)}
    advice = "Dequantise the files before: load them by from_pretrained with dequantize=True"
    wrong = r"weight_scale_inv of shape \[9, 2\]\)\. For shape \[9, 4\], expected .* weight_block_size=\[5, 5\]"
    cases: list[tuple[dict[str, Tensor], type[Exception], str]] = [
        ({"weight": numbers, "weight_scale_inv": torch.ones(9, 2)}, ValueError, wrong),
        ({"weight": numbers}, ValueError, "expected its scales as weight_scale_inv, found none"),
        ({"weight": numbers, "weight_scale": torch.ones(9, 1, dtype=torch.uint8)}, NotImplementedError, advice),
        (
            {"weight": numbers, "weight_scale_inv": torch.ones(9, 1).to(torch.float8_e8m0fnu)},
            NotImplementedError,
            rf"float8_e4m3fn, with weight_scale_inv in torch\.float8_e8m0fnu\), .*{advice}",
        ),
        ({"weight": torch.ones(9, 4).to(torch.int8), "weight_scale": torch.ones(9, 1)}, NotImplementedError, advice),
        (
            {"weight_packed": packed["weight"], "weight_scale": torch.ones(9, 1)},
            NotImplementedError,
            rf"lacks weight, and has packed values as weight_packed\. {advice}",
        ),
        (
            {"weight_blocks": packed["weight"], "weight_scales": torch.ones(9, 1, dtype=torch.uint8)},
            NotImplementedError,
            rf"lacks weight, and has packed values as weight_blocks\. {advice}",
        ),
    ]
    for i, (tensors, kind, expected) in enumerate(cases):
        with pytest.raises(kind, match=expected):
            hf.load_model(model, write(folder / f"refused {i}", tensors, blocks=(5, 5)))
        assert_same(full(model.weight), before, 0, 0, expected)


CHECKS = (any_cut, larger_than_a_piece, one_scale, values_as_they_are, refused)


@pytest.mark.parametrize("world_size", world_sizes(2, 3, nightly=(1, 4)))
def test_files_in_fp8(world_size: int, tmp_path: Path) -> None:
    run_checks(world_size, [(check.__name__, lambda check=check: check(tmp_path)) for check in CHECKS], timeout=120)
