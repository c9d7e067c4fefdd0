"""Tests that each attribute of the engine's objects has one writer: the file that defines the class.

Others ask by a verb: a method of the owner. Read by the source: an assignment to `x.name`, where `x` is named as objects
of the engine are (`group`, `root`, `param`, ...), counts if a class of the engine or of a room has that attribute and
stands in another file.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from list_modules import ROOMS

PACKAGE = Path(__file__).resolve().parents[2] / "fsdp2"
FOLDERS = ("engine", *ROOMS)
# (file, attribute) -> why another file than the owner's writes it.
ALLOWED: dict[tuple[str, str], str] = {
    ("dtensor/fixes.py", "are_seen"): "to go",
    ("engine/root.py", "backward_hooks"): "to go",
    ("engine/state.py", "buffers"): "to go",
    ("features/conditional.py", "consensus"): "to go",
    ("calls/served_calls.py", "depth"): "to go",
    ("engine/step.py", "depth"): "to go",
    ("features/large_submodules.py", "depth"): "to go",
    ("features/passes.py", "depth"): "to go",
    ("engine/group.py", "grad_choice"): "to go",
    ("checks/named_comm.py", "has_failed"): "to go",
    ("engine/group_parameters.py", "has_rebuilt"): "to go",
    ("checks/lost_writes.py", "hold"): "to go",
    ("features/conditional.py", "hold"): "to go",
    ("features/passes.py", "hold"): "to go",
    ("module.py", "hold"): "to go",
    ("features/copying.py", "ignored"): "to go",
    ("engine/group_parameters.py", "keeps_storage"): "to go",
    ("engine/group.py", "label"): "to go",
    ("engine/group.py", "leaves_gradients"): "to go",
    ("engine/placeholders.py", "leaves_gradients"): "to go",
    ("engine/build.py", "left"): "to go",
    ("features/copying.py", "name"): "to go",
    ("engine/root.py", "needs_no_input_hooks"): "to go",
    ("module.py", "needs_no_input_hooks"): "to go",
    ("engine/group.py", "neighbours"): "to go",
    ("checks/step_history.py", "num_added"): "to go",
    ("shards/registered.py", "num_blocks"): "to go",
    ("features/passes.py", "num_resets"): "to go",
    ("engine/group_parameters.py", "num_uses"): "to go",
    ("features/copying.py", "parts"): "to go",
    ("features/conditional.py", "prefetcher"): "to go",
    ("engine/root.py", "references"): "to go",
    ("shards/registered.py", "references"): "to go",
    ("checks/model_facts.py", "remark"): "to go",
    ("checks/named_comm.py", "root"): "to go",
    ("engine/build.py", "root"): "to go",
    ("engine/root.py", "root"): "to go",
    ("features/accumulate.py", "root"): "to go",
    ("features/conditional.py", "root"): "to go",
    ("features/skip.py", "root"): "to go",
    ("features/passes.py", "running"): "to go",
    ("features/large_submodules.py", "runs_for_loss"): "to go",
    ("dtensor/fixes.py", "sees_operations"): "to go",
    ("features/copying.py", "sharded"): "to go",
    ("engine/state.py", "state"): "to go",
    ("checks/step_history.py", "steps"): "to go",
    ("features/optimizer_in_backward.py", "steps"): "to go",
    ("checks/equal_inputs.py", "take_inputs"): "to go",
    ("features/copying.py", "unsharded"): "to go",
    ("parameters/replacements.py", "untied"): "to go",
    ("engine/build.py", "used"): "to go",
    ("parameters/ties.py", "used"): "to go",
    ("parameters/ties.py", "users"): "to go",
}
# How variables that hold objects of the engine are named, and attributes.
RECEIVERS = {
    *("group", "root", "state", "submodule_state", "owner", "each", "other", "first"),
    *(
        "param",
        "parameters",
        "gradients",
        "buffers",
        "queue",
        "prefetcher",
        "registration",
        "bucket",
        "comm",
        "purpose",
    ),
    *("pending", "plan", "forward", "backward", "saved_tensors", "notices", "events", "offload_policy", "settings"),
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
            if receiver in RECEIVERS and owners and place not in owners and each.attr not in OF_TORCH:
                found.add((place, each.attr))
    return found


def test_each_attribute_has_one_writer() -> None:
    found = foreign_writes()
    assert found - set(ALLOWED) == set(), "give the owner a verb, and call that"
    assert set(ALLOWED) - found == set(), "these are not needed any more"
