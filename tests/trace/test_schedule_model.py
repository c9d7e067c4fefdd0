"""Tests the events of whole iterations against a model of the schedule, in ways of training that are drawn at random.

The model knows order, not how it comes about. test_golden_trace.py has the traces that people read, of ways that the
model leaves out.
"""

import dataclasses
import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from recorder import Root, record
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import MixedPrecisionPolicy, fully_shard
from fsdp2.compression import Compression, Int8
from fsdp2.engine.state import groups_of
from helpers import NIGHTLY, fake_world

RANKS = 4


@dataclasses.dataclass(frozen=True)
class Iteration:
    """`runs`: the indices of the blocks that run, in order. `syncs`: gradients are reduced."""

    runs: tuple[int, ...]
    with_grad: bool = True
    syncs: bool = True


@dataclasses.dataclass(frozen=True)
class Way:
    """A way of training. `ahead`: how many groups may be gathered ahead; None: the default, one. `shards`:
    ranks that share the parameters, of 4. `itemsizes`: of what is gathered, reduced, and summed between replicas.
    """

    depth: int = 3
    reshard: bool | None = None
    ahead: int | None = None
    shards: int = RANKS
    policy: MixedPrecisionPolicy = MixedPrecisionPolicy()
    itemsizes: tuple[int, int, int] = (4, 4, 4)
    recompute: str | None = None
    iterations: tuple[Iteration, ...] = (Iteration((0, 1, 2)),) * 2


