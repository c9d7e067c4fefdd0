"""Makes random models and ways to shard them, each a *recipe*: its differences from the plainest model, by name.

A seed chooses a recipe. A recipe without some of its choices still is one. So a recipe that fails can be made minimal,
printed, and pasted: `Recipe(17, {"tree kind": "branch", "freeze tree.parts.0": True})` (see recipes.py).

The plainest model is a linear layer and one part, in one group, in fp64. A choice adds parts (in a tree, some of which
run twice), shares modules and parameters, freezes some, makes groups, checkpoints, mixes dtypes, replicates shards.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from fsdp2 import FSDPModule, MixedPrecisionPolicy, fully_shard
from fsdp2.compression import Compression
from fsdp2.engine import buckets, gather, pack
from recipes import Recipe

DIM = 6
VOCAB = 11


# ---- parts: (x, tokens) -> x, all of width DIM -----------------------------------------------------------------------


class Dense(nn.Module):
    """Has two linears over an odd width, used through their modules."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, width, bias=bias)
        self.down = nn.Linear(width, DIM, bias=bias)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Norm(nn.Module):
    """Has a norm, whose weight's gradient is a sum over rows."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.norm = kind(DIM)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.norm(x)


class Lookup(nn.Module):
    """Has an embedding: its input needs no gradient, so its group's backward starts from the weight alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, DIM)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.table(tokens)


