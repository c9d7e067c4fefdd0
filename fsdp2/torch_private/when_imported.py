"""Calls a function with a module as soon as a program has imported that module, and does not import it itself.

This file imports nothing of fsdp2 or torch: bridge/startup/sitecustomize.py runs it before any program.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Action = Callable[[ModuleType], None]


def when_imported(name: str, action: Action) -> Callable[[], None]:
    """Calls `action(module)` when the module `name` has been imported: at once, if its import has begun already.

    Returns a function that cancels it. One finder in sys.meta_path waits for all such modules, while there are any.
    """
    if name in sys.modules:
        action(sys.modules[name])
        return lambda: None
    _finder.actions.setdefault(name, []).append(action)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    return partial(_finder.cancel, name, action)


class _Finder(MetaPathFinder):
    """Finds modules by the finders behind this one in sys.meta_path, and wraps their loaders."""

    def __init__(self) -> None:
        self.actions: dict[str, list[Action]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.actions:
            return None
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :]
        specs = (other.find_spec(fullname, path, target) for other in behind)
        spec = next((each for each in specs if each is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, partial(self._act, fullname))
        return spec

    def _act(self, name: str, module: ModuleType) -> None:
        # Not earlier: a program may look for the spec without importing the module.
        for action in [*self.actions.get(name, ())]:
            self.cancel(name, action)
            action(module)

    def cancel(self, name: str, action: Action) -> None:
        """Forgets `action`, and removes this finder from sys.meta_path if it waits for nothing else."""
        waiting = self.actions.get(name, [])
        if action in waiting:
            waiting.remove(action)
            if not waiting:
                del self.actions[name]
        if not self.actions and self in sys.meta_path:
            sys.meta_path.remove(self)


_finder = _Finder()


class _Loader(Loader):
    """Runs another loader, and then an action."""

    def __init__(self, loader: Loader, action: Action) -> None:
        self._loader, self._action = loader, action

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Functions that ask for the loader later (pkgutil, inspect) find the module's own.
        assert module.__spec__ is not None, "it is being imported"
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._action(module)
