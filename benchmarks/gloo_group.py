"""Measures two real ranks on gloo: differences of gradients, step time, bytes on the wire."""

import math
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .gloo_threads import DEFAULT, read_policies, set_policies
from .jobs import Job
from .libraries import Library
from .meters import WireMeter
from .models import PRECISIONS, Shape, able, build_plain, build_sharded, compute_loss, make_batch, run_step
from .peers import full_gradients
from .places import sent_bytes
from .report import Row, timed_row
from .timing import Call, interleave, repeat

WORKLOADS = {
    # Six blocks of 8 MiB (fp32) and next to no compute, as at a small batch on a slow link.
    "communication-heavy": Shape(blocks=6, dim=512, hidden=704, tokens=8),
    "compute-heavy": Shape(blocks=4, dim=256, hidden=512, tokens=256),
    # What a library is tried on first: all is latency.
    "small": Shape(blocks=6, dim=64, hidden=88, tokens=8),
}
# All libraries run the same arithmetic; only the order of a sum of two ranks' gradients may differ.
TOLERANCE = {"fp32": 1e-6, "bf16/fp32": 1e-2}


def measure_gloo(job: Job, libraries: Sequence[Library]) -> list[Row]:
    """Returns the same rows on every rank. All ranks must call it."""
    dist.init_process_group("gloo", store=dist.FileStore(job.store, 2), rank=job.rank, world_size=2)
    rows = []
    for workload, shape in WORKLOADS.items():
        for precision in PRECISIONS:
            setting = f"{workload} {precision}"
            rows += _measure_workload(job, setting, shape, precision, able(libraries, precision))
    dist.destroy_process_group()
    return rows


def _measure_workload(
    job: Job, setting: str, shape: Shape, precision: str, libraries: Sequence[Library]
) -> Iterator[Row]:
    batch = make_batch(shape, precision, seed=1 + dist.get_rank())
    built = {library.name: _build(shape, precision, library, batch) for library in libraries}
    models = {name: model for name, (model, _) in built.items()}
    lossy = {each.name for each in libraries if each.is_lossy}
    differences, errors = _compare_gradients(models, batch, precision, lossy)
    count_bytes = _count_interface if job.megabits else _count_wire
    model_bytes = shape.numel * PRECISIONS[precision][0].itemsize
    wire = {name: count_bytes(model, batch) / model_bytes for name, model in models.items()}
    turns = {name: _Turn(partial(run_step, model, batch), policies) for name, (model, policies) in built.items()}
    turns["plain"] = _Turn(partial(run_step, build_plain(shape, precision), batch), {})
    times = interleave(turns, rounds=3 if job.quick else 7, warmup=1, measure=_time_step)
    bare = statistics.median(times.pop("plain"))
    wire_limit = _wire_limit(shape)
    on_link = wire_limit * model_bytes * 8 / (job.megabits * 1e3) if job.megabits else 0.0
    yield timed_row(job.suite, "step ms", setting, times, bare, limit=max(bare, on_link))
    yield Row(job.suite, "wire, in units of P", setting, wire, limit=wire_limit)
    quantity = f"largest gradient difference to {libraries[0].name}, relative"
    yield Row(job.suite, quantity, setting, differences, limit=0.0)
    if lossy:
        quantity = f"norm of the difference to {libraries[0].name} over that of the gradients, of the worst group"
        yield Row(job.suite, quantity, setting, errors, limit=0.0)


def _build(shape: Shape, precision: str, library: Library, batch: Tensor) -> tuple[nn.Module, dict[int, int]]:
    """Returns a model that has taken a step, on its own process group, and the scheduling policy of gloo's threads
    after it.
    """
    mesh = dist.DeviceMesh.from_group(dist.new_group(), "cpu")
    set_policies(dict.fromkeys(read_policies(), DEFAULT))
    model = build_sharded(shape, precision, library, mesh)
    run_step(model, batch)
    return model, read_policies()


def _wire_limit(shape: Shape) -> float:
    """Returns the least bytes on the wire: gradients in the dtype of autograd are sufficient to sum them in
    any other.
    """
    return (1 + shape.gathered_twice + 1) / 2


def _compare_gradients(
    models: Mapping[str, nn.Module], batch: Tensor, precision: str, lossy: Set[str]
) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the largest difference of each model's gradients to the first one's, over the largest gradient; and the
    norm of the difference over that of the gradients, in the group where that is most. `lossy`: those that may differ.
    """
    for model in models.values():
        compute_loss(model, batch).backward()
    gradients = {name: full_gradients(model) for name, model in models.items()}
    for model in models.values():
        model.zero_grad(set_to_none=True)
    batch.grad = None
    first, *others = gradients
    tolerances = {name: math.inf if name in lossy else TOLERANCE[precision] for name in others}
    largest = {name: largest_difference(gradients[first], gradients[name], tolerances[name]) for name in others}
    return largest, {name: _worst_group(gradients[first], gradients[name]) for name in others}


def _worst_group(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    groups: dict[str, list[str]] = {}
    for name in ours:
        groups.setdefault(".".join(name.split(".")[:2]) if name.startswith("blocks.") else "root", []).append(name)
    flat = [
        tuple(torch.cat([each[n].flatten() for n in names]) for each in (ours, theirs)) for names in groups.values()
    ]
    return max(float((own - other).norm() / own.norm()) for own, other in flat)


def largest_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> float:
    worst, scale = torch.zeros(()), torch.zeros(())
    for name in {**ours, **theirs}:
        worst = torch.maximum(worst, (ours[name] - theirs[name]).abs().max())
        scale = torch.maximum(scale, theirs[name].abs().max())
    # Also false when something is not a number.
    if not bool(worst <= tolerance * scale) or not bool(scale > 0):
        raise RuntimeError(f"The libraries disagree: gradients up to {scale:.3e} differ by {worst:.3e}.")
    return float(worst / scale)


def _count_wire(model: nn.Module, batch: Tensor) -> float:
    """Counts the bytes that leave this rank in a step. gloo's reduce-scatter is an all-reduce, which sends twice the
    bytes.
    """
    run_step(model, batch)
    with WireMeter() as wire:
        run_step(model, batch)
    return sum(c.sent_bytes * (2 if c.kind == "reduce_scatter" else 1) for c in wire.collectives)


def _count_interface(model: nn.Module, batch: Tensor) -> float:
    """Counts the bytes that leave this rank's interface in a step; less than a hundredth are headers."""
    run_step(model, batch)
    before = _sent_by_all()
    repeat(3, partial(run_step, model, batch))
    return (_sent_by_all() - before) / 3


def _sent_by_all() -> int:
    """Returns the bytes after a barrier, before which all data has been received. Every rank must call it."""
    dist.barrier()
    return sent_bytes(os.environ["GLOO_SOCKET_IFNAME"])


@dataclass(frozen=True)
class _Turn:
    """Is a step of one library, with the scheduling of gloo's threads that the library alone would have."""

    step: Call
    policies: Mapping[int, int]

    def __call__(self) -> None:
        self.step()


def _time_step(turn: _Turn) -> float:
    """Returns the milliseconds of wall time of the slower rank. Every rank must call it."""
    set_policies(turn.policies)
    dist.barrier()
    start = time.perf_counter()
    turn()
    elapsed = torch.tensor((time.perf_counter() - start) * 1e3)
    dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)
    return float(elapsed)
