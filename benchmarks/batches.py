"""Counts the largest batch of GPT-2 that trains in 24 GB, on rank 0 of two, by each library, on a simulated GPU.

No batch is guessed by a formula: a step of the batch that is found fits into the memory, and one of a row more does not.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .cuda_batches import KINDS as GPU_KINDS
from .cuda_batches import RANKS
from .cuda_models import GPT, GPTS, EagerGPTBlock, GPTShape
from .cuda_wrapping import Recipe, wrap
from .jobs import Job
from .libraries import Library
from .report import Row
from .simulated_gpu import KIND, StorageMeter, simulated_gpu

GIB = 2**30
BUDGET = 22.78 * GIB  # of a card of 24 GB, what its driver and PyTorch's own context leave
TOKENS = 160
LARGEST = "largest batch"
SHAPES = {label: replace(shape, tokens=TOKENS) for label, shape in GPTS.items()}
KINDS = {**GPU_KINDS, "FULL_SHARD, reshard_after_forward=True": (Recipe(reshard_after_forward=True), ("fsdp2", "torch"))}
# (model, what is sharded) -> what was published; 0: out of memory.
PUBLISHED = {
    ("GPT-2 Large", "DDP"): "7",
    ("GPT-2 Large", "SHARD_GRAD_OP"): "11",
    ("GPT-2 Large", "FULL_SHARD"): "15",
    ("GPT-2 Large", "FULL_SHARD + offload"): "20 and 22",
    ("GPT-2 XL", "DDP"): "0",
    ("GPT-2 XL", "FULL_SHARD"): "5",
    ("GPT-2 XL", "FULL_SHARD + offload"): "14",
}


class EagerGPT(GPT):
    """Is GPT-2 as transformers had it in 2022. Its forward returns the loss and the logits, which the caller keeps."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__(shape, EagerGPTBlock)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = super().forward(ids)
        shifted = logits[:, :-1].contiguous()
        return F.cross_entropy(shifted.flatten(0, 1), ids[:, 1:].flatten()), logits


@dataclass
class Training:
    """Holds one library's model and optimizer on a simulated GPU, and counts steps in steady state."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    shape: GPTShape
    meter: StorageMeter

    def step(self, rows: int) -> None:
        ids = torch.zeros(rows, self.shape.tokens, dtype=torch.long, device=KIND)
        loss, logits = self.model(ids)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        del logits

    def peak_bytes(self, rows: int) -> int:
        """Returns the most bytes that are alive on the device during a step of so many sequences."""
        self.meter.start_region()
        self.step(rows)
        return self.meter.peak[KIND]


def build(
    name: str,
    shape: GPTShape,
    recipe: Recipe,
    mesh: DeviceMesh,
    meter: StorageMeter,
    prepare: Callable[[nn.Module], object] = lambda _: None,
) -> Training:
    """Builds a training by one library inside `simulated_gpu`, and takes the step that makes the optimizer's state.

    `prepare`: changes the model before it is sharded.
    """
    with torch.device(KIND):
        plain = EagerGPT(shape)
        prepare(plain)
    model = wrap(name, plain, mesh, recipe)
    del plain
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    training = Training(model, torch.optim.AdamW(trained, lr=1e-4), shape, meter)
    training.step(1)
    gc.collect()
    return training


def find_largest(peak_bytes: Callable[[int], float], budget: float, points: tuple[int, int] = (8, 16)) -> int:
    """Returns the largest number of rows whose peak is within the budget, or 0. Peaks grow with rows.

    It guesses from two counted points, and counts on from there until the answer is confirmed.
    """
    known: dict[int, float] = {0: 0.0}

    def fits(rows: int) -> bool:
        if rows not in known:
            known[rows] = peak_bytes(rows)
        return known[rows] <= budget

    few, more = points
    fits(few), fits(more)
    rows = max(0, few + int((budget - known[few]) * (more - few) // max(1, known[more] - known[few])))
    while not fits(rows):
        rows -= 1
    while fits(rows + 1):
        rows += 1
    return rows


def measure_batches(job: Job, libraries: Sequence[Library]) -> list[Row]:
    names = {library.name for library in libraries}
    rows = [row for label, shape in SHAPES.items() for row in batch_rows(label, shape, names)]
    return sorted(rows, key=lambda row: row.quantity != LARGEST)


def batch_rows(label: str, shape: GPTShape, names: set[str], budget: float = BUDGET) -> Iterator[Row]:
    for kind, (recipe, able) in KINDS.items():
        found = {}
        for name in able:
            if name in names:
                found[name] = count_batch(name, shape, replace(recipe, casts=False), budget)
        published = PUBLISHED.get((label, kind), "-")
        for what in next(iter(found.values()), {}):
            values = {name: count[what] for name, count in found.items()}
            setting = f"{label}, {kind}" + (f" (published: {published})" if what == LARGEST else "")
            yield Row("batches", what, setting, values)


def count_batch(name: str, shape: GPTShape, recipe: Recipe, budget: float) -> Mapping[str, float]:
    """Returns the largest batch, and what the memory of a step consists of."""
    with simulated_gpu(RANKS) as (mesh, meter, _):
        training = build(name, shape, recipe, mesh, meter)
        resting = meter.live[KIND]
        peaks: dict[int, int] = {}

        def peak_bytes(rows: int) -> int:
            peaks[rows] = training.peak_bytes(rows)
            return peaks[rows]

        largest = find_largest(peak_bytes, budget)
        per_row = (peaks[16] - peaks[8]) / 8
        counted = {
            LARGEST: largest,
            "GiB that rest between steps": resting / GIB,
            "GiB per row": per_row / GIB,
            "GiB at the peak beside rows": (peaks[16] - 16 * per_row) / GIB,
            "GiB that rest on the host": meter.live["cpu"] / GIB,
        }
        del training
        return counted
