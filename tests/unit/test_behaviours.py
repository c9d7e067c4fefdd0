"""Tests that the table of behaviours that PyTorch's tests pin (tests/BEHAVIOURS.md) names tests that exist."""

import ast
import functools
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ROW = re.compile(r"\|(?P<behaviour>[^|]*)\|(?P<tests>[^|]*)\|")
NAMED = re.compile(r"`((?:unit|trace|ranks|cuda)/[^`]*)`")


def rows(text: str) -> list[tuple[str, str]]:
    """(behaviour, tests) of each row but headings."""
    found = []
    for line in text.splitlines():
        if not line.startswith("|"):
            continue
        row = ROW.fullmatch(line)
        assert row, f"expected two columns: {line}"
        cells = row["behaviour"].strip(), row["tests"].strip()
        if cells not in (("behaviour", "test"), ("---", "---")):
            found.append(cells)
    return found


@functools.cache
def names_in(file: Path) -> set[str]:
    """Tests, and functions and classes that something in the file uses: a check that nobody runs does not count."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    defined = [node for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    return {n.name for n in defined if n.name.startswith("test_") or n.name in used or n.decorator_list}


def problem(behaviour: str, tests: str) -> str | None:
    """What is wrong with a row."""
    if not behaviour:
        return "no behaviour"
    if tests.startswith("not offered: "):
        return None if len(tests) > len("not offered: ") + 20 else "no reason"
    named = NAMED.findall(tests)
    if not named:
        return "no test"
    for each in named:
        path, _, name = each.partition("::")
        if not (TESTS / path).is_file():
            return f"no file {path}"
        if name and name not in names_in(TESTS / path):
            return f"no {name} in {path}"
    return None


def test_every_row_names_tests_that_exist() -> None:
    found = rows((TESTS / "BEHAVIOURS.md").read_text())
    assert len(found) > 90
    wrong = [f"{behaviour}: {text}" for behaviour, tests in found if (text := problem(behaviour, tests))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (("Something", ""), "no test"),
        (("", "`unit/test_param.py`"), "no behaviour"),
        (("Something", "`unit/test_nothing.py`"), "no file unit/test_nothing.py"),
        (("Something", "`unit/test_param.py`, `unit/test_param.py::test_no`"), "no test_no in unit/test_param.py"),
        (("Something", "not offered: no"), "no reason"),
        (("Something", "not offered: torch has removed it, and so have we"), None),
        (("Something", "`unit/test_param.py`"), None),
    ],
    ids=str,
)
def test_wrong_rows_are_found(row: tuple[str, str], expected: str | None) -> None:
    assert problem(*row) == expected
