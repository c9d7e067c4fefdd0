"""Calls a function with a module as soon as a program has imported that module, and does not import it itself.

This file imports nothing of fsdp2 or torch: bridge/startup/sitecustomize.py runs it before any program.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def when_imported(name: str, action: Callable[[ModuleType], None]) -> Callable[[], None]:
    """Calls `action(module)` when the module `name` has been imported: at once, if its import has begun already.

    Returns a function that cancels it.
    """
    if name in sys.modules:
        action(sys.modules[name])
        return lambda: None
    finder = _Finder(name, action)
    sys.meta_path.insert(0, finder)
    return finder.cancel


class _Finder(MetaPathFinder):
    """Finds one module by the finders behind this one in sys.meta_path, and wraps its loader."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self._name, self._action = name, action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (other.find_spec(fullname, path, target) for other in behind)
        spec = next((each for each in specs if each is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._act)
        return spec

    def _act(self, module: ModuleType) -> None:
        self.cancel()  # not earlier: a program may look for the spec without importing the module
        self._action(module)

    def cancel(self) -> None:
        """Removes this finder."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)


class _Loader(Loader):
    """Runs another loader, and then an action."""

    def __init__(self, loader: Loader, action: Callable[[ModuleType], None]) -> None:
        self._loader, self._action = loader, action

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Functions that ask for the loader later (pkgutil, inspect) find the module's own.
        assert module.__spec__ is not None, "it is being imported"
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._action(module)
