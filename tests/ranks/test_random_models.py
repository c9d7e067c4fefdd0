"""Random models, wrapped and trained at random, against plain training: combinations that nobody thinks of.

A seed draws a tree of small parts; some parts run twice, some modules and parameters are shared, some are frozen; a
random choice of modules becomes groups. It then draws three training steps: which parts each forward skips, how many
micro-batches, with or without gradient sync, one backward for several forwards, evaluation forwards in between. All of
it is fixed before training starts, and is the same on all ranks. fp64, so that any real difference stands out.

    FSDP2_SEED=17 python -m pytest tests/ranks/test_random_models.py     # one seed alone, on 2 and on 3 ranks
"""

import dataclasses
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp2 import FSDPModule, fully_shard
from helpers import alone, assert_same, assert_same_names, assert_shard_of, run_ranks, shard_batch

DIM = 6
VOCAB = 11
ROWS = 6  # divides by 2 and 3 ranks
STEPS = 3
THIS_FILE = os.path.basename(__file__)
TOLERANCE = {"rtol": 1e-9, "atol": 1e-11}


# ---- parts: (x, tokens) -> x, all of width DIM -----------------------------------------------------------------------


class Dense(nn.Module):
    """Two linears over an odd width, used through their modules."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, width, bias=bias)
        self.down = nn.Linear(width, DIM, bias=bias)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Norm(nn.Module):
    """A norm: its weight's gradient is a sum over rows."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.norm = kind(DIM)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.norm(x)


class Lookup(nn.Module):
    """An embedding: its input needs no gradient, so its group's backward starts from the weight alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, DIM)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.table(tokens)


class Direct(nn.Module):
    """Parameters of its own: 3-d, a single row, and one that no forward ever uses."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(2, DIM, DIM) * 0.3)
        self.scale = nn.Parameter(torch.ones(1, DIM))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return torch.einsum("bi,kio->bo", x, self.mix) * self.scale


class Branch(nn.Module):
    """Parts in a row, each added to its input. `order` may name a part twice; `skipped` changes with every forward."""

    def __init__(self, parts: Sequence[nn.Module], order: Sequence[int]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.order = tuple(order)
        self.skipped: frozenset[int] = frozenset()

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        for index in self.order:
            if index not in self.skipped:
                x = torch.tanh(x + self.parts[index](x, tokens))
        return x


class Root(nn.Module):
    """A trainable projection, so that every step has a gradient, then the random tree."""

    def __init__(self, tree: Branch) -> None:
        super().__init__()
        self.project = nn.Linear(DIM, DIM)
        self.tree = tree

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.tree(self.project(x), tokens)


def branches(model: nn.Module) -> list[Branch]:
    return [m for m in model.modules() if isinstance(m, Branch)]


# ---- drawing a model -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class Group:
    """One call of fully_shard."""

    modules: list[nn.Module]
    options: dict[str, Any]


def draw_part(rng: random.Random, depth: int) -> nn.Module:
    kind = rng.choice(["dense", "norm", "lookup", "direct"] + ["branch"] * min(depth, 1) * 2)
    if kind == "branch":
        return draw_branch(rng, depth - 1)
    if kind == "dense":
        return Dense(rng.choice([1, 3, 5, 7]), bias=rng.random() < 0.7)
    if kind == "norm":
        return Norm(rng.choice([nn.LayerNorm, nn.RMSNorm]))
    return Lookup() if kind == "lookup" else Direct()


def draw_branch(rng: random.Random, depth: int) -> Branch:
    parts = [draw_part(rng, depth) for _ in range(rng.randint(2, 3))]
    order = list(range(len(parts)))
    if rng.random() < 0.3:
        order.insert(rng.randrange(len(order) + 1), rng.choice(order))
    return Branch(parts, order)


def share_a_module(model: Root, rng: random.Random) -> None:
    """One leaf part takes the place of another: registered twice, and called from two branches or twice from one."""
    slots = [(b, i) for b in branches(model) for i, part in enumerate(b.parts) if not isinstance(part, Branch)]
    if len(slots) >= 2:
        (source, i), (target, j) = rng.sample(slots, 2)
        target.parts[j] = source.parts[i]


def draw_groups(model: Root, rng: random.Random) -> list[Group]:
    """A group is a module at any level, or two neighbours in a branch; inner groups first, the root last."""

    def group(*modules: nn.Module) -> Group:
        return Group(list(modules), {"reshard_after_forward": rng.choice([None, True, False])})

    groups = [group(model)]
    shared = [m for m, paths in paths_to(model).items() if paths > 1]
    for branch in branches(model):
        pair = branch.parts[:2]
        if rng.random() < 0.15 and not any(m in shared for m in pair):
            groups.append(group(*pair))
    paired = [m for g in groups for m in g.modules]
    groups += [group(m) for m in model.modules() if m not in paired and can_run(m) and rng.random() < 0.3]
    wrapped = [m for g in groups for m in g.modules]
    groups += [group(m) for m, owners in owners_of(model, groups).items() if len(owners) > 1 and m not in wrapped]
    return sorted(groups, key=lambda g: len({inner for m in g.modules for inner in m.modules()}))


def can_run(module: nn.Module) -> bool:
    return not isinstance(module, nn.ModuleList)


def paths_to(model: nn.Module) -> Counter[nn.Module]:
    """How often each module is registered, counting every path from the root."""
    return Counter(m for _, m in model.named_modules(remove_duplicate=False))


def owners_of(model: nn.Module, groups: list[Group]) -> dict[nn.Module, set[Group]]:
    """The groups that own each module's parameters, by every path on which it is reached: a shared one may have two."""
    by_module = {m: g for g in groups for m in g.modules}
    owners: dict[nn.Module, set[Group]] = {}

    def visit(module: nn.Module, outer: Group | None) -> None:
        own = by_module.get(module, outer)
        owners.setdefault(module, set()).add(own)
        for child in module.children():
            visit(child, own)

    visit(model, None)
    return owners


def tie_parameters(model: Root, groups: list[Group], rng: random.Random) -> None:
    """Weights of one shape in one group become one parameter. (Across groups it is refused, so not drawn.)"""
    owners = owners_of(model, groups)
    candidates = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding)]
    for _ in range(2):
        source, target = rng.choice(candidates), rng.choice(candidates)
        if source.weight.shape == target.weight.shape and owners[source] == owners[target]:
            target.weight = source.weight


