"""Parameters that modules of several fully_shard calls share: one group owns each, and all its users train it exactly.

The oracle is the plain model on the whole batch, in fp64 to 1e-12. Random models and drawn training have such ties, too
(test_random_models.py, test_training.py); here is what these don't draw, and what is refused.
"""

import copy
import itertools
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.checkpoint import checkpoint

import fsdp2
from fsdp2 import FSDPModule, MixedPrecisionPolicy, full_params, fully_shard, replicate
from fsdp2.engine.events import Observer
from fsdp2.engine.state import groups_below, require_state
from fsdp2.features import large_submodules
from helpers import NIGHTLY, assert_same, fake_world, in_a_fork, run_checks, shard_batch

VOCAB, WIDTH, ROWS = 11, 5, 12
Way = Callable[[Any], list[Any]]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.reentrant: bool | None = None  # its body is checkpointed so

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None or not torch.is_grad_enabled():
            return self.body(x)
        return checkpoint(self.body, x, use_reentrant=self.reentrant)

    def body(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Language(nn.Module):
    """Ties embedding and head, two blocks, and a parameter of its own with a block. Blocks may run in other orders."""

    def __init__(self, order: Iterable[int] = (0, 1, 2), reentrant: bool | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.blocks[2].up.weight = self.blocks[0].down.weight
        self.scale = self.blocks[1].up.bias
        self.order, self.is_checkpointed = tuple(order), False
        for block in self.blocks:
            block.reentrant = reentrant
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * self.scale
        for i in self.order:
            block = self.blocks[i]
            x = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
        return self.head(x)


WAYS: dict[str, Way] = {
    "the embedding first": lambda model: [model.embed, *model.blocks, model.head],
    "the head first": lambda model: [model.head, *reversed(model.blocks), model.embed],
    "the head with the root": lambda model: [model.embed, *model.blocks],
    "the embedding with the root": lambda model: [*reversed(model.blocks), model.head],
    "inside blocks": lambda model: [model.blocks[0].down, *model.blocks, model.head],
    "lists": lambda model: [[model.embed, model.blocks[1]], [model.head, model.blocks[0]], model.blocks[2]],
}

_NEXT_WAYS = itertools.cycle(WAYS.items())


def some_ways(number: int) -> list[tuple[str, Way]]:
    """Returns the next ways, which are dealt to the checks of a launch in turn; at night all."""
    return [*itertools.islice(_NEXT_WAYS, len(WAYS) if NIGHTLY else number)]


def shard(model: nn.Module, way: Way, function: Any = fully_shard, **options: Any) -> Any:
    for each in way(model):
        function(each, **options)
    return function(model, **options)


def batch(step: int) -> Tensor:
    return torch.randint(VOCAB, (ROWS, 3), generator=torch.Generator().manual_seed(step))


def own_rows(tokens: Tensor) -> Tensor:
    return shard_batch(tokens, dist.get_rank(), dist.get_world_size())


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    loss: Tensor = (model(tokens) - 0.5).square().mean()
    return loss


def check_same(model: nn.Module, plain: nn.Module, what: str = "", grads: bool = False) -> None:
    names, expected = dict(model.named_parameters()), dict(plain.named_parameters())
    assert list(names) == list(expected), what
    for name, param in expected.items():
        if grads:
            assert_same(names[name].grad, param.grad, 0, 1e-12, f"{what} {name}.grad")
        assert_same(names[name], param.detach(), 0, 1e-12, f"{what} {name}")


def train(model: Any, plain: nn.Module, what: str = "", steps: int = 2, micros: int = 1) -> None:
    """Trains both, with clipping, and compares gradients, norms and parameters."""
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.5) for each in (model, plain)]
    for step in range(steps):
        for micro in range(micros):
            loss_of(plain, batch(10 * step + micro)).backward()
            model.set_requires_gradient_sync(micro == micros - 1)
            loss_of(model, own_rows(batch(10 * step + micro))).backward()
        check_same(model, plain, f"{what} step {step}", grads=True)
        norms: list[Any] = [torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1) for each in (model, plain)]
        assert_same(norms[0].full_tensor(), norms[1], 0, 1e-12, f"{what} norm")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    check_same(model, plain, what)
    assert model.head.weight is model.embed.weight
    assert all(isinstance(param, DTensor) for param in model.parameters())


def pair(way: Way, plain: Any = None, function: Any = fully_shard, **options: Any) -> tuple[Any, Any]:
    plain = plain or Language()
    return shard(copy.deepcopy(plain), way, function, **options), plain


