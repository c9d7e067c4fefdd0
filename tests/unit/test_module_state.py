"""Tests that state is in the object it is about: lists the module-level objects that change, with the reason for each.

The list can only shrink. State of a group belongs into the group or into what it owns, that of a root into the root.
"""

import ast
import collections
import functools
import importlib
import itertools
import threading
import weakref
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parents[2] / "fsdp2"
NOT_IMPORTED = ("__main__", "sitecustomize")  # they act when they are imported
CHANGEABLE = (
    *(list, dict, set, collections.deque, collections.Counter, itertools.count),
    *(weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet),
)
FOR_THREADS = (threading.local, type(threading.Lock()), type(threading.RLock()))
MUTATORS = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update"}

THREADS = "ranks may be threads of one process"
OF_COMM = "to become state of what communicates over the process group"
OF_CLASS = "operations of a class of tensors, which torch has once for each process"
OF_TORCH = "what of torch is replaced in this process"
CACHE = "remembers the last answer for objects that are not the package's"

# Folder and name (a file may be renamed) -> why it is module-level.
ALLOWED = {
    "bridge._finder": "waits for modules that the program may import, one for each process",
    "bridge._in_force": OF_TORCH,
    "bridge._pairs": OF_TORCH,
    "bridge._replaced": OF_TORCH,
    "bridge._undo": OF_TORCH,
    "checks._ONE_SEARCH": THREADS,
    "checks._checked": CACHE,
    "checks._conversations": OF_COMM,
    "checks._headers": OF_COMM,
    "checks._levels": OF_COMM,
    "checks._purposes": OF_COMM,
    "checks.comms_of": OF_COMM,
    "dtensor._explainers": OF_CLASS,
    "dtensor._handlers": OF_CLASS,
    "dtensor._inspected": CACHE,
    "dtensor._kinds_of_classes": CACHE,
    "dtensor._replaced": OF_CLASS,
    "dtensor._thread_handlers": THREADS,
    "dtensor._views": "the copied views that are alive, which no other object knows",
    "dtensor.before_step": OF_CLASS,
    "dtensor.meshes_in_use": "tells torch before 2.13, whose operations know a mesh only, which operations are ours",
    "dtensor.off": "fixes that the user has switched off for the process",
    "dtensor.parts": "the parts of graphs that are alive, which no other object knows",
    "dtensor.stepped_beside": OF_CLASS,
    "engine._in_use": "interned meshes",
    "engine._known": CACHE,
    "engine._last_default": "interned meshes",
    "engine._names": THREADS,
    "engine._names_by_ranks": OF_TORCH,
    "engine._naming": THREADS,
    "engine._num_naming": OF_TORCH,
    "engine._num_made": "process groups are torch's, and made once",
    "engine._roots": "the roots that are alive",
    "engine._running": THREADS,
    "engine._shard_in": "finds the owner of a tensor that the user has",
    "engine._subgroups": "process groups are torch's, and made once",
    "engine._thread": THREADS,
    "engine._uncounted": "a number that is never given twice",
    "engine.hooks_of_all_modules": "torch's own table, under another name",
    "engine.notices": OF_CLASS,
    "engine.without_graph": "the nodes of graphs that are alive, which no other object knows",
    "features._watching": OF_COMM,
    "module._lock": THREADS,
    "tools._endings": "a profiler is one for each process",
    "tools._examined": "says a remark once in each process",
    "tools._numbers": "a number that is never given twice",
    "tools._prepared": CACHE,
    "tools._ranges": "a profiler is one for each process",
    "tools._steps": "a profiler is one for each process",
    "tools._steps_end": "a profiler is one for each process",
}
# Methods in which a class of the engine leaves something to a subclass.
LEFT_TO_SUBCLASSES: set[str] = set()


@functools.cache
def trees() -> list[tuple[Path, ast.Module]]:
    return [(path, ast.parse(path.read_text())) for path in sorted(PACKAGE.rglob("*.py"))]


def assigned(tree: ast.Module) -> set[str]:
    """Returns the names that a module binds by assignment, outside of functions and classes."""
    targets = [
        each
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        for each in (node.targets if isinstance(node, ast.Assign) else [node.target])
    ]
    return {node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)} - {"__all__"}


def changes(tree: ast.Module) -> set[str]:
    """Returns the names that the functions of a module rebind, or whose elements the module changes."""
    found: set[str] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Global(names=names):
                found.update(names)
            case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
                found.add(name)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attr)) if attr in MUTATORS:
                found.add(name)
    return found


def is_state(name: str, value: Any, is_changed: bool) -> bool:
    """Returns True if a module-level object changes. A name in capitals is a constant, unless the module changes it."""
    if isinstance(value, FOR_THREADS) or is_changed:
        return True
    is_ours = type(value).__module__.startswith("fsdp2.") and not isinstance(value, type)
    return name != name.upper() and (isinstance(value, CHANGEABLE) or is_ours)


def test_module_level_objects_that_change_are_those_listed() -> None:
    found = set()
    for path, tree in trees():
        place = path.relative_to(PACKAGE).with_suffix("")
        if place.name not in NOT_IMPORTED:
            module = importlib.import_module(".".join(["fsdp2", *place.parts]).removesuffix(".__init__"))
            changed = changes(tree)
            found |= {
                f"{place.parts[0]}.{name}"
                for name in assigned(tree)
                if is_state(name, getattr(module, name), name in changed)
            }
    assert found - set(ALLOWED) == set(), "new state in modules: put it into the object that it is about"
    assert set(ALLOWED) - found == set(), "these are gone: remove them from ALLOWED, so that they do not come back"


def test_classes_of_the_engine_leave_nothing_to_subclasses() -> None:
    """A method that only raises NotImplementedError is one that never runs, outside of a Protocol."""
    found = {
        f"{cls.name}.{method.name}"
        for path, tree in trees()
        if path.parent.name == "engine"
        for cls in ast.walk(tree)
        if isinstance(cls, ast.ClassDef) and "Protocol" not in [ast.unparse(base) for base in cls.bases]
        for method in cls.body
        if isinstance(method, ast.FunctionDef)
        if ast.unparse(method.body[-1]) in ("raise NotImplementedError", "raise NotImplementedError()")
    }
    assert found == LEFT_TO_SUBCLASSES


def test_state_is_found() -> None:
    tree = ast.parse("_a = {}\nB = {}\nC = {}\nTHREE: int = 3\ndef f():\n    global d\n    C['x'] = 1\n    _a.clear()")
    assert assigned(tree) == {"_a", "B", "C", "THREE"}
    assert changes(tree) == {"_a", "C", "d"}
    assert [is_state(name, {}, changed) for name, changed in (("_a", False), ("B", False), ("C", True))] == [1, 0, 1]
    assert is_state("LOCK", threading.RLock(), False)
