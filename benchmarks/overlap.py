"""Measures communication that compute does not hide, on a link of known speed, with compute of known length.

Blocks and collectives sleep. Their times are long compared with the disturbances by the machine and its other users.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .jobs import Job
from .libraries import Library
from .models import make_vectors, run_step
from .pictures import Lanes, draw_lanes
from .report import Row, timed_row
from .timed_group import Clock, Link, SimulatedClock, start_timed_group
from .timing import Call, interleave, repeat, subtract

BLOCKS, LAYERS, DIM = 5, 4, 512
FORWARD_SECONDS = 0.035  # of one block; its backward takes twice that
LATENCY_SECONDS = 50e-6
# Seconds of all transfers of a step, two gathers and a reduction per block, over seconds of compute.
COMMUNICATION_PER_COMPUTE = (1.0, 0.3)


@dataclass
class Compute:
    """Records the compute of blocks: "forward" or "backward", begin and end of each, and the total time."""

    clock: Clock
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    seconds: float = 0.0

    def run(self, kind: str, seconds: float) -> None:
        begin = self.clock.now()
        self.clock.sleep_until(begin + seconds)
        end = self.clock.now()
        self.spans.append((kind, begin, end))
        self.seconds += end - begin


class _Busy(torch.autograd.Function):
    """Is an identity that takes `seconds` in forward, and twice as long in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, compute: Compute) -> Tensor:
        ctx.seconds, ctx.compute = seconds, compute
        compute.run("forward", seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.compute.run("backward", 2 * ctx.seconds)
        return gradient, None, None


class _Block(nn.Module):
    """Holds linear layers, each of which is as slow as if its matrix were many times larger."""

    def __init__(self, compute: Compute, layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(layers))
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = _Busy.apply(layer(x), FORWARD_SECONDS / len(self.layers), self.compute)
        return x


class SlowStack(nn.Module):
    """Holds equal blocks, and no parameters in the root."""

    def __init__(self, compute: Compute, layers: int = LAYERS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block(compute, layers) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def floor_seconds(transfer: float, forward: float, backward: float, blocks: int) -> float:
    """Returns the seconds of communication that no order hides, if each collective takes `transfer` seconds.

    Nothing can hide the first gather and the last reduction; all other transfers are exposed as far as they take longer
    than the block that computes meanwhile. The last two blocks stay unsharded for backward.
    """
    in_forward = (blocks - 1) * max(0.0, transfer - forward)
    # Beside the last block there is none, beside the first a reduction, beside the others a gather and a reduction.
    in_backward = max(0.0, transfer - backward) + (blocks - 2) * max(0.0, 2 * transfer - backward)
    return 2 * transfer + in_forward + in_backward


class Stage:
    """Holds one process group with a link, models that run on it, and a clock for both. Close it.

    `layers`: the number of layers of each block. `mixed`: gathers are in bf16, and reductions, which take twice as
    long, in fp32.
    """

    def __init__(
        self, world_size: int, clock: Clock, libraries: Sequence[Library], layers: int = LAYERS, mixed: bool = False
    ) -> None:
        self._clock, self._world_size = clock, world_size
        self._block_nbytes = layers * DIM**2 * (2 if mixed else 4)
        dtypes = (torch.bfloat16, torch.float32) if mixed else None
        self._link, self._compute = Link(clock, LATENCY_SECONDS), Compute(clock)
        start_timed_group(world_size, self._link)
        mesh = dist.init_device_mesh("cpu", (world_size,))
        models = {each.name: each.shard(SlowStack(self._compute, layers), mesh, dtypes) for each in libraries}
        models["plain"] = SlowStack(self._compute, layers)
        self.steps: dict[str, Call] = {
            name: partial(run_step, model, make_vectors(DIM)) for name, model in models.items()
        }

    def set_transfer(self, seconds: float) -> None:
        """Sets the time of a gather of a whole block."""
        nbytes = self._block_nbytes * (self._world_size - 1) / self._world_size
        self._link.bandwidth = nbytes / (seconds - LATENCY_SECONDS)

    def seconds_outside_compute(self, step: Call) -> float:
        """Returns the seconds of one step. A busy machine sleeps longer than requested, which does not count."""
        before, start = self._compute.seconds, self._clock.now()
        step()
        return self._clock.now() - start - (self._compute.seconds - before)

    def record(self, step: Call) -> Lanes:
        """Returns the events of link and compute in one step, in milliseconds from its beginning."""
        self._link.transfers.clear()
        self._compute.spans.clear()
        start = self._clock.now()
        step()
        length = (self._clock.now() - start) * 1e3
        link, compute = (
            [(kind, (begin - start) * 1e3, (end - start) * 1e3) for kind, begin, end in spans]
            for spans in (self._link.transfers, self._compute.spans)
        )
        return Lanes(length, link, compute)

    def close(self) -> None:
        dist.destroy_process_group()


def measure_overlap(job: Job, libraries: Sequence[Library]) -> list[Row]:
    (world_size,) = job.worlds
    stage, rows = Stage(world_size, Clock(), libraries), []
    for ratio in COMMUNICATION_PER_COMPUTE:
        transfer, setting = ratio * FORWARD_SECONDS, f"link / compute = {ratio}"
        stage.set_transfer(transfer)
        rounds = 3 if job.quick else 9
        times = interleave(stage.steps, rounds=rounds, warmup=2, measure=stage.seconds_outside_compute)
        exposed = {each.name: subtract(times[each.name], times["plain"], 1e3) for each in libraries}
        rows.append(timed_row("overlap", "exposed ms per step", setting, exposed, limit=floor_of(transfer) * 1e3))
        if job.pictures is not None:
            lanes = {name: stage.record(stage.steps[name]) for name in job.libraries}
            draw_lanes(f"{job.pictures}-overlap-{ratio}.png", lanes, f"One step, {setting}")
    stage.close()
    return rows + [_simulated_row(world_size, ratio, libraries) for ratio in COMMUNICATION_PER_COMPUTE]


def _simulated_row(world_size: int, ratio: float, libraries: Sequence[Library]) -> Row:
    transfer = ratio * FORWARD_SECONDS
    values = {each.name: exposed_by_order(each, world_size, transfer) * 1e3 for each in libraries}
    setting = f"link / compute = {ratio}"
    return Row("overlap", "of it by order alone", setting, values, limit=floor_of(transfer) * 1e3)


def exposed_by_order(library: Library, world_size: int, transfer: float, **options: Any) -> float:
    """Returns the exact seconds per step in steady state, if all but compute and link were infinitely fast."""
    stage = Stage(world_size, SimulatedClock(), [library], **options)
    stage.set_transfer(transfer)
    step = stage.steps[library.name]
    repeat(2, step)
    seconds = stage.seconds_outside_compute(step)
    stage.close()
    return seconds


def floor_of(transfer: float) -> float:
    return floor_seconds(transfer, FORWARD_SECONDS, 2 * FORWARD_SECONDS, BLOCKS)