# ---- training


def all_ways() -> None:
    for name, way in WAYS.items():
        train(*pair(way), name, steps=1)
    for name, way in some_ways(2):
        train(*pair(way, Language((2, 0, 1, 0))), f"{name}, in another order, and one twice", steps=1)


def what_stays_after_forward() -> None:
    """A part does only on four ranks: 2 of 2 are all."""
    for choice in (2,) if dist.get_world_size() == 4 else (True, False):
        for name, way in some_ways(2):
            model, plain = pair(way, reshard_after_forward=choice)
            train(model, plain, f"{name} {choice}")
        model.set_reshard_after_backward(False)
        train(model, plain, f"{name} kept")


def accumulation() -> None:
    for name, way in some_ways(3):
        train(*pair(way), name, micros=3)


def synchronised_in_one_user_only() -> None:
    """The setting is one of the group: the module that sets it last decides."""
    model, plain = pair(WAYS["the embedding first"])
    for micro in range(2):
        model.embed.set_requires_gradient_sync(False)
        model.head.set_requires_gradient_sync(micro == 1)
        loss_of(plain, batch(micro)).backward()
        loss_of(model, own_rows(batch(micro))).backward()
    check_same(model, plain, grads=True)


def means_over_weights() -> None:
    model, plain = pair(WAYS["the head with the root"])
    with fsdp2.accumulate(model) as acc:
        for i in range(2):
            rows = own_rows(batch(i))
            acc.backward(loss_of(model, rows) * rows.numel(), weight=rows.numel())
    ((loss_of(plain, batch(0)) + loss_of(plain, batch(1))) / 2).backward()
    check_same(model, plain, grads=True)


def recomputed() -> None:
    for of_model, reentrant in ((True, None), (False, False), (False, True)):
        for name, way in some_ways(2):
            if reentrant and name == "inside blocks":
                continue  # recomputations need modules with groups, or groups whose gradients are not complete
            plain = Language(reentrant=reentrant)
            plain.is_checkpointed = of_model
            train(*pair(way, plain), f"{name} {of_model} {reentrant}")


def frozen() -> None:
    for name, way in some_ways(3):
        model, plain = pair(way)
        for each in (model, plain):
            each.embed.weight.requires_grad_(False)
            each.blocks[0].down.weight.requires_grad_(False)
        train(model, plain, name)
        for each in (model, plain):
            each.requires_grad_(True)
        train(model, plain, f"{name}, thawed")


def a_user_alone_and_left_out() -> None:
    """The owner or a user runs alone, or not at all; the gradients of all forwards meet."""
    for name, way in some_ways(3):
        model, plain = pair(way)
        for order in ((0, 1), (2,), (2, 1, 0)):
            model.order = plain.order = order
            loss_of(plain, batch(0)).backward()
            loss_of(model, own_rows(batch(0))).backward()
            check_same(model, plain, f"{name} {order}", grads=True)
        hidden = torch.ones(ROWS, WIDTH, dtype=torch.float64)
        if isinstance(model.head, FSDPModule):
            plain.head(hidden).square().mean().backward()
            model.head(own_rows(hidden)).square().mean().backward()
            check_same(model, plain, f"{name}, the head alone", grads=True)


