"""Compares two ways to shard a model with LoRA adapters: in the groups of its blocks, and in groups of their own.

Bytes, calls and memory are counted on a simulated GPU, with GPT-2 Large; the host's time is measured with a tiny model.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn

from .batches import GIB, SHAPES, EagerGPT, build
from .cuda_models import GPTShape, make_ids
from .cuda_wrapping import Recipe, wrap
from .jobs import Job
from .libraries import Library
from .quiet_group import start_quiet_group
from .report import Row, timed_row
from .simulated_gpu import KIND, simulated_gpu
from .timing import interleave, process_seconds, subtract

RANK = 16
TINY = GPTShape(blocks=12, dim=16, heads=2, vocab=32, tokens=4, positions=4)


class Adapted(nn.Module):
    """Is a frozen linear layer, plus the product of two thin ones."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def add_adapters(model: nn.Module) -> None:
    """Freezes a model, and adapts all linear layers of its blocks."""
    model.requires_grad_(False)
    for block in model.blocks:
        for name, layer in list(block.named_children()):
            if isinstance(layer, nn.Linear):
                setattr(block, name, Adapted(layer))


def _adapters_and_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Returns each matrix of an adapter before its block, as the policy of peft for FSDP1 has it."""
    for block in model.blocks:
        for layer in block.children():
            if isinstance(layer, Adapted):
                yield from (layer.down, layer.up)
        yield block


WAYS = {
    "adapters in the groups of blocks": Recipe(casts=False),
    "each adapter matrix a group": Recipe(casts=False, units=_adapters_and_blocks),
}


def measure_adapters(job: Job, libraries: Sequence[Library]) -> list[Row]:
    (world_size,) = job.worlds
    names = [library.name for library in libraries]
    rows = count_rows(names, SHAPES["GPT-2 Large"], world_size, f"GPT-2 Large, N={world_size}")
    return [*rows, *time_rows(names, world_size, 6 if job.quick else 25)]


def count_rows(names: Sequence[str], shape: GPTShape, world_size: int, setting: str) -> Iterator[Row]:
    counts = {way: {name: count_step(name, shape, WAYS[way], world_size) for name in names} for way in WAYS}
    first, *_ = counts.values()
    for what in next(iter(first.values())):
        for way, of_names in counts.items():
            yield Row("adapters", what, f"{setting}, {way}", {name: count[what] for name, count in of_names.items()})


def count_step(name: str, shape: GPTShape, recipe: Recipe, world_size: int) -> Mapping[str, float]:
    """Counts a step with one sequence, in fp32, in steady state."""
    with simulated_gpu(world_size) as (mesh, meter, wire):
        training = build(name, shape, recipe, mesh, meter, add_adapters)
        training.step(1)
        sent, calls, resting = wire.sent_bytes, wire.calls, meter.live[KIND]
        peak = training.peak_bytes(1)
        del training
    return {
        "GiB sent per step": (wire.sent_bytes - sent) / GIB,
        "collective calls per step": wire.calls - calls,
        "step peak, GiB": peak / GIB,
        "step peak above resting, GiB": (peak - resting) / GIB,
    }


def time_rows(names: Sequence[str], world_size: int, rounds: int) -> Iterator[Row]:
    """Returns rows of the process time of a step above the plain model's, and how it grows with separate groups."""
    start_quiet_group(world_size)
    mesh = dist.init_device_mesh("cpu", (world_size,))
    steps = {"plain": partial(_run_step, _build_tiny())}
    for way, recipe in WAYS.items():
        for name in names:
            steps[f"{name}, {way}"] = partial(_run_step, wrap(name, _build_tiny(), mesh, recipe))
    times = interleave(steps, rounds=rounds, warmup=3, measure=process_seconds)
    dist.destroy_process_group()
    setting = f"{TINY.blocks} tiny blocks, N={world_size}"
    above = {way: {name: subtract(times[f"{name}, {way}"], times["plain"], 1e3) for name in names} for way in WAYS}
    for way, of_names in above.items():
        yield timed_row("adapters", "ms of a step above the plain model", f"{setting}, {way}", of_names)
    whole, apart = above.values()
    growth = {name: [more / less for more, less in zip(apart[name], whole[name], strict=True)] for name in names}
    yield timed_row("adapters", "the same, separate over whole", setting, growth)


def _build_tiny() -> nn.Module:
    model = EagerGPT(TINY)
    add_adapters(model)
    return model


def _run_step(model: nn.Module) -> None:
    loss, _ = model(make_ids(TINY.vocab, 1, TINY.tokens, next(model.parameters()).device))
    loss.backward()
    model.zero_grad(set_to_none=True)
