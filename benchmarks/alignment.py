"""Do the payloads of common models start and end on 16 bytes? NCCL copies element by element where they do not."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from .jobs import Job
from .libraries import Library
from .meters import WireMeter
from .quiet_group import start_fake_group
from .report import Row

# Columns of the matrices and lengths of the vectors of one block. Rows of these matrices are multiples of 16 bytes in
# bf16, so their number changes no remainder; 64 rows stand for all.
BLOCKS: dict[str, tuple[Sequence[int], Sequence[int]]] = {
    "Llama-3-8B": ([4096] * 6 + [14336], [4096] * 2),
    "Qwen3-4B": ([2560] * 5 + [4096, 9728], [2560] * 2 + [128] * 2),
    "Qwen2.5-7B": ([3584] * 6 + [18944], [3584] * 2 + [3584, 512, 512]),
    "GPT-OSS attention": ([2880] * 3 + [4096], [2880, 4096, 512, 512, 2880, 64]),
    "GPT-2-XL": ([4800, 1600, 6400, 1600], [1600] * 4 + [4800, 1600, 6400, 1600]),
}
ROWS = 64


def measure_alignment(job: Job, libraries: Sequence[Library]) -> list[Row]:
    """Share of (block, world size) pairs whose all-gather has a payload that is not a multiple of 16 bytes."""
    misaligned = {library.name: 0 for library in libraries}
    for world_size in job.worlds:
        start_fake_group(world_size)
        for library in libraries:
            misaligned[library.name] += sum(_is_misaligned(name, library, world_size) for name in BLOCKS)
        dist.destroy_process_group()
    pairs = len(job.worlds) * len(BLOCKS)
    values = {name: 100 * count / pairs for name, count in misaligned.items()}
    setting = f"{len(BLOCKS)} common blocks, {len(job.worlds)} worlds of {job.worlds[0]} to {job.worlds[-1]}"
    return [Row("alignment", "% of groups gathered off 16 bytes", setting, values, limit=0.0)]


class _Block(nn.Module):
    def __init__(self, columns: Sequence[int], vectors: Sequence[int]) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(torch.zeros(ROWS, width) for width in columns)
        self.vectors = nn.ParameterList(torch.zeros(length) for length in vectors)

    def forward(self) -> None:
        """Never called: the block is only gathered."""


def _is_misaligned(block_name: str, library: Library, world_size: int) -> bool:
    block = _Block(*BLOCKS[block_name])
    mesh = dist.init_device_mesh("cpu", (world_size,))
    library.fully_shard(block, mesh=mesh, mp_policy=library.mixed_precision_policy(param_dtype=torch.bfloat16))
    with WireMeter() as wire:
        block.unshard()
    return any(collective.payload_bytes % 16 for collective in wire.collectives)
