"""Tests that the API reference that README.md's command makes from the docstrings is complete, and has no warnings.

It is made where pdoc is installed (the extra `docs`), as in .ci/run.
"""

import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import fsdp2
from documents import ROOT, code_blocks
from fsdp2.module import public_methods


@pytest.mark.parametrize("name", sorted(public_methods()))
def test_every_argument_of_a_method_is_described(name: str) -> None:
    """`recurse` above all, whose default differs from method to method."""
    method = getattr(fsdp2.FSDPModule, name)
    _, *arguments = inspect.signature(method).parameters
    described = inspect.getdoc(method).partition("Args:")[2].partition("Raises:")[0]
    assert [each for each in arguments if not re.search(rf"^ +{each}: ", described, re.MULTILINE)] == []


def test_the_reference_has_all_public_names_and_no_others(tmp_path: Path) -> None:
    pytest.importorskip("pdoc")
    (command,) = (block.source for block in code_blocks(ROOT / "README.md", "") if "pdoc" in block.source)
    _, *words = shlex.split(command.partition("&&")[2])
    words[words.index("-o") + 1] = str(tmp_path)
    made = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "PYTHONWARNINGS": "error"},
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    assert "Warn" not in made.stderr
    pages = [page.read_text() for page in tmp_path.rglob("*.html")]
    shown = {name for page in pages for name in re.findall(r'<section id="(\w+)"', page)}
    assert sorted(shown) == sorted({*fsdp2.__all__, *fsdp2.hf.__all__})
    methods = {name for page in pages for name in re.findall(r'<div id="\w+\.(\w+)"', page)}
    assert sorted(public_methods() - methods) == []
