"""Adds the observers of all folders to the engine. Each is named here with the module that defines it."""

from __future__ import annotations

from typing import Any

from .bridge.torch_interface import RegisteredStates
from .checks import comm_watcher, entry_points, named_comm, table, tools_when_needed, unnoticed_writes
from .checks.plan import check_plan
from .dtensor import fixes, optimizer_steps
from .engine import parameter_methods, subclasses, transforms
from .engine.events import Observer, extend
from .engine.unsharded_versions import UnshardedVersions
from .features import accumulate, conditional, large_submodules, module_repr, optimizer_in_backward


def install() -> None:
    """Extends the engine. `import fsdp2` calls it, once."""
    extend(
        comm_watcher=comm_watcher.Watched(),
        plan=(check_plan, subclasses.plan_packed_values, large_submodules.plan_large_submodules),
        class_attributes=(entry_points.class_attributes, module_repr.class_attributes),
        observers=(
            unnoticed_writes.make_unnoticed_writes,
            _each(RegisteredStates),
            _each(comm_watcher.DebugLevelFromEnvironment),
            _each(named_comm.Goodbyes),
            _each(UnshardedVersions),
            optimizer_in_backward.make_observer,
            conditional.make_consensus,
            _each(large_submodules.LargeSubmodules),
            _each(subclasses.MethodsSetLater),
            _each(parameter_methods.StateDictHooks),
            _each(tools_when_needed.AuditAtDebugLevel),
            _each(tools_when_needed.WasteLog),
            _each(tools_when_needed.ProfilerRanges),
            _each(_TorchFunc),
        ),
    )
    fixes.install()
    optimizer_steps.before_step.append(accumulate.refuse_step)
    table.install()


class _TorchFunc(Observer):
    """Makes saved-tensor hooks withdraw where torch.func forbids them."""

    def attached(self, root: Any) -> None:
        transforms.withdraw_where_disabled()


def _each(cls: type[Observer]) -> Any:
    """Returns a function that makes an observer of class `cls` for each root."""
    return lambda root: cls()
