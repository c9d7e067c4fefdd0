"""Computes the payloads of common models: if they start and end on 16 bytes, and how much of them is padding.

NCCL copies element by element where they do not.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .jobs import Job
from .libraries import Library
from .meters import WireMeter
from .quiet_group import start_fake_group
from .report import Row

Shape = tuple[int, ...]
# Parameters of one block, matrices as nn.Linear has them.
BLOCKS: dict[str, list[Shape]] = {
    "Llama-3-8B": [*[(4096, 4096)] * 2, *[(1024, 4096)] * 2, *[(14336, 4096)] * 2, (4096, 14336), *[(4096,)] * 2],
    "Qwen3-4B": [
        *[(4096, 2560), *[(1024, 2560)] * 2, (2560, 4096), *[(9728, 2560)] * 2, (2560, 9728)],
        *[(2560,), (2560,), (128,), (128,)],
    ],
    "Qwen2.5-7B": [
        *[*[(3584, 3584)] * 2, *[(512, 3584)] * 2, *[(18944, 3584)] * 2, (3584, 18944)],
        *[(3584,), (3584,), (3584,), (512,), (512,)],
    ],
    "GPT-OSS attention": [
        *[(4096, 2880), (512, 2880), (512, 2880), (2880, 4096)],
        *[(2880,), (4096,), (512,), (512,), (2880,), (64,)],
    ],
    "GPT-2-XL": [(4800, 1600), (1600, 1600), (6400, 1600), (1600, 6400), (4800,), (6400,), *[(1600,)] * 6],
}
# All experts of one block, of which there are fewer than ranks.
EXPERTS: dict[str, list[Shape]] = {
    "GPT-OSS experts": [(128, 2880, 5760), (128, 2880, 2880), (128, 5760), (128, 2880), (128, 2880), (128,)],
    "Qwen3-30B-A3B experts": [(128, 1536, 2048), (128, 2048, 768), (128, 2048)],
}
PADDING_WORLDS = (8, 64, 96, 256, 512)


def measure_alignment(job: Job, libraries: Sequence[Library]) -> list[Row]:
    return [_alignment_row(job, libraries), *_padding_rows(libraries)]


def _alignment_row(job: Job, libraries: Sequence[Library]) -> Row:
    """Returns the share of (block, world size) pairs whose all-gather has a payload that is not a multiple of
    16 bytes.
    """
    misaligned = {library.name: 0 for library in libraries}
    for world_size in job.worlds:
        start_fake_group(world_size)
        for library in libraries:
            misaligned[library.name] += sum(is_misaligned(name, library) for name in BLOCKS)
        dist.destroy_process_group()
    pairs = len(job.worlds) * len(BLOCKS)
    values = {name: 100 * count / pairs for name, count in misaligned.items()}
    setting = f"{len(BLOCKS)} common blocks, {len(job.worlds)} worlds of {job.worlds[0]} to {job.worlds[-1]}"
    return Row("alignment", "% of groups gathered off 16 bytes", setting, values, limit=0.0)


def _padding_rows(libraries: Sequence[Library]) -> Iterator[Row]:
    """Returns the bytes of a gather divided by those of the parameters, and for experts with
    `cheapest_placement`, too.
    """
    what = "bytes gathered, over the parameters'"
    for world_size in PADDING_WORLDS:
        start_fake_group(world_size)
        for name, shapes in (BLOCKS | EXPERTS).items():
            ratios = {library.name: _padding_ratio(shapes, library, world_size) for library in libraries}
            yield Row("alignment", what, f"N={world_size} {name}", ratios, limit=1.0)
        planners = [library for library in libraries if library.has_more]
        for name, shapes in EXPERTS.items() if planners else ():
            planned = {each.name: _padding_ratio(shapes, each, world_size, planned=True) for each in planners}
            yield Row("alignment", what, f"N={world_size} {name}, planned", planned, limit=1.0)
        dist.destroy_process_group()


class _Block(nn.Module):
    def __init__(self, shapes: Sequence[Shape]) -> None:
        super().__init__()
        self.params = nn.ParameterList(torch.zeros(shape) for shape in shapes)

    def forward(self) -> list[Tensor]:
        """Reads all parameters, so that all are gathered."""
        return [param.sum() for param in self.params]


class _Model(nn.Module):
    def __init__(self, block: _Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([block])

    def forward(self) -> list[Tensor]:
        return self.blocks[0]()


def _gather(shapes: Sequence[Shape], library: Library, **options: Any) -> WireMeter:
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    model = library.shard(_Model(_Block(shapes)), mesh, (torch.bfloat16, torch.float32), **options)
    with torch.no_grad(), WireMeter() as wire:
        model()
    return wire


def is_misaligned(block_name: str, library: Library) -> bool:
    # Rows of these matrices are multiples of 16 bytes in bf16, so their number changes no remainder; 64 stand for all.
    shapes = [shape if len(shape) == 1 else (64, *shape[1:]) for shape in BLOCKS[block_name]]
    wire = _gather(shapes, library)
    return any(collective.payload_bytes % 16 for collective in wire.collectives)


def _padding_ratio(shapes: Sequence[Shape], library: Library, world_size: int, **options: Any) -> float:
    # Padding comes in rows: thinner ones make the same share of it.
    thin = [_thin(shape) for shape in shapes]
    wire = _gather(thin, library, **options)
    own = sum(2 * torch.Size(shape).numel() for shape in thin)
    return world_size * sum(collective.payload_bytes for collective in wire.collectives) / own


def _thin(shape: Shape) -> Shape:
    return shape if len(shape) == 1 else (*shape[:-1], shape[-1] // (16 if len(shape) == 2 else 64))
