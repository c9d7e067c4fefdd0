"""Tests that the script that runs the tests on several releases of torch counts the results that pytest reports."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from run_matrix import Outcome, read, table

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


def test_the_table_names_every_release() -> None:
    lines = table({"1.0": Outcome(3, 1, 2, 4.6), "2.0": Outcome(note="not installed")}).splitlines()
    assert lines[2:] == ["| 1.0 | 3 | 1 | 2 | 5 |  |", "| 2.0 | 0 | 0 | 0 | 0 | not installed |"]
