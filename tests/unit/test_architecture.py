"""Tests that fsdp2/ARCHITECTURE.md is two pages, and that what it states is so: counts, doors, phases, names."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from test_rooms import ROOMS

from fsdp2.engine.events import EVENTS
from fsdp2.engine.policy import TRANSITIONS

PACKAGE = Path(__file__).resolve().parents[2] / "fsdp2"
TEXT = (PACKAGE / "ARCHITECTURE.md").read_text()
ENGINE = PACKAGE / "engine"
PATH = ("step", "group", "unsharded", "gather", "reduce", "schedule")


def rows(heading: str) -> list[list[str]]:
    """Returns the cells of each row of the table under these column names."""
    table = TEXT.partition(f"| {heading} |")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in table.splitlines()[2:]]


def defined() -> Iterator[str]:
    """Yields `name`, `Class` and `Class.method` of the whole package."""
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            name = getattr(node, "name", None)
            if name:
                yield name
            if isinstance(node, ast.ClassDef):
                for each in node.body:
                    yield f"{name}.{getattr(each, 'name', '')}"


def test_it_is_two_pages() -> None:
    assert len(TEXT.split()) <= 1200


def test_counts() -> None:
    files = list(ENGINE.glob("*.py"))
    assert f"`engine/` has {len(files)} files" in TEXT
    lines = sum(len((ENGINE / f"{name}.py").read_text().splitlines()) for name in PATH)
    (stated,) = re.findall(r"about ([\d,]+) lines", TEXT)
    assert abs(int(stated.replace(",", "")) / lines - 1) < 0.05, lines
    assert f"{len(EVENTS)} events" in TEXT


def test_rooms_and_their_doors() -> None:
    found = {
        row[0].strip("`/"): " ".join(re.findall(r"`(\w+)`", row[2])) for row in rows("room | what it is for | doors")
    }
    assert found == {name: room.doors for name, room in ROOMS.items()}


def test_phases() -> None:
    found = {row[0].partition(":")[0]: row[1] for row in rows("phase | may become")}
    assert found == {phase.name: ", ".join(each.name for each in later) for phase, later in TRANSITIONS.items()}


def test_names_exist() -> None:
    known = set(defined())
    named = re.findall(r"`([A-Z]\w+(?:\.\w+)?)`", TEXT)
    assert len(named) > 15
    assert [name for name in named if name not in known] == []
    files = [name for name in re.findall(r"`((?:\w+/)*\w+\.py)`", TEXT) if not name.startswith("tests/")]
    assert [name for name in files if not (list(PACKAGE.rglob(name)) or (PACKAGE / name).exists())] == []
