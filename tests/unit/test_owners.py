"""Tests that each attribute of the engine's objects has one writer: the file that defines the class.

Others ask by a verb: a method of the owner. Read by the source: an assignment to `x.name`, where `x` is named as
objects of the engine are (`group`, `root`, `param`, ...), counts if a class of the engine or of a room has that
attribute and stands in another file.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from list_modules import ROOMS

PACKAGE = Path(__file__).resolve().parents[2] / "fsdp2"
FOLDERS = ("engine", *ROOMS)
# (file, attribute) -> why another file than the owner's writes it.
ALLOWED: dict[tuple[str, str], str] = {
    ("engine/root.py", "running"): "counted for each call of a module, where a verb would be two calls more",
}
# How variables that hold objects of the engine are named, and attributes; and of which file their class is, if that is
# one: then an attribute of the same name in another class does not count.
FILE_OF = {"group": "group", "root": "root", "state": "state", "param": "parameter", "parameters": "group_parameters"}
RECEIVERS = {
    *FILE_OF,
    *("submodule_state", "owner", "each", "other", "first", "gradients", "buffers", "queue", "prefetcher"),
    *("registration", "bucket", "comm", "comm_label", "pending", "plan", "forward", "backward", "saved_tensors"),
    *("notices", "events", "offload_policy", "settings", "unsharded", "unsynchronized"),
}
# Attributes of torch's objects that some class of the engine has, too.
OF_TORCH = {"grad", "data", "requires_grad", "__class__", "__dict__", "_attributes"}


def targets(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Yields the attributes that are assigned, also in tuples, by `+=`, and by `del`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, (ast.Store, ast.Del)):
            yield node


def attributes() -> dict[str, set[str]]:
    """Returns attribute -> the files whose classes set it on themselves."""
    found: dict[str, set[str]] = {}
    for folder in FOLDERS:
        for path in (PACKAGE / folder).glob("*.py"):
            for cls in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)):
                names = {each.attr for each in targets(cls) if ast.unparse(each.value) == "self"}
                names |= {
                    n.target.id for n in cls.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
                }
                for name in names:
                    found.setdefault(name, set()).add(path.relative_to(PACKAGE).as_posix())
    return found


def foreign_writes() -> set[tuple[str, str]]:
    """Returns (file, attribute) for each attribute of an engine's object that another file than its class's assigns."""
    owned, found = attributes(), set()
    for path in PACKAGE.rglob("*.py"):
        place = path.relative_to(PACKAGE).as_posix()
        for each in targets(ast.parse(path.read_text())):
            receiver = ast.unparse(each.value).rpartition(".")[2].removesuffix("()").split("[")[0].strip("_")
            owners = owned.get(each.attr, set())
            own_file = f"engine/{FILE_OF.get(receiver, '')}.py"
            owners = owners & {own_file} or owners
            if receiver in RECEIVERS and owners and place not in owners and each.attr not in OF_TORCH:
                found.add((place, each.attr))
    return found


def test_each_attribute_has_one_writer() -> None:
    found = foreign_writes()
    assert found - set(ALLOWED) == set(), "give the owner a verb, and call that"
    assert set(ALLOWED) - found == set(), "these are not needed any more"
