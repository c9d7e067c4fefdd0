"""Collects the private names by which other parts of torch, and programs written for torch's FSDP2, know a module."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from .lookup import are_there, load, optional
from .once import once
from .when_imported import when_imported

if TYPE_CHECKING:
    from torch.distributed._composable_state import _State
else:
    _State = optional("torch.distributed._composable_state._State", "other composable APIs of torch")

# The files through which dynamo traces: they have functions around torch's own, or around methods of users.
_TRACED = ("entry_points.py", "forward_method.py", "module_class.py")


@once
def keep_out_of_graphs() -> None:
    """Has dynamo, as soon as it is imported, trace no file of fsdp2 but those in `_TRACED`."""
    when_imported("torch._dynamo", _skip_ours)


def _skip_ours(_: ModuleType) -> None:
    package, off = Path(__file__).parents[1], "what keeps torch.compile from tracing files of fsdp2"
    folders: list[str] | None = optional("torch._dynamo.trace_rules.SKIP_DIRS", off, instead=None)
    add: Callable[[str], None] | None = optional("torch._dynamo.trace_rules.add", off, instead=None)
    if folders is None or add is None:
        return
    for folder in {path.parent for path in package.rglob("*.py")} - {package}:
        files = {path.name for path in folder.glob("*.py")}
        has_traced = not files.isdisjoint(_TRACED)
        folders.extend(str(folder / each) for each in files.difference(_TRACED)) if has_traced else (
            folders.append(f"{folder}/")
        )
    folders.extend(map(str, package.glob("*.py")))
    add(__name__)  # takes 10 ms, to compile a pattern of all


ComposableState = _State
_COMPOSABLE = "what torch's other composable APIs know of sharded modules"


def register_composable(module: nn.Module, reference: weakref.ref[_State], name: str) -> None:
    """Lets torch's other composable APIs know that `name` manages `module`.

    DDP's `replicate` refuses such a module, and leaves its parameters alone below another. Tools look for the state in
    torch's table, which does not keep it alive: it gets `reference`, a weak one.
    """
    states = _states_of_modules()
    # Imported at the first call, because it imports DDP.
    key = optional("torch.distributed._composable.contract.REGISTRY_KEY", _COMPOSABLE)
    item = optional("torch.distributed._composable.contract.RegistryItem", _COMPOSABLE)
    if states is not None and are_there(key, item):
        module.__dict__.setdefault(key, {})[name] = item()
        states[module] = reference


@once
def _states_of_modules() -> dict[nn.Module, Any] | None:
    """Returns torch's table of modules that a composable API manages. None: it has none, which a warning says."""
    found = optional("torch.distributed._composable_state._module_state_mapping", _COMPOSABLE, instead=None)
    return cast("dict[nn.Module, Any] | None", found)


def state_in_table(module: nn.Module) -> _State | None:
    """Returns the state that a composable API of torch has noted for `module`, or None."""
    found = (_states_of_modules() or {}).get(module)
    return found() if isinstance(found, weakref.ref) else found


def is_traced() -> bool:
    """Returns True while torch.compile traces code on this thread, and asks objects what they are."""
    if "torch._dynamo" not in sys.modules:
        return False
    return load("torch._guards.TracingContext", "torch.compile of sharded models").try_get() is not None
