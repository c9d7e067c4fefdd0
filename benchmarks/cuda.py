"""Measures what one GPU can show: launches, memory and time of a step with simulated peers, and exposed communication.

`python -m benchmarks.cuda PART FILE` measures one part and appends rows to a file as it goes.

At steps number 1, 2, 4, 8, 16, ... fsdp2's checks read the device (fsdp2/checks/check_times.py), and the host waits.
Counts and memory are those of steps between; of nine timed steps at most one is such a step, which medians leave
out.
"""

import gc
import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from .cuda_batches import GPTs, batch_rows
from .cuda_group import Wire, start_wire_group
from .cuda_models import GPTS, LLAMAS, Llama, LlamaShape, make_ids, run_lm_step
from .cuda_wrapping import materialise, wrap
from .jobs import Job
from .libraries import Library
from .report import Row, timed_row
from .timing import Call, interleave, repeat, subtract

WARM_UP = 4  # the next three steps are not among those at which checks are due
# Which calls of the CUDA runtime and driver count as what; the first that fits.
CALLS = {
    "device-wide and stream waits": ("Synchronize", "cudaMemcpy$"),
    "kernel launches": ("LaunchKernel", "LaunchCooperative"),
    "copies and fills": ("Memcpy", "Memset"),
    "waits between streams": ("StreamWaitEvent",),
    "allocations by the driver": ("cudaMalloc", "cudaFree", "cuMem"),
}


