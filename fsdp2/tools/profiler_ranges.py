"""Names what fsdp2 does in the pictures of torch's profiler, while one runs."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary, finalize

from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import record_function
from torch.utils.hooks import RemovableHandle

from ..engine.group import FSDPParamGroup
from ..engine.owners import sharded_owner, some_of
from ..engine.root import Root
from ..torch_private.internals import profiler_runs
from .watched_comms import Collective, watch


class _Ranges:
    """Opens a range for each collective, and for each step of an optimizer."""

    def __init__(self) -> None:
        # Root -> what ends its ranges, also when it is freed.
        self._endings: WeakKeyDictionary[Root, finalize[[], Any]] = WeakKeyDictionary()
        # torch's handles of the hooks around steps, while there are any.
        self.hooks: list[RemovableHandle] = []
        # Identity of an optimizer -> the range of its step.
        self._steps: dict[int, record_function] = {}

    def start(self, root: Root) -> None:
        self._endings[root] = finalize(root, watch(root.groups, self))
        self._endings[root].atexit = False
        if not self.hooks:
            self.hooks.append(register_optimizer_step_pre_hook(self._before_step))
            self.hooks.append(register_optimizer_step_post_hook(self._after_step))

    def end(self, root: Root) -> None:
        self._endings.pop(root)()
        while self.hooks:
            self.hooks.pop().remove()
        self._steps.clear()

    def launching(self, collective: Collective) -> AbstractContextManager[Any]:
        return record_function(f"fsdp2.{collective}")

    def waiting(self, collective: Collective) -> AbstractContextManager[Any]:
        return record_function(f"fsdp2.wait_{collective}")

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if not profiler_runs():  # no root has had a pass since the last one stopped, or they are gone
            return
        names, nbytes = describe_step(optimizer)
        self._steps[id(optimizer)] = step = record_function(f"fsdp2.optimizer_step {names} {nbytes} bytes")
        step.__enter__()

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        step = self._steps.pop(id(optimizer), None)
        if step is not None:
            step.__exit__(None, None, None)


# One for the process, as a profiler of torch, and its hooks around steps, are.
_ranges = _Ranges()


def start(root: Root) -> None:
    """Opens ranges for the collectives under `root` from now on, and for optimizer steps."""
    _ranges.start(root)


def end(root: Root) -> None:
    """Opens none from now on, as the profiler has stopped."""
    _ranges.end(root)


def show_reshard(group: FSDPParamGroup) -> None:
    """Opens a range for the reshard of `group`, if that frees memory."""
    if group.params and group.holds_memory():
        with record_function(f"fsdp2.reshard {group.name} {group.nbytes} bytes"):
            pass


def describe_step(optimizer: Optimizer) -> tuple[str, int]:
    """Returns the groups that an optimizer steps on, as text, and the bytes of their parameters on this rank."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    owners = [owner for param in params if isinstance(param, DTensor) and (owner := sharded_owner(param)) is not None]
    names = list(dict.fromkeys(owner.group.name for owner in owners))
    return some_of(names) or type(optimizer).__name__, sum(owner.param.local.nbytes for owner in owners)
