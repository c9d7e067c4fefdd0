"""Tests the size and the structure of the core, which an expert must read to understand the engine.

Nothing of fsdp2 is imported here; the tests count in syntax trees. Each message lists the largest counts.
"""

import ast
import io
import tokenize
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

CORE = Path(__file__).resolve().parents[2] / "fsdp2" / "core"

MAX_CODE_LINES = 3500
MAX_FILES = 24
MAX_LEVELS = 9
MAX_FILE_LINES = 350
MAX_BOOLEANS = 10

_LAYOUT_TOKENS = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def sources() -> dict[str, str]:
    """Returns the text of each file of the core by its path inside the core."""
    return {path.relative_to(CORE).as_posix(): path.read_text() for path in sorted(CORE.rglob("*.py"))}


# ---- lines


def count_code_lines(text: str) -> int:
    """Returns the number of lines that hold code: no blank lines, comments or docstrings."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and (
            ast.get_docstring(node, clean=False) is not None
        ):
            first = node.body[0]
            docstrings.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _LAYOUT_TOKENS:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


def test_lines_of_code() -> None:
    lines = {name: count_code_lines(text) for name, text in sources().items()}
    listed = "\n".join(f"{count:5} {name}" for name, count in sorted(lines.items(), key=lambda item: -item[1]))
    assert sum(lines.values()) <= MAX_CODE_LINES, f"{sum(lines.values())} lines of code in the core:\n{listed}"


def test_number_of_files() -> None:
    names = list(sources())
    assert len(names) <= MAX_FILES, f"{len(names)} files in the core: {', '.join(names)}"


def test_no_file_is_long() -> None:
    long = {name: len(text.splitlines()) for name, text in sources().items()}
    long = {name: count for name, count in long.items() if count > MAX_FILE_LINES}
    assert not long, f"files of the core with more than {MAX_FILE_LINES} lines: {long}"


def test_code_lines_are_counted_as_they_should() -> None:
    text = '"""One.\n\nTwo."""\n\n# three\nx = [\n    1,  # four\n]\n\n\ndef f():\n    """Five."""\n'
    text += '    return """six\n\nseven"""\n'
    assert count_code_lines(text) == 3 + 1 + 3


# ---- imports


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


def test_levels_of_imports() -> None:
    chain = longest_chain(import_graph(sources()))
    assert len(chain) <= MAX_LEVELS, f"{len(chain)} levels: {' -> '.join(chain)}"


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


# ---- booleans


def booleans(texts: dict[str, str]) -> list[str]:
    """Returns "Class.attribute" for each boolean of state in the core.

    An attribute is a boolean if it is annotated so, or assigned one: True, False, a comparison, an argument annotated
    as bool. It is state if it is annotated in the class, assigned True or False, or assigned again after construction,
    by whichever object. Frozen dataclasses, NamedTuples and Protocols hold no state.
    """
    trees = [ast.parse(text) for text in texts.values()]
    assigned_again = {name for tree in trees for name in _assigned_after_construction(tree)}
    found: set[str] = set()
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.ClassDef) and not _is_frozen(node):
            kinds = dict(sorted(_booleans_of(node)))  # True comes last, and counts
            found.update(
                f"{node.name}.{name}" for name, is_state in kinds.items() if is_state or name in assigned_again
            )
    return sorted(found)


def _is_frozen(cls: ast.ClassDef) -> bool:
    bases = {ast.unparse(base).rpartition(".")[2].partition("[")[0] for base in cls.bases}
    return bool(bases & {"NamedTuple", "Protocol", "Enum", "IntEnum"}) or any(
        "frozen=True" in ast.unparse(decorator) for decorator in cls.decorator_list
    )


def _assigned_after_construction(tree: ast.AST) -> Iterator[str]:
    """Yields the names of attributes, of any object, that something else than `__init__` assigns."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if not (isinstance(node, ast.FunctionDef) and node.name in ("__init__", "__post_init__")):
            waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def _booleans_of(cls: ast.ClassDef) -> Iterator[tuple[str, bool]]:
    """Yields the name of each boolean, and whether it is certainly state."""
    for statement in cls.body:
        if isinstance(statement, ast.AnnAssign) and _is_bool_annotation(statement.annotation):
            yield ast.unparse(statement.target), True
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            arguments = [*statement.args.posonlyargs, *statement.args.args, *statement.args.kwonlyargs]
            names = {each.arg for each in arguments if each.annotation and _is_bool_annotation(each.annotation)}
            for node in ast.walk(statement):
                if isinstance(node, ast.AnnAssign) and _is_bool_annotation(node.annotation):
                    yield from ((name, True) for name in _attributes_of_self(node.target))
                elif isinstance(node, ast.Assign):
                    for target in node.targets:
                        yield from _boolean_targets(target, node.value, names)


