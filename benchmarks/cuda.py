"""Measures what one GPU can show by the protocol (PROTOCOL.md): memory and time of whole steps as one of simulated
ranks, and the calls of CUDA in a step.

`python -m benchmarks.cuda PART FILE` measures one part and appends rows to a file as it goes. Each library has a
process of its own, in which `PYTORCH_ALLOC_CONF` asks for expandable segments, and processes take turns.

Timed are 128 consecutive steps: fsdp2's checks read the device at some steps (fsdp2/checks/due.py), each 128th among
them. Calls and memory are those of steps between.
"""

import argparse
import gc
import gzip
import importlib
import json
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from .cuda_group import Wire, start_wire_group
from .cuda_models import LLAMAS, Llama, LlamaShape, make_ids, run_lm_step
from .cuda_wrapping import BF16, FP32, materialise
from .recipe import MODULES, ROWS, clip_function, make_optimizer, shard
from .report import Row, merge_rows, timed_row
from .timing import Call, repeat
from .turns import run_in_turns, take_turn

NVLINK = 370  # GB/s
WARM_UP = 4  # the next three steps are not among those at which checks are due
ENVIRONMENT = dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"), "expandable_segments:True")
# Libraries whose processes are alive at the same time, and take turns.
TOGETHER = (ROWS[:2], ROWS[2:])
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
        rounds, in_a_row: the number of turns of each library, and of the steps in each turn.
        gb_per_second, latency_us: the bandwidth of the wire, each way, and how long each collective takes besides.
        short_tokens: the length of a short sequence, with which activations take little.
        files: a folder for the timelines of counted steps.
    """

    device: torch.device = torch.device("cuda", 0)  # noqa: RUF009
    world_size: int = 64
    llamas: Mapping[str, LlamaShape] = field(default_factory=lambda: LLAMAS)
    rounds: int = 8
    in_a_row: int = 16
    gb_per_second: int = NVLINK
    latency_us: int = 20
    short_tokens: int = 512
    files: Path | None = None

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def synchronise(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize()


def tiny_setup(device: torch.device) -> Setup:
    """Returns a setup of a few seconds, whose numbers mean nothing."""
    shape = LlamaShape(blocks=2, dim=16, heads=4, kv_heads=2, hidden=32, vocab=32, tokens=4)
    return Setup(device=device, world_size=4, llamas={"tiny": shape}, rounds=2, in_a_row=1, short_tokens=2)


class Stage:
    """Makes models of one shape, in bf16, as rank 0 of simulated ranks that share one wire. Close it."""

    def __init__(self, setup: Setup, shape: LlamaShape) -> None:
        self.setup, self.shape = setup, shape
        self.wire: Wire = start_wire_group(setup.world_size, setup.device)
        self.mesh = dist.init_device_mesh(setup.device.type, (setup.world_size,))
        self.ids = make_ids(shape.vocab, 1, shape.tokens, setup.device)

    def build_model(self, name: str, prepare: Callable[[Any], object] = lambda model: None) -> Any:
        """Returns a new model of a library, or a "plain" one. `prepare` is called before it is sharded."""
        with torch.device("meta"):
            model: nn.Module = Llama(self.shape)
        prepare(model)
        if name == "plain":
            model = model.to(BF16)
        else:
            policy = importlib.import_module(MODULES[name]).MixedPrecisionPolicy(BF16, FP32)
            model = shard(name, model, mesh=self.mesh, mp_policy=policy)
        return materialise(model, self.setup.device)

    def close(self) -> None:
        dist.destroy_process_group()
        free_memory(self.setup)


def free_memory(setup: Setup) -> None:
    gc.collect()
    if setup.is_cuda:
        torch.cuda.empty_cache()


# ---- the protocol


def measure_protocol(setup: Setup, name: str, turn: Callable[[], object] = lambda: None) -> Iterator[Row]:
    """Measures one library: memory and time of whole steps. Calls `turn` before steps that are timed."""
    for label, shape in setup.llamas.items():
        stage = Stage(setup, shape)
        model = stage.build_model(name)
        optimizer = make_optimizer(name, model)
        is_first = label == next(iter(setup.llamas))
        for tokens, recomputes in ((setup.short_tokens, False), (shape.tokens, False), (shape.tokens, True)):
            model.recomputes = recomputes
            ids = make_ids(shape.vocab, 1, tokens, setup.device)
            step = partial(take_whole_step, model, ids, clip_function(name), optimizer)
            where = f"{label}, {tokens} tokens, N={setup.world_size}{', recomputed' * recomputes}"
            for quantity, number in _measure_memory(step, setup).items():
                yield Row("cuda", quantity, where, {name: number})
            if not recomputes and (is_first or tokens == shape.tokens):
                fill_cache(setup)
                if is_first:
                    yield from _time_rows(setup, name, step, tokens, where, turn)
                if tokens == shape.tokens:
                    stage.wire.bandwidth, stage.wire.latency = setup.gb_per_second * 1e9, setup.latency_us / 1e6
                    on_wire = f"{where}, {setup.gb_per_second} GB/s, {setup.latency_us} us"
                    yield from _time_rows(setup, name, step, tokens, on_wire, turn)
                    _write_trace(step, setup, f"{label}-{tokens}-{name}")
                    stage.wire.bandwidth = None
            del ids, step
        del model, optimizer
        stage.close()


def take_whole_step(model: Any, ids: Any, clip: Callable[..., object], optimizer: Any) -> None:
    run_lm_step(model, ids, keeps_gradients=True)
    clip(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def _measure_memory(step: Call, setup: Setup) -> dict[str, float]:
    repeat(WARM_UP, step)
    if not setup.is_cuda:
        return {}
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
        "allocation retries": after["num_alloc_retries"] - before["num_alloc_retries"],
    }


def fill_cache(setup: Setup) -> None:
    """Fills what the allocator has reserved with ordinary numbers: simulated gathers return memory as it is, and a GPU
    that multiplies zeros is faster.
    """
    if setup.is_cuda:
        free = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        numbers = [torch.empty(2**25, dtype=BF16, device=setup.device) for _ in range(free // 2**26)]
        for each in numbers:
            each.normal_(std=0.02)


def _time_rows(
    setup: Setup, name: str, step: Call, tokens: int, where: str, turn: Callable[[], object]
) -> Iterator[Row]:
    """Yields times of a step among some in a row: of the device, and the CPU time of this process."""
    times, cpu = [], []
    for _ in range(setup.rounds):
        turn()
        setup.synchronise()
        clock, start = read_clock(setup), time.process_time()
        repeat(setup.in_a_row, step)
        cpu.append((time.process_time() - start) * 1e3 / setup.in_a_row)
        times.append(clock() / setup.in_a_row)
    yield timed_row("cuda", "whole step ms", where, {name: times})
    yield timed_row("cuda", "tokens/s of a rank", where, {name: [tokens / ms * 1e3 for ms in times]})
    yield timed_row("cuda", "CPU ms of a whole step, until all is issued", where, {name: cpu})


def read_clock(setup: Setup) -> Callable[[], float]:
    """Returns a function that waits for the device, and returns the ms on its clock since now."""
    if not setup.is_cuda:
        start = time.perf_counter()
        return lambda: (time.perf_counter() - start) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()

    def stop() -> float:
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end))

    return stop


def _write_trace(step: Call, setup: Setup, label: str) -> None:
    """Writes a trace of two steps that Perfetto shows."""
    if setup.files is not None:
        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setup.is_cuda else [])]) as traced:
            repeat(2, step)
            setup.synchronise()
        traced.export_chrome_trace(str(setup.files / f"trace-{label.replace(' ', '-')}.json.gz"))


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


def measure_calls(setup: Setup, name: str, turn: Callable[[], object] = lambda: None) -> Iterator[Row]:
    """Counts the calls of CUDA in a step, forward and backward alone, of the first model."""
    label, shape = next(iter(setup.llamas.items()))
    stage = Stage(setup, shape)
    step = partial(run_lm_step, stage.build_model(name), stage.ids)
    repeat(WARM_UP, step)
    counts, kernels = count_calls(step, setup, f"{label}-{name}".replace(" ", "-"))
    print(f"{label}: kernels of {name}, how often and which", flush=True)
    print("\n".join(f"{count}\t{kernel}" for kernel, count in kernels.most_common()), flush=True)
    del step
    stage.close()
    for kind in CALLS:
        yield Row(
            "cuda", f"{kind} of a step", f"{label}, {shape.tokens} tokens, N={setup.world_size}", {name: counts[kind]}
        )


# ---- all

Measure = Callable[[Setup, str, Callable[[], object]], Iterator[Row]]
# Parts that are measured by library, and which libraries take turns. The others measure settings of fsdp2, or kernels.
BY_LIBRARY: dict[str, tuple[Measure, tuple[tuple[str, ...], ...]]] = {
    "protocol": (measure_protocol, TOGETHER),
    "calls": (measure_calls, (("plain", *ROWS),)),
}
OTHERS = {"schedules": "measure_schedules", "beside": "measure_beside"}  # in cuda_schedules.py, which imports this


def measure_part(part: str, setup: Setup) -> Iterator[Row]:
    """Measures a part of all libraries."""
    if part in OTHERS:
        yield from getattr(importlib.import_module("benchmarks.cuda_schedules"), OTHERS[part])(setup)
        return
    for names in BY_LIBRARY[part][1]:
        yield from run_libraries(names)


def run_libraries(names: Sequence[str]) -> list[Row]:
    """Runs this program again for each library, in turns, and returns the rows of all."""
    with tempfile.TemporaryDirectory() as folder:
        commands = {name: [*sys.orig_argv, "--library", name, "--into", f"{folder}/{name}"] for name in names}
        run_in_turns(commands, **ENVIRONMENT)
        lines = [line for name in names for line in Path(folder, name).read_text().splitlines()]
    return merge_rows(Row(**json.loads(line)) for line in lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.cuda")
    parser.add_argument("part", choices=[*BY_LIBRARY, *OTHERS])
    parser.add_argument("rows", type=Path, help="rows are appended to this file")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--dry", action="store_true", help="tiny models")
    parser.add_argument("--files", type=Path, help="a folder for the timelines of counted steps")
    parser.add_argument("--library", help=argparse.SUPPRESS)  # is one of these processes
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # torch warns about deprecated collectives of its own
    device = torch.device("cuda", 0) if parsed.device == "cuda" else torch.device("cpu")
    setup = replace(tiny_setup(device) if parsed.dry else Setup(device=device), files=parsed.files)
    is_one = parsed.library is not None
    measured = (
        BY_LIBRARY[parsed.part][0](setup, parsed.library, take_turn) if is_one else measure_part(parsed.part, setup)
    )
    with (parsed.into or parsed.rows).open("a") as rows:
        for row in measured:
            print(json.dumps(asdict(row)), file=rows, flush=True)


if __name__ == "__main__":
    main()