@dataclass(frozen=True)
class Setup:
    """Describes one measurement. Small values make it run on a CPU, in seconds, with nothing to count.

    Args:
        names: names of libraries; the others are compared with the last one.
        rounds: the number of rounds of each timing.
        gb_per_second: the bandwidth of the wire, each way.
    """

    names: tuple[str, ...] = ("fsdp2", "torch")
    device: torch.device = torch.device("cuda", 0)  # noqa: RUF009
    world_size: int = 64
    llamas: Mapping[str, LlamaShape] = field(default_factory=lambda: LLAMAS)
    gpts: GPTs = field(default_factory=lambda: GPTS)
    rounds: int = 9
    gb_per_second: tuple[int, ...] = (50, 100, 200, 450)

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def synchronise(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()


class Stage:
    """Holds the plain model of one shape (in bf16) and the wrapped ones of the libraries, on 64 ranks and one wire.
    Close it.
    """

    def __init__(self, setup: Setup, shape: LlamaShape) -> None:
        self.setup, self.shape = setup, shape
        self.wire: Wire = start_wire_group(setup.world_size, setup.device)
        self.mesh = dist.init_device_mesh(setup.device.type, (setup.world_size,))
        self.ids = make_ids(shape.vocab, 1, shape.tokens, setup.device)

    def build(self, name: str) -> Call:
        """Returns a step of a new model."""
        with torch.device("meta"):
            model: nn.Module = Llama(self.shape)
        model = model.to(torch.bfloat16) if name == "plain" else wrap(name, model, self.mesh)
        return partial(run_lm_step, materialise(model, self.setup.device), self.ids)

    def build_all(self) -> dict[str, Call]:
        return {name: self.build(name) for name in ("plain", *self.setup.names)}

    def close(self) -> None:
        dist.destroy_process_group()
        free_memory(self.setup)


def free_memory(setup: Setup) -> None:
    gc.collect()
    if setup.is_cuda:
        torch.cuda.empty_cache()


def each_stage(setup: Setup) -> Iterator[tuple[str, Stage]]:
    for label, shape in setup.llamas.items():
        stage = Stage(setup, shape)
        yield f"{label}, {shape.tokens} tokens, N={setup.world_size}", stage
        stage.close()


# ---- launches


def count_calls(step: Call, setup: Setup) -> Counter[str]:
    """Counts the calls of CUDA that one step makes, by kind."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setup.is_cuda else [])]
    setup.synchronise()
    with profile(activities=activities) as profiled:
        with record_function("meter::step"):
            step()
        setup.synchronise()
    events = profiled.profiler.kineto_results.events()
    on_host = [event for event in events if event.device_type() == torch.autograd.DeviceType.CPU]
    (region,) = (event for event in on_host if event.name() == "meter::step")
    inside = (each.name() for each in on_host if region.start_ns() <= each.start_ns() <= region.end_ns())
    return Counter(kind for name in inside if (kind := kind_of_call(name)) is not None)


def kind_of_call(name: str) -> str | None:
    if not name.startswith("cu") or not name.removeprefix("cuda").removeprefix("cu")[:1].isupper():
        return None
    for kind, parts in CALLS.items():
        if any(name == part[:-1] if part.endswith("$") else part in name for part in parts):
            return kind
    return None


def measure_calls(setup: Setup) -> Iterator[Row]:
    """Counts the calls of the library alone, per group: those of the plain model are subtracted. Waits: of the whole
    step.
    """
    for setting, stage in each_stage(setup):
        counts: dict[str, Counter[str]] = {}
        for name in ("plain", *setup.names):
            step = stage.build(name)
            repeat(WARM_UP, step)
            counts[name] = count_calls(step, setup)
            del step
            free_memory(setup)
        plain = counts.pop("plain")
        for kind in CALLS:
            waits = "waits" in kind and "between" not in kind
            less, per, unit = (0, 1, "step") if waits else (plain[kind], stage.shape.groups, "group")
            values = {name: (count[kind] - less) / per for name, count in counts.items()}
            yield Row("cuda", f"{kind} per {unit}", setting, values, limit=0.0 if waits else None)


# ---- memory


def measure_memory(setup: Setup) -> Iterator[Row]:
    """Measures the memory of steps in steady state, each library with the GPU to itself."""
    for setting, stage in each_stage(setup):
        found = {name: _measure_memory(stage.build(name), setup) for name in setup.names}
        for what in found[setup.names[0]]:
            values = {name: memory[what] for name, memory in found.items()}
            yield Row("cuda", what, setting, values)


def _measure_memory(step: Call, setup: Setup) -> dict[str, float]:
    if not setup.is_cuda:
        step()
        return {}
    repeat(WARM_UP, step)
    free_memory(setup)
    resting, before = torch.cuda.memory_allocated(), torch.cuda.memory_stats()
    torch.cuda.reset_peak_memory_stats()
    repeat(3, step)
    torch.cuda.synchronize()
    after = torch.cuda.memory_stats()
    found = {
        "resting GiB": resting / 2**30,
        "peak allocated GiB": torch.cuda.max_memory_allocated() / 2**30,
        "peak reserved GiB": torch.cuda.max_memory_reserved() / 2**30,
        "peak allocated above resting GiB": (torch.cuda.max_memory_allocated() - resting) / 2**30,
        "allocation retries": after["num_alloc_retries"] - before["num_alloc_retries"],
    }
    del step
    free_memory(setup)
    return found


# ---- time


@dataclass
class Timer:
    """Measures steps in milliseconds: on the device's clock, if it has one, and until the host has issued
    everything.
    """

    setup: Setup
    host: dict[Any, list[float]] = field(default_factory=dict)

    def time(self, step: Call) -> float:
        self.setup.synchronise()
        start = time.perf_counter()
        if self.setup.is_cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            step()
            end.record()
        else:
            step()
        self.host.setdefault(step, []).append((time.perf_counter() - start) * 1e3)
        self.setup.synchronise()
        return begin.elapsed_time(end) if self.setup.is_cuda else self.host[step][-1]


def fill_cache(setup: Setup) -> None:
    """Fills the memory that simulated gathers return with ordinary numbers."""
    if setup.is_cuda:
        free, _ = torch.cuda.mem_get_info()
        numbers = torch.empty(int(free * 0.8) // 2, dtype=torch.bfloat16, device=setup.device)
        numbers.normal_(std=0.02)


def measure_time(setup: Setup) -> Iterator[Row]:
    """Measures steps on a wire that takes no time: the time of the library's own kernels and its host time."""
    for setting, stage in each_stage(setup):
        fill_cache(setup)
        steps, timer = stage.build_all(), Timer(setup)
        times = interleave(steps, rounds=setup.rounds, warmup=WARM_UP, measure=timer.time)
        plain = sorted(times.pop("plain"))[setup.rounds // 2]
        host = {name: timer.host[steps[name]][-setup.rounds :] for name in setup.names}
        yield timed_row("cuda", "step ms", setting, times, limit=plain)
        yield timed_row("cuda", "ms until all is issued", setting, host)
        del steps, timer


def measure_exposed(setup: Setup) -> Iterator[Row]:
    """Measures how much longer a step takes on a wire of some speed than on one that takes no time."""
    for setting, stage in each_stage(setup):
        fill_cache(setup)
        models = stage.build_all()
        plain = models.pop("plain")
        for speed in (0, *setup.gb_per_second):
            steps = {name: _OnWire(step, stage.wire, speed * 1e9) for name, step in models.items()}
            measure = Timer(setup).time
            if speed == 0:
                free = interleave(steps, rounds=setup.rounds, warmup=WARM_UP, measure=measure)
                compute = min(interleave({"plain": plain}, rounds=3, warmup=2, measure=measure)["plain"])
                continue
            times = interleave(steps, rounds=setup.rounds, warmup=1, measure=measure)
            exposed = {name: subtract(times[name], free[name]) for name in setup.names}
            busy = {name: step.seconds_on_wire() * 1e3 for name, step in steps.items()}
            where, unhidden = f"{setting}, {speed} GB/s", unhidden_bytes(stage.shape) / speed / 1e6
            limit = max(unhidden, busy[setup.names[0]] - compute)
            yield Row("cuda", "wire busy ms", where, busy)
            yield timed_row("cuda", "exposed ms", where, exposed, limit=limit)
        del models, plain, steps


class _OnWire:
    """Is a step on a wire of some bandwidth in bytes a second (0: it takes no time)."""

    def __init__(self, step: Call, wire: Wire, bandwidth: float) -> None:
        self._step, self._wire, self._bandwidth = step, wire, bandwidth or None

    def __call__(self) -> None:
        self._wire.bandwidth = self._bandwidth
        self._step()
        self._wire.bandwidth = None

    def seconds_on_wire(self) -> float:
        before = self._wire.sent_bytes
        self()
        assert self._bandwidth is not None
        return (self._wire.sent_bytes - before) / self._bandwidth


def unhidden_bytes(shape: LlamaShape) -> float:
    """Returns the bytes that no order can hide: the embedding, which is looked up in no time, the first block, its
    gradient.
    """
    embedding = shape.vocab * shape.dim
    return embedding * 2 + shape.block_numel * 2 + embedding * 4


# ---- all


PARTS: dict[str, Callable[[Setup], Iterator[Row]]] = {
    "calls": measure_calls,
    "memory": measure_memory,
    "time": measure_time,
    "exposed": measure_exposed,
    "batches": lambda setup: batch_rows(setup.gpts, setup.device),
}


def measure_cuda(job: Job, libraries: Sequence[Library]) -> list[Row]:
    (world_size,) = job.worlds
    names = tuple(library.name for library in libraries)
    setup = Setup(names=names, world_size=world_size, rounds=5 if job.quick else 9)
    return [row for measure in PARTS.values() for row in measure(setup)]


def main(part: str, path: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch warns about deprecated collectives of its own
    with path.open("a") as rows:
        for row in PARTS[part](Setup()):
            print(json.dumps(asdict(row)), file=rows, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
