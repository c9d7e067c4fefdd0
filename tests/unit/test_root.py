"""Tests that a model has one root, which its first use builds, and that building it does not communicate."""

import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fsdp2
from fsdp2 import fully_shard
from fsdp2.engine import events
from fsdp2.engine.events import Observer
from fsdp2.engine.owners import all_groups, outermost_of_thread
from fsdp2.engine.root import Root
from fsdp2.engine.state import require_state, root_of
from helpers import fake_world

DIM = 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)

    def forward(self, x: Any) -> Any:
        return self.inner(x)


@pytest.fixture(autouse=True)
def _world() -> Iterator[None]:
    with fake_world(2):
        yield


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Root]:
    """The roots that are built in a test."""
    found: list[Root] = []
    usual = Root.take_over

    def take_over(root: Root) -> None:
        found.append(root)
        usual(root)

    monkeypatch.setattr(Root, "take_over", take_over)
    return found


def sharded(num_blocks: int = 3) -> Any:
    model = nn.Sequential(*[Block() for _ in range(num_blocks)], nn.Linear(DIM, 2))
    for block in model[:num_blocks]:
        fully_shard(block)
    return fully_shard(model)


def test_a_model_has_one_root_that_its_first_forward_builds(built: list[Root]) -> None:
    model = sharded()
    model.set_requires_gradient_sync(True)
    assert not built
    model(torch.ones(1, DIM)).sum().backward()
    (root,) = built
    assert all(group.root is root for group in root.groups)
    assert [group.name for group in root.groups] == ["root", "0", "1", "2"]
    assert root is root_of(model) is root_of(model[0])


@pytest.mark.parametrize(
    "ask",
    [
        lambda model: repr(fsdp2.describe(model)),
        lambda model: model.state_dict(),
        lambda model: model.load_state_dict(model.state_dict()),
        lambda model: model.zero_grad(),
        lambda model: model.double(),
        lambda model: model.unshard(),
        lambda model: model.set_unsharded_budget(0),
        lambda model: model.set_optimizer_in_backward(torch.optim.SGD(model.parameters(), lr=0.1)),
        lambda model: bool(model._is_fsdp_managed_module),
        lambda model: copy.deepcopy(model),
        lambda model: fsdp2.check(model),
    ],
)
def test_one_rank_alone_may_ask_for_the_root(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No question makes a process group, and building a root sends nothing."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a rank alone communicates")

    model = sharded()
    usual = Root.take_over

    def take_over(root: Root) -> None:
        with monkeypatch.context() as patched:
            for name in ("new_group", "all_reduce", "all_gather_into_tensor", "split_group", "broadcast"):
                if hasattr(dist, name):
                    patched.setattr(dist, name, refuse)
            usual(root)

    monkeypatch.setattr(Root, "take_over", take_over)
    ask(model)
    assert require_state(model).root.state is require_state(model)


def test_an_outer_call_replaces_the_root_of_a_model_that_has_run(built: list[Root]) -> None:
    inner = Block()
    fully_shard(inner)
    inner(torch.ones(1, DIM)).sum().backward()
    model = fully_shard(nn.Sequential(inner, nn.Linear(DIM, 2)))
    before = built[0]
    (group,) = require_state(inner).groups
    assert group.built_root is None
    assert require_state(inner).built_root is None
    model(torch.ones(1, DIM)).sum().backward()
    assert len(built) == 2
    assert group.root is root_of(model) is not before
    assert group.name == "0"


def test_what_waits_for_shards_is_waited_for_before_the_root_is_replaced() -> None:
    inner, waited = Block(), []
    fully_shard(inner)
    root_of(inner).waits_before_read.append(waited.append)
    fully_shard(nn.Sequential(inner, nn.Linear(DIM, 2)))
    assert waited == require_state(inner).groups


def test_a_root_is_built_anew_after_an_observer_has_refused_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(Observer):
        def attached(self, root: Any) -> None:
            raise ValueError("on purpose")

    model, x = sharded(), torch.ones(1, DIM)
    usual = events.extensions()
    with events.chosen(observers=(*usual.observers, lambda root: Refusing())):
        for _ in range(2):
            with pytest.raises(ValueError, match="on purpose"):
                model(x)
            assert all(group.built_root is None for group in require_state(model).groups)
    model(x).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


def test_a_module_that_moves_to_another_model_stays_under_its_root() -> None:
    block = Block()
    fully_shard(block)
    first = fully_shard(nn.Sequential(block, nn.Linear(DIM, 2)))
    second = fully_shard(nn.Sequential(block, nn.Linear(DIM, 3)))
    root = root_of(second)
    assert root_of(first) is not root  # it is built last
    assert root_of(block) is root
    assert require_state(block).groups[0].root is root


def test_the_registry_knows_models_without_a_root_and_forgets_those_that_are_gone(built: list[Root]) -> None:
    model = sharded(1)
    groups = [group for state in (require_state(model), *require_state(model).inside) for group in state.groups]
    before = {*all_groups()} - {*groups}  # of models of other tests
    assert {*groups} <= {*all_groups()}
    assert require_state(model) in outermost_of_thread()
    assert not built
    del model, groups
    gc.collect()
    assert {*all_groups()} <= before


def test_replacements_before_the_first_use_are_known_when_ranks_compare() -> None:
    """Ranks compare what they have cut at first, unless a user has put something else there since."""
    from fsdp2.checks.model_facts import known_of

    model = sharded(1)
    (group,) = require_state(model[0]).groups
    at_first = known_of(group)
    model[0].inner.weight = nn.Parameter(model[0].inner.weight.detach().double())
    assert group.built_root is None
    assert group.adopt_replacements()
    assert [param.name for param in at_first.keys() - known_of(group).keys()] == ["0.inner.weight"]
