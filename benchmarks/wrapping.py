"""Measures the cost of sharding a model and running it for the first time."""

import gc
import time
from collections.abc import Sequence
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn

from .jobs import Job
from .libraries import Library
from .models import make_vectors
from .quiet_group import start_quiet_group
from .report import Row, timed_row
from .timing import Call, interleave

BLOCKS, LAYERS = 48, 8
# Narrow: parameters smaller than most worlds. Wide: rows for a middle-sized world, a hundred MB in all.
DIMS = {"narrow, dim 16": 16, "wide, dim 256": 256}


class Chain(nn.Module):
    def __init__(self, dim: int, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(*(nn.Linear(dim, dim) for _ in range(LAYERS))) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def measure_init(job: Job, libraries: Sequence[Library]) -> list[Row]:
    """Measures the CPU time of `fully_shard` on every block and the root, and of the first forward, without building
    the model.
    """
    rows = []
    for label, dim in list(DIMS.items())[: 1 if job.quick else None]:
        of_width = [_measure_world(world, label, dim, libraries, _rounds(world, job.quick)) for world in job.worlds]
        rows += of_width
        if len(of_width) > 1:
            small, large = of_width[0].values, of_width[-1].values
            setting = f"N={job.worlds[-1]} over N={job.worlds[0]}, {label}"
            rows.append(Row("init", "growth", setting, {name: large[name] / small[name] for name in small}, limit=1.0))
    return rows


def _rounds(world_size: int, quick: bool) -> int:
    """Returns the number of rounds of each turn. Torch takes ten seconds a round among thousands of ranks."""
    return 2 if quick else 4 if world_size <= 64 else 1


def _measure_world(world_size: int, label: str, dim: int, libraries: Sequence[Library], rounds: int) -> Row:
    start_quiet_group(world_size)
    mesh = dist.init_device_mesh("cpu", (world_size,))
    batch = make_vectors(dim)
    calls: dict[str, Call] = {each.name: partial(_milliseconds, each, dim, batch, mesh=mesh) for each in libraries}
    times = interleave(calls, rounds=rounds, warmup=1, measure=lambda call: call())
    dist.destroy_process_group()
    return timed_row("init", "ms to wrap and run once", f"N={world_size} {label}", times)


def _milliseconds(library: Library, dim: int, batch: Tensor, mesh: dist.DeviceMesh) -> float:
    model = Chain(dim)
    gc.collect()
    gc.freeze()  # what the others have left behind is not looked through in this one's time
    start = time.process_time()
    library.shard(model, mesh)(batch)
    elapsed = time.process_time() - start
    gc.unfreeze()
    return elapsed * 1e3
