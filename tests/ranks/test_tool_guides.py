"""Tests the Python of the guide about the command line, run as it is written, on two ranks."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from documents import ROOT, code_blocks
from fsdp2.hf.files import read_checkpoint
from helpers import full, run_checks

Names = dict[str, Any]
# The lines that all snippets share, wherever the guides have them.
GROUND = next(
    block
    for path in sorted((ROOT / "examples").rglob("*.md"))
    for block in code_blocks(path)
    if "def make_sharded" in block.source
)


def run_guide(name: str, heading: str, folder: Path) -> Names:
    """Runs the snippets under a heading, as one program, in a folder of its own."""
    os.chdir(folder)
    names: Names = {"__name__": heading}
    exec(GROUND.compiled(), names)
    torch.manual_seed(dist.get_rank())
    blocks = [each for each in code_blocks(ROOT / "examples" / "guides" / f"{name}.md") if each.heading == heading]
    assert blocks
    for block in blocks:
        exec(block.compiled(), names)
    return names


def merged(names: Names) -> None:
    if dist.get_rank() == 0:
        found = read_checkpoint(Path("merged")).tensors
        assert {*found} == {*names["model"].state_dict()}
        assert all(each.dtype == torch.bfloat16 for each in found.values())
    for param in names["model"].parameters():
        full(param)


CHECKS: dict[tuple[str, str], Callable[[Names], None]] = {
    ("command-line", "From a checkpoint to Hugging Face files"): merged,
}


def test_each_snippet_has_a_check() -> None:
    headings = {block.heading for block in code_blocks(ROOT / "examples" / "guides" / "command-line.md")}
    assert headings == {heading for _, heading in CHECKS}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:torch")
def test_guides(tmp_path: Path) -> None:
    checks = []
    for (name, heading), check in CHECKS.items():
        folder = tmp_path / f"{name}-{len(checks)}"
        folder.mkdir()

        def run(name: str = name, heading: str = heading, folder: Path = folder, check: Any = check) -> None:
            check(run_guide(name, heading, folder))

        checks.append((f"{name}: {heading}", run))
    run_checks(2, checks, timeout=120)
