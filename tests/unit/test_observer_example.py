"""Tests that the example of an observer in fsdp2/README.md runs as written, and prints what the README says."""

import re
from pathlib import Path
from typing import Any

import pytest

from helpers import extensions_restored, fake_world

HEADING = "## Add an observer"
ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "fsdp2" / "README.md"


def blocks(kind: str) -> list[str]:
    """Returns the code blocks of one language ("" of none) below the heading."""
    section = README.read_text().partition(HEADING)[2].partition("\n## ")[0]
    found = re.findall(r"^```(\w*)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return [text for language, text in found if language == kind]


def test_the_example_runs_as_written(capsys: pytest.CaptureFixture[str]) -> None:
    observer, program = blocks("python")
    (expected,) = blocks("")
    names: dict[str, Any] = {"__name__": "example"}
    with extensions_restored(), fake_world(4):  # the observer goes with the test
        exec(compile(observer, "observer", "exec"), names)
        exec(compile(program, "program", "exec"), names)
    assert capsys.readouterr().out.splitlines() == expected.splitlines()


def test_the_example_is_short() -> None:
    lines = [line for line in blocks("python")[0].splitlines() if line.strip()]
    assert len(lines) <= 20
