"""Measures what one GPU can show: launches, memory and time of a step with simulated peers, and exposed communication.

`python -m benchmarks.cuda PART FILE` measures one part and appends rows to a file as it goes.

At steps number 1, 2, 4, 8, 16, ... fsdp2's checks read the device (fsdp2/checks/due.py), and the host waits.
Counts and memory are those of steps between; of five timed steps at most one is such a step, which medians leave
out.
"""

import argparse
import gc
import gzip
import importlib
import json
import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

import fsdp2

from .cuda_batches import GPTs, batch_rows
from .cuda_group import Wire, start_wire_group
from .cuda_models import GPTS, LLAMAS, GPTShape, Llama, LlamaShape, make_ids, run_lm_step
from .cuda_variants import VARIANTS, in_force, library_of
from .cuda_wrapping import materialise, wrap
from .jobs import Job
from .libraries import Library
from .report import Row, timed_row
from .timing import Call, interleave, repeat

NVLINK = 370  # GB/s
WARM_UP = 4  # the next three steps are not among those at which checks are due, also after each further 4 + 3 steps
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
        variants: names in `VARIANTS`, for times; likewise.
        rounds: the number of rounds of each timing.
        gb_per_second, latencies_us: the bandwidths of the wire, each way, and how long each collective takes besides.
        short_tokens: the length of a short sequence, beside that of the model, with which activations take little.
        alone: if True, each library is measured in a process of its own where memory is counted.
        packed: the shape of the gradient that is packed.
        files: a folder for the timelines of counted steps.
    """

    names: tuple[str, ...] = ("fsdp2", "torch")
    variants: tuple[str, ...] = tuple(VARIANTS)
    device: torch.device = torch.device("cuda", 0)  # noqa: RUF009
    world_size: int = 64
    llamas: Mapping[str, LlamaShape] = field(default_factory=lambda: LLAMAS)
    gpts: GPTs = field(default_factory=lambda: GPTS)
    rounds: int = 11
    gb_per_second: tuple[int, ...] = (50, 450)
    latencies_us: tuple[int, ...] = (20,)
    short_tokens: int = 512
    alone: bool = True
    packed: tuple[int, int] = (8192, 2048)
    compile_backend: str = "inductor"
    files: Path | None = None

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def synchronise(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()


def tiny_setup(device: torch.device) -> Setup:
    """Returns a setup of a few seconds, whose numbers mean nothing."""
    return Setup(
        device=device,
        world_size=4,
        llamas={"tiny": LlamaShape(blocks=2, dim=16, heads=4, kv_heads=2, hidden=32, vocab=32, tokens=4)},
        gpts={"tiny": GPTShape(blocks=2, dim=16, heads=2, vocab=32, tokens=4)},
        rounds=1,
        gb_per_second=(50,),
        latencies_us=(0, 20),
        short_tokens=2,
        packed=(16, 8),
        compile_backend="aot_eager",
    )


class Stage:
    """Holds the plain model of one shape (in bf16) and the wrapped ones of the libraries, on 64 ranks and one wire.
    Close it.
    """

    def __init__(self, setup: Setup, shape: LlamaShape) -> None:
        self.setup, self.shape = setup, shape
        self.wire: Wire = start_wire_group(setup.world_size, setup.device)
        self.mesh = dist.init_device_mesh(setup.device.type, (setup.world_size,))
        self.ids = make_ids(shape.vocab, 1, shape.tokens, setup.device)

    def build_model(self, name: str, prepare: Callable[[Any], object] = lambda model: None) -> Any:
        """Returns a new model, of a library, a variant of fsdp2, or plain. `prepare` is called before it is sharded."""
        with torch.device("meta"):
            model: nn.Module = Llama(self.shape)
        prepare(model)
        library = library_of(name)
        model = model.to(torch.bfloat16) if library == "plain" else wrap(library, model, self.mesh)
        return materialise(model, self.setup.device)

    def build(self, name: str) -> Call:
        """Returns a step of a new model."""
        return partial(run_lm_step, self.build_model(name), self.ids)

    def build_variants(self, names: Sequence[str]) -> dict[str, Call]:
        """Returns steps of the plain model and of the named variants or libraries, which have each run once."""
        steps = {}
        for name in ("plain", *names):
            with in_force(name):
                steps[name] = self.build(name)
                steps[name]()
        return steps

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


def count_calls(step: Call, setup: Setup, label: str = "") -> tuple[Counter[str], Counter[str]]:
    """Counts the calls of CUDA that one step makes, by kind, and the kernels that it runs, by name.

    If `setup` has a folder for files, `events-LABEL.jsonl.gz` is written there: see `_write_events`.
    """
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setup.is_cuda else [])]
    setup.synchronise()
    with profile(activities=activities) as profiled:
        with record_function("meter::step"):
            step()
        setup.synchronise()
    events = profiled.profiler.kineto_results.events()
    on_host = [event for event in events if event.device_type() == torch.autograd.DeviceType.CPU]
    kernels = Counter(event.name() for event in events if event.device_type() == torch.autograd.DeviceType.CUDA)
    if setup.files is not None:
        _write_events(events, setup.files / f"events-{label}.jsonl.gz")
    (region,) = (event for event in on_host if event.name() == "meter::step")
    inside = (each.name() for each in on_host if region.start_ns() <= each.start_ns() <= region.end_ns())
    return Counter(kind for name in inside if (kind := kind_of_call(name)) is not None), kernels


def _write_events(events: Sequence[Any], path: Path) -> None:
    """Writes a line for each call of CUDA and each thing that the device has done: [name, "host" or "device", thread
    or stream, correlation, begin, duration], times in ns. A call and what it launches have one correlation.
    """
    with gzip.open(path, "wt") as file:
        for event in events:
            on_device = event.device_type() == torch.autograd.DeviceType.CUDA
            if on_device or is_call(event.name()) or event.name() == "meter::step":
                place = event.device_resource_id() if on_device else event.start_thread_id()
                when = (event.correlation_id(), event.start_ns(), event.duration_ns())
                print(json.dumps([event.name(), "device" if on_device else "host", place, *when]), file=file)


def is_call(name: str) -> bool:
    """Returns True for functions of the CUDA runtime and driver."""
    return name.startswith("cu") and name.removeprefix("cuda").removeprefix("cu")[:1].isupper()


def kind_of_call(name: str) -> str | None:
    if not is_call(name):
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
            fill_cache(setup)
            step = stage.build(name)
            repeat(WARM_UP, step)
            counts[name], kernels = count_calls(step, setup, f"{setting.split(',')[0]}-{name}".replace(" ", "-"))
            print(f"{setting}: kernels of {name}, how often and which", flush=True)
            print("\n".join(f"{count}\t{kernel}" for kernel, count in kernels.most_common()), flush=True)
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
    """Measures the memory of steps in steady state, each library in a process of its own: what one leaves behind would
    count for the next.
    """
    for label in setup.llamas:
        found: dict[str, dict[str, dict[str, float]]] = {}
        for name in setup.names:
            if setup.alone:
                with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                    found[name] = pool.submit(_memory_of, setup, label, name).result()
            else:
                found[name] = _memory_of(setup, label, name)
        for setting, quantities in found[setup.names[0]].items():
            for what in quantities:
                yield Row("cuda", what, setting, {name: memory[setting][what] for name, memory in found.items()})


def _memory_of(setup: Setup, label: str, name: str) -> dict[str, dict[str, float]]:
    """Returns setting -> quantity -> number, of one library, and what is left when its model is deleted."""
    _be_quiet()
    stage = Stage(setup, setup.llamas[label])
    model, tokens = stage.build_model(name), stage.shape.tokens
    found = {}
    for length, recomputes in ((setup.short_tokens, False), (tokens, False), (tokens, True)):
        model.recomputes = recomputes
        ids = make_ids(stage.shape.vocab, 1, length, setup.device)
        setting = f"{label}, {length} tokens, N={setup.world_size}{', recomputed' * recomputes}"
        found[setting] = _measure_memory(partial(run_lm_step, model, ids), setup)
        del ids
    del model
    stage.close()
    if setup.is_cuda:
        time.sleep(0.3)  # autograd's thread of the device holds the last graph for some milliseconds
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        found[f"{label}, deleted"] = {"left GiB": torch.cuda.memory_allocated() / 2**30}
    return found


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
    return {
        "resting GiB": resting / 2**30,
        "peak allocated GiB": torch.cuda.max_memory_allocated() / 2**30,
        "peak reserved GiB": torch.cuda.max_memory_reserved() / 2**30,
        "peak allocated above resting GiB": (torch.cuda.max_memory_allocated() - resting) / 2**30,
        "allocation retries": after["num_alloc_retries"] - before["num_alloc_retries"],
    }


# ---- time


@dataclass
class Timer:
    """Measures steps in milliseconds: on the device's clock, if it has one, until the host has issued everything, and
    the CPU time of all threads of this process until then.
    """

    setup: Setup
    host: dict[Any, list[float]] = field(default_factory=dict)
    cpu: dict[Any, list[float]] = field(default_factory=dict)

    def time(self, step: Call) -> float:
        self.setup.synchronise()
        start, cpu = time.perf_counter(), time.process_time()
        if self.setup.is_cuda:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            step()
            end.record()
        else:
            step()
        self.host.setdefault(step, []).append((time.perf_counter() - start) * 1e3)
        self.cpu.setdefault(step, []).append((time.process_time() - cpu) * 1e3)
        self.setup.synchronise()
        return begin.elapsed_time(end) if self.setup.is_cuda else self.host[step][-1]

    def rows(self, steps: Mapping[str, Call], what: str, setting: str, rounds: int) -> Iterator[Row]:
        """Yields the host's times of the last rounds."""
        for quantity, found in (
            (f"{what} until all is issued", self.host),
            (f"{what} of the CPUs until then", self.cpu),
        ):
            yield timed_row("cuda", quantity, setting, {name: found[step][-rounds:] for name, step in steps.items()})


