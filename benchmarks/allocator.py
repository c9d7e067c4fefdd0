"""Counts what CUDA's caching allocator holds in a step of real sizes, on the phantom GPU."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from . import phantom_gpu
from .jobs import Job
from .libraries import Library
from .phantom_gpu import PLAIN, Record
from .report import Row
from .timeline import MODELS, TOKENS, case, models_of

GIB = 2**30
PEAKS = {
    "resting": "resting, GiB",
    "allocated": "peak allocated, GiB",
    "reserved": "peak reserved, GiB",
    "left": "left by the deleted model, GiB",
}


def measure_allocator(job: Job, libraries: Sequence[Library]) -> list[Row]:
    (world_size,) = job.worlds
    names = [library.name for library in libraries]
    rows = []
    for model, tokens, is_recomputed in product(models_of(world_size), TOKENS, (False, True)):
        if is_recomputed and tokens != TOKENS[0]:
            continue
        options = {**case(model, tokens, world_size), "checkpoint": is_recomputed, "steps": 1}
        where = f"{MODELS[model]}, N={world_size}, {tokens:,} tokens" + ", blocks recomputed" * is_recomputed
        for expandable in (False, True):
            records = phantom_gpu.record(names, expandable, **options)
            rows += allocator_rows(records, where + ", expandable segments" * expandable)
    return rows


def allocator_rows(records: Mapping[str, Record], where: str) -> Iterator[Row]:
    for kind, what in PEAKS.items():
        held = {name: record["memory"][kind] / GIB for name, record in records.items()}
        if kind != "left" or any(held.values()):
            values = {name: number for name, number in held.items() if name != PLAIN}
            yield Row("allocator", what, where, values, bare=held[PLAIN])
