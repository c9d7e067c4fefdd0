"""At which passes checks check the forwards of a group, and that nothing of them runs in the others."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp2 import MixedPrecisionPolicy, fully_shard, set_checks
from fsdp2.checks.due import ForwardCheck, ForwardChecks, _Forwards, judge_at_end
from fsdp2.engine.events import Events
from fsdp2.engine.state import groups_of, require_state
from helpers import fake_world

STEPS, MARKS = 40, (1, 2, 4, 8, 16, 32)


class Noting(ForwardCheck):
    """Notes of which groups, in which pass, a check is told."""

    def __init__(self) -> None:
        self.number = 0
        self.noted: dict[str, list[int]] = {}

    def note(self, what: str, group: Any) -> None:
        self.noted.setdefault(f"{what} {group}", []).append(self.number)

    def before_cast(self, state: Any, inputs: Any, dtype: torch.dtype) -> None:
        self.note("cast", state)

    def before_forward(self, group: Any) -> None:
        self.note("before", group)

    def after_forward(self, group: Any) -> None:
        self.note("after", group)

    def after_failure(self, group: Any) -> None:
        self.note("failed", group)


class Net(nn.Module):
    """`rare` runs in the passes that `runs_rare` names; a module that fails raises ValueError."""

    def __init__(self) -> None:
        super().__init__()
        self.often, self.rare = nn.Linear(4, 4), nn.Linear(4, 4)
        self.runs_rare = self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.often(x)
        if self.fails:
            raise ValueError("on purpose")
        return self.rare(x) if self.runs_rare else x


@pytest.fixture
def net() -> Iterator[Any]:
    with fake_world(4):
        model, mesh = Net(), init_device_mesh("cpu", (4,))
        for module in (model.often, model.rare, model):
            fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
        yield model


def noting(model: nn.Module, *rest: ForwardCheck) -> tuple[Noting, ForwardChecks]:
    """Has the root of `model` tell such a check, and no other observer."""
    root, noted = require_state(model).root, Noting()
    checks = ForwardChecks(root)
    root.observe([noted, *rest, checks])
    return noted, checks


def run(model: Any, noted: Noting, numbers: range, rare: tuple[int, ...] = ()) -> None:
    for noted.number in numbers:
        model.runs_rare = noted.number in rare
        model(torch.ones(2, 4))


def follows(events: Events) -> set[str]:
    """Returns the events of forwards that the ForwardChecks follow."""
    names = ("inputs_given", "forward_began", "forward_ended", "pass_ended")
    return {
        name
        for name in names
        for each in getattr(events, name)
        if isinstance(each.__self__, (ForwardChecks, _Forwards))
    }


def test_a_group_is_checked_in_its_first_forward_and_in_the_next_one_after_each_mark(net: Any) -> None:
    noted, _ = noting(net)
    rare = (3, 5, 6, 7, 20, 21, 22, 39)
    run(net, noted, range(1, STEPS + 1), rare)
    assert noted.noted["before often"] == noted.noted["after often"] == [*MARKS]
    assert noted.noted["before root"] == noted.noted["after root"] == noted.noted["cast root"] == [*MARKS]
    # Of the marks 1 and 2, 4, 8 and 16, 32.
    assert noted.noted["before rare"] == noted.noted["after rare"] == [3, 5, 20, 39]


def test_no_event_of_a_forward_is_followed_while_no_group_is_due(net: Any) -> None:
    noted, _ = noting(net)
    root = require_state(net).root
    found = {}
    for number in range(1, 10):
        run(net, noted, range(number, number + 1), rare=range(1, 100))  # type: ignore[arg-type]
        found[number] = follows(root.events)
    assert not any(found.values()), found
    run(net, noted, range(16, 17))
    assert not follows(root.events)
    run(net, noted, range(17, 23))
    assert root.events.of(ForwardChecks)._passes == 16
    assert follows(root.events), "one that does not run is due until it does"


def test_numbers_are_judged_when_the_pass_ends(net: Any) -> None:
    judged: list[list[int]] = []

    class Reads(ForwardCheck):
        def after_forward(self, group: Any) -> None:
            judge_at_end(group.root, torch.tensor([1, 2]), judged.append)
            assert "pass_ended" in follows(group.root.events)

    noted, _ = noting(net, Reads())
    run(net, noted, range(1, 5))
    assert judged == [[1, 2]] * 2 * 3, "of two groups, at the passes 1, 2 and 4"
    net.fails = True
    run_failing(net)
    assert not require_state(net).root.events.of(ForwardChecks).forwards.waiting


def run_failing(model: Any) -> None:
    with pytest.raises(ValueError, match="on purpose"):
        model(torch.ones(2, 4))


def test_a_forward_that_fails_leaves_nothing_under_way(net: Any) -> None:
    noted, checks = noting(net)
    net.fails = True
    run_failing(net)
    assert "after root" not in noted.noted
    assert "failed root" in noted.noted
    assert not checks.forwards.running
    net.fails = False
    run(net, noted, range(2, 4))
    assert noted.noted["after root"] == [2]
    assert not checks.forwards.running


def test_a_check_that_raises_is_told_of_the_next_forward_too(net: Any) -> None:
    class Refuses(ForwardCheck):
        refuses = True

        def before_forward(self, group: Any) -> None:
            if self.refuses:
                raise RuntimeError("refused")

    refuses = Refuses()
    noted, _ = noting(net, refuses)
    for noted.number in range(1, 4):
        with pytest.raises(RuntimeError, match="refused"):
            net(torch.ones(2, 4))
    refuses.refuses = False
    run(net, noted, range(4, 8))
    assert noted.noted["after root"] == [4]


def test_at_the_debug_level_each_forward_is_checked(net: Any) -> None:
    noted, checks = noting(net)
    run(net, noted, range(1, 6))
    root = require_state(net).root
    try:
        set_checks("debug")
        root.observe([noted, checks])
        checks.refresh()
        run(net, noted, range(6, 9))
        set_checks("default")
        root.observe([noted, checks])
        run(net, noted, range(9, 12))
    finally:
        set_checks("default")
    assert noted.noted["before often"] == noted.noted["cast root"] == [1, 2, 4, 6, 7, 8, 9]


def test_settings_that_change_in_each_step_make_nothing_due(net: Any) -> None:
    """As those of an accumulation do."""
    noted, _ = noting(net)
    for number in range(1, 8):
        net.set_requires_gradient_sync(number % 2 == 0)
        run(net, noted, range(number, number + 1))
    assert noted.noted["before often"] == [1, 2, 4]


def test_a_module_that_is_called_by_itself_begins_a_pass(net: Any) -> None:
    noted, _ = noting(net)
    for noted.number in range(1, 9):
        net.often(torch.ones(2, 4))
        net.rare(torch.ones(2, 4))
    # The passes 1, 2, 4, 8 and 16: of the first module the odd ones, of the second the even ones.
    assert noted.noted["before often"] == [1, 2, 3, 5]
    assert noted.noted["before rare"] == [1, 2, 4, 8]
    assert groups_of(net)[0] in require_state(net).root.events.of(ForwardChecks).due, "the root has not run"
