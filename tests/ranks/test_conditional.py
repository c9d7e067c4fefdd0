"""Tests modules that run on some ranks only, on different ones in each step.

Numbers are those of plain training, in which a rank that leaves a module out contributes nothing to its gradient. A
*plan* lists the optional modules that each rank runs, in each batch. The oracle runs all ranks' batches one after the
other in one process, each with its own plan, and takes the mean of the losses.
"""

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from fsdp2 import fully_shard, replicate
from helpers import RankError, alone, assert_same, full, run_ranks
from scenarios import WIDTH, Block, assert_none_differ, loss_of, sgd

Plan = frozenset[str]
"""Names of the optional modules to run."""
Shown = list[tuple[str, Tensor | None]]


class Tower(nn.Module):
    """Blocks inside a module with parameters of its own: an image tower."""

    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(inner=i + 2) for i in range(depth))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return x


class Multimodal(nn.Module):
    """Towers that a batch may lack, and a language model that always runs."""

    optional = ("image", "audio")

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.image = Tower()  # registered in another order than they run in
        self.audio = Tower(1)

    def groups(self) -> list[tuple[nn.Module, bool]]:
        inner = [*self.image.blocks, *self.audio.blocks, *self.layers]
        return [*((block, False) for block in inner), (self.image, True), (self.audio, True), (self, False)]

    def forward(self, x: Tensor, plan: Plan) -> Tensor:
        hidden = self.embed(x)
        for name in ("audio", "image"):
            if name in plan:
                hidden = hidden + getattr(self, name)(x)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class Dropped(nn.Module):
    """Layers, each of which may be left out, between a stem and a head of the root's; `recompute` checkpoints them."""

    optional = ("0", "1", "2")

    def __init__(self, recompute: bool | None = None) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block(inner=i + 2) for i in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.recompute = recompute

    def groups(self) -> list[tuple[nn.Module, bool]]:
        return [*((layer, True) for layer in self.layers), (self, False)]

    def forward(self, x: Tensor, plan: Plan) -> Tensor:
        x = self.stem(x)
        for name in self.optional:
            if name in plan:
                x = self._run(self.layers[int(name)], x)
        return self.head(x)

    def _run(self, layer: nn.Module, x: Tensor) -> Tensor:
        if self.recompute is None or not torch.is_grad_enabled():
            return layer(x)
        return checkpoint(layer, x, use_reentrant=self.recompute)


class Experts(nn.Module):
    """A layer that always runs, with experts inside, all of which hand their output to the layer's last weight."""

    optional = ("0", "1", "2")

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(Block(inner=i + 1) for i in range(3))
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, plan: Plan) -> Tensor:
        hidden = torch.tanh(self.up(x))
        outputs = [expert(hidden) for i, expert in enumerate(self.experts) if str(i) in plan]
        return x + self.down(sum(outputs, hidden))


class Mixture(nn.Module):
    """Two layers of experts."""

    optional = Experts.optional

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Experts() for _ in range(2))

    def groups(self) -> list[tuple[nn.Module, bool]]:
        experts = [(expert, True) for layer in self.layers for expert in layer.experts]
        return [*experts, *((layer, False) for layer in self.layers), (self, False)]

    def forward(self, x: Tensor, plan: Plan) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x, plan)
        return x


class Nested(nn.Module):
    """An optional module inside an optional module, and one that runs last, whose output only adds to the loss."""

    optional = ("outer", "inner", "last")

    def __init__(self) -> None:
        super().__init__()
        self.stem = Block()
        self.outer = nn.ModuleDict({"first": Block(inner=2), "inner": Block(inner=4)})
        self.last = Block(inner=2)

    def groups(self) -> list[tuple[nn.Module, bool]]:
        first, inner = self.outer["first"], self.outer["inner"]
        return [(inner, True), (first, True), (self.stem, False), (self.last, True), (self, False)]

    def forward(self, x: Tensor, plan: Plan) -> Tensor:
        x = self.stem(x)
        if "outer" in plan:
            x = self.outer["first"](x)
            if "inner" in plan:
                x = self.outer["inner"](x)
        return self.last(x) if "last" in plan else x


class Passing(nn.Module):
    """A layer that always runs. Without its optional part it returns what it got; what it computes besides is for the
    loss.
    """

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(WIDTH, 2)
        self.inner = Block(inner=2)

    def forward(self, x: Tensor, plan: Plan) -> Tensor:
        self.aside = self.side(torch.tanh(x)).square().mean()
        return self.inner(x) if "inner" in plan else x


class Passed(nn.Module):
    optional = ("inner",)

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layer = Passing()
        self.last = Block(inner=3)

    def groups(self) -> list[tuple[nn.Module, bool]]:
        return [(self.layer.inner, True), (self.layer, False), (self.last, False), (self, False)]

    def forward(self, x: Tensor, plan: Plan) -> Tensor:
        x = self.stem(x)
        return self.last(torch.tanh(x + self.layer(x, plan))) + self.layer.aside


