"""CPU time of what a training step does besides the model's own work: hooks, clipping, the optimizer, clearing."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.tensor import DTensor

from .jobs import Job
from .libraries import Library
from .models import Shape, build_plain, build_sharded, compute_loss, make_batch
from .quiet_group import start_quiet_group
from .recipe import clip_function, make_optimizer
from .report import Row, timed_row
from .timing import interleave, keep_freed_memory, process_seconds, subtract

# 144 parameters, of which a rank of 64 holds a row each: host time is all there is.
MANY_SHAPE = Shape(blocks=16, dim=16, hidden=32, tokens=4)
# Of which a rank of 8 holds 5 million elements: the elements take the time.
LARGE_SHAPE = Shape(blocks=16, dim=512, hidden=1024, tokens=1)
LARGE_WORLD = 8
WAYS: dict[str, dict[str, bool]] = {"foreach": {"foreach": True}, "fused": {"fused": True}}
WARMUP = 3
PHASES = ("forward and backward", "clip_grad_norm_", "AdamW", "zero_grad")


@dataclass
class Training:
    """A model, its optimizer, and how long each phase of each step has taken."""

    model: Any
    optimizer: optim.Optimizer
    batch: torch.Tensor
    clip: Callable[[Sequence[nn.Parameter]], Any]
    fills_gradients: bool
    seconds: dict[str, list[float]] = field(default_factory=lambda: {phase: [] for phase in PHASES})

    def __post_init__(self) -> None:
        self.params = [*self.model.parameters()]

    def run(self) -> None:
        self._time("forward and backward", lambda: compute_loss(self.model, self.batch).backward())
        if self.fills_gradients:
            # They come of weights that no rank has sent: steps on NaN take twice the time.
            for param in self.params:
                grad: Any = param.grad
                if grad is not None:  # FSDP1's rank may hold nothing of a parameter
                    (grad.to_local() if isinstance(grad, DTensor) else grad).fill_(1e-3)
        self._time("clip_grad_norm_", lambda: self.clip(self.params))
        self._time("AdamW", self.optimizer.step)
        self._time("zero_grad", self.optimizer.zero_grad)
        self.batch.grad = None

    def _time(self, phase: str, call: Callable[[], Any]) -> None:
        start = time.process_time()
        call()
        self.seconds[phase].append(time.process_time() - start)


def measure_step(job: Job, libraries: Sequence[Library]) -> list[Row]:
    (world_size,) = job.worlds
    rows: list[Row] = []
    keep_freed_memory()
    for shape, size, rounds in ((MANY_SHAPE, world_size, 14), (LARGE_SHAPE, LARGE_WORLD, 3)):
        start_quiet_group(size)
        for way in WAYS:
            rows += _rows(shape, way, libraries, max(2, rounds // 4) if job.quick else rounds)
        dist.destroy_process_group()
    return rows


def _rows(shape: Shape, way: str, libraries: Sequence[Library], rounds: int) -> list[Row]:
    trainings = {library.name: _build(library, shape, way) for library in libraries}
    trainings["plain"] = _build(None, shape, way)
    whole = interleave(
        {name: training.run for name, training in trainings.items()},
        rounds=rounds,
        warmup=WARMUP,
        measure=process_seconds,
    )
    names = [library.name for library in libraries]
    seconds = {name: {p: s[WARMUP:] for p, s in training.seconds.items()} for name, training in trainings.items()}
    setting = f"N={dist.get_world_size()}, {len(trainings['plain'].params)} parameters"
    if shape is LARGE_SHAPE:
        setting += f", {shape.numel / dist.get_world_size() / 1e6:.0f} M local elements"
    hooks = {name: subtract(seconds[name][PHASES[0]], seconds["plain"][PHASES[0]], 1e3) for name in names}
    of_phases = {p: {name: [1e3 * s for s in seconds[name][p]] for name in names} for p in PHASES[1:]}
    together = {
        name: [sum(parts) for parts in zip(hooks[name], *(of_phases[p][name] for p in PHASES[1:]), strict=True)]
        for name in names
    }
    assert all(len(times) == rounds for times in (*whole.values(), *together.values()))
    rows = [timed_row("step", f"AdamW({way}), ms", setting, of_phases["AdamW"], limit=_flat_adamw(shape, way))]
    rows.append(timed_row("step", f"hooks, clip, AdamW({way}), clearing: ms above the plain model", setting, together))
    if way == "foreach":
        rows.append(timed_row("step", "hooks alone, ms above the plain model", setting, hooks))
        rows += [timed_row("step", f"{phase}, ms", setting, of_phases[phase]) for phase in (PHASES[1], PHASES[3])]
    return rows


def _build(library: Library | None, shape: Shape, way: str) -> Training:
    """On all ranks. Without a library, the plain model."""
    if library is None:
        model: Any = build_plain(shape, "fp32")
    else:
        model = build_sharded(shape, "fp32", library, dist.init_device_mesh("cpu", (dist.get_world_size(),)))
    name = "plain" if library is None else library.name
    optimizer = make_optimizer(name, model, lr=1e-4, **{"fused": False, **WAYS[way]})
    clip = partial(clip_function(name), max_norm=1.0)
    if name == "fsdp1":
        clip = lambda params: model.clip_grad_norm_(1.0)  # noqa: E731
    return Training(model, optimizer, make_batch(shape, "fp32"), clip, fills_gradients=shape is LARGE_SHAPE)


def _flat_adamw(shape: Shape, way: str) -> float:
    """Milliseconds of a step on as many elements in one plain tensor."""
    param = nn.Parameter(torch.ones(-(-shape.numel // dist.get_world_size())))
    param.grad = torch.full_like(param, 0.5)
    optimizer = optim.AdamW([param], lr=1e-4, **WAYS[way])
    for _ in range(WARMUP):
        optimizer.step()
    return 1e3 * statistics.median(process_seconds(optimizer.step) for _ in range(10))
