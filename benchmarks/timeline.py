"""Replays recorded CUDA calls of real sizes on a model of a cluster: the time of a step, and what it waits for.

Calls are recorded on the phantom GPU, and the prices are those of benchmarks/phantom/prices.py: times of kernels are an
H100's, and no collective was measured. The host's own time is that of the machine that records.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from . import phantom_gpu
from .jobs import Job
from .libraries import Library
from .phantom_gpu import PLAIN, Record
from .report import Row, timed_row

MODELS = {"1B": "Llama 1B", "8B": "Llama 8B", "moe": "experts 7B"}
EXPERTS = 64  # of a block of the last one: over more ranks, both libraries shard experts by their second dimension
TOKENS = (4096, 512)
STEPS, QUICK_STEPS = 5, 3
LATENCIES = {"half of the latency": 0.5, "twice the latency": 2.0}
EXPOSED = {
    "exposed gather": "exposed gathers, ms",
    "exposed reduce": "exposed reductions, ms",
    "exposed other": "other exposed collectives, ms",
    "exposed copy": "exposed copies, ms",
    "host-bound": "waits for the host, ms",
}
COUNTS = {
    "launches": "kernels, copies and collectives launched",
    "gather": "all-gathers launched",
    "gather operations": "operations in them",
    "reduce": "reduce-scatters launched",
    "waits": "waits of streams",
    "records": "events recorded",
}
LONGEST = 3  # waits that are described


def measure_timeline(job: Job, libraries: Sequence[Library]) -> list[Row]:
    (world_size,) = job.worlds
    names = [library.name for library in libraries]
    rows = []
    for model in models_of(world_size):
        for tokens in TOKENS if model == "1B" and not job.quick else TOKENS[:1]:
            steps = QUICK_STEPS if job.quick else STEPS
            records = phantom_gpu.record(names, **case(model, tokens, world_size), steps=steps, optimizer=True)
            rows += timeline_rows(records, model, tokens, world_size)
    return rows


def models_of(world_size: int) -> list[str]:
    """Returns the models that are measured on so many ranks: all on 64."""
    return [*MODELS] if world_size == 64 else ["1B"]


def case(model: str, tokens: int, world_size: int) -> dict[str, Any]:
    """Returns options of `phantom.record`."""
    return {"model": model, "tokens": tokens, "ranks": world_size, "shard_dim": int(world_size > EXPERTS)}


def timeline_rows(records: Mapping[str, Record], model: str, tokens: int, world_size: int) -> Iterator[Row]:
    """Yields rows of the records of libraries and of the plain model."""
    timeline = phantom_gpu.load().timeline
    machine = timeline.Machine()
    where = f"{MODELS[model]}, N={world_size}, {tokens:,} tokens"
    base = {name: timeline.replay(record, machine) for name, record in records.items()}

    def row(what: str, setting: str, numbers: Mapping[str, float], note: str = "") -> Row:
        values = {name: number for name, number in numbers.items() if name != PLAIN}
        return Row("timeline", what, setting, values, bare=numbers[PLAIN], note=note)

    def steps_of(changed: Any) -> dict[str, float]:
        return {name: timeline.replay(record, changed)["step"] / 1e3 for name, record in records.items()}

    waits = "; ".join(f"{name}: {describe_waits(base[name])}" for name in records if name != PLAIN)
    step_ms = {name: result["step"] / 1e3 for name, result in base.items()}
    yield row("step, ms", where, step_ms, f"{where}: {waits}")
    for label, latency in LATENCIES.items():
        yield row("step, ms", f"{where}, {label}", steps_of(replace(machine, latency=latency)))
    if world_size > machine.ranks_per_machine:
        yield row("step, ms", f"{where}, one card a machine", steps_of(replace(machine, cards=1)))
    yield row("step, ms", f"{where}, a host without cost", steps_of(timeline.without_host(machine)))
    for kind, what in EXPOSED.items():
        if any(result[kind] for result in base.values()):
            yield row(what, where, {name: result[kind] / 1e3 for name, result in base.items()})
    if tokens == TOKENS[0]:
        for kind, what in COUNTS.items():
            yield row(what, where, {name: {**result, **result["counts"]}.get(kind, 0) for name, result in base.items()})
    rounds = {name: record["cpu_ms"] for name, record in records.items() if name != PLAIN}
    plain_ms = statistics.median(records[PLAIN]["cpu_ms"])
    yield timed_row("timeline", "CPU time of the host, ms", where, rounds, bare=plain_ms)


def describe_waits(result: Mapping[str, Any]) -> str:
    """Names the longest waits of the compute stream."""
    told = []
    for time, at, phase, cause, *_ in result["idle"][:LONGEST]:
        told.append(
            f"{time / 1e3:.2f} ms at {at / 1e3:.1f} ms, in {phase}, for {cause if len(cause) < 60 else 'a kernel'}"
        )
    return ", ".join(told) or "no waits"
