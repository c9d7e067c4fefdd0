"""Measures the host time of a step on a simulated group of any size, and counts its Python calls."""

import gc
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from .jobs import Job
from .libraries import Library
from .models import PRECISIONS, Shape, able, build_plain, build_sharded, make_batch, run_step
from .quiet_group import start_fake_group, start_quiet_group
from .report import Row, timed_row
from .timing import Call, interleave, process_seconds, repeat, subtract

# Tiny, so that compute and copies are negligible beside the host time.
HOST_SHAPE = Shape(blocks=16, dim=8, hidden=16, tokens=4)
ONE_MATRIX_SHAPE = replace(HOST_SHAPE, hidden=0)
HOST_SHAPES = {"9 parameters": HOST_SHAPE, "1 parameter": ONE_MATRIX_SHAPE}


def measure_host(job: Job, libraries: Sequence[Library]) -> list[Row]:
    (world_size,) = job.worlds
    cases = [(label, shape, precision) for label, shape in HOST_SHAPES.items() for precision in PRECISIONS]
    start_fake_group(world_size)
    rows = [_calls_row(*case, libraries) for case in cases]
    dist.destroy_process_group()
    start_quiet_group(world_size)
    rounds = 10 if job.quick else 14
    return rows + [_time_row(*case, libraries, rounds) for case in cases]


def _time_row(label: str, shape: Shape, precision: str, libraries: Sequence[Library], rounds: int) -> Row:
    """Returns the process time of a step beyond the plain model's, per group. Libraries, plain model and floor take
    turns.
    """
    libraries = able(libraries, precision)
    calls = build_steps(shape, precision, libraries)
    times = interleave(calls, rounds=rounds, warmup=2, measure=process_seconds)
    per_group = 1e6 / shape.groups
    above = {
        library.name: subtract(times[library.name], times["plain"], per_group) for library in able(libraries, precision)
    }
    bare, limit = (statistics.median(times[name]) * per_group for name in ("plain", "floor"))
    return timed_row("host", "us per group and step", _setting(label, precision), above, bare, limit)


def build_steps(shape: Shape, precision: str, libraries: Sequence[Library]) -> dict[str, Call]:
    """Returns a step of each library, of the "plain" model, and the "floor"."""
    steps = {library.name: build_step(library, shape, precision) for library in libraries}
    return {**steps, "plain": build_step(None, shape, precision), "floor": _build_floor(shape, precision)}


def build_step(library: Library | None, shape: Shape, precision: str) -> Call:
    """Returns a step of a library, or of the plain model."""
    if library is None:
        model = build_plain(shape, precision)
    else:
        model = build_sharded(shape, precision, library, dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    return partial(run_step, model, make_batch(shape, precision))


def _build_floor(shape: Shape, precision: str) -> Call:
    """Returns the least that a step can cost: per group two casts, two gathers and a reduction, without hooks."""
    compute, reduce = PRECISIONS[precision]
    world_size = dist.get_world_size()
    shard_numel = shape.block_numel // world_size + 1
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

    return partial(repeat, shape.groups, floor_of_one_group)


def _calls_row(label: str, shape: Shape, precision: str, libraries: Sequence[Library]) -> Row:
    plain = count_step_calls(None, shape, precision)
    values = {
        each.name: (count_step_calls(each, shape, precision) - plain) / shape.groups
        for each in able(libraries, precision)
    }
    setting = _setting(label, precision)
    return Row("host", "Python calls per group and step", setting, values, bare=plain / shape.groups)


def _setting(label: str, precision: str) -> str:
    return f"N={dist.get_world_size()} {precision}, {label}"


def count_step_calls(library: Library | None, shape: Shape, precision: str) -> int:
    """Counts the Python functions that one step in steady state calls; without a library, the plain model's."""
    return count_calls(build_steady_step(library, shape, precision))


def build_steady_step(library: Library | None, shape: Shape, precision: str) -> Call:
    """Returns a step that has run four times: in the 1st, 2nd, 4th, 8th, ... more checks run."""
    step = build_step(library, shape, precision)
    repeat(4, step)
    return step


def count_calls(call: Callable[[], Any]) -> int:
    """Counts the Python functions that this thread calls meanwhile, including `call`, without functions in C."""
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


class _Ops(TorchDispatchMode):
    sees_fsdp2 = True
    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def count_ops(call: Callable[[], Any]) -> int:
    """Counts the operations below autograd that `call` dispatches, views and collectives included."""
    with _Ops() as ops:
        call()
    return ops.count
