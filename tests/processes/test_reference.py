"""Tests that the site of the documentation has all pages and public names, and comes without warnings.

That takes 20 s of a core: it is made in .ci/run and at night, where Sphinx is installed (the extra `docs`). Links
between pages are checked without it, in test_readme.py.
"""

import inspect
import itertools
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import fsdp2
import fsdp2.compression
import fsdp2.testing
from documents import GUIDES, PATHS, ROOT, code_blocks, results
from fsdp2.module import public_methods
from helpers import NIGHTLY


@pytest.mark.parametrize("name", sorted(public_methods()))
def test_every_argument_of_a_method_is_described(name: str) -> None:
    """`recurse` above all, whose default differs from method to method."""
    method = getattr(fsdp2.FSDPModule, name)
    _, *arguments = inspect.signature(method).parameters
    described = inspect.getdoc(method).partition("Args:")[2].partition("Raises:")[0]
    assert [each for each in arguments if not re.search(rf"^ +{each}: ", described, re.MULTILINE)] == []


@pytest.mark.skipif(not NIGHTLY, reason="it takes 20 s: run with FSDP2_NIGHTLY=1, as .ci/run does")
@pytest.mark.timeout(900)
def test_the_site_has_all_public_names_and_no_others(tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    (command,) = (
        block.source for block in code_blocks(ROOT / "examples" / "README.md", "") if "sphinx" in block.source
    )
    _, *words = shlex.split(command.partition("&&")[2])
    assert words[-1] == "docs"
    made = subprocess.run(
        [sys.executable, *words[:-1], str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    for path in (*PATHS, ROOT / "fsdp2" / "MODULES.md"):
        assert (tmp_path / path.relative_to(ROOT).with_suffix(".html")).is_file()
    assert (tmp_path / "index.html").is_file()
    shown = set[str]()
    for page in (tmp_path / "examples" / "site" / "reference").glob("*.html"):
        shown |= set(re.findall(r'<dt class="sig[^"]*" id="fsdp2\.([\w.]+)"', page.read_text()))
    first = (tmp_path / "examples" / "site" / "reference" / "sharding.html").read_text()
    assert re.findall(r'<dt class="sig[^"]*" id="fsdp2\.([\w.]+)"', first)[:2] == ["fully_shard", "replicate"]
    captions = re.findall(r'class="caption-text">([^<]+)<', (tmp_path / "index.html").read_text())
    assert captions[:2] == ["Start", "Reference"]
    names = {*fsdp2.__all__, *(f"hf.{each}" for each in fsdp2.hf.__all__)}
    names |= {f"checkpoint.{each}" for each in fsdp2.checkpoint.__all__}
    names |= {f"testing.{each}" for each in fsdp2.testing.__all__}
    names |= {*(f"compression.{each}" for each in fsdp2.compression.__all__), *itertools.chain(*results().values())}
    assert sorted(name for name in shown if name.rpartition(".")[0] not in names) == sorted(names)
    assert {f"FSDPModule.{name}" for name in public_methods()} <= shown


def test_pictures_are_as_drawn() -> None:
    """`python examples/site/draw_pictures.py` draws them. Guides show each, with words for those who do not see it."""
    drawn = runpy.run_path(str(ROOT / "examples" / "site" / "draw_pictures.py"))["PICTURES"]
    files = {path.stem: path.read_text() for path in (ROOT / "examples" / "pictures").glob("*.svg")}
    assert files == {name: draw().svg() for name, draw in drawn.items()}
    shown = re.findall(r"!\[[^\]]{40,}\]\(\.\./pictures/([\w-]+)\.svg\)", "".join(path.read_text() for path in GUIDES))
    assert {*shown} == {*files}
