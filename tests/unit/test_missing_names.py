"""Tests that a release of torch without one of the private names in torch_private/ is refused at once, or costs one
ability and nothing else.

The names are found in the source. Each is hidden in turn from a copy of the package.
processes/test_hidden_names.py hides all that training does not need from processes that train.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from private_names import FILES, FOLDER, NAMES, OTHERS, REQUIRED

COPY = "copy_of_torch_private"


def hide(lookup: Any, paths: list[str]) -> None:
    """Has the module `lookup` find none of `paths`."""
    found: dict[tuple[int, str], Any] = {}
    for path in paths:
        parent, _, name = path.rpartition(".")
        found[id(lookup._find(parent)), name] = path

    def get(owner: Any, name: str) -> Any:
        if (id(owner), name) in found:
            raise AttributeError(name)
        return builtins.getattr(owner, name)

    def module(name: str) -> ModuleType:
        if name in paths:
            raise ModuleNotFoundError(name)
        return importlib.import_module(name)

    lookup.getattr, lookup.import_module = get, module
    lookup.sys = SimpleNamespace(modules={name: each for name, each in sys.modules.items() if name not in paths})


@contextmanager
def copied(paths: list[str]) -> Iterator[Callable[[], dict[str, Any]]]:
    """Context: yields a function that imports a copy of the package, from which `paths` are hidden."""

    def load(name: str, path: Path, **options: Any) -> Any:
        spec = importlib.util.spec_from_file_location(name, path, **options)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def load_all() -> dict[str, Any]:
        load(COPY, FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)])
        return {path.stem: importlib.import_module(f"{COPY}.{path.stem}") for path in FILES} | {"lookup": lookup}

    lookup = load(f"{COPY}.lookup", FOLDER / "lookup.py")
    hide(lookup, paths)
    try:
        yield load_all
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == COPY]:
            del sys.modules[name]


# ---- by the source


def _private(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields private names of torch that a file uses itself, with their lines."""
    typing_only = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for child in [each for statement in node.body for each in ast.walk(statement)]
    }
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if id(node) in typing_only or not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        base = f"{node.module}." if isinstance(node, ast.ImportFrom) and not node.level else ""
        if isinstance(node, ast.ImportFrom) and node.level:
            continue
        for alias in node.names:
            aliases[alias.asname or alias.name.partition(".")[0]] = base + alias.name
            yield node.lineno, base + alias.name

    def resolve(node: ast.expr) -> str:
        if isinstance(node, ast.Name):
            return aliases.get(node.id, "")
        base = resolve(node.value) if isinstance(node, ast.Attribute) else ""
        return base and f"{base}.{node.attr}"  # type: ignore[attr-defined]

    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            yield node.lineno, resolve(node)


def is_private(dotted: str) -> bool:
    parts = dotted.split(".")
    return parts[0] == "torch" and any(each.startswith("_") and not each.endswith("__") for each in parts)


def test_no_private_name_is_used_but_by_a_lookup() -> None:
    found = [
        f"{path.name}:{line}: {dotted}"
        for path in FILES
        for line, dotted in _private(ast.parse(path.read_text()))
        if is_private(dotted)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "import torch\nx = torch._C._x",
        "from torch._guards import TracingContext",
        "from torch import distributed as d\nd._x()",
        "def f():\n    import torch._dynamo",
    ],
)
def test_a_planted_name_is_found(text: str) -> None:
    assert any(is_private(dotted) for _, dotted in _private(ast.parse(text)))


def test_names_are_of_both_kinds() -> None:
    assert len(REQUIRED) > 30
    assert len(OTHERS) > 30
    assert all(each.at_import or each.kind != "required" or "simple_registry" in each.path for each in NAMES)


# ---- one name, and all of a kind


@pytest.mark.parametrize("path", REQUIRED)
def test_without_a_name_that_training_needs_the_import_says_so(path: str) -> None:
    with copied([path]) as load_all, pytest.raises(ImportError) as raised:
        load_all()
    named = str(raised.value).split("training needs: ")[1].split(". ")[0].split(", ")
    assert named == [each for each in REQUIRED if each == path or each.startswith(f"{path}.")]
    assert torch.__version__ in str(raised.value)


def test_one_error_lists_all() -> None:
    with copied(REQUIRED) as load_all, pytest.raises(ImportError) as raised:
        load_all()
    assert all(path in str(raised.value) for path in REQUIRED)


@pytest.mark.parametrize("path", OTHERS)
def test_without_another_name_one_ability_is_refused_or_off(path: str) -> None:
    with copied([path]) as load_all, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        modules = load_all()
        lookup = modules["lookup"]
        stand_ins = {
            id(value): value
            for module in modules.values()
            for value in vars(module).values()
            if isinstance(value, lookup.Missing)
        }
        assert {each.path for each in stand_ins.values()} <= {path}
        said = [str(each.message) for each in caught if path in str(each.message)]
        uses = [each for each in NAMES if each.path == path]
        for each in uses:
            if each.at_import and each.kind == "optional":
                assert said if each.has_substitute else stand_ins
        raising = [*stand_ins.values(), lambda: lookup.load(path, "an ability")]
        for each in raising:
            with pytest.raises(NotImplementedError, match="install one of these") as raised:
                each()
            assert path in str(raised.value)
            assert torch.__version__ in str(raised.value)


@pytest.mark.parametrize("path", [*REQUIRED, *OTHERS])
def test_the_torch_that_is_installed_has_the_name(path: str) -> None:
    """A misspelt name would be missing in all releases."""
    from fsdp2.torch_private import lookup

    lookup.load(path, "this test")


def test_another_file_reads_them_where_torch_has_no_names_of_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here torch itself lacks the name, which hides nothing from the test alone."""
    from fsdp2.torch_private.rare_internals import name_of_new_group

    monkeypatch.delattr(dist.distributed_c10d, "_hash_ranks_to_str")
    refused = "process groups of neighbouring ranks: expected torch to have"
    with pytest.raises(NotImplementedError, match=refused), name_of_new_group("a name"):
        pass


def test_the_watch_is_off_without_its_names(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsdp2.checks import watch
    from fsdp2.torch_private import checks
    from fsdp2.torch_private.lookup import Missing

    class World:
        def size(self) -> int:
            return 2

    world = World()
    monkeypatch.setattr(watch, "dist", SimpleNamespace(group=SimpleNamespace(WORLD=world)))
    monkeypatch.setattr(checks, "default_store", Missing("torch.distributed._store", "the watch"))
    before = {*watch._running}
    with pytest.warns(UserWarning, match="the watch: off, because torch .* lacks torch.distributed._store"):
        watch.start()
    assert {*watch._running} == before
