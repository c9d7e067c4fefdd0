"""Tests that a root calls the observers that follow an event, in their order, and no others."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import fully_shard
from fsdp2.engine.events import EVENTS, Change, Events, Observer
from fsdp2.engine.state import require_state
from helpers import fake_world

ROOT = Path(__file__).resolve().parents[2]


class Noting(Observer):
    """Notes what it is told of in a list that several may share."""

    def __init__(self, name: str, noted: list[str]) -> None:
        self.name, self.noted = name, noted

    def attached(self, root: Any) -> None:
        self.noted.append(f"{self.name} attached")

    def detached(self, root: Any) -> None:
        self.noted.append(f"{self.name} detached")

    def pass_began(self, root: Any) -> None:
        self.noted.append(f"{self.name} pass_began")


class Reducing(Noting):
    def before_reduce(self, group: Any) -> None:
        self.noted.append(f"{self.name} before_reduce")


@pytest.fixture
def root() -> Iterator[Any]:
    with fake_world(4):
        model = nn.Sequential(nn.Linear(4, 4))
        yield require_state(fully_shard(model, mesh=init_device_mesh("cpu", (4,)))).root


def happen(events: Events, *names: str) -> None:
    for name in names:
        for notify in getattr(events, name):
            notify(None)


def test_an_observer_is_called_in_order_for_the_events_that_it_overrides() -> None:
    noted: list[str] = []
    events = Events([Reducing("first", noted), Noting("second", noted)])
    happen(events, "pass_began", "before_reduce", "before_gather")
    assert noted == ["first pass_began", "second pass_began", "first before_reduce"]
    assert not events.before_gather


def test_an_observer_that_is_added_stands_behind_another_one_or_behind_all() -> None:
    noted: list[str] = []
    first, second, third, last = (Noting(name, noted) for name in ("first", "second", "third", "last"))
    events = Events([first, third])
    events.add(second, behind=first)
    events.add(last)
    assert events.observers == (first, second, third, last)
    happen(events, "pass_began")
    assert noted == [f"{name} pass_began" for name in ("first", "second", "third", "last")]
    events.remove(second)
    assert events.observers == (first, third, last)


def test_an_observer_is_told_when_it_begins_and_ends_to_follow(root: Any) -> None:
    noted: list[str] = []
    before, group = root.events.observers, root.groups[0]
    first, second = Noting("first", noted), Noting("second", noted)
    root.observe([*before, first])
    root.add(second)
    assert noted == ["first attached", "second attached"]
    assert group.events.observers == root.events.observers == (*before, first, second)
    assert root.events.of(Noting) is second
    noted.clear()
    root.state.modules[0](torch.ones(1, 4))
    assert noted == ["first pass_began", "second pass_began"]
    noted.clear()
    root.observe([*before, second])
    root.remove(second)
    root.remove(second)  # which does not follow any more
    assert noted == ["first detached", "second detached"]
    assert group.events.observers == before
    root.state.modules[0](torch.ones(1, 4))
    assert len(noted) == 2


def test_to_add_and_remove_forgets_nothing_of_what_forwards_have_kept(root: Any) -> None:
    """They may come in the middle of a pass; other observers (`observe`) come between passes."""
    root.state.modules[0](torch.ones(1, 4))
    group = root.groups[0]
    counted = group.unsharded.references
    assert counted is not None
    other = Noting("other", [])
    root.add(other)
    root.remove(other)
    assert group.unsharded.references is counted
    root.observe(root.events.observers)
    assert group.unsharded.references is None


def test_an_event_in_which_an_observer_leaves_reaches_the_others() -> None:
    noted: list[str] = []

    class Once(Noting):
        def pass_began(self, root: Any) -> None:
            super().pass_began(root)
            events.remove(self)

    events = Events([Once("once", noted), Noting("always", noted)])
    happen(events, "pass_began", "pass_began")
    assert noted == ["once pass_began", "always pass_began", "always pass_began"]


def test_a_pass_that_fails_says_which_it_was(root: Any) -> None:
    found: list[bool] = []

    class Failures(Observer):
        def pass_failed(self, root: Any, in_backward: bool) -> None:
            found.append(in_backward)

    def fail(*_: Any) -> None:
        raise ValueError("on purpose")

    root.add(Failures())
    (model,) = root.state.modules
    hook = model[0].register_forward_hook(fail)
    with pytest.raises(ValueError, match="on purpose"):
        model(torch.ones(1, 4))
    hook.remove()
    assert found == [False]
    x = torch.ones(1, 4, requires_grad=True)
    x.register_hook(fail)  # behind the backward of the module
    with pytest.raises(ValueError, match="on purpose"):
        model(x).sum().backward()
    model(torch.ones(1, 4))  # which notices it: autograd does not say so
    assert found == [False, True]


def test_a_group_that_is_rebuilt_says_what_a_user_has_replaced(root: Any) -> None:
    found: list[list[str]] = []

    class Replaced(Observer):
        def changed(self, group: Any, change: Change, replaced: Any) -> None:
            if change is not Change.PARAMETERS:
                assert not replaced
                return
            assert all(parameter is not param.unsharded for param, parameter in replaced.items())
            found.append([param.name for param in replaced])

    root.add(Replaced())
    (model,) = root.state.modules
    model(torch.ones(1, 4))
    assert not found
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    model(torch.ones(1, 4))
    assert found == [["0.weight"]]
    model.double()
    assert sorted(found[-1]) == ["0.bias", "0.weight"]


def test_an_unknown_event_is_an_error() -> None:
    with pytest.raises(AttributeError, match="pass_begun is no event of fsdp2; there are pass_began, pass_ended"):
        _ = Events().pass_begun


def test_each_event_has_a_follower_in_the_package() -> None:
    """An event that nobody follows is no event."""
    followed = {name for cls in below(Observer) if cls.__module__.startswith("fsdp2.") for name in vars(cls)}
    assert followed.issuperset(EVENTS)


def test_the_readme_lists_the_events_in_their_order() -> None:
    section = (ROOT / "fsdp2" / "README.md").read_text().partition("## The interface")[2].partition("\n## ")[0]
    table = section.partition("| of | events |")[2].partition("\n\n")[0]
    cells = [line.split(" | ")[1] for line in table.splitlines() if " | " in line]
    assert tuple(re.findall(r"`(\w+)`", " ".join(cells))) == EVENTS


def below(cls: type) -> list[type]:
    return [each for sub in cls.__subclasses__() for each in (sub, *below(sub))]