def fill_cache(setup: Setup, share: float = 0.8) -> None:
    """Fills the memory that simulated gathers return with ordinary numbers: so much of what is free."""
    if setup.is_cuda:
        free, _ = torch.cuda.mem_get_info()
        numbers = torch.empty(int(free * share) // 2, dtype=torch.bfloat16, device=setup.device)
        numbers.normal_(std=0.02)


def measure_time(setup: Setup) -> Iterator[Row]:
    """Measures steps on a wire that takes no time: the time of the library's own kernels and its host time, which a
    short sequence does not hide.
    """
    short = {label: replace(shape, tokens=setup.short_tokens) for label, shape in setup.llamas.items()}
    for setting, stage in chain(each_stage(setup), each_stage(replace(setup, llamas=short))):
        fill_cache(setup)
        steps, timer = stage.build_variants(setup.variants), Timer(setup)
        times = interleave(steps, rounds=setup.rounds, warmup=WARM_UP, measure=timer.time)
        yield timed_row("cuda", "step ms", setting, times, limit=min(times["plain"]))
        yield Row("cuda", "step ms, least of all rounds", setting, {name: min(each) for name, each in times.items()})
        yield from timer.rows(steps, "ms", setting, setup.rounds)
        del steps, timer


def measure_exposed(setup: Setup) -> Iterator[Row]:
    """Measures how long a step takes on wires of some speed and latency, and how much longer than without a wire."""
    for setting, stage in each_stage(setup):
        fill_cache(setup)
        models = stage.build_variants(setup.names)
        plain = models.pop("plain")
        measure = Timer(setup).time
        free = interleave(models, rounds=setup.rounds, warmup=WARM_UP, measure=measure)
        compute = min(interleave({"plain": plain}, rounds=3, warmup=2, measure=measure)["plain"])
        for speed in setup.gb_per_second:
            for latency in setup.latencies_us:
                steps = {name: OnWire(step, stage.wire, speed * 1e9, latency / 1e6) for name, step in models.items()}
                times = interleave(steps, rounds=setup.rounds, warmup=1, measure=Timer(setup).time)
                exposed = {name: statistics.median(times[name]) - min(free[name]) for name in models}
                sent = {name: step.count() for name, step in steps.items()}
                busy = {
                    name: (calls * latency / 1e6 + nbytes / speed / 1e9) * 1e3 for name, (calls, nbytes) in sent.items()
                }
                where, unhidden = f"{setting}, {speed} GB/s, {latency} us", unhidden_bytes(stage.shape) / speed / 1e6
                limit = max(unhidden, busy[setup.names[0]] - compute)
                yield Row("cuda", "collectives", where, {name: calls for name, (calls, _) in sent.items()})
                yield Row("cuda", "wire busy ms", where, busy)
                yield timed_row("cuda", "step ms on this wire", where, times, limit=compute + limit)
                yield Row("cuda", "exposed ms", where, exposed, limit=limit)
        del models, plain, steps


def measure_captured(setup: Setup) -> Iterator[Row]:
    """Measures a step (forward, backward, clipping, AdamW) as a replayed CUDA graph beside the eager one."""
    for setting, stage in each_stage(setup):
        fill_cache(setup, 0.3)  # graphs take none of what the allocator keeps
        stage.wire.moves = False
        steps: dict[str, Call] = {}
        for name in setup.names:
            model = stage.build_model(name)
            if name == "fsdp2":
                model.set_keep_unsharded_storage(True)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True, capturable=setup.is_cuda)
            clip = fsdp2.clip_grad_norm_ if name == "fsdp2" else torch.nn.utils.clip_grad_norm_
            if name == "fsdp2":
                _flatten(optimizer)
            steps[name] = partial(_whole_step, model, stage.ids, clip, optimizer)
            repeat(WARM_UP, steps[name])
        if setup.is_cuda:
            steps["fsdp2, a graph"] = _capture(steps["fsdp2"], stage.wire)
        timer = Timer(setup)
        times = interleave(steps, rounds=setup.rounds, warmup=1, measure=timer.time)
        yield timed_row("cuda", "step ms with clipping and AdamW", setting, times)
        yield from timer.rows(steps, "ms with clipping and AdamW", setting, setup.rounds)
        if setup.is_cuda:
            graphs: dict[str, Call] = {}
            for wire, bandwidth in {"no wire": None, f"{NVLINK} GB/s": NVLINK * 1e9}.items():
                stage.wire.bandwidth, stage.wire.latency = bandwidth, setup.latencies_us[-1] / 1e6
                repeat(WARM_UP, steps["fsdp2"])
                graphs[wire] = _capture(steps["fsdp2"], stage.wire)
            stage.wire.bandwidth = None
            times = interleave(graphs, rounds=setup.rounds, warmup=1, measure=timer.time)
            about = f"{setting}, {setup.latencies_us[-1]} us where there is a wire"
            yield timed_row("cuda", "step ms with clipping and AdamW, a graph", about, times)
            del graphs
        del steps, timer, model, optimizer


