"""Tests which way the core's imports go: it imports nothing of the rest of the package, and has no cycle.

Nothing of fsdp2 is imported here; the tests read syntax trees.
"""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

CORE = Path(__file__).resolve().parents[2] / "fsdp2" / "core"


def sources() -> dict[str, str]:
    """Returns the text of each file of the core by its path inside the core."""
    return {path.relative_to(CORE).as_posix(): path.read_text() for path in sorted(CORE.rglob("*.py"))}


def imports_of(text: str, name: str) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yields line and dotted name, relative to the package fsdp2, of everything that a file of the core imports of it.

    Imports inside functions and for type checkers are included. `from . import a, b` yields both a and b.
    """
    folder = ["core", *name.split("/")[:-1]]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                parts = alias.name.split(".")
                if parts[0] == "fsdp2":
                    yield node.lineno, tuple(parts[1:])
        elif isinstance(node, ast.ImportFrom):
            module = node.module.split(".") if node.module else []
            if node.level:
                # One dot is the folder of the file; what climbs out of fsdp2 would not run.
                module = folder[: len(folder) + 1 - node.level] + module
            elif module[:1] == ["fsdp2"]:
                module = module[1:]
            else:
                continue
            if len(module) < 2:  # `from . import x` may import a module
                for alias in node.names:
                    yield node.lineno, (*module, alias.name)
            else:
                yield node.lineno, tuple(module)


def outside_imports(texts: dict[str, str]) -> list[str]:
    """Returns the imports of the rest of the package, as "file:line: what"."""
    return [
        f"{name}:{line}: fsdp2.{'.'.join(dotted)}"
        for name, text in texts.items()
        for line, dotted in imports_of(text, name)
        if dotted[:1] != ("core",)
    ]


def import_graph(texts: dict[str, str]) -> dict[str, set[str]]:
    """Returns for each module of the core those that it imports when it runs, not for annotations alone.

    `__init__` hands on names only, and has no level.
    """
    modules = {name.removesuffix(".py") for name in texts}
    graph: dict[str, set[str]] = {}
    for name, text in texts.items():
        module = name.removesuffix(".py")
        if module != "__init__":
            imported = {
                dotted[1]
                for _, dotted in imports_of(running(text), name)
                if dotted[:1] == ("core",) and len(dotted) > 1
            }
            graph[module] = (imported & modules) - {"__init__", module}
    return graph


def running(text: str) -> str:
    """Returns the source without what stands under `if TYPE_CHECKING:`."""
    tree = ast.parse(text)
    tree.body = [
        each for each in tree.body if not (isinstance(each, ast.If) and "TYPE_CHECKING" in ast.unparse(each.test))
    ]
    return ast.unparse(tree)


def longest_chain(graph: dict[str, set[str]]) -> list[str]:
    """Returns the longest chain of modules of which each imports the next.

    Raises:
        CycleError: modules import each other.
    """
    longest: dict[str, list[str]] = {}
    for module in TopologicalSorter(graph).static_order():
        below = [longest[each] for each in graph.get(module, ())]
        longest[module] = [module, *max(below, key=len, default=[])]
    return max(longest.values(), key=len)


def test_the_core_imports_nothing_of_the_package_outside_itself() -> None:
    found = outside_imports(sources())
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "line",
    [
        "from ..ext import owners",
        "from .. import ext",
        "from .. import fully_shard",
        "import fsdp2",
        "import fsdp2.checks.check_times",
        "from fsdp2 import fully_shard",
        "from fsdp2.ext.owners import all_groups",
        "def f():\n    from ..checks import check_times",
        "if TYPE_CHECKING:\n    from ..checks.check_times import is_check_time",
    ],
)
def test_an_import_of_the_rest_is_found(line: str) -> None:
    assert len(outside_imports({"gather.py": line})) == 1


@pytest.mark.parametrize(
    "line", ["from . import comm", "from .comm import Comm", "import torch", "from fsdp2.core.comm import Comm"]
)
def test_other_imports_are_none_of_the_rest(line: str) -> None:
    assert not outside_imports({"gather.py": line})


def test_no_imports_go_in_a_circle() -> None:
    longest_chain(import_graph(sources()))


def test_chains_of_imports_are_found() -> None:
    texts = {
        "__init__.py": "from .a import x",
        "a.py": "def f():\n    from . import b\nfrom .d import D",
        "b.py": "from fsdp2.core.c import C",
        "c.py": "import torch",
        "d.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .b import C",
    }
    assert longest_chain(import_graph(texts)) == ["a", "b", "c"]
    with pytest.raises(CycleError):
        longest_chain(import_graph(texts | {"c.py": "from .a import f"}))