class Counts(torch.autograd.Function):
    """Adds nothing to `x`, but communicates in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + 0 * _sum_over_ranks(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient + 0 * _sum_over_ranks(gradient)


def _sum_over_ranks(x: Tensor) -> Tensor:
    total = x.sum().reshape(1).repeat(3)
    if dist.is_initialized():
        dist.all_reduce(total)
        dist.all_gather([torch.empty_like(total) for _ in range(dist.get_world_size())], tensor=total)
    return total[0]


class Counting(Dropped):
    """The same layers, with a user's own collectives between them."""

    def _run(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x) * 1.0

    def forward(self, x: Tensor, plan: Plan) -> Tensor:
        x = Counts.apply(self.stem(x))
        for name in self.optional:
            x = Counts.apply(self._run(self.layers[int(name)], x) if name in plan else x)
        return self.head(x)


MODELS: dict[str, Callable[[], Any]] = {
    "towers": Multimodal,
    "dropped layers": Dropped,
    "dropped layers, recomputed": lambda: Dropped(recompute=False),
    "dropped layers, recomputed reentrantly": lambda: Dropped(recompute=True),
    "experts": Mixture,
    "nested": Nested,
    "passed on": Passed,
    "collectives of a user's own": Counting,
}
STEPS = 6


def plans(optional: Sequence[str], world_size: int, steps: int = STEPS) -> list[list[Plan]]:
    """[step][rank]. First nobody runs anything, then one rank all, then all ranks all; then as it comes."""
    generator = torch.Generator().manual_seed(world_size)

    def drawn() -> Plan:
        return frozenset(name for name in optional if torch.rand((), generator=generator) < 0.5)

    everything, nothing = frozenset(optional), frozenset[str]()
    first = [[nothing] * world_size, [nothing] * (world_size - 1) + [everything], [everything] * world_size]
    return (first + [[drawn() for _ in range(world_size)] for _ in range(steps)])[:steps]


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def build(make: Callable[[], Any]) -> Any:
    torch.manual_seed(1)
    return make().double()


def train_plain(make: Callable[[], Any], world_size: int, accumulate: bool) -> Shown:
    """What training shows: each rank's outputs, gradients of all, weights."""
    model, shown = build(make), []
    optimizer = sgd(model)
    for step, of_ranks in enumerate(plans(model.optional, world_size)):
        with torch.no_grad():
            shown += [(f"evaluated {step}", model(batch(rank, 50 + step), p)) for rank, p in enumerate(of_ranks[::-1])]
        losses = [loss_of(model(batch(rank, step), plan)) for rank, plan in enumerate(of_ranks)]
        (sum(losses) / world_size).backward()
        if accumulate and step % 2 == 0:
            continue
        shown += [(f"step {step}: {name}.grad", copy(p.grad)) for name, p in model.named_parameters()]
        optimizer.step()
        shown += [(f"step {step}: {name}", copy(p)) for name, p in model.named_parameters()]
        optimizer.zero_grad()
    return shown


def copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def train_sharded(model: Any, rank: int, world_size: int, accumulate: bool) -> Iterator[tuple[str, Tensor | None]]:
    """Trains alike on one rank, and shows the same as it comes; what others evaluate is left out."""
    optimizer = sgd(model)
    for step, of_ranks in enumerate(plans(model.optional, world_size)):
        with torch.no_grad():
            output = model(batch(rank, 50 + step), of_ranks[::-1][rank])
        yield f"evaluated {step}", output
        model.set_requires_gradient_sync(not accumulate or step % 2 == 1)
        loss_of(model(batch(rank, step), of_ranks[rank])).backward()
        if accumulate and step % 2 == 0:
            continue
        yield from ((f"step {step}: {name}.grad", p.grad) for name, p in model.named_parameters())
        optimizer.step()
        yield from ((f"step {step}: {name}", p) for name, p in model.named_parameters())
        optimizer.zero_grad()


def compare(shown: Iterable[tuple[str, Tensor | None]], expected: Shown, rank: int, world_size: int) -> list[str]:
    evaluated = itertools.count()
    own = [each for each in expected if not each[0].startswith("evaluated") or next(evaluated) % world_size == rank]
    different = []
    for (name, value), (same_name, other) in zip(shown, own, strict=True):
        assert name == same_name
        if name.endswith("unused.grad") and other is None and value is not None:
            other = torch.zeros(value.shape, dtype=value.dtype)  # others of its group have been used
        try:
            assert_same(value, other, 1e-10, 1e-12, name)
        except AssertionError as error:
            different.append(str(error))
    return different[:2]


def check_all(world_size: int, *ways: Callable[[Any], None], accumulate: bool = False, names: Any = MODELS) -> None:
    """Trains each of the models in each of the `ways` to shard it."""
    makers = {name: MODELS[name] for name in names}
    expected = alone(lambda: {name: train_plain(make, world_size, accumulate) for name, make in makers.items()})

    def body(rank: int, _: int) -> list[str]:
        different = []
        for shard, (name, make) in itertools.product(ways, makers.items()):
            model = build(make)
            shard(model)
            shown = train_sharded(model, rank, world_size, accumulate)
            title = f"[{shard.__name__}, {name}]"
            different += [f"{title} {text}" for text in compare(shown, expected[name], rank, world_size)]
        return different

    assert_none_differ(run_ranks(world_size, body, timeout=60))


