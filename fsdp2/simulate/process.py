"""Exchanges what a process has once and each rank has for itself, when one rank's turn ends and another's begins."""

from __future__ import annotations

import importlib.machinery
import logging
import os
import random
import sys
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ..torch_private.simulate import WORLD, RankWorld


def environment_of(rank: int, num_ranks: int) -> dict[str, str]:
    """Returns the variables that torchrun sets for a rank, on one machine."""
    local = {"RANK": rank, "LOCAL_RANK": rank, "ROLE_RANK": rank, "GROUP_RANK": 0}
    sizes = {
        "WORLD_SIZE": num_ranks,
        "LOCAL_WORLD_SIZE": num_ranks,
        "ROLE_WORLD_SIZE": num_ranks,
        "GROUP_WORLD_SIZE": 1,
    }
    names = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 29500,
        "ROLE_NAME": "default",
        "TORCHELASTIC_RUN_ID": "simulated",
    }
    restarts = {"TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0}
    return {name: str(value) for name, value in (local | sizes | names | restarts).items()}


def _change_folder(folder: str) -> None:
    if folder != os.getcwd():
        os.chdir(folder)


def _set_environment(values: Mapping[str, str]) -> None:
    if values != os.environ:
        for name in os.environ.keys() - values.keys():
            del os.environ[name]
        os.environ.update((name, value) for name, value in values.items() if os.environ.get(name) != value)


_RANDOM = 4
# Functions that get and set what a rank has: the environment, folder, dtype, and generators of random numbers.
_FUNCTIONS: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (lambda: dict(os.environ), _set_environment),
    (os.getcwd, _change_folder),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_rng_state, torch.set_rng_state),
    (random.getstate, random.setstate),
]
# Variables of modules, and how the first value of a rank is made of the caller's: programs append to the lists, replace
# the streams, and enter `warnings.catch_warnings`, which sets three variables.
_VARIABLES: list[tuple[Any, str, Callable[[Any], Any]]] = [
    (sys, "argv", list),
    (sys, "stdout", lambda value: value),
    (sys, "stderr", lambda value: value),
    (sys, "excepthook", lambda value: value),
    (warnings, "filters", list),
    (warnings, "showwarning", lambda value: value),
    (warnings, "_showwarnmsg_impl", lambda value: value),
    (logging.root, "handlers", list),
    (*WORLD, lambda _: RankWorld()),
]


def _numpy() -> Any:
    """Returns NumPy, which torch imports where it is installed."""
    return sys.modules.get("numpy")


class OwnModules(MetaPathFinder):
    """Finds the modules of which each rank has its own: those below the folder of the program, and some packages.

    What was imported before the program starts is shared, and so are other installed packages.
    """

    def __init__(self, folder: Path | None, packages: Collection[str]) -> None:
        self._folder, self._packages = None if folder is None else folder.resolve(), packages
        self._shared = {name.partition(".")[0] for name in sys.modules}
        self.names = set() if folder is None else {"__main__"}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Notes the name of a module that a rank imports, if each rank needs its own."""
        if self._folder is None or name.partition(".")[0] in self._shared - self.names:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        places = [spec.origin or "", *(spec.submodule_search_locations or ())] if spec is not None else []
        is_own = any(self._folder in Path(each).resolve().parents and "site-packages" not in each for each in places)
        if not is_own and name.partition(".")[0] not in self._packages:
            return None
        self.names.add(name)
        return spec


class ProcessState:
    """The state that a process has once, kept while others have theirs in its place. It begins as a copy of the present
    one.
    """

    def __init__(self, modules: OwnModules) -> None:
        self._modules, self._own_modules = modules, dict[str, ModuleType]()
        self._functions, numpy = [*_FUNCTIONS], _numpy()
        if numpy is not None:
            self._functions.append((numpy.random.get_state, numpy.random.set_state))
        self._keep()

    def _keep(self) -> None:
        self._values = [get() for get, _ in self._functions]
        self._objects = [getattr(owner, name) for owner, name, _ in _VARIABLES]

    def enter(self) -> None:
        """Gives the process this state."""
        for (_, change), value in zip(self._functions, self._values, strict=True):
            change(value)
        for (owner, name, _), value in zip(_VARIABLES, self._objects, strict=True):
            setattr(owner, name, value)
        sys.modules.update(self._own_modules)

    def leave(self) -> None:
        """Keeps the state of the process, for another one to be given to it."""
        self._keep()
        self._own_modules = {name: sys.modules.pop(name) for name in self._modules.names if name in sys.modules}


class RankProcess(ProcessState):
    """The state of the process as a simulated rank has it. It begins with torchrun's environment, and no process group.

    Python's and NumPy's generators of random numbers differ between ranks, as those of processes do.
    """

    def __init__(self, rank: int, num_ranks: int, modules: OwnModules) -> None:
        super().__init__(modules)
        self._values[0] |= environment_of(rank, num_ranks)
        self._objects = [first(value) for (_, _, first), value in zip(_VARIABLES, self._objects, strict=True)]
        self._values[_RANDOM] = random.Random(rank).getstate()
        if (numpy := _numpy()) is not None:
            self._values[-1] = numpy.random.RandomState(rank).get_state()
