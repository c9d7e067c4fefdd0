"""Counts what CUDA's caching allocator holds in whole steps of real sizes, on the phantom GPU."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from . import phantom_gpu
from .jobs import Job
from .libraries import Library
from .recipe import MODULES
from .report import Row
from .timeline import MODELS, case, models_of

QUANTITIES = ("resting, GiB", "peak allocated, GiB", "peak reserved, GiB")
SEGMENTS = {"": False, ", expandable segments": True}


def measure_allocator(job: Job, libraries: Sequence[Library]) -> list[Row]:
    (world_size,) = job.worlds
    names = [library.name for library in libraries if library.name in MODULES]
    rows: list[Row] = []
    for model, (segments, is_expandable) in product(models_of(world_size), SEGMENTS.items()):
        options = {name: value for name, value in case(model, 0, world_size).items() if name != "tokens"}
        found = {name: phantom_gpu.count_memory(name, is_expandable, **options) for name in names}
        where = f"{MODELS[model]}, N={world_size}"
        rows += [*allocator_rows(found, where, segments)]
        print(rows[-1], flush=True)
    return rows


def allocator_rows(found: Mapping[str, Mapping[str, Sequence[float]]], where: str, segments: str) -> Iterator[Row]:
    """Yields rows of library -> case -> numbers in the order of `QUANTITIES`."""
    for about in next(iter(found.values())):
        for index, quantity in enumerate(QUANTITIES):
            values = {name: cases[about][index] for name, cases in found.items()}
            yield Row("allocator", quantity, f"{where}, {about}{segments}", values)