class Schedule:
    """Is the model: what one model's groups do in the iterations of a way.

    In forward, a group is gathered when its module begins, then those that followed in the last pass, up to the budget.
    In backward the same, in reverse order of the forwards that have ended. A group is freed when its module has run,
    but for the root and the last ones, which backward needs first; in backward, when its gradients are there, which are
    then reduced. Replicas sum a reduction when the next one begins.
    """

    def __init__(self, way: Way) -> None:
        self.way, self.lines = way, list[str]()
        self.there, self.in_flight, self.unreduced = set[str](), set[str](), set[str]()
        self.recorded: Sequence[str] = ()
        self.to_sum: str | None = None

    def run(self, iteration: Iteration) -> list[str]:
        self.lines = []
        self.backward(self.forward(iteration), iteration) if iteration.with_grad else self.forward(iteration)
        return self.lines

    def forward(self, iteration: Iteration) -> list[str]:
        way, order = self.way, ["root", *(f"b{i}" for i in iteration.runs)]
        place, kept, gathered = 0, set[str](), bool(set(order) - self.there)
        budget = 1 if way.ahead is None else way.ahead
        self.kept = kept
        for name in order:
            self.arrive(name)
            if name in self.recorded[place:]:
                place = self.recorded.index(name, place) + 1
                if len(self.recorded) - place < 1 + budget:
                    kept.add(name)
            self.look_ahead(self.recorded[place:], in_backward=False)
            self.note("run", name)
            if name != "root":
                self.end_forward(name, iteration)
        self.end_forward("root", iteration)
        for name in sorted(self.in_flight):  # in vain
            self.free(name)
        if gathered:
            self.recorded = order
        return ["root", *order[:0:-1]]  # the root's forward ends last

    def end_forward(self, name: str, iteration: Iteration) -> None:
        stays = self.way.reshard is False
        if self.way.reshard is None and iteration.with_grad:
            stays = name == "root" or name in self.kept
        if not stays:
            self.free(name)

    def backward(self, order: Sequence[str], iteration: Iteration) -> None:
        for place, name in enumerate(order, start=1):
            self.arrive(name)
            self.look_ahead(order[place:], in_backward=True)
            self.note("back", name)
            if self.way.recompute and name != "root":
                self.note("run", name)
            self.free(name)
            self.unreduced.add(name)
            if iteration.syncs:
                self.reduce(name)
        for name in sorted(self.unreduced if iteration.syncs else (), reverse=True):  # of blocks that ran before
            self.reduce(name)
        for name in sorted(self.there):  # what an evaluation has left
            self.free(name)
        self.sum_up()

    def reduce(self, name: str) -> None:
        self.sum_up()
        self.unreduced.discard(name)
        self.note("reduce", name, self.segment(name, self.way.itemsizes[1]) * self.way.shards)
        self.to_sum = name

    def look_ahead(self, following: Sequence[str], in_backward: bool) -> None:
        count = self.way.ahead if self.way.ahead is not None else 1
        # What has arrived costs nothing, but in backward the groups that stayed for it.
        costs = [name for name in following if name not in self.there or (in_backward and name in self.kept)]
        for name in costs[:count]:
            self.gather(name)

    def gather(self, name: str) -> None:
        if name not in self.there | self.in_flight:
            self.in_flight.add(name)
            self.note("gather", name, self.segment(name, self.way.itemsizes[0]) * self.way.shards)

    def arrive(self, name: str) -> None:
        self.gather(name)
        self.in_flight.discard(name)
        self.there.add(name)

    def free(self, name: str) -> None:
        self.there.discard(name)
        self.in_flight.discard(name)
        self.note("free", name)

    def sum_up(self) -> None:
        name, self.to_sum = self.to_sum, None
        if name is not None and self.way.shards < RANKS:
            _, sent, summed = self.way.itemsizes
            self.note("sum", name, self.segment(name, sent) // sent * summed)

    def segment(self, name: str, itemsize: int) -> int:
        """Returns the bytes of one rank: of rows of 4 numbers and a bias, with padding. The root has 2, a block 4."""
        numel = -(-(2 if name == "root" else 4) // self.way.shards) * 5
        return -(-numel * itemsize // 16) * 16

    def note(self, event: str, name: str, nbytes: int | None = None) -> None:
        self.lines.append(f"{event:6} {name}" if nbytes is None else f"{event:6} {name:5} {nbytes}")


# ---- the engine ------------------------------------------------------------------------------------------------------


def traces(way: Way) -> list[list[str]]:
    """Returns the lines of each iteration."""
    model: Any = Root(way.depth, reentrant=False if way.recompute == "non-reentrant" else None)
    blocks, mesh = model.blocks(), init_device_mesh("cpu", (RANKS // way.shards, way.shards))
    for module in (*blocks, model):
        if way.recompute == "composable" and module is not model:
            composable_checkpoint(module)
        mesh_of_way: Any = mesh if way.shards < RANKS else mesh["dim_1"] if mesh.mesh_dim_names else None
        fully_shard(module, mesh=mesh_of_way, reshard_after_forward=way.reshard, mp_policy=way.policy)
    if way.ahead is not None:
        model.set_unsharded_budget(way.ahead * max(group.nbytes for block in blocks for group in groups_of(block)))
    lines, found = record(model), []
    for iteration in way.iterations:
        lines.clear()
        model.runs = iteration.runs
        model.set_requires_gradient_sync(iteration.syncs)
        with torch.set_grad_enabled(iteration.with_grad):
            output = model(torch.ones(2, 4))
        if iteration.with_grad:
            output.sum().backward()
        found.append([*lines])
        if way.ahead is not None:  # a step: else the budget keeps groups for the next iteration (test_kept_groups.py)
            with torch.no_grad():
                [parameter.add_(0) for parameter in model.parameters()]
    return found


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
POLICIES = (
    (MixedPrecisionPolicy(), (4, 4, 4)),
    (BF16, (2, 4, 4)),
    (dataclasses.replace(BF16, compression=Compression(reduce_scatter=torch.bfloat16)), (2, 2, 4)),
    (MixedPrecisionPolicy(reduce_dtype=torch.bfloat16), (4, 2, 2)),
    (MixedPrecisionPolicy(reduce_dtype=torch.float64), (4, 8, 8)),
    (
        MixedPrecisionPolicy(reduce_dtype=torch.float64, compression=Compression(reduce_scatter=torch.float32)),
        (4, 4, 8),
    ),
    # Parameters as small as these travel as without it.
    (MixedPrecisionPolicy(compression=Compression(reduce_scatter=Int8())), (4, 4, 4)),
)


def draw(seed: int) -> Way:
    rng = random.Random(seed)
    depth = rng.randint(1, 5)
    policy, itemsizes = rng.choice(POLICIES)
    reshard = rng.choice([None, None, True, False])
    iterations = [Iteration(tuple(range(depth)))]
    for _ in range(rng.randint(1, 4)):
        runs = [*range(depth)]
        if rng.random() < 0.3:
            runs.remove(rng.choice(runs))
        iterations.append(Iteration(tuple(runs), with_grad=rng.random() < 0.8, syncs=rng.random() < 0.7))
    return Way(
        depth=depth,
        reshard=reshard,
        ahead=None if reshard is False else rng.choice([None, None, 0, 1, 2, 3]),
        shards=rng.choice([RANKS, RANKS, 2]),
        policy=policy,
        itemsizes=itemsizes,
        recompute=rng.choice([None, None, "non-reentrant", "composable"]),
        iterations=tuple(iterations),
    )


@pytest.mark.parametrize("seed", range(400 if NIGHTLY else 60))
def test_events_are_those_of_the_model(seed: int) -> None:
    way = draw(seed)
    schedule = Schedule(way)
    with fake_world(RANKS):
        found = traces(way)
    for iteration, lines in zip(way.iterations, found, strict=True):
        expected = schedule.run(iteration)
        assert lines == expected, f"{way}\n{iteration}\n" + "\n".join(
            f"{a or '':20}| {b or ''}" for a, b in itertools.zip_longest(lines, expected)
        )
