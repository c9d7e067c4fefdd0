"""Worker: one process, a group of any size that exists only in name. Host time, copies, wire bytes and peak memory.

Started by compare.py, one fresh process for each job and world size.
"""

import gc
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from libraries import Library
from meters import AllocationMeter, CopyMeter, WireMeter
from models import PRECISIONS, Shape, build_plain, build_sharded, compute_loss, make_batch, run_step
from quiet_group import start_fake_group, start_quiet_group
from report import Row, timed_row
from timing import interleave, process_seconds, repeat, subtract

# Tiny, so that compute and copies are negligible beside the host time.
HOST_SHAPE = Shape(blocks=16, dim=8, hidden=16, tokens=4)
# Equal blocks whose parameters dwarf the activations, and whose rows divide by every world size up to 512.
BYTES_SHAPE = Shape(blocks=8, dim=512, hidden=1536, tokens=1)
# Embedding and head of 4.8 blocks, left in the root as the standard recipe does.
HEAVY_ROOT_SHAPE = Shape(blocks=6, dim=512, hidden=1536, tokens=1, vocab=15872)


def measure_host(world_size: int, libraries: Sequence[Library], quick: bool) -> list[Row]:
    """Process time of a step above the plain model's, per group. Libraries, plain model and floor take turns."""
    start_quiet_group(world_size)
    mesh = dist.init_device_mesh("cpu", (world_size,))
    rows = []
    for precision in PRECISIONS:
        batch = make_batch(HOST_SHAPE, precision)
        models = {library.name: build_sharded(HOST_SHAPE, precision, library, mesh) for library in libraries}
        models["plain"] = build_plain(HOST_SHAPE, precision)
        calls = {name: partial(run_step, model, batch) for name, model in models.items()}
        calls["floor"] = _build_floor(precision, world_size)
        rounds = 10 if quick else 60
        times = interleave(calls, rounds=rounds, warmup=5, measure=partial(process_seconds, count=3))
        per_group = 1e6 / HOST_SHAPE.groups
        above = {library.name: subtract(times[library.name], times["plain"], per_group) for library in libraries}
        row = timed_row("host", "us per group and step", f"N={world_size} {precision}", above)
        rows.append(replace(row, limit=statistics.median(times["floor"]) * per_group))
    return rows


def _build_floor(precision: str, world_size: int) -> Callable[[], None]:
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


def measure_bytes(world_size: int, libraries: Sequence[Library]) -> list[Row]:
    """Exact counts of one step in steady state: copies, collectives, allocations."""
    start_fake_group(world_size)
    mesh = dist.init_device_mesh("cpu", (world_size,))
    rows = []
    for precision in PRECISIONS:
        rows += _traffic_rows(precision, world_size, libraries, mesh)
        rows += _peak_rows(precision, world_size, libraries, mesh)
    return rows


def _traffic_rows(precision: str, world_size: int, libraries: Sequence[Library], mesh: DeviceMesh) -> list[Row]:
    counts: dict[str, dict[str, float]] = {}
    plain_copies, _ = _count_step(build_plain(BYTES_SHAPE, precision), precision)
    for library in libraries:
        copies, wire = _count_step(build_sharded(BYTES_SHAPE, precision, library, mesh), precision)
        counts[library.name] = {
            "copy bytes per parameter": (copies.copy_bytes - plain_copies.copy_bytes) / BYTES_SHAPE.numel,
            "arithmetic bytes per parameter": (copies.arithmetic_bytes - plain_copies.arithmetic_bytes)
            / BYTES_SHAPE.numel,
            "wire bytes per parameter": wire.sent_bytes / BYTES_SHAPE.numel,
            "collective calls per step": wire.calls,
            "payloads per step": len(wire.collectives),
            "payloads not multiple of 16 bytes": sum(c.payload_bytes % 16 != 0 for c in wire.collectives),
        }
    limits = {
        "copy bytes per parameter": _copy_limit(precision, world_size),
        "wire bytes per parameter": _wire_limit(precision, world_size),
        "payloads not multiple of 16 bytes": 0,
    }
    setting = f"N={world_size} {precision}"
    quantities = counts[libraries[0].name]
    return [
        Row("traffic", what, setting, {name: count[what] for name, count in counts.items()}, limit=limits.get(what))
        for what in quantities
    ]


