"""Draws scenarios over topologies, ways to wrap and settings: each scenario is written once, see `Matrix`."""

import dataclasses
import functools
import inspect
import itertools
import random
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fsdp2 import DataParallelMeshDims, FSDPModule, fully_shard, replicate, set_checks
from fsdp2.collectives.meshes import shared_data_mesh
from fsdp2.engine import buckets
from helpers import NIGHTLY, alone, assert_same, end_of_part, own_rows, run_ranks, shard_batch
from models import TinyModel
from scenarios import TOLERANCE, WIDTH, Block, Run, assert_none_differ, describe, differences, wrapped

ROWS = 12  # divides by 1, 2, 3 and 4 ranks
NAMES = ("replicas", "shards")


@dataclasses.dataclass(frozen=True)
class Topology:
    """`make`: the mesh, whose last axis shards, unless `function` is `replicate`. It is called on each rank.

    `dims`: what the axes of the mesh are used for instead; then parameters rest on the mesh that joins all axes.
    """

    ranks: int
    make: Callable[[], DeviceMesh]
    function: Any = fully_shard
    placements: tuple[Placement, ...] | None = None
    has_replicas: bool = True
    dims: DataParallelMeshDims | None = None


TOPOLOGIES = {
    "2": Topology(2, lambda: init_device_mesh("cpu", (2,)), has_replicas=False),
    "2x1": Topology(2, lambda: init_device_mesh("cpu", (2, 1), mesh_dim_names=NAMES)),
    # Rank 1 is another replica of what rank 0 holds: an axis taken for the other shows.
    "2x2 across": Topology(4, lambda: DeviceMesh("cpu", [[0, 2], [1, 3]])),
    # Both axes cut the shards; ranks compute, and wait for other replicas, as with HSDP.
    "2x2 at rest": Topology(
        4,
        lambda: init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES),
        dims=DataParallelMeshDims(shard="shards", outer_shard="replicas"),
    ),
    "2 replicas": Topology(2, lambda: init_device_mesh("cpu", (2,)), replicate, (Replicate(),)),
}
if NIGHTLY:
    TOPOLOGIES |= {
        "3": Topology(3, lambda: init_device_mesh("cpu", (3,)), has_replicas=False),
        "1x2": Topology(2, lambda: init_device_mesh("cpu", (1, 2)), has_replicas=False),
        "2x2 of more": Topology(4, lambda: init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pp", *NAMES))[NAMES]),
    }


def assert_lies_on(
    mesh: DeviceMesh,
    actual: Any,
    expected: Tensor | None,
    rtol: float,
    atol: float,
    name: str,
    placements: tuple[Placement, ...] | None = None,
) -> None:
    """Asserts that `actual` is a DTensor on `mesh` and this rank's part of `expected`, cut along the mesh's last axis
    unless other `placements` are given.
    """
    if actual is None or expected is None:
        return assert_same(actual, expected, rtol, atol, name)
    placements = placements or (Replicate(), Shard(0))[-mesh.ndim :]
    if not isinstance(actual, DTensor) or actual.placements != placements or actual.device_mesh != mesh:
        raise AssertionError(f"{name}: expected {placements} on {mesh}, got {actual!r}")
    if actual.shape != expected.shape:
        raise AssertionError(f"{name}: expected {tuple(expected.shape)}, got {tuple(actual.shape)}")
    last, is_cut = mesh.ndim - 1, placements[-1] == Shard(0)
    rows = own_rows(expected, mesh.get_local_rank(last), mesh.size(last)) if is_cut else expected
    return assert_same(actual.to_local(), rows, rtol, atol, f"{name} on rank {dist.get_rank()}")


class MatrixRun(Run):
    """Is a run on a topology; without one, of the plain model. `setting` is made of each module that is sharded."""

    def __init__(
        self,
        topology: Topology | None = None,
        mesh: DeviceMesh | None = None,
        expected: list[tuple[str, str, Any]] | None = None,
        tolerance: dict[str, float] = TOLERANCE,
    ) -> None:
        super().__init__(*((dist.get_rank(), dist.get_world_size()) if mesh else (0, 1)), expected, tolerance)
        self.topology, self.mesh, self.setting = topology, mesh, "nothing"
        self.has_replicas = topology is not None and topology.has_replicas

    def shard(self, module: Any, **options: Any) -> Any:
        if self.topology is None:
            return module
        if self.topology.function is replicate:
            options.pop("reshard_after_forward", None)
        if self.topology.dims is not None:
            options["dp_mesh_dims"] = self.topology.dims
        sharded = self.topology.function(module, mesh=self.mesh, **options)
        for each in module if isinstance(module, list) else [module]:
            SETTINGS[self.setting](each)  # and again when a module around it is sharded, which is the root then
        return sharded

    def batch(self, *row_shape: int, seed: int, rows: int = ROWS) -> Tensor:
        return super().batch(*row_shape, seed=seed, rows=rows)

    def example(self, model: TinyModel, seed: int) -> Tensor:
        batch = shard_batch(model.example(rows=ROWS, seed=seed), self.rank, self.world_size)
        return batch.double() if batch.is_floating_point() else batch

    def waits(self, mode: str) -> bool:
        """Returns True if gradients of a backward in this mode are unsynchronized, see `set_mode`."""
        return mode == "wait" or (mode == "scatter" and self.has_replicas)

    def _compare(self, kind: str, name: str, value: Any, expected: tuple[str, str, Any]) -> None:
        if kind == "shard" and expected[:2] == (kind, name):
            assert self.mesh is not None
            assert self.topology is not None
            placements, dims = self.topology.placements, self.topology.dims
            mesh = self.mesh if dims is None else shared_data_mesh(self.mesh, dims).mesh
            assert_lies_on(mesh, value, expected[2], **self.tolerance, name=name, placements=placements)
        else:
            super()._compare(kind, name, value, expected)


class Towers(nn.Module):
    """Has two towers and a head; `use` says which towers a forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Block(), Block()
        self.head = nn.Linear(WIDTH, 3)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, use: str = "lrh") -> Tensor:
        if "l" in use:
            x = self.left(x)
        if "r" in use:
            x = self.right(x * self.scale)
        return self.head(x) if "h" in use else x


def transformer(run: Any, model: Any) -> None:
    """Makes a group per block; the rest, a tied embedding and head among it, is in the root."""
    for block in getattr(model, "blocks", ()):
        run.shard(block)
    run.shard(model)


MODES = ("wait", "scatter", "reduce")


def sums_within_replicas(choices: dict[str, Any]) -> bool:
    """Returns True if a mode among these choices is "scatter"."""
    return any(value == "scatter" or (isinstance(value, tuple) and "scatter" in value) for value in choices.values())


def set_mode(model: nn.Module, mode: str) -> None:
    """Says what the next backward does with gradients: "wait" unsharded, "scatter" within replicas, or "reduce"."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(mode != "wait")
        model.set_requires_all_reduce(mode == "reduce")


# ---- settings that leave the numbers alone ---------------------------------------------------------------------------


def prefetch(model: nn.Module, modules: Sequence[FSDPModule]) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_modules_to_forward_prefetch(modules)  # type: ignore[arg-type]
            module.set_modules_to_backward_prefetch(modules)  # type: ignore[arg-type]


SETTINGS: dict[str, Callable[[Any], object]] = {
    "nothing": lambda model: None,
    "no reshard_after_backward": lambda model: model.set_reshard_after_backward(False),
    "prefetch nothing": lambda model: prefetch(model, []),
    "prefetch everything": lambda model: prefetch(model, [m for m in model.modules() if isinstance(m, FSDPModule)]),
    "a budget of 200 bytes": lambda model: model.set_unsharded_budget(200),
    "a budget of 6000 bytes": lambda model: model.set_unsharded_budget(6000),
    "many reductions": lambda model: model.set_reduce_scatter_max_input_buffers(9),
    "sums": lambda model: model.set_force_sum_reduction_for_comms(True, recurse=True),
    "hook": lambda model: model.set_all_reduce_hook(lambda reduced: None, recurse=True),
    "divide factor": lambda model: model.set_gradient_divide_factor(dist.get_world_size(), recurse=True),
    "separate group": lambda model: model.set_separate_reduce_scatter_group(True),
    "further backwards": lambda model: model.set_is_last_backward(False),
    "keep storage": lambda model: model.set_keep_unsharded_storage(True),
    "free viewed storage": lambda model: model.set_free_viewed_storage(True),
    "small buckets": lambda model: None,  # see `check_on`: it is made before the model is wrapped
}


CHECKED = "2x1"
"""The topology on which checks run: in the first steps all are due, and take a third of a rank's time. They have tests
of their own; here they may change nothing, and find nothing in right programs."""

# ---- the matrix ------------------------------------------------------------------------------------------------------

Scenario = Callable[..., None]


@dataclasses.dataclass
class Case:
    """Is one cell: a scenario with a value for each of its choices, on a topology, under a setting."""

    scenario: Scenario
    topology: str
    setting: str
    choices: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.scenario.__name__} {describe(self.choices)} on {self.topology}, {self.setting}"

    def run(self, run: Run) -> None:
        self.scenario(run, **self.choices)


