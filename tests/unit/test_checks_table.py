"""The table of checks and its switches: every check is documented, and some test shows that it catches its fault."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp2.checks import levels, table
from fsdp2.checks.due import Check, RankObserver, is_check_time, next_check_time
from fsdp2.engine.events import EVENTS, Observer

TESTS = Path(__file__).resolve().parents[1]
CAUGHT_ELSEWHERE = {"headers": "ranks/test_named_collectives.py"}


@pytest.mark.parametrize("row", table.TABLE, ids=lambda row: row.name)
def test_every_check_says_what_it_catches_when_it_communicates_and_what_it_costs(row: table.Row) -> None:
    assert all(text and not text.endswith(".") for text in (row.catches, row.communicates, row.costs))
    assert row.cls is None or issubclass(row.cls, Check)
    assert row.cls is None or re.match(r"[A-Z]\w+s ", row.cls.__doc__ or ""), "its docstring says what it does"


@pytest.mark.parametrize("name", levels.NAMES)
def test_some_test_shows_that_it_catches_its_fault(name: str) -> None:
    text = (TESTS / CAUGHT_ELSEWHERE.get(name, "ranks/test_checks.py")).read_text()
    assert f'"{name}"' in text or name in CAUGHT_ELSEWHERE


def test_the_table_lists_what_can_be_switched_and_every_class_of_check() -> None:
    assert tuple(row.name for row in table.TABLE) == levels.NAMES
    classes = [row.cls for row in table.TABLE if row.cls is not None]
    assert len(set(classes)) == len(classes)
    ours = [each for each in _below(Check) if each.__module__.startswith("fsdp2.")]
    assert set(classes) == {each for each in ours if not _below(each)}


def _below(cls: type) -> list[type]:
    return [each for sub in cls.__subclasses__() for each in (sub, *_below(sub))]


def test_observers_follow_events_that_there_are() -> None:
    for make in table.CHECKS:
        assert callable(make)
    for cls in _below(Observer):
        followed = [name for name in vars(cls) if name in (*EVENTS, "attached")]
        assert cls.__module__.startswith("fsdp2.checks") is False or followed or issubclass(cls, (Check, RankObserver))


def test_checks_are_due_at_the_times_that_are_said_beforehand() -> None:
    times = [n for n in range(1, 600) if is_check_time(n)]
    assert times == [1, 2, 4, 8, 16, 32, 64, 128, 256, 384, 512]
    assert [next_check_time(n) for n in (0, *times[:-1])] == times
    assert all(is_check_time(n, always=True) for n in range(1, 600))


@pytest.fixture
def fresh_levels(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    levels._levels.cache_clear()
    monkeypatch.delenv(levels.VARIABLE, raising=False)
    yield monkeypatch
    levels._levels.cache_clear()


def test_all_are_at_default_unless_somebody_chooses(fresh_levels: pytest.MonkeyPatch) -> None:
    assert {levels.level_of(name) for name in levels.NAMES} == {"default"}
    table.set_checks("off")
    assert not any(map(levels.is_on, levels.NAMES))
    table.set_checks("debug", "unseen writes", "entry points")
    assert [name for name in levels.NAMES if levels.is_on(name)] == ["unseen writes", "entry points"]
    table.set_checks({"unseen writes": "off", "headers": "default"})
    assert [levels.level_of(name) for name in ("unseen writes", "entry points", "headers")] == [
        "off",
        "debug",
        "default",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", {}),
        ("off", dict.fromkeys(levels.NAMES, "off")),
        ("entry points=off, unseen writes = debug", {"entry points": "off", "unseen writes": "debug"}),
        ("debug,headers=off", {**dict.fromkeys(levels.NAMES, "debug"), "headers": "off"}),
    ],
)
def test_the_environment_chooses(fresh_levels: pytest.MonkeyPatch, text: str, expected: dict[str, str]) -> None:
    fresh_levels.setenv(levels.VARIABLE, text)
    found = {name: levels.level_of(name) for name in levels.NAMES}
    assert found == {**dict.fromkeys(levels.NAMES, "default"), **expected}


@pytest.mark.parametrize("text", ["on", "entry point=off", "entry points=sometimes", "off=", "=off,", "entry points"])
def test_the_environment_may_name_nothing_else(fresh_levels: pytest.MonkeyPatch, text: str) -> None:
    fresh_levels.setenv(levels.VARIABLE, text)
    with pytest.raises(ValueError, match=r"FSDP2_CHECKS: expected off, default, debug.* got .* Names: "):
        levels.is_on("headers")


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        (("sometimes",), ValueError, "level: expected one of off, default, debug, got 'sometimes'"),
        ((True,), ValueError, "level: expected one of off, default, debug, got True"),
        (("off", "unseen write"), ValueError, "names: expected some of .*unseen writes.*; got unseen write"),
        (({"headers": "never"},), ValueError, "got 'never' for headers"),
        (({"header": "off"},), ValueError, "got header"),
        (({"headers": "off"}, "headers"), TypeError, "names: expected none besides a dict"),
    ],
)
def test_unknown_names_and_levels_change_nothing(
    fresh_levels: pytest.MonkeyPatch, arguments: tuple[object, ...], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        table.set_checks(*arguments)  # type: ignore[arg-type]
    assert {levels.level_of(name) for name in levels.NAMES} == {"default"}


def test_the_table_is_printed_with_what_is_in_force(fresh_levels: pytest.MonkeyPatch) -> None:
    fresh_levels.setenv(levels.VARIABLE, "moved data=off")
    _, _, *lines = table.describe_checks().splitlines()
    assert len(lines) == len(table.TABLE)
    off = [line for line in lines if line.split(" | ")[1] == "off"]
    assert len(off) == 1
    assert off[0].startswith("| moved data | off |")
