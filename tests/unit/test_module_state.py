"""Tests that state is in the object it is about: lists all state of the process, with the reason for each.

There are three kinds: objects at module level that change, attributes of classes that functions set, and results that
functools remembers. The lists can only shrink. State of a group belongs into the group or into what it owns, that of a
root into the root.
"""

import ast
import collections
import functools
import importlib
import itertools
import threading
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

from list_modules import ROOMS

PACKAGE = Path(__file__).resolve().parents[2] / "fsdp2"
NOT_IMPORTED = ("__main__", "sitecustomize")  # they act when they are imported
CHANGEABLE = (
    *(list, dict, set, collections.deque, collections.Counter, itertools.count),
    *(weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet),
)
FOR_THREADS = (threading.local, type(threading.Lock()), type(threading.RLock()), ContextVar)
Cache = functools._lru_cache_wrapper
MUTATORS = {"add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove", "setdefault", "update"}

THREADS = "ranks may be threads of one process"
OF_CLASS = "operations of a class of tensors, which torch has once for each process"
OF_STEPS = "what is called around steps of optimizers, as torch's own hooks around them are, for all in the process"
OF_TORCH = "what of torch is replaced in this process"
COUNTS = "a number that only grows, and says when something else is out of date"
VALUES = "frozen values, made of frozen values"
BY_CLASS = "a fact about a class"
CACHE = "remembers the last answer for objects that are not the package's"

# Folder and name (a file may be renamed) -> why it is module-level.
ALLOWED = {
    "torch_private._finder": "waits for modules that the program may import, one for each process",
    "bridge._replaced": OF_TORCH,
    "checkpoint._sessions": "process groups are torch's, and have no place for what the saves of one share; weak",
    "checks._conversations": "what a thread of the process looks at, in one operation",
    "checks._groups": "what checks know of a process group, which is torch's, and which several Comms share",
    "checks._running": "threads, which are the process's",
    "checks._started": "default process groups are torch's, and have no place for what looks at them",
    "dtensor._explainers": OF_CLASS,
    "dtensor._handlers": OF_CLASS,
    "dtensor._inspected": CACHE,
    "dtensor.after_step": OF_STEPS,
    "dtensor.before_step": OF_STEPS,
    "dtensor.parts": "the parts of graphs that are alive, which no other object knows",
    "dtensor.stepped_beside": OF_STEPS,
    "engine._chosen": "what joins roots that a thread makes, in place of what joins others",
    "torch_private._group_names": OF_TORCH,
    "torch_private._missing": "names that torch lacks, until the import of the package fails because of them",
    "collectives._in_use": "interned meshes",
    "engine._known": CACHE,
    "collectives._last_default": "interned meshes",
    "collectives._num_made": "process groups are torch's, and made once",
    "engine._states": "the states of all sharded modules that are alive",
    "torch_private._running": THREADS,
    "engine._shard_in": "finds the owner of a tensor that the user has",
    "collectives._subgroups": "process groups are torch's, and made once",
    "calls._thread": THREADS,
    "engine._uncounted": "a number that is never given twice",
    "calls.class_lock": THREADS,
    "torch_private.hooks_of_all_modules": "torch's own table, under another name",
    "devices.notices": OF_CLASS,
    "devices.simulated": "the simulation that a thread plans by; operations of torch do not hand it on",
    "parameters.without_graph": "the nodes of graphs that are alive, which no other object knows",
    "features._in_pass": OF_TORCH,
    "features._lock": THREADS,
    "features._replaced": OF_TORCH,
    "simulate._here": THREADS,
    "tools._numbers": "a number that is never given twice",
    "tools._prepared": CACHE,
    "tools._ranges": "a profiler is one for each process",
}
# Attributes of classes that functions set.
ON_CLASSES = {
    "dtensor._Calls.number": COUNTS,
    "engine._Current.extensions": "what joins the roots of all models that are sharded later",
}
# Functions whose results functools remembers.
REMEMBERED = {
    "checkpoint.head_and_tail": VALUES,
    "checks._follow_log_level": "sets a logger of the process",
    "checks._indices_among": VALUES,
    "checks._managed_by_class": BY_CLASS,
    "checks._chosen": "the level that the user has chosen for the process; it begins as the environment says",
    "dtensor._has_other_subclasses": BY_CLASS,
    "torch_private._may_be_collective": BY_CLASS,
    "dtensor.is_mutable": "a fact about an operation of torch",
    "parameters._allowed": "functions of torch",
    "engine._events_of": BY_CLASS,
    "devices._side_stream_of": "streams of torch, of which it has one pool for each process",
    "devices._transfers_of": "streams of torch, of which it has one pool for each process",
    "engine.bounds_of": VALUES,
    "engine.contiguous_stride": VALUES,
    "engine.gather_layout": VALUES,
    "engine.param_spec": VALUES,
    "engine.plan_buckets": VALUES,
    "features._late_class": "classes that are made once",
    "module._sharded_class": "classes that are made once",
    "module.public_methods": "names of our own methods",
}
# Methods in which a class of the engine leaves something to a subclass.
LEFT_TO_SUBCLASSES: set[str] = set()


