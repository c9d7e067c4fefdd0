"""Tests that the script that runs the tests on several releases of torch counts the results that pytest reports."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from run_matrix import ROOT, Outcome, read, table

TESTS = """
import pytest

def test_passes(): pass
def test_passes_too(): pass
def test_fails(): assert False
def test_is_skipped(): pytest.skip("on purpose")

@pytest.fixture
def broken(): raise ValueError("on purpose")
def test_has_an_error(broken): pass
"""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [((), Outcome(passed=2, failed=2, skipped=1)), (("-k", "nothing"), Outcome(note="pytest left with 5"))],
    ids=["all", "none"],
)
def test_reports_are_counted(tmp_path: Path, arguments: tuple[str, ...], expected: Outcome) -> None:
    tests, report = tmp_path / "test_some.py", tmp_path / "report.xml"
    tests.write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}"]
    code = subprocess.run([*command, *arguments, tests], cwd=tmp_path, capture_output=True, timeout=60).returncode
    outcome = read(report, code)
    assert dataclasses.replace(outcome, seconds=expected.seconds) == expected
    assert not outcome.is_good
    assert Outcome(passed=2).is_good


def test_the_table_names_every_cell() -> None:
    lines = table({("3.10", "1.0"): Outcome(3, 1, 2, 4.6), ("3.14", "2.0"): Outcome(note="not installed")}).splitlines()
    assert lines[2:] == ["| 3.10 | 1.0 | 3 | 1 | 2 | 5 |  |", "| 3.14 | 2.0 | 0 | 0 | 0 | 0 | not installed |"]


def test_cells_that_cannot_run_say_so(tmp_path: Path) -> None:
    """No such Python; with --as-they-are, no such environment."""
    command = [sys.executable, ROOT / "tests" / "run_matrix.py", "--torch", "1.0", "--environments", tmp_path]
    for more, note in (((), "there is no such Python"), (("--as-they-are",), "there is no such environment")):
        done = subprocess.run([*command, "--python", "3.99", *more], capture_output=True, text=True, timeout=60)
        assert done.returncode == 1
        assert f"| 3.99 | 1.0 | 0 | 0 | 0 | 0 | not run: {note} |" in done.stdout
