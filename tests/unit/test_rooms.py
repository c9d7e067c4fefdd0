"""Tests where the engine enters the rooms around it, and what of the engine these import, against one table.

A room is a folder of abilities that a plain step does not run. The engine may import a room's doors, and no other file
of it. A room may import the files of the engine that its row names: the fewer and the simpler these are, the less one
has to know of the engine to read the room. Imports for types alone do not count, those inside functions do.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from test_source import PACKAGE, Source, read


class Room(NamedTuple):
    """A row of the table: files without their `.py`."""

    doors: str
    may_import: str


ROOMS = {
    # ways to communicate
    "collectives": Room(doors="choose", may_import="comm events layout mesh owners"),
    # compressed gradients and weights
    "codecs": Room(doors="choose_sum", may_import="codec comm layout"),
    # streams, memory on the CPU, simulated devices
    "devices": Room(doors="offload simulation staged_shards streams write_notices", may_import="mesh policy"),
    # kinds of parameters, and what users do to them
    "parameters": Room(
        doors="cast_buffers cut_graphs empty_memory freed parameter_methods replacements secondary_shards subclasses "
        "tensor_parallel ties",
        may_import="comm events gather group group_parameters layout mesh owners parameter placeholders policy state",
    ),
    # how users' code calls sharded modules
    "calls": Room(
        doors="callers compiled_backward forward_method inputs nested transforms user_classes user_code",
        may_import="autograd group state step",
    ),
    # what ranks tell each other, for features and checks
    "ranks": Room(doors="", may_import="comm events group mesh policy"),
    # private names of torch: nothing of fsdp2 lies below them
    "torch_private": Room(doors="internals rare_internals", may_import=""),
}


def imports(source: Source) -> Iterator[tuple[str, str]]:
    """Yields (folder, file) of each module of the package that a file imports at run time."""
    for _, dotted, _, is_at_run_time in source.imports:
        parts = dotted.split(".")
        if is_at_run_time and parts[0] == "fsdp2" and len(parts) > 2:
            yield parts[1], parts[2]


def entered(room: str, sources: list[Source]) -> set[str]:
    """Returns the files of a room that these sources import."""
    return {file for source in sources for folder, file in imports(source) if folder == room}


def folder(name: str) -> list[Source]:
    return [read(path) for path in sorted((PACKAGE / name).glob("*.py"))]


@pytest.mark.parametrize("room", ROOMS)
def test_the_engine_enters_by_the_doors(room: str) -> None:
    assert entered(room, folder("engine")) == {*ROOMS[room].doors.split()}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_knows_what_its_row_says_of_the_engine(room: str) -> None:
    assert entered("engine", folder(room)) == {*ROOMS[room].may_import.split()}


@pytest.mark.parametrize("room", ROOMS)
def test_the_docstring_of_a_room_names_its_doors(room: str) -> None:
    text = ast.get_docstring(read(PACKAGE / room / "__init__.py").tree) or ""
    missing = [door for door in ROOMS[room].doors.split() if f"`{door}" not in text]
    assert not missing, f"fsdp2/{room}/__init__.py does not say that the engine enters by {missing}"


def test_each_folder_that_the_engine_enters_is_a_room() -> None:
    found = {room for source in folder("engine") for room, _ in imports(source)}
    assert found <= {*ROOMS, "engine"}


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("from ..collectives.gloo import PairwiseComm", {"gloo"}),
        ("from ..collectives import gloo", {"gloo"}),
        ("def f():\n    from ..collectives import gloo", {"gloo"}),
        ("if TYPE_CHECKING:\n    from ..collectives import gloo", set()),
        ("from .comm import Comm", set()),
    ],
)
def test_how_a_file_enters(line: str, expected: set[str]) -> None:
    assert entered("collectives", [Source(line, "engine/group.py")]) == expected


def test_rooms_exist() -> None:
    for room, row in ROOMS.items():
        files = {path.stem for path in Path(PACKAGE / room).glob("*.py")}
        assert {*row.doors.split()} <= files