class Direct(nn.Module):
    """Has parameters of its own: 3-d, a single row, and one that no forward ever uses."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(2, DIM, DIM) * 0.3)
        self.scale = nn.Parameter(torch.ones(1, DIM))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return torch.einsum("bi,kio->bo", x, self.mix) * self.scale


class Branch(nn.Module):
    """Runs parts in a row, and adds each to its input. `order` may repeat a part; `skipped` changes with every forward.

    `checkpoints`: the parts that run again in backward, and whether reentrantly.
    """

    def __init__(self, parts: Sequence[nn.Module], order: Sequence[int], checkpoints: dict[int, bool]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.order, self.checkpoints = tuple(order), checkpoints
        self.skipped: frozenset[int] = frozenset()

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        for index in self.order:
            if index not in self.skipped:
                x = torch.tanh(x + self._run(index, x, tokens))
        return x

    def _run(self, index: int, x: Tensor, tokens: Tensor) -> Tensor:
        part, reentrant = self.parts[index], self.checkpoints.get(index)
        if reentrant is None or not torch.is_grad_enabled():
            return part(x, tokens)
        skipped = [(branch, branch.skipped) for branch in branches(part)]

        def run(x: Tensor, tokens: Tensor) -> Tensor:
            for branch, skips in skipped:  # in backward: other forwards have come since
                branch.skipped = skips
            return part(x, tokens)

        # Reentrant checkpointing refuses an output without gradient, which a frozen table's is.
        return checkpoint(run, x, tokens, use_reentrant=reentrant and not isinstance(part, Lookup))


class Root(nn.Module):
    """Has a trainable projection, so that every step has a gradient, then the random tree."""

    def __init__(self, tree: nn.Module) -> None:
        super().__init__()
        self.project = nn.Linear(DIM, DIM)
        self.tree = tree

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.tree(self.project(x), tokens)


def branches(model: nn.Module) -> list[Branch]:
    return [m for m in model.modules() if isinstance(m, Branch)]


# ---- a model ---------------------------------------------------------------------------------------------------------


def make_part(recipe: Recipe, name: str, depth: int) -> nn.Module:
    others = ["norm", "lookup", "direct"] + ["branch"] * 2 * min(depth, 1)
    kind = recipe.pick(f"{name} kind", "dense", others, 0.75) if depth < 2 else "branch"
    if kind == "branch":
        return make_branch(recipe, name, depth)
    if kind == "dense":
        return Dense(
            recipe.pick(f"{name} width", 3, (1, 5, 7), 0.7), bias=recipe.pick(f"{name} bias", True, (False,), 0.3)
        )
    if kind == "norm":
        return Norm(nn.RMSNorm if recipe.pick(f"{name} rms", False, (True,), 0.5) else nn.LayerNorm)
    return Lookup() if kind == "lookup" else Direct()


def make_branch(recipe: Recipe, name: str, depth: int) -> Branch:
    count = recipe.pick(f"{name} parts", 1, (2, 3), 1.0)
    parts = [make_part(recipe, f"{name}.parts.{i}", depth - 1) for i in range(count)]
    again = recipe.pick(f"{name} again", None, range(count), 0.3)
    chosen = {i: recipe.pick(f"{name} checkpoints {i}", None, (True, False), 0.15) for i in range(count)}
    checkpoints = {i: reentrant for i, reentrant in chosen.items() if reentrant is not None}
    return Branch(parts, [*range(count), *([again] if again is not None else [])], checkpoints)


PAIRS = [(i, j) for i in range(8) for j in range(8)]


def share_a_module(model: Root, recipe: Recipe) -> None:
    """Replaces one leaf part by another: registered twice, and called from two branches or twice from one."""
    slots = [(b, i) for b in branches(model) for i, part in enumerate(b.parts) if not isinstance(part, Branch)]
    chosen = recipe.pick("shared module", None, PAIRS, 0.5)
    if chosen is not None:
        (source, i), (target, j) = (slots[each % len(slots)] for each in chosen)
        target.parts[j] = source.parts[i]


def tie_parameters(model: Root, groups: list["Group"], recipe: Recipe) -> None:
    """Makes weights of one shape one parameter, also across groups, unless these are sharded or reduced differently."""
    owners = owners_of(model, groups)
    candidates = [m for m in model.modules() if isinstance(m, nn.Linear | nn.Embedding)]
    for number in range(2):
        chosen = recipe.pick(f"tie {number}", None, PAIRS, 0.7)
        if chosen is not None:
            source, target = (candidates[each % len(candidates)] for each in chosen)
            of_both = owners[source] | owners[target]
            if source.weight.shape == target.weight.shape and len({ways(g.name, recipe) for g in of_both}) == 1:
                target.weight = source.weight


def freeze_some(model: Root, recipe: Recipe) -> None:
    for name, module in model.tree.named_modules():
        if recipe.pick(f"freeze module {name}", False, (True,), 0.1):
            module.requires_grad_(False)
    for name, param in model.tree.named_parameters():
        if recipe.pick(f"freeze {name}", False, (True,), 0.15):
            param.requires_grad_(False)
    model.project.requires_grad_(True)


# ---- groups ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class Group:
    """Is one call of fully_shard."""

    name: str
    modules: list[nn.Module]
    # Whether ranks may leave its modules out, each for itself.
    conditional: bool = False


def choose_groups(model: Root, recipe: Recipe) -> list[Group]:
    """Chooses groups: a module at any level, or two neighbours in a branch; inner groups first, the root last."""
    names = {m: name for name, m in model.named_modules()}
    groups = [Group("root", [model])]
    shared = [m for m, paths in paths_to(model).items() if paths > 1]
    for branch in branches(model):
        pair = list(branch.parts[:2])
        free = len(pair) == 2 and not any(m in shared for m in pair)
        if free and recipe.pick(f"group a pair of {names[branch]}", False, (True,), 0.15):
            groups.append(Group(f"pair of {names[branch]}", pair))
    paired = [m for g in groups for m in g.modules]
    for module, name in names.items():
        runs = module not in paired and not isinstance(module, nn.ModuleList)
        if runs and recipe.pick(f"group {name}", False, (True,), 0.3):
            groups.append(Group(name, [module]))
    wrapped = [m for g in groups for m in g.modules]
    for module, owners in owners_of(model, groups).items():
        if len(owners) > 1 and module not in wrapped:
            groups.append(Group(names[module], [module]))
    if recipe.pick("conditional groups", False, (True,), 0.5):
        for group in groups:
            group.conditional = group.modules != [model] and recipe.pick(
                f"conditional {group.name}", False, (True,), 0.6
            )
    return sorted(groups, key=lambda g: len({inner for m in g.modules for inner in m.modules()}))


def optional_modules(groups: list[Group]) -> set[nn.Module]:
    """Returns all modules below a conditional group's modules, with these."""
    return {inner for group in groups if group.conditional for m in group.modules for inner in m.modules()}