def stepped_on_in_backward() -> None:
    model, plain = pair(WAYS["the embedding first"])
    model.set_optimizer_in_backward(torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        loss_of(plain, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model, own_rows(batch(step))).backward()
        check_same(model, plain, f"step {step}")


class Towers(nn.Module):
    """Has two towers with a weight in common, of which each rank runs one in some steps only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()
        self.second.up.weight = self.first.up.weight
        self.double()
        self.runs = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x) if self.runs else x


def left_out_on_some_ranks() -> None:
    """A conditional module is the owner, or a user. A group that any rank uses is reduced in full."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for order in (("first", "second"), ("second", "first")):
        plain = Towers()
        model: Any = copy.deepcopy(plain)
        for name in order:
            fully_shard(getattr(model, name), conditional=name == "second")
        fully_shard(model)
        x = torch.randn(ROWS, WIDTH, dtype=torch.float64)
        for step in range(4):
            for each in range(ranks):
                plain.runs = (each + step) % 2 == 0
                (plain(shard_batch(x, each, ranks)).square().mean() / ranks).backward()
            model.runs = (rank + step) % 2 == 0
            model(own_rows(x)).square().mean().backward()
            for name, param in plain.named_parameters():
                if step > 0 or ranks > 1:
                    assert_same(model.get_parameter(name).grad, param.grad, 0, 1e-12, f"{order} {step}: {name}")


def hsdp_and_replicas() -> None:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    for name, way in some_ways(4):
        train(*pair(way, mesh=mesh), name)
    train(*pair(WAYS["the head first"], function=replicate), "replicate", micros=2)


def mixed_precision() -> None:
    """Policies may differ in what they do to inputs and outputs."""
    plain = Language()
    model: Any = copy.deepcopy(plain)
    low = MixedPrecisionPolicy(torch.float32, torch.float64)
    fully_shard(model.embed, mp_policy=low)
    fully_shard(model.head, mp_policy=MixedPrecisionPolicy(torch.float32, output_dtype=torch.float64))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(torch.float32, torch.float64, cast_forward_inputs=False))
    loss_of(model, own_rows(batch(0))).backward()
    computes, ranks = copy.deepcopy(plain).float(), dist.get_world_size()
    for rank in range(ranks):
        (computes(shard_batch(batch(0), rank, ranks)).double() - 0.5).square().mean().div(ranks).backward()
    for name, param in computes.named_parameters():
        assert param.grad is not None
        assert_same(model.get_parameter(name).grad, param.grad.double(), 1e-5, 1e-7, name)


# ---- parameters


def state_dicts_and_copies() -> None:
    for name, way in some_ways(3):
        model, plain = pair(way)
        train(model, plain, name, steps=1)
        copied = copy.deepcopy(model)
        assert copied.head.weight is copied.embed.weight
        assert copied.head.weight is not model.embed.weight
        train(copied, copy.deepcopy(plain), f"{name}, a copy")
        if dist.get_world_size() == 1:
            train(pickle.loads(pickle.dumps(model)), copy.deepcopy(plain), f"{name}, a pickle")
        sharded = model.state_dict()
        assert list(sharded) == list(plain.state_dict())
        assert sharded["embed.weight"].to_local().data_ptr() == sharded["head.weight"].to_local().data_ptr()
        other = Language()
        cut = {
            n: distribute_tensor(value, sharded[n].device_mesh, sharded[n].placements)
            for n, value in other.state_dict().items()
        }
        model.load_state_dict(cut)
        train(model, other, f"{name}, loaded", steps=1)
        other = Language()
        model.load_state_dict(copy.deepcopy(other.state_dict()), assign=True)
        train(model, other, f"{name}, assigned", steps=1)
        other, whole = Language(), StateDictOptions(full_state_dict=True)
        set_model_state_dict(model, copy.deepcopy(other.state_dict()), options=whole)
        train(model, other, f"{name}, by torch's functions", steps=1)
        for n, value in get_model_state_dict(model, options=whole).items():
            assert_same(value, other.state_dict()[n], 0, 1e-12, n)


def from_meta() -> None:
    for name, way in some_ways(3):
        plain = Language()
        with torch.device("meta"):
            model = shard(Language(), way)
        model.to_empty(device="cpu")
        assert model.head.weight is model.embed.weight, name
        with torch.no_grad():
            for target, source in zip(model.parameters(), plain.parameters(), strict=True):
                target.copy_(distribute_tensor(source.detach(), target.device_mesh, target.placements))
        train(model, plain, name, steps=1)


def whole_parameters() -> None:
    for name, way in some_ways(3):
        model, plain = pair(way)
        with full_params(model) as full:
            assert full["embed.weight"] is full["head.weight"] is model.head.weight
            assert_same(model.head.weight, plain.head.weight, 0, 0, name)
        with full_params(model.head, writeback=True) as full:
            full["weight"].mul_(2)
        with torch.no_grad():
            plain.embed.weight.mul_(2)
        check_same(model, plain, name)
        streamed = {n: t.clone() for bucket in fsdp2.stream_full_params(model) for n, t in bucket.tensors.items()}
        for n, param in plain.named_parameters():
            assert_same(streamed[n], param.detach(), 0, 0, n)
        assert sum(len(group.params) for group in groups_below(model)) == len(list(plain.parameters()))
        model.unshard()
        if isinstance(model.head, FSDPModule):
            model.head.unshard()
            assert not isinstance(model.embed.weight, DTensor)
            model.head.reshard()
        model.reshard()
        train(model, plain, name, steps=1)


