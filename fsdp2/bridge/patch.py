"""Replaces torch's FSDP2 by fsdp2 in programs that were written for torch's: patch_torch(). This file and
torch_interface.py know in which modules torch's names are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from ..api import fully_shard, replicate
from ..calls.forward_method import register_fsdp_forward_method
from ..collectives.meshes import DataParallelMeshDims
from ..engine.policy import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from ..engine.state import require_state
from ..module import FSDPModule, GradientReductionHandle, UnshardHandle, share_comm_ctx
from ..torch_private.lookup import load_module
from .torch_interface import get_module_fsdp_state

_API = "torch.distributed.fsdp"
_REPLICATE = "torch.distributed._composable.replicate_with_fsdp"
# The package of torch's implementation. Its code continues to use its own names: programs may hold references to it.
_INTERNAL = f"{_API}._fully_shard."
_STATES = f"{_INTERNAL}_fsdp_state"
# Modules from which others import names. These get a copy of the module, in which the names are those of fsdp2.
_COPIED = (f"{_INTERNAL}_fully_shard", _STATES, _REPLICATE)
_ALIASES = ("torch.distributed._composable.fsdp", "torch.distributed._composable.fsdp.fully_shard")
_PACKAGE = __name__.partition(".")[0]


class _OfReplicated(type):
    """Lets `isinstance` distinguish a replicated module from a sharded one: both have the same class."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, FSDPModule) and not require_state(instance).groups[0].mesh.shard_axes


class ReplicateModule(FSDPModule, metaclass=_OfReplicated):
    """The class of modules that `replicate` was applied to, under torch's name for it, for `isinstance`."""


_PUBLIC = (
    *(CPUOffloadPolicy, DataParallelMeshDims, FSDPModule, GradientReductionHandle, MixedPrecisionPolicy),
    *(OffloadPolicy, UnshardHandle, fully_shard, register_fsdp_forward_method, share_comm_ctx),
)
# Module of torch -> a name in it -> the object that replaces the one of that name. Older releases lack some of them.
_OURS: dict[str, dict[str, Any]] = {
    _API: {each.__name__: each for each in _PUBLIC},
    _REPLICATE: {"replicate": replicate, "ReplicateModule": ReplicateModule},
    _STATES: {"_get_module_fsdp_state": get_module_fsdp_state},
}


class Patch:
    """Represents one call of `patch_torch`. The patch is in force as long as one of them is not undone."""

    def __init__(self) -> None:
        self._is_undone = False

    def undo(self) -> None:
        """Restores torch's names, unless another call is in force. Further calls do nothing.

        Modules sharded meanwhile stay sharded by fsdp2, and modules outside torch keep the names that they imported
        meanwhile.
        """
        if not self._is_undone:
            self._is_undone = True
            _replaced.in_force.remove(self)
            if not _replaced.in_force:
                _replaced.restore()

    def __enter__(self) -> Patch:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def patch_torch() -> Patch:
    """Replaces torch's `fully_shard`, `FSDPModule`, policies, ... by those of fsdp2, wherever programs find them.

    It replaces the names of torch's objects in all imported modules: in torch's own, from which later imports take
    them, and in others that have imported them before. Call it before or after such imports. Torch's implementation
    itself stays as it is, for programs that reach it in another way.

    Returns:
        A handle: call its `undo()`, or use it in a `with` statement; otherwise the patch stays. Calls may nest. Each
        call also replaces the names under which modules have imported torch's objects since the last.
    """
    patch = Patch()
    _replaced.in_force.append(patch)
    _replaced.replace()
    return patch


class _Replaced:
    """Replaces names of torch while patches are `in_force`, and restores them."""

    def __init__(self) -> None:
        self.in_force: list[Patch] = []
        # Pairs of an object of torch, which may be a module, and the object that replaces it.
        self._pairs: list[tuple[Any, Any]] = []
        # The replaced names: (the dict of names, the name, torch's object, the object of fsdp2).
        self._names: list[tuple[dict[str, Any], str, Any, Any]] = []

    def replace(self) -> None:
        # All are imported before anything is replaced, so that classes which torch derives from its own are complete.
        for name in (_API, *_ALIASES, *_COPIED):
            load_module(name, "patch_torch and python -m fsdp2")  # under `python -m fsdp2`, this may call patch_torch
        if not self._pairs:
            self._pairs.extend(_pair_up())
        ours = {id(theirs): our for theirs, our in self._pairs}
        for name, module in list(sys.modules.items()):
            if id(module) in ours:
                self._put(sys.modules, name, ours[id(module)])
            elif not name.startswith(_INTERNAL) and not name.startswith(f"{_PACKAGE}."):
                for key, value in _items(module):
                    if id(value) in ours:
                        self._put(vars(module), key, ours[id(value)])

    def _put(self, names: dict[str, Any], key: str, ours: Any) -> None:
        self._names.append((names, key, names[key], ours))
        names[key] = ours

    def restore(self) -> None:
        for names, key, theirs, ours in reversed(self._names):
            if names.get(key) is ours:
                names[key] = theirs
        self._restore_in_torch()
        self._names.clear()
        self._pairs.clear()

    def _restore_in_torch(self) -> None:
        """Restores names in modules of torch that were imported meanwhile: its code must know its own modules again."""
        theirs = {id(ours): their for their, ours in self._pairs}
        for name, module in list(sys.modules.items()):
            if name.startswith("torch."):
                for key, value in _items(module):
                    if id(value) in theirs:
                        vars(module)[key] = theirs[id(value)]


_replaced = _Replaced()


def _pair_up() -> Iterator[tuple[Any, Any]]:
    """Yields each of torch's objects with the one that replaces it."""
    pairs = [
        (getattr(sys.modules[module], name), ours)
        for module, names in _OURS.items()
        for name, ours in names.items()
        if hasattr(sys.modules[module], name)
    ]
    yield from pairs
    for name in _COPIED:
        yield sys.modules[name], _copy(sys.modules[name], {id(theirs): ours for theirs, ours in pairs})


def _copy(module: ModuleType, ours: dict[int, Any]) -> ModuleType:
    """Returns a copy of a module, in which objects are replaced by `ours`: identity -> object."""
    copied = ModuleType(module.__name__, module.__doc__)
    vars(copied).update({key: ours.get(id(value), value) for key, value in vars(module).items()})
    return copied


def _items(module: Any) -> list[tuple[str, Any]]:
    """Returns the names in a module, with their values."""
    names = getattr(module, "__dict__", None)  # anything can be in sys.modules
    return list(names.items()) if isinstance(names, dict) else []