def reduced_together(model: nn.Module, groups: list[Group]) -> list[list[nn.Parameter]]:
    """Returns the parameters of each group that some ranks may leave out. If any has a gradient, others have zeros."""
    users = users_by_parameter(model, groups)
    return [[p for p, of in users.items() if of[0] is g] for g in left_out(model, groups)]


def users_by_parameter(model: nn.Module, groups: list[Group]) -> dict[nn.Parameter, list[Group]]:
    """Returns the groups whose modules have a parameter: the one that is sharded first, which owns it, comes first."""
    users: dict[nn.Parameter, list[Group]] = {}
    owners = owners_of(model, groups)
    for group in groups:
        for module, of in owners.items():
            for param in module._parameters.values():
                if of == {group} and param is not None and group not in users.setdefault(param, []):
                    users[param].append(group)
    return users


def left_out(model: nn.Module, groups: list[Group]) -> list[Group]:
    """Returns the groups that ranks may leave out, and those that own parameters which are tied to some of these."""
    optional = optional_modules(groups)
    own = [g for g in groups if optional.issuperset(g.modules)]
    users = users_by_parameter(model, groups)
    return own + [g for g in groups if g not in own and any(of[0] is g and {*of} & {*own} for of in users.values())]


def paths_to(model: nn.Module) -> Counter[nn.Module]:
    """Counts how often each module is registered, by every path from the root."""
    return Counter(m for _, m in model.named_modules(remove_duplicate=False))


def owners_of(model: nn.Module, groups: list[Group]) -> dict[nn.Module, set[Group]]:
    """Returns the groups that own each module's parameters, by every path to it: a shared one may have two."""
    by_module = {m: g for g in groups for m in g.modules}
    owners: dict[nn.Module, set[Group]] = {}

    def visit(module: nn.Module, outer: Group | None) -> None:
        own = by_module.get(module, outer)
        owners.setdefault(module, set()).add(own)
        for child in module.children():
            visit(child, own)

    visit(model, None)
    return owners


def make_model(recipe: Recipe) -> tuple[Root, list[Group]]:
    """Returns the same model and the same groups in every process. The groups are not yet sharded."""
    torch.manual_seed(recipe.seed)
    model = Root(make_part(recipe, "tree", depth=2)).double()
    share_a_module(model, recipe)
    groups = choose_groups(model, recipe)
    tie_parameters(model, groups, recipe)
    freeze_some(model, recipe)
    refrain_from_reentrant_checkpoints(model)
    return model, groups


def refrain_from_reentrant_checkpoints(model: Root) -> None:
    """Turns off reentrant checkpoints around parameters that are also used elsewhere.

    A group may be freed after their gradients from there. The recomputation of a reentrant checkpoint then needs them
    without a call that fsdp2 sees, unless it is a module with a group: an error.
    """
    names = Counter(p for _, p in model.named_parameters(remove_duplicate=False))
    for branch in branches(model):
        for i in branch.checkpoints:
            if any(names[p] > 1 for p in branch.parts[i].parameters()):
                branch.checkpoints[i] = False


# ---- sharding it -----------------------------------------------------------------------------------------------------


def computes_in_fp32(recipe: Recipe) -> bool:
    """Returns True if all groups compute in fp32. Either all do or none, because torch's operations refuse to mix."""
    return recipe.pick("computes in fp32", False, (True,), 0.25)


def is_rounded(recipe: Recipe) -> bool:
    """Returns True if some value is rounded to fp32, between parameters and gradients that are stored in fp64."""
    return any("fp32" in name for name in recipe.chosen)