def shard_groups(model: Any, **options: Any) -> None:
    for module, conditional in model.groups():
        fully_shard(module, conditional=conditional, **options)


@pytest.mark.parametrize("world_size", [1, 2])  # three and four below, and in test_random_models.py
def test_it_trains_as_plain_models_do(world_size: int) -> None:
    check_all(world_size, shard_groups)


def test_unsynchronized_gradients() -> None:
    check_all(3, shard_groups, accumulate=True)


def replicas(model: Any) -> None:
    shard_groups(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def test_replicas_of_shards() -> None:
    check_all(4, replicas, names=("towers", "dropped layers", "experts"))
    check_all(4, replicas, accumulate=True, names=("towers", "nested"))


def test_gradients_that_replicas_have_left() -> None:
    """Summed between replicas only in every second backward: what is left on the way belongs to all ranks' groups."""

    def shard(model: Any) -> None:
        replicas(model)
        backward = itertools.count()
        model.register_forward_hook(
            lambda *_: model.set_requires_all_reduce(next(backward) % 2 == 1) if torch.is_grad_enabled() else None
        )
        model.set_requires_gradient_sync = lambda sync: None

    check_all(4, shard, accumulate=True, names=("towers", "dropped layers"))


def data_parallel(model: Any) -> None:
    for module, conditional in model.groups():
        replicate(module, conditional=conditional)


def kept_after_forward(model: Any) -> None:
    shard_groups(model, reshard_after_forward=False)


def kept_after_backward(model: Any) -> None:
    shard_groups(model)
    model.set_reshard_after_backward(False)


def without_hooks(model: Any) -> None:
    shard_groups(model)
    model.set_saved_tensor_hooks(False)


def without_prefetch(model: Any) -> None:
    shard_groups(model)
    model.set_prefetch_budget(0)


def test_settings() -> None:
    ways = (data_parallel, kept_after_forward, kept_after_backward, without_hooks, without_prefetch)
    check_all(2, *ways, names=("towers", "dropped layers, recomputed", "experts", "nested"))


# ---- what can't be agreed on -----------------------------------------------------------------------------------------


def test_a_root_is_not_conditional() -> None:
    """Ranks that leave it out would never meet the others. Said before any of these waits."""

    def body(rank: int, _: int) -> None:
        tower = build(Tower)
        fully_shard(tower, conditional=True)
        if rank == 0:
            with pytest.raises(
                RuntimeError, match="root: conditional=True needs a module around it that all ranks run"
            ):
                tower(batch(0, 0))

    run_ranks(2, body, timeout=20)


def test_groups_that_are_not_conditional_must_run_everywhere() -> None:
    """Ranks at different places all raise, before weights are mixed up, though the groups are of equal shapes; the next
    step is exact.
    """

    class Unequal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.first, self.second, self.expert = (Block() for _ in range(4))
            self.runs = "both"

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            x = self.first(x) if self.runs != "second" else x
            x = self.second(x) if self.runs != "first" else x
            return self.expert(x)

    def train(model: Any, ranks: Sequence[int]) -> list[Tensor]:
        sum(loss_of(model(batch(rank, 1))) / len(ranks) for rank in ranks).backward()
        return [full(param.grad) for param in model.parameters()]

    expected = alone(lambda: train(build(Unequal), range(3)))

    def body(rank: int, _: int) -> list[Tensor]:
        model = build(Unequal)
        for block in (model.stem, model.first, model.second):
            fully_shard(block, reshard_after_forward=True)
        fully_shard(model.expert, conditional=True)
        fully_shard(model)
        model.runs = "first" if rank < 2 else "second"
        with pytest.raises(RuntimeError, match=r"this one is gathering (first|second), one is gathering f"):
            model(batch(rank, 0))
        model.runs = "both"
        return train(model, [rank])

    for grads in run_ranks(3, body, timeout=30):
        for grad, other in zip(grads, expected, strict=True):
            assert_same(grad, other, 1e-10, 1e-12, "gradient after the error")


def test_a_rank_that_dies_at_a_consensus() -> None:
    def body(rank: int, _: int) -> str:
        model = build(Dropped)
        shard_groups(model)
        if rank == 1:
            os._exit(1)
        with pytest.raises(RuntimeError) as caught:
            model(batch(rank, 0), frozenset("0"))
        raise AssertionError(f"{caught.value}")

    with pytest.raises(RankError, match=r"while this rank is gathering (root|layers\.0)"):
        run_ranks(2, body, timeout=30)


def test_copies_are_conditional_too() -> None:
    """The ranks of a deep copy reach consensus separately."""
    expected = alone(lambda: {"": train_plain(Dropped, 2, False)})

    def body(rank: int, world_size: int) -> list[str]:
        model = build(Dropped)
        shard_groups(model)
        shown = train_sharded(deepcopy(model), rank, world_size, False)
        return compare(shown, expected[""], rank, world_size)

    assert_none_differ(run_ranks(2, body, timeout=30))
