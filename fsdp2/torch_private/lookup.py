"""Looks up private names of torch, and decides what fsdp2 does with a release of torch that lacks one.

- `required`: training needs the name. `import fsdp2` raises one error that lists all that are missing.
- `optional`: one ability needs it. Without the name the import succeeds. The ability raises NotImplementedError when it
  is used; or it is off, and one warning says so.
- `load`: one ability needs it, and looks it up when it is used, because its module takes long to import.
"""

from __future__ import annotations

import sys
import warnings
from importlib import import_module
from types import ModuleType
from typing import Any, NoReturn

import torch

SUPPORTED = "2.11 to 2.15"
"""The releases of torch with which fsdp2 is tested."""

_RAISE = object()

# The required names that torch lacks, until `refuse_incomplete` has raised.
_missing: list[str] = []


class Missing:
    """Stands for a function or a class that torch lacks. As a base class it adds nothing, and no object is of it.

    Raises:
        NotImplementedError: on each call, with the name, torch's release, and the ability of fsdp2 that needs it.
    """

    def __init__(self, path: str, ability: str) -> None:
        self.path, self.ability = path, ability

    def __call__(self, *_: object, **__: object) -> NoReturn:
        raise NotImplementedError(
            f"{self.ability}: expected torch to have {self.path}, which torch {torch.__version__} lacks. fsdp2 "
            f"supports torch {SUPPORTED}: install one of these, or train without this ability; the others work."
        )

    def __mro_entries__(self, _: tuple[Any, ...]) -> tuple[type, ...]:
        return (object,)

    def __instancecheck__(self, _: object) -> bool:
        return False


def required(path: str) -> Any:
    """Returns the object of this name, from `torch.` on, which training needs. `refuse_incomplete` raises if there is
    none.
    """
    try:
        return _find(path)
    except LookupError:
        _missing.append(path)
        return Missing(path, "training")


def optional(path: str, ability: str, instead: Any = _RAISE) -> Any:
    """Returns the object of this name, which only one ability of fsdp2 needs.

    Without it, a Missing; or `instead`, if the rest of fsdp2 is exact with that and without the ability: a warning says
    that it is off.
    """
    try:
        return _find(path)
    except LookupError:
        if instead is _RAISE:
            return Missing(path, ability)
    _warn(ability, path)
    return instead


def are_there(*found: object) -> bool:
    """Returns False if one of these objects of `optional` is missing. A warning then says that its ability is off."""
    missing = next((each for each in found if isinstance(each, Missing)), None)
    if missing is not None:
        _warn(missing.ability, missing.path)
    return missing is None


def _warn(ability: str, path: str) -> None:
    text = f"{ability}: off, because torch {torch.__version__} lacks {path}. fsdp2 supports torch {SUPPORTED}."
    warnings.warn(text, stacklevel=3)


def load(path: str, ability: str) -> Any:
    """Returns the object of this name now, and imports its module if nobody has.

    Raises:
        NotImplementedError: torch has none.
    """
    try:
        return _find(path)
    except LookupError:
        return Missing(path, ability)()


def load_module(name: str, ability: str) -> ModuleType:
    """Returns the module of this name, which it imports.

    Raises:
        NotImplementedError: torch has none.
    """
    try:
        return import_module(name)
    except ImportError:
        return Missing(name, ability)()


def refuse_incomplete() -> None:
    """Raises one error for all required names that are missing.

    Raises:
        ImportError: some are.
    """
    if not _missing:
        return
    names, _missing[:] = ", ".join(sorted({*_missing})), []
    raise ImportError(
        f"fsdp2 supports torch {SUPPORTED}, and this is torch {torch.__version__}, which lacks private names that "
        f"training needs: {names}. Install one of these releases, or a newer fsdp2."
    )


def _find(path: str) -> Any:
    """Returns what a dotted name stands for.

    Raises:
        LookupError: nothing.
    """
    found, prefix = torch, "torch"
    for name in path.split(".")[1:]:
        prefix += f".{name}"
        try:
            # A package may have a function of the name of its module: torch.distributed._composable.contract.
            found = sys.modules.get(prefix) or getattr(found, name)
        except AttributeError:
            try:
                found = import_module(prefix)
            except ImportError as error:
                raise LookupError(path) from error
    return found
