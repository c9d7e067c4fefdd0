"""Counts what DDP and the three stages of ZeRO send, and what they hold, beside the published formulas."""

import gc
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .cuda_wrapping import Recipe, wrap_by_fully_shard
from .jobs import Job
from .libraries import Library
from .meters import AllocationMeter, WireMeter
from .models import BYTES_SHAPE, Shape, Stack, compute_loss, make_batch
from .peers import shard_by_ddp
from .quiet_group import start_fake_group
from .report import Row

MICRO_BATCHES = 2
KINDS = {
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_reduce": "all-reduce",
    "broadcast": "broadcast",
}
_1 = "bytes sent per parameter, one micro-batch"
_2 = "bytes sent per parameter, two micro-batches"
_BETWEEN = "bytes held per parameter between micro-batches"
_RESTING = "bytes held per parameter between steps"


@dataclass(frozen=True)
class Stage:
    """Is one way to train, with AdamW, in fp32.

    Args:
        reshard_after_forward: as `fully_shard` takes it. DDP has no such option.
        reshards: if True, parameters are resharded after the backward of each micro-batch, not of the last one only.
        reduces: if True, gradients are reduced in the backward of each micro-batch, not of the last one only.
        libraries: names of those that can.
        formulas: of N ranks, the bytes of each quantity: 4 per parameter, 4 per gradient, 8 of the optimizer's state.
    """

    reshard_after_forward: bool | None
    reshards: bool
    reduces: bool
    libraries: tuple[str, ...]
    formulas: Callable[[int], Mapping[str, float]]


def _formulas(
    num_ranks: int, sent: float, sent_twice: float, between: tuple[float, float], resting: tuple[float, float]
) -> Mapping[str, float]:
    """Returns the formulas. `sent`: in units of 4 (N-1)/N bytes. Held: bytes on each rank, and bytes that all share."""
    unit = 4 * (num_ranks - 1) / num_ranks
    held = [whole + shared / num_ranks for whole, shared in (between, resting)]
    return dict(zip((_1, _2, _BETWEEN, _RESTING), (sent * unit, sent_twice * unit, *held), strict=True))


_SHARDED = ("fsdp2", "torch")
STAGES = {
    "stage 0: all is on each rank": Stage(
        None,
        False,
        False,
        ("ddp",),
        partial(_formulas, sent=2, sent_twice=2, between=(16, 0), resting=(12, 0)),
    ),
    "stage 1: the optimizer's state is sharded": Stage(
        False,
        False,
        False,
        (*_SHARDED, "ddp"),
        partial(_formulas, sent=2, sent_twice=2, between=(8, 8), resting=(4, 8)),
    ),
    "stage 2: and gradients": Stage(
        False,
        False,
        True,
        _SHARDED,
        partial(_formulas, sent=2, sent_twice=3, between=(4, 12), resting=(4, 8)),
    ),
    "stage 3: and parameters": Stage(
        True,
        True,
        True,
        _SHARDED,
        partial(_formulas, sent=3, sent_twice=6, between=(0, 16), resting=(0, 12)),
    ),
    "stage 3, the default": Stage(
        None,
        True,
        True,
        _SHARDED,
        partial(_formulas, sent=3, sent_twice=6, between=(0, 16), resting=(0, 12)),
    ),
}


def measure_stages(job: Job, libraries: Sequence[Library]) -> list[Row]:
    (world_size,) = job.worlds
    start_fake_group(world_size)
    mesh = dist.init_device_mesh("cpu", (world_size,))
    return stage_rows([library.name for library in libraries], BYTES_SHAPE, mesh)


def stage_rows(names: Sequence[str], shape: Shape, mesh: DeviceMesh) -> list[Row]:
    rows = []
    for label, stage in STAGES.items():
        limits = stage.formulas(mesh.size())
        counts = {name: count_stage(name, label, shape, mesh) for name in names if name in stage.libraries}
        for what in dict.fromkeys(key for count in counts.values() for key in count):
            values = {name: count.get(what, 0.0) for name, count in counts.items()}
            rows.append(Row("stages", what, f"N={mesh.size()}, {label}", values, limit=limits.get(what)))
    return sorted(rows, key=lambda row: [_1, _2, _BETWEEN, _RESTING].index(row.quantity.partition(":")[0]))


def count_stage(name: str, label: str, shape: Shape, mesh: DeviceMesh) -> dict[str, float]:
    """Counts a step in steady state. Sent bytes are also returned by the kind of collective."""
    stage = STAGES[label]
    with AllocationMeter() as meter:
        model, optimizer = _build(name, stage, shape, mesh, shards_optimizer=not label.startswith("stage 0"))
        batch = make_batch(shape, "fp32")
        train = partial(_train, model, optimizer, batch, stage)
        train(MICRO_BATCHES)
        with WireMeter() as one:
            train(1)
        with WireMeter() as two:
            train(MICRO_BATCHES)
        gc.collect()
        with meter.region("between steps"):
            pass
        _run_backward(model, batch, stage, is_last=False)
        gc.collect()
        with meter.region("between micro-batches"):
            pass
        _run_backward(model, batch, stage, is_last=True)
        del model, optimizer, batch, train
    kinds = Counter[str]()
    for collective in one.collectives:
        kinds[collective.kind] += collective.sent_bytes
    return {
        _1: one.sent_bytes / shape.numel,
        **{f"{_1}: {KINDS[kind]}": sent / shape.numel for kind, sent in kinds.items()},
        _2: two.sent_bytes / shape.numel,
        _BETWEEN: meter.allocated_before("between micro-batches") / shape.numel,
        _RESTING: meter.allocated_before("between steps") / shape.numel,
    }


def _build(
    name: str, stage: Stage, shape: Shape, mesh: DeviceMesh, shards_optimizer: bool
) -> tuple[Any, torch.optim.Optimizer]:
    model: nn.Module = Stack(shape)
    if name != "ddp":
        recipe = Recipe(reshard_after_forward=stage.reshard_after_forward, casts=False)
        model = wrap_by_fully_shard(name, model, mesh, recipe)
    else:
        model = shard_by_ddp(model, mesh)
        if shards_optimizer:
            from torch.distributed.optim import ZeroRedundancyOptimizer  # torch warns of what it imports

            return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4)


def _train(model: Any, optimizer: torch.optim.Optimizer, batch: torch.Tensor, stage: Stage, micro_batches: int) -> None:
    for index in range(micro_batches):
        _run_backward(model, batch, stage, is_last=index == micro_batches - 1)
    optimizer.step()
    optimizer.zero_grad()


def _run_backward(model: Any, batch: torch.Tensor, stage: Stage, is_last: bool) -> None:
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model.require_backward_grad_sync = is_last  # as `no_sync` does
    else:
        model.set_requires_gradient_sync(stage.reduces or is_last)
        model.set_reshard_after_backward(stage.reshards or is_last)
    compute_loss(model, batch).backward()
    batch.grad = None
