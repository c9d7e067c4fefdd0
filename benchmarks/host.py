"""Host time of a step on a group of any size that exists only in name, and the Python calls that it takes."""

import gc
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from .jobs import Job
from .libraries import Library
from .models import PRECISIONS, Shape, build_plain, build_sharded, make_batch, run_step
from .quiet_group import start_fake_group, start_quiet_group
from .report import Row, timed_row
from .timing import Call, interleave, process_seconds, repeat, subtract

# Tiny, so that compute and copies are negligible beside the host time.
HOST_SHAPE = Shape(blocks=16, dim=8, hidden=16, tokens=4)


def measure_host(job: Job, libraries: Sequence[Library]) -> list[Row]:
    (world_size,) = job.worlds
    start_fake_group(world_size)
    rows = [_calls_row(precision, world_size, libraries) for precision in PRECISIONS]
    dist.destroy_process_group()
    start_quiet_group(world_size)
    return rows + [_time_row(precision, world_size, libraries, job.quick) for precision in PRECISIONS]


def _time_row(precision: str, world_size: int, libraries: Sequence[Library], quick: bool) -> Row:
    """Process time of a step above the plain model's, per group. Libraries, plain model and floor take turns."""
    mesh = dist.init_device_mesh("cpu", (world_size,))
    batch = make_batch(HOST_SHAPE, precision)
    models = {library.name: build_sharded(HOST_SHAPE, precision, library, mesh) for library in libraries}
    models["plain"] = build_plain(HOST_SHAPE, precision)
    calls: dict[str, Call] = {name: partial(run_step, model, batch) for name, model in models.items()}
    calls["floor"] = _build_floor(precision, world_size)
    times = interleave(calls, rounds=10 if quick else 60, warmup=2, measure=partial(process_seconds, count=3))
    per_group = 1e6 / HOST_SHAPE.groups
    above = {library.name: subtract(times[library.name], times["plain"], per_group) for library in libraries}
    limit = statistics.median(times["floor"]) * per_group
    return timed_row("host", "us per group and step", f"N={world_size} {precision}", above, limit)


def _build_floor(precision: str, world_size: int) -> Call:
    """The least that a step can cost: per group two casts, two gathers and a reduction; no hooks, no parameters."""
    compute, reduce = PRECISIONS[precision]
    shard_numel = HOST_SHAPE.block_numel // world_size + 1
    shard, own = torch.zeros(shard_numel), torch.zeros(shard_numel, dtype=compute)
    full = torch.zeros(shard_numel * world_size, dtype=compute)
    gradient, reduced = torch.zeros_like(full, dtype=reduce), torch.zeros_like(shard, dtype=reduce)
    storage = full.untyped_storage()
    full_bytes = storage.nbytes()

    def floor_of_one_group() -> None:
        for _ in range(2):
            storage.resize_(full_bytes)
            own.copy_(shard)
            dist.all_gather_into_tensor(full, own, async_op=True).wait()
            storage.resize_(0)
        dist.reduce_scatter_tensor(reduced, gradient, async_op=True).wait()

    return partial(repeat, HOST_SHAPE.groups, floor_of_one_group)


def _calls_row(precision: str, world_size: int, libraries: Sequence[Library]) -> Row:
    plain = count_step_calls(None, HOST_SHAPE, precision)
    above = {each.name: count_step_calls(each, HOST_SHAPE, precision) - plain for each in libraries}
    values = {name: count / HOST_SHAPE.groups for name, count in above.items()}
    return Row("host", "Python calls per group and step", f"N={world_size} {precision}", values)


def count_step_calls(library: Library | None, shape: Shape, precision: str) -> int:
    """Python functions that one step in steady state calls; without a library, the plain model's."""
    if library is None:
        model = build_plain(shape, precision)
    else:
        model = build_sharded(shape, precision, library, dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    step = partial(run_step, model, make_batch(shape, precision))
    repeat(3, step)
    return count_calls(step)


def count_calls(call: Callable[[], Any]) -> int:
    """Python functions that are called meanwhile, in this thread: `call` is one, what is written in C none."""
    count = 0

    def on_event(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal count
        count += event == "call"

    gc.collect()
    gc.disable()  # finalisers of somebody else's garbage would be counted
    sys.setprofile(on_event)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count
