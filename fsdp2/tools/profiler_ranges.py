"""Names what fsdp2 does in the pictures of torch's profiler, while one runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary, finalize

from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import record_function

from ..engine.compat import profiler_runs
from ..engine.group import FSDPParamGroup
from ..engine.owners import sharded_owner, some_of
from ..engine.root import Root
from .watched_comms import Collective, watch


class _Ranges:
    """Opens a range for each collective."""

    def launching(self, collective: Collective) -> AbstractContextManager[Any]:
        return record_function(f"fsdp2.{collective}")

    def waiting(self, collective: Collective) -> AbstractContextManager[Any]:
        return record_function(f"fsdp2.wait_{collective}")


_ranges = _Ranges()
# Root -> what ends its ranges, also when it is freed.
_endings: WeakKeyDictionary[Root, finalize[[], Any]] = WeakKeyDictionary()
# What ends the ranges of optimizer steps.
_steps_end: list[Callable[[], None]] = []
# Identity of an optimizer -> the range of its step.
_steps: dict[int, record_function] = {}


def start(root: Root) -> None:
    """Opens ranges for the collectives under `root` from now on, and for optimizer steps."""
    _endings[root] = finalize(root, watch(root.groups, _ranges))
    _endings[root].atexit = False
    if not _steps_end:
        hooks = register_optimizer_step_pre_hook(_before_step), register_optimizer_step_post_hook(_after_step)
        _steps_end.extend(hook.remove for hook in hooks)


def end(root: Root) -> None:
    """Opens none from now on, as the profiler has stopped."""
    _endings.pop(root)()
    while _steps_end:
        _steps_end.pop()()
    _steps.clear()


def show_reshard(group: FSDPParamGroup) -> None:
    """Opens a range for the reshard of `group`, if that frees memory."""
    buffers = group.parameters.buffers
    if group.params and buffers is not None and buffers.hold_memory():
        with record_function(f"fsdp2.reshard {group.name} {group.nbytes} bytes"):
            pass


def describe_step(optimizer: Optimizer) -> tuple[str, int]:
    """Returns the groups that an optimizer steps on, as text, and the bytes of their parameters on this rank."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    owners = [owner for param in params if isinstance(param, DTensor) and (owner := sharded_owner(param)) is not None]
    names = list(dict.fromkeys(owner.group.name for owner in owners))
    return some_of(names) or type(optimizer).__name__, sum(owner.param.local.nbytes for owner in owners)


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    if not profiler_runs():  # no root has had a pass since the last one stopped, or they are gone
        return
    names, nbytes = describe_step(optimizer)
    _steps[id(optimizer)] = step = record_function(f"fsdp2.optimizer_step {names} {nbytes} bytes")
    step.__enter__()


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    step = _steps.pop(id(optimizer), None)
    if step is not None:
        step.__exit__(None, None, None)