def freeze_some(model: Root, rng: random.Random) -> None:
    for module in model.tree.modules():
        if rng.random() < 0.1:
            module.requires_grad_(False)
    for param in model.tree.parameters():
        if rng.random() < 0.15:
            param.requires_grad_(False)
    model.project.requires_grad_(True)


def draw_model(seed: int) -> tuple[Root, list[Group]]:
    """The same model and the same groups in every process. The groups are not yet sharded."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model = Root(draw_branch(rng, depth=2)).double()
    if rng.random() < 0.5:
        share_a_module(model, rng)
    groups = draw_groups(model, rng)
    tie_parameters(model, groups, rng)
    freeze_some(model, rng)
    return model, groups


# ---- drawing and training steps --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class StepPlan:
    """One optimizer step. `skips` has one entry per micro-batch: for each branch, the parts it leaves out."""

    skips: tuple[tuple[frozenset[int], ...], ...]
    mode: str  # "sync each": reduce every backward; "sync last": only the last; "one backward" for all forwards
    evaluate_first: bool
    set_to_none: bool


def draw_plan(model: Root, seed: int) -> list[StepPlan]:
    rng = random.Random(seed + 1_000_000)

    def skips() -> tuple[frozenset[int], ...]:
        return tuple(frozenset(i for i in range(len(b.parts)) if rng.random() < 0.15) for b in branches(model))

    return [
        StepPlan(
            skips=tuple(skips() for _ in range(rng.choice([1, 1, 2, 3]))),
            mode=rng.choice(["sync each", "sync last", "sync last", "one backward"]),
            evaluate_first=rng.random() < 0.25,
            set_to_none=rng.random() < 0.7,
        )
        for _ in range(STEPS)
    ]


@dataclasses.dataclass
class Observed:
    """What a step shows from outside. On a sharded model, gradients and parameters are the live, sharded ones."""

    evaluation: Tensor | None
    grads: dict[str, Tensor | None]
    params: dict[str, Tensor]


class Trainer:
    """Trains the plain model and the sharded one by the same lines; the plain one is rank 0 of 1."""

    def __init__(self, model: Root, seed: int, rank: int = 0, world_size: int = 1) -> None:
        self.model, self.seed, self.rank, self.world_size = model, seed, rank, world_size
        self.plan = draw_plan(model, seed)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5, foreach=True)

    def steps(self) -> Iterator[Observed]:
        for number, step in enumerate(self.plan):
            evaluation = self.evaluate(number, step) if step.evaluate_first else None
            self.backward(number, step)
            grads = {name: p.grad for name, p in self.model.named_parameters()}
            self.optimizer.step()
            yield Observed(evaluation, grads, dict(self.model.named_parameters()))
            self.optimizer.zero_grad(set_to_none=step.set_to_none)

    def forward(self, number: int, step: StepPlan, micro: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 100 + number * 10 + micro)
        x = torch.randn(ROWS, DIM, generator=generator, dtype=torch.float64)
        tokens = torch.randint(VOCAB, (ROWS,), generator=generator)
        for branch, skipped in zip(branches(self.model), step.skips[micro], strict=True):
            branch.skipped = skipped
        return self.model(*(shard_batch(t, self.rank, self.world_size) for t in (x, tokens)))

    @torch.no_grad()
    def evaluate(self, number: int, step: StepPlan) -> Tensor:
        return self.forward(number, step, 0)

    def backward(self, number: int, step: StepPlan) -> None:
        losses = []
        for micro in range(len(step.skips)):
            last = micro == len(step.skips) - 1
            self.set_sync(last or step.mode != "sync last")
            losses.append((self.forward(number, step, micro) - 0.5).square().mean() / len(step.skips))
            if last or step.mode != "one backward":
                sum(losses).backward()
                losses = []

    def set_sync(self, sync: bool) -> None:
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(sync)


# ---- the test --------------------------------------------------------------------------------------------------------


def train_plain(seed: int) -> list[Observed]:
    model, _ = draw_model(seed)
    return [
        Observed(
            seen.evaluation,
            {name: None if g is None else g.clone() for name, g in seen.grads.items()},
            {name: p.detach().clone() for name, p in seen.params.items()},
        )
        for seen in Trainer(model, seed).steps()
    ]


def check(actual: Observed, expected: Observed, rank: int, world_size: int) -> None:
    if expected.evaluation is not None:
        rows = shard_batch(expected.evaluation, rank, world_size)
        assert_same(actual.evaluation, rows, **TOLERANCE, name="evaluation output")
    assert_same_names(actual.params, expected.params)
    for name, grad in expected.grads.items():
        assert_shard_of(actual.grads[name], grad, **TOLERANCE, name=f"{name}.grad")
    for name, param in expected.params.items():
        assert_shard_of(actual.params[name], param, **TOLERANCE, name=name)


def train_sharded(seed: int, rank: int, world_size: int, expected: list[Observed]) -> str | None:
    """The first difference, if any. Trains to the end even so: a rank that left early would hang the others."""
    model, groups = draw_model(seed)
    for group in groups:
        fully_shard(group.modules if len(group.modules) > 1 else group.modules[0], **group.options)
    different = None
    for number, actual in enumerate(Trainer(model, seed, rank, world_size).steps()):
        try:
            check(actual, expected[number], rank, world_size)
        except AssertionError as error:
            different = different or f"step {number}: {error}"
    return different


def describe(seed: int, world_size: int) -> str:
    """The seed, how to run it alone, and what it drew."""
    model, groups = draw_model(seed)
    names = {m: name or "(root)" for name, m in model.named_modules()}
    lines = [f"seed {seed} on {world_size} ranks; alone: FSDP2_SEED={seed} python -m pytest tests/ranks/{THIS_FILE}"]
    lines += [f"  group {[names[m] for m in g.modules]} {g.options}" for g in groups]
    lines += [f"  branch {names[b]} order {b.order}" for b in branches(model) if b.order != tuple(range(len(b.parts)))]
    lines += [f"  frozen {[name for name, p in model.named_parameters() if not p.requires_grad]}"]
    aliases = [names for names in aliases_of(model) if len(names) > 1]
    lines += [f"  shared {aliases}"]
    for number, step in enumerate(draw_plan(model, seed)):
        skipped = [[f"{names[b]}.{i}" for b, s in zip(branches(model), m, strict=True) for i in s] for m in step.skips]
        lines += [f"  step {number}: {step.mode}, evaluate={step.evaluate_first}, skipped per micro-batch {skipped}"]
    return "\n".join(lines)


def aliases_of(model: nn.Module) -> list[list[str]]:
    names: dict[nn.Parameter, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        names.setdefault(p, []).append(name)
    return list(names.values())


def seeds(first: int, count: int) -> list[int]:
    only = os.environ.get("FSDP2_SEED")
    return list(range(first, first + count)) if only is None else [int(only)]


@pytest.mark.parametrize(("world_size", "seeds"), [(2, seeds(0, 40)), (3, seeds(40, 16))], ids=["2 ranks", "3 ranks"])
def test_random_models_train_as_plain_ones(world_size: int, seeds: list[int]) -> None:
    """Features that work alone break together: a twice-called part in a group that a micro-batch skips, for one."""
    expected = alone(lambda: {seed: train_plain(seed) for seed in seeds})

    def body(rank: int, _: int) -> list[str]:
        different = []
        for seed in seeds:
            print(f"rank {rank}: seed {seed}", file=sys.stderr, flush=True)  # for the report of a hang
            try:
                text = train_sharded(seed, rank, world_size, expected[seed])
            except Exception as error:
                raise RuntimeError(f"{describe(seed, world_size)}\n{different}") from error
            if text is not None:
                different.append(f"{text}\n{describe(seed, world_size)}")
        return different

    different = [text for texts in run_ranks(world_size, body) for text in texts]
    assert not different, f"{len(different)} differences:\n" + "\n".join(different)
