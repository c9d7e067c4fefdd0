"""Copies and wire bytes of one step in steady state, on torch's fake process group. Exact counts."""

from collections.abc import Sequence
from functools import partial

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .jobs import Job
from .libraries import Library
from .meters import CopyMeter, WireMeter
from .models import BYTES_SHAPE, PRECISIONS, build_plain, build_sharded, make_batch, run_step
from .quiet_group import start_fake_group
from .report import Row
from .timing import repeat


def measure_traffic(job: Job, libraries: Sequence[Library]) -> list[Row]:
    (world_size,) = job.worlds
    start_fake_group(world_size)
    mesh = dist.init_device_mesh("cpu", (world_size,))
    return [row for precision in PRECISIONS for row in _traffic_rows(precision, world_size, libraries, mesh)]


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
