"""Tests the command line `python -m fsdp2`: help, tables for terminals, and words that it does not know."""

import os
import re
import subprocess
import sys

import pytest
import torch

import fsdp2
from fsdp2.__main__ import main
from fsdp2.checks.table import TABLE, describe_checks
from fsdp2.dtensor.fixes import describe_fixes
from fsdp2.dtensor.table import FIXES


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["fsdp2", *arguments])
    monkeypatch.setattr(os, "execv", lambda path, command: pytest.fail(f"started {command}"))
    try:
        main()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 1
    return 0


@pytest.mark.parametrize("word", ["--help", "-h", "help"])
def test_help_is_its_own(word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, word) == 0
    text = capsys.readouterr().out
    for command in ("script.py ARGUMENTS", "fsdp2 fixes", "fsdp2 checks", "fsdp2 plan", "--version"):
        assert command in text


def test_help_in_a_process_of_its_own() -> None:
    """Python has options of these names, too."""
    result = subprocess.run([sys.executable, "-m", "fsdp2", "--help"], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0
    assert "python -m fsdp2 plan" in result.stdout


@pytest.mark.parametrize("word", ["--version", "-V"])
def test_releases(word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, word) == 0
    text = capsys.readouterr().out
    assert re.fullmatch(rf"fsdp2 {fsdp2.__version__}, torch {re.escape(torch.__version__)}, Python 3\.\d+\.\d+\n", text)


@pytest.mark.parametrize(
    ("word", "meant"),
    [("chekcs", "checks"), ("fix", "fixes"), ("plna", "plan"), ("trian.py", None), ("no/such/file.py", None)],
)
def test_unknown_words(
    word: str, meant: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, word, "--lr", "1") == 2
    text = capsys.readouterr().err
    assert re.search(f"expected a script, or one of fixes, checks, plan, help; got '{word}', which is no file", text)
    assert ("Did you mean" in text) == (meant is not None)
    if meant:
        assert f"`python -m fsdp2 {meant}`" in text


@pytest.mark.parametrize("command", ["fixes", "checks", "plan"])
def test_commands_have_help(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, command, "--help") == 0
    assert f"usage: python -m fsdp2 {command}" in capsys.readouterr().out


@pytest.mark.parametrize("width", [60, 100, 400])
@pytest.mark.parametrize("command", ["fixes", "checks"])
def test_tables_have_one_line_each(
    command: str, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    names = [fix.name for fix in FIXES] if command == "fixes" else [row.name for row in TABLE]
    assert call(monkeypatch, command) == 0
    head, *lines = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert head.startswith("name")
    assert len(lines) == len(names)
    assert all(len(line) <= width for line in (head, *lines))
    assert all(line.startswith(name) for line, name in zip(lines, names, strict=True))
    assert any(line.endswith("...") for line in lines) == (width < 400)


def test_all_about_one_and_all_as_markdown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "fixes", "--markdown") == 0
    assert capsys.readouterr().out == describe_fixes() + "\n"
    assert call(monkeypatch, "checks", "--markdown") == 0
    assert capsys.readouterr().out == describe_checks() + "\n"
    row, fix = TABLE[1], FIXES[1]
    assert call(monkeypatch, "checks", row.name, TABLE[2].name) == 0
    text = capsys.readouterr().out
    for each in (row.name, row.catches, row.communicates, row.costs, TABLE[2].catches):
        assert each in text
    assert call(monkeypatch, "fixes", fix.name) == 0
    text = capsys.readouterr().out
    for each in (fix.name, fix.torch, fix.instead):
        assert each in text
    assert call(monkeypatch, "checks", "haeders") == 2
    assert "expected names among" in capsys.readouterr().err