def two_values_for_one() -> None:
    """What is loaded under two names must be one value, as where one group has both names."""
    model, plain = pair(WAYS["the embedding first"])
    values = plain.state_dict()
    values["head.weight"] = values["head.weight"] * 2
    model.load_state_dict(values, assign=True)
    with pytest.raises(ValueError, match=r"head\.weight was tied to embed\.weight when fully_shard was applied"):
        model(own_rows(batch(0)))


def tied_after_sharding() -> None:
    """As transformers ties a model that it has loaded: the head is in the root, the embedding a group of its own."""
    plain = Language()
    model = copy.deepcopy(plain)
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    shard(model, WAYS["the head with the root"])
    model.head.weight = model.embed.weight
    train(model, plain)


TRAINING = [all_ways, what_stays_after_forward, recomputed, frozen, tied_after_sharding]
OTHERS = [accumulation, synchronised_in_one_user_only, means_over_weights, a_user_alone_and_left_out, mixed_precision]
OTHERS += [stepped_on_in_backward, left_out_on_some_ranks]
PARAMETERS = [state_dicts_and_copies, from_meta, whole_parameters, two_values_for_one]
LAUNCHES = {
    1: PARAMETERS,
    2: [*TRAINING, *OTHERS, *PARAMETERS],
    3: [left_out_on_some_ranks],
    4: [what_stays_after_forward, hsdp_and_replicas],
}


@pytest.mark.parametrize("world_size", LAUNCHES)
def test_tied_across_groups(world_size: int) -> None:
    run_checks(world_size, [(check.__name__, check) for check in LAUNCHES[world_size]], timeout=150)


# ---- what is communicated, and when memory is there


class Seen(Observer):
    """Notes what groups communicate, and which are unsharded meanwhile."""

    def __init__(self) -> None:
        self.gathers, self.reductions = list[str](), list[str]()
        self.unsharded = dict[str, bool]()

    def before_gather(self, group: Any) -> None:
        self.gathers.append(group.name)

    def before_reduce(self, group: Any) -> None:
        self.reductions.append(group.name)

    def forward_began(self, group: Any) -> None:
        owner = next(each for each in group.root.groups if each.params and each.params[0].names[0] == "embed.weight")
        self.unsharded[group.name] = owner.is_unsharded


@pytest.mark.parametrize("way", ["the embedding first", "the head with the root"])
@in_a_fork
def test_it_is_gathered_where_it_is_used_and_reduced_once(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head that the model's call finds, tied to an embedding that is sharded, uses that group only when it runs."""
    monkeypatch.setattr(large_submodules, "MIN_BYTES", 1)
    with fake_world(2):
        model = Language()
        model.scale = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
        sharded = shard(model, WAYS[way])
        seen = Seen()
        require_state(sharded).root.add(seen)
        for _ in range(2):
            seen.gathers.clear()
            seen.reductions.clear()
            loss_of(sharded, batch(0)).backward()
        # Once for the embedding and once for the head; what is last in forward stays; for the embedding in backward.
        assert seen.gathers.count("embed") == 3
        assert seen.reductions.count("embed") == 1
        assert not seen.unsharded["blocks.1"]


# ---- refused


@in_a_fork
def test_users_without_a_common_root() -> None:
    with fake_world(2):
        model = Language()
        fully_shard(model.embed)
        fully_shard(model.head)
        with pytest.raises(RuntimeError, match=r"Linear: .* tied to some of Embedding \(weight, .*module around both"):
            model.head(torch.ones(2, WIDTH, dtype=torch.float64))
        fully_shard(model)
        loss_of(model, batch(0)).backward()


def test_a_part_of_it_cannot_be_kept_where_ranks_may_leave_it_out() -> None:
    with fake_world(4):
        model = Towers()
        fully_shard(model.first, reshard_after_forward=2)
        fully_shard(model.second, conditional=True)
        fully_shard(model)
        with pytest.raises(NotImplementedError, match=r"first has an int for reshard_after_forward.*conditional"):
            model(torch.ones(2, WIDTH, dtype=torch.float64))


@in_a_fork
def test_a_call_that_fails_leaves_the_owner_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(root: Any) -> None:
        raise MemoryError

    with fake_world(2):
        model = Language()
        fully_shard(model.embed)
        (group,) = require_state(model.embed).groups
        with monkeypatch.context() as patched:
            patched.setattr("fsdp2.engine.build.note_state", fail)
            with pytest.raises(MemoryError):
                fully_shard(model)
        assert [len(param.slots) for param in group.params] == [1] == [len(param.names) for param in group.params]
        assert group.sharing_states == ()
        model.embed(batch(0)).sum().backward()
        assert model.embed.weight.grad is not None