def _capture(step: Call, wire: Wire) -> Call:
    """Returns the replay of a step, which has run before."""
    graph = torch.cuda.CUDAGraph()
    wire.settle()
    with torch.cuda.graph(graph):
        step()
    wire.settle()
    return graph.replay


def _flatten(optimizer: torch.optim.Optimizer) -> None:
    try:
        fsdp2.flatten_optimizer(optimizer)
    except TypeError as error:  # its trial failed here: worth knowing, and no reason to end
        print(f"AdamW is timed as it is: {error}", flush=True)


def _whole_step(model: Any, ids: Any, clip: Callable[..., object], optimizer: Any) -> None:
    run_lm_step(model, ids, keeps_gradients=True)
    clip(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


class OnWire:
    """Is a step on a wire of some bandwidth in bytes a second, and latency in seconds. None: it takes no time."""

    def __init__(self, step: Call, wire: Wire, bandwidth: float | None, latency: float) -> None:
        self._step, self._wire, self._speed = step, wire, (bandwidth, latency)

    def __call__(self) -> None:
        self._wire.bandwidth, self._wire.latency = self._speed
        self._step()
        self._wire.bandwidth = None

    def count(self) -> tuple[int, float]:
        """Runs it, and returns the calls of collectives and the bytes that it sends."""
        calls, nbytes = self._wire.calls, self._wire.sent_bytes
        self()
        return self._wire.calls - calls, self._wire.sent_bytes - nbytes


def unhidden_bytes(shape: LlamaShape) -> float:
    """Returns the bytes that no order can hide: the embedding, which is looked up in no time, the first block, its
    gradient.
    """
    embedding = shape.vocab * shape.dim
    return embedding * 2 + shape.block_numel * 2 + embedding * 4


# ---- kernels


def measure_kernels(setup: Setup) -> Iterator[Row]:
    """Measures ways to pack one gradient for a reduce-scatter, and AdamW on the shards of a model: flat with fsdp2."""
    yield timed_row("cuda", "us to pack", f"bf16 to fp32, {setup.packed}, N={setup.world_size}", _pack_times(setup))
    for setting, stage in each_stage(setup):
        for option in ("fused", "foreach"):
            steps: dict[str, Call] = {}
            for name in setup.names:
                model = stage.build_model(name)
                run_lm_step(model, stage.ids, keeps_gradients=True)
                optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, **{option: True})
                if name == "fsdp2":
                    _flatten(optimizer)
                steps[name] = optimizer.step
                del model, optimizer
            timer = Timer(setup)
            times = interleave(steps, rounds=setup.rounds, warmup=3, measure=timer.time)
            yield timed_row("cuda", f"AdamW {option} ms", setting, times)
            yield from timer.rows(steps, f"AdamW {option} ms", setting, setup.rounds)
            del steps, timer


