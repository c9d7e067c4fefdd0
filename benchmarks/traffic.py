"""Counts copies and bytes on the wire of one step in steady state, on torch's fake process group."""

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from .jobs import Job
from .libraries import Library
from .meters import CopyMeter, WireMeter
from .models import BYTES_SHAPE, PRECISIONS, Shape, able, build_plain, build_sharded, make_batch, run_step
from .quiet_group import start_fake_group
from .report import Row
from .timing import repeat


def measure_traffic(job: Job, libraries: Sequence[Library]) -> list[Row]:
    (world_size,) = job.worlds
    start_fake_group(world_size)
    mesh = dist.init_device_mesh("cpu", (world_size,))
    rows = [row for precision in PRECISIONS for row in _traffic_rows(precision, world_size, libraries, mesh)]
    with_more = [library for library in libraries if library.has_more]
    return rows + _traffic_rows("bf16/fp32", world_size, with_more, mesh, torch.bfloat16)


def _traffic_rows(
    precision: str,
    world_size: int,
    libraries: Sequence[Library],
    mesh: DeviceMesh,
    wire_dtype: torch.dtype | None = None,
) -> list[Row]:
    """Returns rows. `wire_dtype`: the dtype in which gradients are sent, that of autograd."""
    counts: dict[str, dict[str, float]] = {}
    wire = {"wire_dtype": wire_dtype} if wire_dtype else {}
    plain_copies, _ = count_step(build_plain(BYTES_SHAPE, precision), BYTES_SHAPE, precision)
    for library in able(libraries, precision):
        model = build_sharded(BYTES_SHAPE, precision, library, mesh, **wire)
        copies, sent = count_step(model, BYTES_SHAPE, precision)
        counts[library.name] = {
            "copy bytes per parameter": (copies.copy_bytes - plain_copies.copy_bytes) / BYTES_SHAPE.numel,
            "arithmetic bytes per parameter": (copies.arithmetic_bytes - plain_copies.arithmetic_bytes)
            / BYTES_SHAPE.numel,
            "wire bytes per parameter": sent.sent_bytes / BYTES_SHAPE.numel,
            "collective calls per step": sent.calls,
            "payloads per step": len(sent.collectives),
            "payloads not multiple of 16 bytes": sum(c.payload_bytes % 16 != 0 for c in sent.collectives),
        }
    compute, reduce = (dtype.itemsize for dtype in PRECISIONS[precision])
    limits = {
        "copy bytes per parameter": copy_limit(compute, compute if wire_dtype else reduce, world_size),
        "wire bytes per parameter": _wire_limit(compute, wire_dtype.itemsize if wire_dtype else reduce, world_size),
        "payloads not multiple of 16 bytes": 0,
    }
    setting = f"N={world_size} {precision}" + (", bf16 wire" if wire_dtype else "")
    quantities = next(iter(counts.values()), {})
    return [
        Row("traffic", what, setting, {name: count[what] for name, count in counts.items()}, limit=limits.get(what))
        for what in quantities
    ]


def count_step(model: nn.Module, shape: Shape, precision: str) -> tuple[CopyMeter, WireMeter]:
    """Counts one step in steady state."""
    batch = make_batch(shape, precision)
    repeat(2, partial(run_step, model, batch))
    with CopyMeter() as copies, WireMeter() as wire:
        run_step(model, batch)
    return copies, wire


def copy_limit(compute: int, sent: int, world_size: int) -> float:
    """Returns the limit: collectives directly on the memory of parameters, and a cast where the element size
    changes.
    """
    there = (4 + compute) / world_size if compute != 4 else 0.0
    return there + (compute + sent if compute != sent else 0)


def _wire_limit(compute: int, sent: int, world_size: int) -> float:
    """Returns the limit: two all-gathers (one for groups that stay) and a reduce-scatter, in the requested dtypes."""
    return (compute * (1 + BYTES_SHAPE.gathered_twice) + sent) * (world_size - 1) / world_size