def cover(choices: dict[str, Sequence[Any]], seed: int) -> list[dict[str, Any]]:
    """Returns combinations in which each value of a choice meets each value of each other choice; at night, all."""
    combinations = [*itertools.product(*(range(len(values)) for values in choices.values()))]
    random.Random(seed).shuffle(combinations)
    if not NIGHTLY:
        combinations = combinations[:1000]  # there are more than enough of each pair among them
        pairs = {each: {*itertools.combinations(enumerate(each), 2)} for each in combinations}
        missing, chosen = set[Any]().union(*pairs.values()), combinations[:1]
        for wanted in range(len(choices) * (len(choices) - 1) // 2, 0, -1):
            for each in combinations:
                if len(pairs[each] & missing) >= wanted:
                    missing -= pairs[each]
                    chosen.append(each)
        # Of one choice, there are no pairs.
        combinations = [*dict.fromkeys(chosen)] if len(choices) > 1 else combinations
    rows = [zip(choices.items(), each, strict=True) for each in combinations]
    return [{name: values[i] for (name, values), i in row} for row in rows]


class Matrix:
    """Collects the scenarios of a file. Decorate each with `matrix.over(choice=values, ...)`.

    A scenario gets a `MatrixRun`, and a value for each choice. Each value of a choice meets each value of each other
    choice. Dealt to these combinations, in turn, are ways to wrap, the values of `wrap`; topologies, all that there are
    if a scenario does not say which, and those of four ranks, which cost most, a third as often; and settings, if there
    are ways to wrap. A combination that has the mode "scatter" is dealt to topologies with replicas: elsewhere it means
    "reduce". At night there are all combinations, on all topologies.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Scenario, tuple[str, ...], bool, dict[str, Sequence[Any]]]] = []

    def over(
        self, topologies: Iterable[str] = tuple(TOPOLOGIES), **choices: Sequence[Any]
    ) -> Callable[[Scenario], Scenario]:
        def add(scenario: Scenario) -> Scenario:
            assert set(inspect.signature(scenario).parameters) == {"run", *choices}, scenario.__name__
            self._entries.append((scenario, tuple(topologies), "wrap" in choices, choices))
            return scenario

        return add

    @functools.cached_property
    def cases(self) -> list[Case]:
        settings, deals = itertools.cycle(SETTINGS), dict[tuple[str, ...], Iterator[str]]()
        found = []
        for scenario, topologies, has_settings, choices in self._entries:
            with_replicas = tuple(each for each in topologies if TOPOLOGIES[each].has_replicas)
            others = {name: values for name, values in choices.items() if name != "wrap"}
            rows = cover(others, seed=zlib.crc32(scenario.__name__.encode())) if others else [{}]
            for row in wrapped(rows, choices["wrap"]) if has_settings else rows:
                chosen = with_replicas if sums_within_replicas(row) else topologies
                few = [each for each in chosen if TOPOLOGIES[each].ranks < 4]
                deal = deals.setdefault(chosen, itertools.cycle([*chosen, *few, *few]))
                for topology in topologies if NIGHTLY else [next(deal)]:
                    found.append(Case(scenario, topology, next(settings) if has_settings else "nothing", row))
        return found

    def check_on(self, topology: str) -> None:
        """Runs the cells of a topology on plain models, and in one launch on its ranks; says what differs."""
        cases = [case for case in self.cases if case.topology == topology]

        def plain() -> list[list[tuple[str, str, Any]]]:
            runs = []
            for case in cases:
                runs.append(MatrixRun())
                case.run(runs[-1])
                assert runs[-1].shown, f"{case}: a scenario must show something"
            return [run.shown for run in runs]

        expected = alone(plain)

        def body(rank: int, _: int) -> list[str]:
            different, mesh = [], TOPOLOGIES[topology].make()
            for case, shown in zip(cases, expected, strict=True):
                print(f"rank {rank}: {case}", file=sys.stderr, flush=True)  # for the report of a hang
                set_checks("default" if topology == CHECKED else "off")
                run = MatrixRun(TOPOLOGIES[topology], mesh, shown)
                run.setting = case.setting
                min_bytes = 1 if case.setting == "small buckets" else buckets.MIN_BUCKET_BYTES
                with mock.patch.object(buckets, "MIN_BUCKET_BYTES", min_bytes):
                    different += [
                        f"{case} {text}" for text in differences(run, functools.partial(case.run, run), shown)
                    ]
                end_of_part()
            return different

        assert_none_differ(run_ranks(TOPOLOGIES[topology].ranks, body, timeout=150))