def _pack_times(setup: Setup) -> dict[str, list[float]]:
    ranks, (rows, cols) = setup.world_size, setup.packed
    gradient = torch.ones(rows, cols, dtype=torch.bfloat16, device=setup.device)
    packed = torch.empty(ranks, rows // ranks * cols, device=setup.device)
    middle = packed.shape[1] // 2
    source = gradient.view(ranks, -1)
    halves = [(whole[:, :middle], whole[:, middle:]) for whole in (packed, source)]

    def in_halves() -> None:
        for to, half in zip(*halves, strict=True):
            to.copy_(half)

    def row_by_row() -> None:
        for to, half in zip(*halves, strict=True):
            torch._foreach_copy_([*to.unbind()], [*half.unbind()])

    ways: dict[str, Call] = {
        "halves": in_halves,
        "halves, row by row": row_by_row,
        "one copy": lambda: packed.copy_(source),
        "chunk_cat": lambda: torch._chunk_cat([gradient], 0, ranks, out=packed),
    }
    if not setup.is_cuda:  # where it does not cast
        del ways["chunk_cat"]
    times = interleave(ways, rounds=max(setup.rounds, 9), warmup=3, measure=Timer(setup).time)
    return {name: [1e3 * milliseconds for milliseconds in found] for name, found in times.items()}


def measure_compiled(setup: Setup) -> Iterator[Row]:
    """Measures steps with compiled blocks, of four blocks of a model."""

    def compile_blocks(model: Any) -> None:
        for block in model.blocks:
            block.compile(backend=setup.compile_backend)

    shapes = {
        f"{label}, 4 blocks": replace(shape, blocks=min(shape.blocks, 4)) for label, shape in setup.llamas.items()
    }
    for setting, stage in each_stage(replace(setup, llamas=shapes)):
        steps: dict[str, Call] = {}
        for name in ("plain", *setup.names):
            steps[name] = partial(run_lm_step, stage.build_model(name, compile_blocks), stage.ids)
            start = time.perf_counter()
            steps[name]()
            setup.synchronise()
            print(f"{name}: the first compiled step took {time.perf_counter() - start:.1f} s", flush=True)
        times = interleave(steps, rounds=setup.rounds, warmup=WARM_UP, measure=Timer(setup).time)
        plain = sorted(times.pop("plain"))[setup.rounds // 2]
        blocks = f"{stage.shape.blocks} blocks compiled by {setup.compile_backend}"
        yield timed_row("cuda", f"step ms, {blocks}", setting, times, limit=plain)
        del steps


# ---- all


def _measure_later(name: str, setup: Setup) -> Iterator[Row]:
    """Calls a function of cuda_schedules.py, which imports this module."""
    found: Iterator[Row] = getattr(importlib.import_module("benchmarks.cuda_schedules"), name)(setup)
    return found


PARTS: dict[str, Callable[[Setup], Iterator[Row]]] = {
    "calls": measure_calls,
    "memory": measure_memory,
    "time": measure_time,
    "exposed": measure_exposed,
    "captured": measure_captured,
    "schedules": partial(_measure_later, "measure_schedules"),
    "beside": partial(_measure_later, "measure_beside"),
    "kernels": measure_kernels,
    "compiled": measure_compiled,
    "batches": lambda setup: batch_rows(setup.gpts, setup.device),
}
# In a short session these parts take the first model only.
OF_ONE_MODEL = {"calls", "time", "captured", "kernels", "compiled"}


def measure_cuda(job: Job, libraries: Sequence[Library]) -> list[Row]:
    (world_size,) = job.worlds
    names = tuple(library.name for library in libraries)
    setup = Setup(names=names, world_size=world_size, rounds=5 if job.quick else 9)
    return [row for measure in PARTS.values() for row in measure(setup)]


def _be_quiet() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch warns about deprecated collectives of its own


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.cuda")
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("rows", type=Path, help="rows are appended to this file")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--dry", action="store_true", help="tiny models")
    parser.add_argument("--files", type=Path, help="a folder for the timelines of counted steps")
    parsed = parser.parse_args(arguments)
    _be_quiet()
    device = torch.device("cuda", 0) if parsed.device == "cuda" else torch.device("cpu")
    setup = replace(tiny_setup(device) if parsed.dry else Setup(device=device), files=parsed.files)
    if parsed.part in OF_ONE_MODEL:
        setup = replace(setup, llamas=dict([*setup.llamas.items()][:1]))
    with parsed.rows.open("a") as rows:
        for row in PARTS[parsed.part](setup):
            print(json.dumps(asdict(row)), file=rows, flush=True)


if __name__ == "__main__":
    main()
