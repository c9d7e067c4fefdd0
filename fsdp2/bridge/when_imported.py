"""Do something to a module as soon as a program imports it, without importing it for that.

Imports nothing of fsdp2 or torch: see bridge/startup/sitecustomize.py, which runs this file before any program.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def when_imported(name: str, action: Callable[[ModuleType], None]) -> Callable[[], None]:
    """Call `action(module)` when the module `name` has been imported; now, if that was done or has begun.

    Returns what cancels that.
    """
    if name in sys.modules:
        action(sys.modules[name])
        return lambda: None
    finder = _Finder(name, action)
    sys.meta_path.insert(0, finder)
    return finder.cancel


class _Finder(MetaPathFinder):
    """In front in sys.meta_path: lets those behind find one module, and wraps its loader."""

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
        self.cancel()  # not earlier: a program may look for the spec, and import the module later, or not
        self._action(module)

    def cancel(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)


class _Loader(Loader):
    """Another loader, and an action after it."""

    def __init__(self, loader: Loader, action: Callable[[ModuleType], None]) -> None:
        self._loader, self._action = loader, action

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # What asks for it later (pkgutil, inspect) finds the module's own loader.
        assert module.__spec__ is not None, "it is being imported"
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._action(module)
