"""Tests the command line `python -m fsdp2`: help, tables for terminals, and words that it does not know."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fsdp2
from fsdp2.__main__ import main
from fsdp2.environment import facts
from fsdp2.tools.columns import aligned, ruled, wrapped

NAMES = ("plan", "merge", "diff", "simulate", "env")


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
    for command in ("script.py ARGUMENTS", "--version", *(f"fsdp2 {each}" for each in NAMES)):
        assert command in text


@pytest.mark.parametrize("word", ["--version", "-V"])
def test_releases(word: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, word) == 0
    text = capsys.readouterr().out
    assert re.fullmatch(rf"fsdp2 {fsdp2.__version__}, torch {re.escape(torch.__version__)}, Python 3\.\d+\.\d+\n", text)


@pytest.mark.parametrize(
    ("word", "meant"),
    [("enf", "env"), ("plna", "plan"), ("trian.py", None), ("no/such/file.py", None)],
)
def test_unknown_words(
    word: str, meant: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, word, "--lr", "1") == 2
    text = capsys.readouterr().err
    assert re.search(f"expected a script, or one of plan, .*simulate, env, help; got '{word}', which is no file", text)
    assert ("Did you mean" in text) == (meant is not None)
    if meant:
        assert f"`python -m fsdp2 {meant}`" in text


@pytest.mark.parametrize("command", NAMES)
def test_commands_have_help(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, command, "--help") == 0
    assert f"usage: python -m fsdp2 {command}" in capsys.readouterr().out


def test_a_plan_fits_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wide_models.py").write_text(
        "from torch import nn\ndef stack(): return nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    lines = {}
    for width in (80, 120, 400):
        monkeypatch.setenv("COLUMNS", str(width))
        assert call(monkeypatch, "plan", "wide_models:stack", "--ranks", "16", "--memory", "1MB") == 0
        lines[width] = capsys.readouterr().out.splitlines()
        assert max(map(len, lines[width])) <= width
    heads = [next(line for line in lines[width] if "setting" in line).split() for width in (80, 120)]
    assert {*heads[1]} - {*heads[0]} == {"forward", "peak", "sent", "exposed"} - {*heads[0]}
    assert len(lines[400]) < len(lines[80])


def test_cells_are_wrapped() -> None:
    rows = [("a", "head"), ("1234", "one two three four"), ("5", "six")]
    assert aligned(rows) == ["a     head", "1234  one two three four", "5     six"]
    assert aligned(rows, {0}, width=16) == ["   a  head", "1234  one two", "      three four", "   5  six"]
    assert ruled(rows, width=16)[1] == "-" * 16
    assert len(aligned([("word" * 10,)], width=20)) == 2
    assert wrapped("one two", 7) == ["one two"]


def test_env_has_what_a_report_needs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name, value in {"NCCL_DEBUG": "INFO", "FSDP2_LOG": "INFO", "WORLD_SIZE": "4", "MY_TOKEN": "secret"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("COLUMNS", raising=False)
    assert call(monkeypatch, "env") == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {name: value.strip() for name, _, value in (line.partition(" ") for line in lines)}  # one may be empty
    assert rows["fsdp2"] == fsdp2.__version__
    assert rows["torch"].startswith(torch.__version__)
    assert "gloo" in rows["backends"]
    assert (rows["NCCL_DEBUG"], rows["FSDP2_LOG"], rows["WORLD_SIZE"]) == ("INFO", "INFO", "4")
    assert "MY_TOKEN" not in rows
    assert (rows["checks"], rows["fixes"]) == ("default", "in force")
    fsdp2.set_checks("debug")
    monkeypatch.setenv("FSDP2_DTENSOR_FIXES", "off")
    try:
        rows = dict(facts("1"))
        assert (rows["checks"], rows["fixes"]) == ("debug", "off")
    finally:
        fsdp2.set_checks("default")


def test_a_reader_that_stops_reading_gets_no_traceback() -> None:
    command = f"{sys.executable} -m fsdp2 env | head -c 5"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120)
    assert (result.stdout, result.stderr) == ("fsdp2", "")
