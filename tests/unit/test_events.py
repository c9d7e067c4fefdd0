"""Tests that a root calls the observers that follow an event, in their order, and no others."""

from typing import Any

import pytest

from fsdp2.engine.events import Events, Observer


class Noting(Observer):
    """Notes what it is told of in a list that several may share."""

    ignored = frozenset({"gathered"})

    def __init__(self, name: str, noted: list[str]) -> None:
        self.name, self.noted = name, noted

    def pass_began(self, root: Any) -> None:
        self.noted.append(f"{self.name} pass_began")

    def gathered(self, group: Any) -> None:
        self.noted.append(f"{self.name} gathered")


def happen(events: Events, *names: str) -> None:
    for name in names:
        for notify in getattr(events, name):
            notify(None)


def test_an_observer_is_called_in_order_for_the_events_it_follows() -> None:
    noted: list[str] = []
    first, second = Noting("first", noted), Noting("second", noted)
    events = Events([first, second])
    happen(events, "pass_began", "gathered")
    assert noted == ["first pass_began", "second pass_began"]
    noted.clear()
    events.follow(second, "gathered")
    events.follow(first, "gathered")
    happen(events, "gathered")
    assert noted == ["first gathered", "second gathered"]
    noted.clear()
    events.ignore(first, "gathered", "pass_began")
    happen(events, "pass_began", "gathered")
    assert noted == ["second pass_began", "second gathered"]
    assert Events([first, second]).pass_began == [second.pass_began], "observers are kept when levels change"
    assert Noting("third", noted).ignored == {"gathered"}


def test_an_event_in_which_an_observer_unfollows_reaches_the_others() -> None:
    noted: list[str] = []

    class Once(Noting):
        def pass_began(self, root: Any) -> None:
            super().pass_began(root)
            events.ignore(self, "pass_began")

    events = Events([Once("once", noted), Noting("always", noted)])
    happen(events, "pass_began", "pass_began")
    assert noted == ["once pass_began", "always pass_began", "always pass_began"]


def test_an_unknown_event_is_an_error() -> None:
    with pytest.raises(AttributeError, match="pass_begun is no event of fsdp2; there are attached, pass_began"):
        _ = Events().pass_begun
