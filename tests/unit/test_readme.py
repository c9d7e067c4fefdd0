"""What README.md names exists, and what exists is named there."""

import ast
import inspect
import re
from pathlib import Path

import pytest

import fsdp2
from fsdp2.module import public_methods

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
TESTS = {path.name: path for path in (ROOT / "tests").rglob("test_*.py")}


@pytest.mark.parametrize("name", sorted(set(re.findall(r"test_\w+\.py(?:::\w+)?", README))))
def test_a_test_that_is_named_exists(name: str) -> None:
    file, _, function = name.partition("::")
    assert file in TESTS
    if function:
        tree = ast.parse(TESTS[file].read_text())
        assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("name", sorted(set(re.findall(r"(?:examples|benchmarks|tests)/[a-z0-9_./-]+\.\w+", README))))
def test_a_file_that_is_named_exists(name: str) -> None:
    assert (ROOT / name).is_file()


def test_what_users_may_call_is_named() -> None:
    arguments = [*inspect.signature(fsdp2.fully_shard).parameters]
    names = {*fsdp2.__all__, *public_methods(), *arguments}
    assert sorted(name for name in names if not re.search(rf"\b{name}\b", README)) == []


def test_modules_are_named() -> None:
    files = {path.name for path in (ROOT / "fsdp2").glob("[!_]*.py")}
    assert sorted(name for name in files if f"`{name}`" not in README) == []