def _count_step(model: nn.Module, precision: str) -> tuple[CopyMeter, WireMeter]:
    batch = make_batch(BYTES_SHAPE, precision)
    repeat(2, partial(run_step, model, batch))
    with CopyMeter() as copies, WireMeter() as wire:
        run_step(model, batch)
    return copies, wire


def _copy_limit(precision: str, world_size: int) -> float:
    """Gathers and reductions straight into and out of the parameters; one cast each way under mixed precision."""
    compute, reduce = (dtype.itemsize for dtype in PRECISIONS[precision])
    return 0.0 if compute == reduce else (4 + compute) / world_size + compute + reduce


def _wire_limit(precision: str, world_size: int) -> float:
    """Two all-gathers (one for the root, which stays) and a reduce-scatter, in the dtypes that were asked for."""
    compute, reduce = (dtype.itemsize for dtype in PRECISIONS[precision])
    kept = compute * BYTES_SHAPE.root_numel / BYTES_SHAPE.numel
    return (2 * compute + reduce - kept) * (world_size - 1) / world_size


def _peak_rows(precision: str, world_size: int, libraries: Sequence[Library], mesh: DeviceMesh) -> list[Row]:
    rows = []
    for label, shape in (("equal blocks", BYTES_SHAPE), ("heavy root", HEAVY_ROOT_SHAPE)):
        peaks = {library.name: _measure_peaks(shape, precision, library, mesh) for library in libraries}
        limits = _peak_limits(precision, world_size) if shape is BYTES_SHAPE else {}
        for what in peaks[libraries[0].name]:
            values = {name: peak[what] for name, peak in peaks.items()}
            setting = f"N={world_size} {precision}, {label}"
            rows.append(Row("memory", what, setting, values, limit=limits.get(what)))
    return rows


def _measure_peaks(shape: Shape, precision: str, library: Library, mesh: DeviceMesh) -> dict[str, float]:
    """Peaks above resting in unsharded blocks; resting bytes (no gradients) in fp32 parameter shards."""
    with AllocationMeter() as meter:
        model, batch = build_sharded(shape, precision, library, mesh), make_batch(shape, precision)
        repeat(2, partial(run_step, model, batch))
        gc.collect()
        with meter.region("step"):
            with meter.region("forward"):
                loss = compute_loss(model, batch)
            loss.backward()
            model.zero_grad(set_to_none=True)
        del model, batch, loss
        gc.collect()
    group_bytes = shape.block_numel * PRECISIONS[precision][0].itemsize
    shard_bytes = shape.numel * 4 / dist.get_world_size()
    resting = meter.allocated_before("step")
    return {
        "forward peak, groups": (meter.peak_during("forward") - resting) / group_bytes,
        "step peak, groups": (meter.peak_during("step") - resting) / group_bytes,
        "resting, parameter shards": resting / shard_bytes,
        "left after the model is gone, groups": meter.allocated_at_end() / group_bytes,
    }


def _peak_limits(precision: str, world_size: int) -> dict[str, float]:
    """Two full groups; in backward also a quarter of one's gradients on their way, and what is reduced already."""
    compute, reduce = (dtype.itemsize for dtype in PRECISIONS[precision])
    in_flight = (reduce * 2 + (compute if compute != reduce else 0)) / compute / 4
    return {
        "forward peak, groups": 2.0,
        "step peak, groups": 2.0 + in_flight + (BYTES_SHAPE.blocks - 2) * 4 / compute / world_size,
        "resting, parameter shards": 1.0,
        "left after the model is gone, groups": 0.0,
    }


def run_job(job: str, world_size: int, libraries: Sequence[Library], quick: bool) -> list[Row]:
    torch.set_flush_denormal(True)  # gathered contents are arbitrary; denormals would slow the arithmetic down
    return measure_host(world_size, libraries, quick) if job == "host" else measure_bytes(world_size, libraries)
