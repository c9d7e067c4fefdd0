"""Two real ranks on gloo: gradients against each other, step time, wire bytes."""

import statistics
import time
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .jobs import Job
from .libraries import Library
from .meters import WireMeter
from .models import PRECISIONS, Shape, build_plain, build_sharded, compute_loss, make_batch, run_step
from .report import Row, timed_row
from .timing import Call, interleave, repeat

WORKLOADS = {
    # Six blocks of 8 MiB (fp32) and next to no compute, as at a small batch on a slow link.
    "communication-heavy": Shape(blocks=6, dim=512, hidden=704, tokens=8),
    "compute-heavy": Shape(blocks=4, dim=256, hidden=512, tokens=256),
}
# Both libraries run the same arithmetic; only the order of a sum of two ranks' gradients may differ.
TOLERANCE = {"fp32": 1e-6, "bf16/fp32": 1e-2}


def measure_gloo(job: Job, libraries: Sequence[Library]) -> list[Row]:
    """All ranks call this; every rank returns the same rows."""
    dist.init_process_group("gloo", store=dist.FileStore(job.store, 2), rank=job.rank, world_size=2)
    mesh = dist.init_device_mesh("cpu", (2,))
    rows = []
    for workload, shape in WORKLOADS.items():
        for precision in PRECISIONS:
            rows += _measure_workload(workload, shape, precision, libraries, mesh, job.quick)
    dist.destroy_process_group()
    return rows


def _measure_workload(
    workload: str, shape: Shape, precision: str, libraries: Sequence[Library], mesh: DeviceMesh, quick: bool
) -> list[Row]:
    setting = f"{workload} {precision}"
    names = [library.name for library in libraries]
    batch = make_batch(shape, precision, seed=1 + dist.get_rank())
    models = {library.name: build_sharded(shape, precision, library, mesh) for library in libraries}
    difference = _compare_gradients([models[name] for name in names], batch, precision)
    wire = {name: _count_wire(models[name], batch) / (shape.numel * _compute_bytes(precision)) for name in names}
    models["plain"] = build_plain(shape, precision)
    calls = {name: partial(run_step, model, batch) for name, model in models.items()}
    rounds, steps = (4, 2) if quick else (15, 2)
    times = interleave(calls, rounds=rounds, warmup=1, measure=partial(_time_steps, count=steps))
    compute = statistics.median(times["plain"])
    return [
        timed_row("gloo", "step ms", setting, times, compute),
        Row("gloo", "wire, in units of P", setting, wire, limit=_wire_limit(precision)),
        Row("gloo", "largest gradient difference, relative", setting, {names[0]: difference}, limit=0.0),
    ]


def _compute_bytes(precision: str) -> int:
    return PRECISIONS[precision][0].itemsize


def _wire_limit(precision: str) -> float:
    compute, reduce = (dtype.itemsize for dtype in PRECISIONS[precision])
    return (2 + reduce / compute) / 2


def _compare_gradients(models: Sequence[nn.Module], batch: Tensor, precision: str) -> float:
    """Largest difference between the first and the last model's sharded gradients, over the largest gradient."""
    for model in models:
        compute_loss(model, batch).backward()
    worst, scale = torch.zeros(()), torch.zeros(())
    for (name, first), (_, last) in zip(models[0].named_parameters(), models[-1].named_parameters(), strict=True):
        ours, theirs = _full_gradient(name, first), _full_gradient(name, last)
        worst = torch.maximum(worst, (ours - theirs).abs().max())
        scale = torch.maximum(scale, theirs.abs().max())
    for model in models:
        model.zero_grad(set_to_none=True)
    batch.grad = None
    # Also false when something is not a number.
    if not bool(worst <= TOLERANCE[precision] * scale) or not bool(scale > 0):
        raise RuntimeError(f"The libraries disagree: gradients up to {scale:.3e} differ by {worst:.3e} ({precision}).")
    return float(worst / scale)


def _full_gradient(name: str, parameter: nn.Parameter) -> Tensor:
    """Every rank must call this."""
    if not isinstance(parameter.grad, DTensor):
        raise RuntimeError(f"{name}: expected a DTensor gradient after backward, got {type(parameter.grad).__name__}.")
    return parameter.grad.full_tensor()


def _count_wire(model: nn.Module, batch: Tensor) -> float:
    """Bytes that leave this rank in a step. gloo's reduce-scatter is an all-reduce inside: it sends twice its due."""
    run_step(model, batch)
    with WireMeter() as wire:
        run_step(model, batch)
    return sum(c.sent_bytes * (2 if c.kind == "reduce_scatter" else 1) for c in wire.collectives)


def _time_steps(call: Call, count: int) -> float:
    """Milliseconds of wall time per call of the slower rank. Every rank must call this."""
    dist.barrier()
    start = time.perf_counter()
    repeat(count, call)
    elapsed = torch.tensor((time.perf_counter() - start) * 1e3 / count)
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    return float(elapsed)
