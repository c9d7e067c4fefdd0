"""Counts the peak memory of a step against the size of the modules that are sharded as groups of their own, on a
simulated GPU.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter

from torch import nn

from .batches import GIB, SHAPES, build
from .cuda_models import GPTShape
from .cuda_wrapping import Recipe
from .jobs import Job
from .libraries import Library
from .report import Row
from .simulated_gpu import KIND, simulated_gpu


def modules_of_size(model: nn.Module, least: int) -> list[nn.Module]:
    """Returns modules with so many parameters that are in no smaller such module, inner ones first.

    FSDP1's `size_based_auto_wrap_policy` chooses the same, except that here tied modules stay in the root.
    """
    uses = Counter(param for module in model.modules() for param in module.parameters(recurse=False))
    found: list[nn.Module] = []

    def walk(module: nn.Module) -> int:
        """Returns the number of parameters that are in a module found."""
        inside, numel = sum(map(walk, module.children())), sum(param.numel() for param in module.parameters())
        is_tied = any(uses[param] > 1 for param in module.parameters())
        if isinstance(module, nn.ModuleList) or is_tied or numel - inside < least:
            return inside
        found.append(module)
        return numel

    for child in model.children():
        walk(child)
    return found


UNITS: dict[str, Callable[[nn.Module], Iterable[nn.Module]]] = {
    "the model as one group": lambda _: (),
    "each block": attrgetter("blocks"),
    "modules of 1M parameters": partial(modules_of_size, least=1_000_000),
    "modules of 2K parameters": partial(modules_of_size, least=2_000),
}


def measure_units(job: Job, libraries: Sequence[Library]) -> list[Row]:
    (world_size,) = job.worlds
    names = [library.name for library in libraries]
    return unit_rows(names, SHAPES["GPT-2 Large"], world_size, f"GPT-2 Large, N={world_size}")


def unit_rows(names: Sequence[str], shape: GPTShape, world_size: int, setting: str) -> list[Row]:
    sharded = [name for name in names if name != "ddp"]
    # It has no groups: its numbers are the same beside each.
    ddp = {"ddp": count_peak("ddp", shape, Recipe(), world_size)} if "ddp" in names else {}
    counts: dict[str, dict[str, Mapping[str, float]]] = {}
    for label, units in UNITS.items():
        recipe = Recipe(units=units)
        counts[label] = {name: count_peak(name, shape, recipe, world_size) for name in sharded} | ddp
    return [
        Row("units", what, f"{setting}, {label}", {name: count[what] for name, count in of_names.items()})
        for what in ("step peak, GiB", "step peak above resting, GiB")
        for label, of_names in counts.items()
    ]


def count_peak(name: str, shape: GPTShape, recipe: Recipe, world_size: int) -> Mapping[str, float]:
    """Counts a step with one sequence, in fp32, in steady state."""
    with simulated_gpu(world_size) as (mesh, meter, _):
        training = build(name, shape, replace(recipe, casts=False), mesh, meter)
        training.step(1)
        resting, peak = meter.live[KIND], training.peak_bytes(1)
        del training
    return {"step peak, GiB": peak / GIB, "step peak above resting, GiB": (peak - resting) / GIB}