def _boolean_targets(target: ast.expr, value: ast.expr, names: set[str]) -> Iterator[tuple[str, bool]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for each, own in zip(target.elts, value.elts, strict=False):
            yield from _boolean_targets(each, own, names)
    elif _is_boolean(value, names):
        yield from ((name, isinstance(value, ast.Constant)) for name in _attributes_of_self(target))


def _attributes_of_self(target: ast.expr) -> Iterator[str]:
    if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
        yield target.attr


def _is_bool_annotation(node: ast.expr) -> bool:
    return "bool" in [part.strip("'\" ") for part in ast.unparse(node).split("|")]


def _is_boolean(value: ast.expr, names: set[str]) -> bool:
    match value:
        case ast.Constant(value=bool()) | ast.Compare() | ast.UnaryOp(op=ast.Not()):
            return True
        case ast.BoolOp(values=values):
            return all(_is_boolean(each, names) for each in values)
        case ast.IfExp(body=first, orelse=second):
            return _is_boolean(first, names) and _is_boolean(second, names)
        case ast.Call(func=ast.Name(id="bool" | "all" | "any" | "isinstance" | "hasattr" | "callable")):
            return True
        case ast.Name(id=name):
            return name in names
    return False


def test_booleans_of_state() -> None:
    found = booleans(sources())
    assert len(found) <= MAX_BOOLEANS, f"{len(found)} booleans of state in the core: {', '.join(found)}"


@pytest.mark.parametrize(
    "body",
    [
        "    x: bool = True",
        "    x: bool | None = None",
        "    def f(self): self.x = False",
        "    def __init__(self): self.x = False",
        "    def __init__(self): self.x: bool = g()",
        "    def __init__(self): self.y, self.x = 1, True",
        "    def __init__(self): y = self.x = True",
        "    def f(self, x: bool): self.x = x",
        "    def f(self): self.x = self.y is not None and not self.z",
        "    def __init__(self, x: bool): self.x = x\n    def f(self): self.x = g()",
        "    def __init__(self, x: bool): self.x = x\n    def f(self, other): other.y, other.x = 1, g()",
    ],
)
def test_a_boolean_of_state_is_found(body: str) -> None:
    assert booleans({"a.py": f"class A:\n{body}\n"}) == ["A.x"]
    assert booleans({"a.py": f"@dataclass\nclass A:\n{body}\n"}) == ["A.x"]
    assert booleans({"a.py": f"@dataclass(frozen=True)\nclass A:\n{body}\n"}) == []


@pytest.mark.parametrize(
    "body",
    [
        "    x: int = 1",
        "    x = True",
        "    def f(self): x = True",
        "    def f(self): self.x = self.y or None",
        "    def f(self): return True",
        "    def f(self): other.x = True",
        "    def __init__(self, x: bool): self.x = x",
        "    def __init__(self, y): self.x = y is not None",
    ],
)
def test_nothing_else_is_a_boolean_of_state(body: str) -> None:
    """A constant of a class (`direct = True`), or a fact that is known when an object is built, does not change."""
    assert booleans({"a.py": f"class A:\n{body}\n"}) == []
