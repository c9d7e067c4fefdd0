"""Counts the largest batch of GPT-2 that trains in 24 GB, on rank 0 of two, by each library, on a simulated GPU.

No formula decides: a step of the batch that is found fits into the memory, and one of a row more does not.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from .cuda_models import GPT, GPTS, EagerGPTBlock, GPTShape
from .cuda_wrapping import Recipe, wrap
from .jobs import Job
from .libraries import Library
from .report import Row
from .simulated_gpu import KIND, StorageMeter, simulated_gpu

GIB = 2**30
BUDGET = 22.78 * GIB  # of a card of 24 GB, what its driver and PyTorch's own context leave
TOKENS = 160
POINTS = (8, 16)  # rows from which a batch is guessed: many, so that activations outweigh the optimizer's temporaries
WITH_GRADIENTS = "largest batch, gradients kept as zeros"
LARGEST = "largest batch"
SHAPES = {label: replace(shape, tokens=TOKENS) for label, shape in GPTS.items()}
ONE_GROUP = "SHARD_GRAD_OP, the model as one group"
RANKS = 2
# What is sharded -> (recipe, libraries).
KINDS = {
    "DDP": (Recipe(), ("ddp",)),
    "SHARD_GRAD_OP": (Recipe(reshard_after_forward=False), ("fsdp2", "torch", "fsdp1")),
    "SHARD_GRAD_OP + offload": (Recipe(reshard_after_forward=False, offload=True), ("fsdp2", "torch", "fsdp1")),
    "FULL_SHARD": (Recipe(), ("fsdp2", "torch", "fsdp1")),
    "FULL_SHARD + offload": (Recipe(offload=True), ("fsdp2", "torch", "fsdp1")),
    ONE_GROUP: (Recipe(reshard_after_forward=False, units=lambda _: ()), ("fsdp2", "torch", "fsdp1")),
    "FULL_SHARD, reshard_after_forward=True": (Recipe(reshard_after_forward=True), ("fsdp2", "torch")),
}
# (model, what is sharded) -> what was published; 0: out of memory.
PUBLISHED = {
    ("GPT-2 Large", "DDP"): "7",
    ("GPT-2 Large", ONE_GROUP): "11",
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
    """Holds one library's model and optimizer on a simulated GPU, and counts steps in steady state.

    `keeps_gradients`: if True, gradients are set to zero after a step, not freed, as torch did by default until 2023.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    shape: GPTShape
    meter: StorageMeter
    keeps_gradients: bool = False
    peaks: dict[tuple[int, bool], int] = field(default_factory=dict)  # by the number of rows, and `keeps_gradients`

    def step(self, rows: int) -> None:
        ids = torch.zeros(rows, self.shape.tokens, dtype=torch.long, device=KIND)
        loss, logits = self.model(ids)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=not self.keeps_gradients)
        del logits

    def peak_bytes(self, rows: int) -> int:
        """Returns the most bytes that are alive on the device during a step of so many sequences."""
        key = rows, self.keeps_gradients
        if key not in self.peaks:
            self.meter.start_region()
            self.step(rows)
            self.peaks[key] = self.meter.peak[KIND]
        return self.peaks[key]


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
    training = Training(model, torch.optim.AdamW(trained, lr=1e-4, foreach=True), shape, meter)
    training.step(1)
    gc.collect()
    return training


def find_largest(peak_bytes: Callable[[int], float], budget: float, near: int | None = None) -> int:
    """Returns the largest number of rows whose peak is within the budget, or 0. Peaks grow with rows.

    It counts on from `near` until the answer is confirmed. Without that it guesses from two counted points.
    """
    if near is None:
        few, more = POINTS
        per_row = (peak_bytes(more) - peak_bytes(few)) / (more - few)
        near = max(0, few + int((budget - peak_bytes(few)) // per_row))
    rows = near
    while rows > 0 and peak_bytes(rows) > budget:
        rows -= 1
    while rows >= near and peak_bytes(rows + 1) <= budget:
        rows += 1
    return rows


def measure_batches(job: Job, libraries: Sequence[Library], label: str) -> list[Row]:
    rows = batch_rows(job.suite, label, SHAPES[label], {library.name for library in libraries})
    order = (WITH_GRADIENTS, LARGEST)
    return sorted(rows, key=lambda row: order.index(row.quantity) if row.quantity in order else len(order))


def batch_rows(suite: str, label: str, shape: GPTShape, names: set[str], budget: float = BUDGET) -> Iterator[Row]:
    for kind, (recipe, able) in KINDS.items():
        found = {}
        for name in able:
            if name in names:
                found[name] = count_batch(name, shape, replace(recipe, casts=False), budget)
        published = PUBLISHED.get((label, kind), "-")
        for what in next(iter(found.values()), {}):
            values = {name: count[what] for name, count in found.items()}
            setting = f"{label}, {kind}" + (f" (published: {published})" if what == WITH_GRADIENTS else "")
            yield Row(suite, what, setting, values)


def count_batch(name: str, shape: GPTShape, recipe: Recipe, budget: float) -> Mapping[str, float]:
    """Returns the largest batch, and what the memory of a step consists of."""
    with simulated_gpu(RANKS) as (mesh, meter, _):
        training = build(name, shape, recipe, mesh, meter)
        resting, host = meter.live[KIND], meter.live["cpu"]
        largest = find_largest(training.peak_bytes, budget)
        few, more = map(training.peak_bytes, POINTS)
        training.keeps_gradients = True
        training.step(1)  # makes the gradients that are kept
        largest_with_gradients = find_largest(training.peak_bytes, budget, near=largest)
        del training
    per_row = (more - few) / (POINTS[1] - POINTS[0])
    return {
        WITH_GRADIENTS: largest_with_gradients,
        LARGEST: largest,
        "GiB that rest between steps": resting / GIB,
        "GiB of the peak per row": per_row / GIB,
        "GiB of the peak beside rows": (more - POINTS[1] * per_row) / GIB,
        "GiB that rest on the host": host / GIB,
    }
