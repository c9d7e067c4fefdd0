"""Finds the private names of torch that torch_private/ looks up."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

FOLDER = Path(__file__).resolve().parents[1] / "fsdp2" / "torch_private"
FILES = sorted(path for path in FOLDER.glob("*.py") if path.stem not in ("__init__", "lookup", "when_imported"))


class Name(NamedTuple):
    """A name that is looked up. `kind`: required, optional, load; `at_import`: when its file is imported."""

    kind: str
    path: str
    has_substitute: bool
    at_import: bool
    file: str


def _found() -> Iterator[Name]:
    for file in FILES:
        tree = ast.parse(file.read_text())
        inside = {
            id(node)
            for function in ast.walk(tree)
            if isinstance(function, ast.FunctionDef)
            for node in ast.walk(function)
        }
        # A process that trains must not import the package before names are hidden.
        flags = {
            ast.unparse(each.targets[0]): eval(ast.unparse(each.value), {"torch": torch})
            for each in tree.body
            if isinstance(each, ast.Assign) and ast.unparse(each.value).startswith("torch.__version__")
        }
        inside |= {
            id(child)
            for node in ast.walk(tree)
            if isinstance(node, ast.IfExp) and flags.get(ast.unparse(node.test)) is False
            for child in ast.walk(node.body)
        }
        for node in ast.walk(tree):
            kind = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            if kind in ("required", "optional", "load"):
                assert isinstance(node, ast.Call)
                path = ast.literal_eval(node.args[0])
                has_substitute = len(node.args) + len(node.keywords) == 3
                yield Name(kind, path, has_substitute, id(node) not in inside, file.name)


NAMES = [*_found()]
# Those of older releases of torch alone stand in an expression with a condition.
REQUIRED = sorted({each.path for each in NAMES if each.kind == "required" and each.at_import})
OTHERS = sorted({each.path for each in NAMES if each.kind != "required"} - {*REQUIRED})