def tolerance(recipe: Recipe) -> dict[str, float]:
    """Returns the tolerance: sums of a hundred terms, through norms, over some steps with momentum, of values
    below 1.
    """
    eps = torch.finfo(torch.float32 if is_rounded(recipe) else torch.float64).eps
    return {"rtol": 2**14 * eps, "atol": 2**7 * eps}


def shard(model: Root, groups: list[Group], recipe: Recipe, world_size: int) -> None:
    mesh = None
    # Only large gradients are cut otherwise.
    buckets.MIN_BUCKET_BYTES = recipe.pick("bytes of buckets", 1 << 20, (1, 200), 0.3)
    buckets.MAX_BUCKET_BYTES = buckets.MIN_BUCKET_BYTES << 10
    buckets.MIN_PIECE_BYTES = recipe.pick("bytes of pieces", 1 << 20, (16,), 0.3)
    buckets.MIN_PIECE_BYTES_OF_RANK = buckets.MIN_PIECE_BYTES // 8
    are_launches = recipe.pick("operations are launches", False, (True,), 0.4)  # as on a GPU
    gather.costs_launches = buckets.costs_launches = pack.costs_launches = lambda device: are_launches
    replicas = recipe.pick("replicas", None, [n for n in range(1, world_size + 1) if world_size % n == 0], 0.4)
    if replicas is not None:
        names = ("replicate", "shard")
        mesh = init_device_mesh("cpu", (replicas, world_size // replicas), mesh_dim_names=names)
    conditional = left_out(model, groups)
    for group in groups:
        modules = group.modules if len(group.modules) > 1 else group.modules[0]
        keeps_part = group not in conditional
        options = options_of(group.name, recipe, world_size // (replicas or 1) if keeps_part else 1)
        fully_shard(modules, mesh=mesh, conditional=group.conditional, **options)
    apply_settings(model, recipe)


def ways(name: str, recipe: Recipe) -> tuple[int | None, str | None]:
    """Returns in which groups must agree that have a parameter in common: the sharded dim, and dtypes of reductions."""
    rounded = ("wire", "sums") if computes_in_fp32(recipe) else ("wire",)
    return (
        recipe.pick(f"sharded dim of {name}", None, (1, 2), 0.25),
        recipe.pick(f"fp32 in reductions of {name}", None, rounded, 0.15),
    )


def options_of(name: str, recipe: Recipe, shards: int) -> dict[str, Any]:
    few = [shards // 2] if shards % 2 == 0 else []
    fp32, (dim, rounded) = computes_in_fp32(recipe), ways(name, recipe)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.float32 if fp32 else None,
        reduce_dtype=torch.float32 if rounded == "sums" else None,
        output_dtype=torch.float64 if name == "root" else None,
        compression=Compression(reduce_scatter=torch.float32 if rounded == "wire" else None),
    )
    return {
        "reshard_after_forward": recipe.pick(f"reshard {name}", None, [True, False, *few], 0.7),
        "shard_placement_fn": None if dim is None else lambda p: Shard(min(dim, p.ndim - 1)) if p.ndim else None,
        "mp_policy": policy,
    }


def apply_settings(model: nn.Module, recipe: Recipe) -> None:
    assert isinstance(model, FSDPModule)
    model.set_unsharded_budget(recipe.pick("prefetch budget", None, (0, 300, 1000, 10**6), 0.4))
    if recipe.pick("no reshard after backward", False, (True,), 0.2):
        model.set_reshard_after_backward(False)
    # What checkpointing runs again needs the full parameters without our notice, unless it is a module with a group.
    recomputes = any(branch.checkpoints for branch in branches(model))
    if not recomputes and recipe.pick("no unshard in backward", False, (True,), 0.2):
        model.set_unshard_in_backward(False, recurse=True)
    model.set_reduce_scatter_max_input_buffers(recipe.pick("reductions in flight", 1, (2, 5), 0.3))
