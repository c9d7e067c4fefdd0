"""Measures peaks and leftovers of one step, on torch's fake process group: every allocation of the CPU allocator."""

import gc
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .jobs import Job
from .libraries import Library
from .meters import AllocationMeter
from .models import (
    BYTES_SHAPE,
    HEAVY_ROOT_SHAPE,
    PRECISIONS,
    Shape,
    able,
    build_plain,
    build_sharded,
    compute_loss,
    make_batch,
    run_step,
)
from .pictures import draw_curves
from .quiet_group import start_fake_group
from .report import Row

FORWARD_PEAK = "forward peak, groups"  # of the plain model: its activations


def measure_memory(job: Job, libraries: Sequence[Library]) -> list[Row]:
    (world_size,) = job.worlds
    start_fake_group(world_size)
    mesh = dist.init_device_mesh("cpu", (world_size,))
    if job.pictures is not None:
        curves = {each.name: _memory_curve("bf16/fp32", each, mesh) for each in able(libraries, "bf16/fp32")}
        draw_curves(f"{job.pictures}-memory-{world_size}.png", curves, f"Memory of one step, bf16/fp32, N={world_size}")
    return [row for precision in PRECISIONS for row in _peak_rows(precision, world_size, libraries, mesh)]


def _memory_curve(precision: str, library: Library, mesh: DeviceMesh) -> list[tuple[float, float]]:
    """Returns pairs: share of the step's time, unsharded blocks above resting. Meters slow down some libraries more
    than others.
    """
    curve = record_step(BYTES_SHAPE, precision, library, mesh).curve("step")
    group_bytes = BYTES_SHAPE.block_numel * PRECISIONS[precision][0].itemsize
    return [(when / curve[-1][0], above / group_bytes) for when, above in curve]


def _peak_rows(precision: str, world_size: int, libraries: Sequence[Library], mesh: DeviceMesh) -> list[Row]:
    rows = []
    for label, shape in (("equal blocks", BYTES_SHAPE), ("embedding and head", HEAVY_ROOT_SHAPE)):
        peaks = {each.name: _measure_peaks(shape, precision, each, mesh) for each in able(libraries, precision)}
        limits = _peak_limits(precision, world_size) if shape is BYTES_SHAPE else {}
        activations = {FORWARD_PEAK: _measure_peaks(shape, precision, None, mesh)[FORWARD_PEAK]}
        for what in next(iter(peaks.values()), {}):
            values = {name: peak[what] for name, peak in peaks.items()}
            setting = f"N={world_size} {precision}, {label}"
            rows.append(Row("memory", what, setting, values, bare=activations.get(what), limit=limits.get(what)))
    return rows


def _measure_peaks(shape: Shape, precision: str, library: Library | None, mesh: DeviceMesh) -> dict[str, float]:
    """Returns peaks above resting in unsharded blocks, and resting bytes (no gradients) in fp32 parameter shards.
    Without a library they are those of the plain model.
    """
    meter = record_step(shape, precision, library, mesh)
    group_bytes = shape.block_numel * PRECISIONS[precision][0].itemsize
    shard_bytes = shape.numel * 4 / dist.get_world_size()
    resting = meter.allocated_before("step")
    return {
        FORWARD_PEAK: (meter.peak_during("forward") - resting) / group_bytes,
        "step peak, groups": (meter.peak_during("step") - resting) / group_bytes,
        "after fully_shard, parameter shards": meter.allocated_before("first step") / shard_bytes,
        "resting, parameter shards": resting / shard_bytes,
        "left after the model is gone, groups": meter.allocated_at_end() / group_bytes,
    }


def record_step(shape: Shape, precision: str, library: Library | None, mesh: DeviceMesh) -> AllocationMeter:
    """Records the regions "first step", and of a step in steady state, "step" and, in it, "forward". Without a library
    it records the plain model.
    """
    with AllocationMeter() as meter:
        model = build_sharded(shape, precision, library, mesh) if library else build_plain(shape, precision)
        batch = make_batch(shape, precision)
        with meter.region("first step"):
            run_step(model, batch)
        run_step(model, batch)
        gc.collect()
        with meter.region("step"):
            with meter.region("forward"):
                loss = compute_loss(model, batch)
            loss.backward()
            model.zero_grad(set_to_none=True)
        del model, batch, loss
        gc.collect()
    return meter


def _peak_limits(precision: str, world_size: int) -> dict[str, float]:
    """Returns the limits: two unsharded groups; in backward also gradients in flight, and reduced ones.

    Gradients in flight are a quarter of a group that is sent without a copy, and the quarter after it; of gradients
    that are cast a quarter, and three eighths that are copied.
    """
    compute, reduce = (dtype.itemsize for dtype in PRECISIONS[precision])
    in_flight = 2 / 4 if compute == reduce else (compute / 4 + reduce * 3 / 8) / compute
    return {
        FORWARD_PEAK: 2.0,
        "step peak, groups": 2.0 + in_flight + (BYTES_SHAPE.blocks - 2) * 4 / compute / world_size,
        "after fully_shard, parameter shards": 1.0,
        "resting, parameter shards": 1.0,
        "left after the model is gone, groups": 0.0,
    }