@functools.cache
def trees() -> list[tuple[Path, ast.Module]]:
    return [(path, ast.parse(path.read_text())) for path in sorted(PACKAGE.rglob("*.py"))]


def modules() -> Iterator[tuple[str, ast.Module, ModuleType]]:
    """Yields the folder, the tree and the object of each module."""
    for path, tree in trees():
        place = path.relative_to(PACKAGE).with_suffix("")
        if place.name not in NOT_IMPORTED:
            name = ".".join(["fsdp2", *place.parts]).removesuffix(".__init__")
            yield place.parts[0], tree, importlib.import_module(name)


def compare(found: set[str], allowed: dict[str, str]) -> None:
    assert found - set(allowed) == set(), "new state of the process: put it into the object that it is about"
    assert set(allowed) - found == set(), "these are gone: remove them from the list, so that they do not come back"


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


def set_on_classes(tree: ast.Module) -> set[str]:
    """Returns the attributes, as Class.name, that a module sets on its own classes; not methods that it replaces."""
    classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return {
        f"{node.value.id}.{node.attr}"
        for node in found
        if isinstance(node.value, ast.Name) and node.value.id in classes and not node.attr.startswith("__")
    }


def test_module_level_objects_that_change_are_those_listed() -> None:
    found = set()
    for folder, tree, module in modules():
        changed, names = changes(tree), assigned(tree)
        found |= {f"{folder}.{name}" for name in names if is_state(name, getattr(module, name), name in changed)}
    compare(found, ALLOWED)


def test_attributes_of_classes_that_change_are_those_listed() -> None:
    compare({f"{folder}.{name}" for folder, tree, _ in modules() for name in set_on_classes(tree)}, ON_CLASSES)


def test_results_that_are_remembered_are_those_listed() -> None:
    """They stay for the life of the process, and so does what they were asked about."""
    found = {
        f"{folder}.{name}"
        for folder, _, module in modules()
        for name, value in vars(module).items()
        if isinstance(value, Cache) and value.__module__ == module.__name__
    }
    compare(found, REMEMBERED)


def test_classes_of_the_engine_leave_nothing_to_subclasses() -> None:
    """A method that only raises NotImplementedError is one that never runs, outside of a Protocol."""
    found = {
        f"{cls.name}.{method.name}"
        for path, tree in trees()
        if path.parent.name in ("engine", *ROOMS)
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
    tree = ast.parse("class A:\n    n = 0\n    def __f(self): ...\ndef f():\n    A.n += 1\n    A.__f = f\n    B.n = 1")
    assert set_on_classes(tree) == {"A.n"}
