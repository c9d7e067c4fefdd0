"""Tests that the example of an observer in fsdp2/README.md runs as written, and prints what the README says."""

import re
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch

from documents import table_rows
from fsdp2 import fully_shard
from fsdp2.engine import root_of
from helpers import extensions_restored, fake_world, raises_in_backward

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


def test_evaluations_and_passes_that_fail_are_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """The counts are those of a program without them. Here the observer joins a root that exists; a loss fails, too."""
    observer, program = (compile(each, "example", "exec") for each in blocks("python"))
    names: dict[str, Any] = {"__name__": "example"}
    with extensions_restored(), fake_world(4):
        exec(program, names)  # before the observer is there: nothing is printed
        exec(observer, names)
        model, x = names["model"], torch.ones(1, 64)
        root_of(model).add(names["GatheredBytes"]())
        assert type(root_of(model[0]).events.of(names["GatheredBytes"])) is names["GatheredBytes"]
        model(x).sum().backward()
        counted = capsys.readouterr().out.splitlines()
        with torch.no_grad():
            for _ in range(3):
                model(x)
        starts = torch.ones(1, 64, requires_grad=True)
        for wrong in (
            lambda: model(torch.ones(1, 65)),
            lambda: raises_in_backward(model(x), RuntimeError("it fails")).sum().backward(),
            lambda: model(raises_in_backward(starts, RuntimeError("it fails"))).sum().backward(),
        ):
            with pytest.raises(RuntimeError):
                wrong()
        model(x).sum().backward()
        gathered = re.findall(r"(\d) x", capsys.readouterr().out)
        model(x).sum().backward()
    assert counted
    assert set(gathered) <= {"1", "2"}, "what was gathered before is counted"
    assert capsys.readouterr().out.splitlines() == [line.replace("pass 3", "pass 5") for line in counted]


def test_what_an_observer_may_read_is_there() -> None:
    """Each attribute that the table of fsdp2/README.md names."""
    with fake_world(4):
        model = fully_shard(torch.nn.Linear(4, 4))
        root = root_of(model)
        group = root.group
        given = {"`root`": root, "`group`": group, "`state`": group.state, "each of `group.params`": group.params[0]}
        rows = {what: text for what, text in table_rows(README)["The interface"] if what in given}
        assert rows.keys() == given.keys()
        for what, text in rows.items():
            names = re.findall(r"(?:^|; )`([\w.]+)`", text)
            assert names
            for name in names:
                attrgetter(name)(given[what])


def test_the_example_is_short() -> None:
    lines = [line for line in blocks("python")[0].splitlines() if line.strip()]
    assert len(lines) <= 20
