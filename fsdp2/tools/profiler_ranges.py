"""Names what fsdp2 does in the pictures of torch's profiler, while one runs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from weakref import ref

from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import record_function

from ..engine.events import Observer
from ..engine.owners import all_groups, sharded_owner, some_of
from ..engine.torch_names import on_profiler, profiler_runs
from .watched_comms import Collective, watch


class ProfilerRanges(Observer):
    """Opens ranges in torch's profiler: "fsdp2.all_gather blocks.0 4096 bytes", and others.

    It follows no event, and watches no collective, until a profiler starts. So a step without one runs nothing of it.
    """

    ignored = frozenset({"before_free"})

    def attached(self, root: Any) -> None:
        if profiler_runs():
            _start_root(root)

    def before_free(self, group: Any) -> None:
        buffers = group.parameters.buffers
        if group.params and buffers is not None and buffers.hold_memory():
            with record_function(f"fsdp2.reshard {group.name} {group.nbytes} bytes"):
                pass


class _Ranges:
    """Opens a range for each collective."""

    def launching(self, collective: Collective) -> AbstractContextManager[Any]:
        return record_function(f"fsdp2.{collective}")

    def waiting(self, collective: Collective) -> AbstractContextManager[Any]:
        return record_function(f"fsdp2.wait_{collective}")


_ranges = _Ranges()
# What ends the ranges when the profiler stops.
_endings: list[Callable[[], None]] = []
# Identity of an optimizer -> the range of its step.
_steps: dict[int, record_function] = {}


def install() -> None:
    """Has ranges begin and end with torch's profilers. It is called once."""
    on_profiler(_start, _stop)


def _start() -> None:
    _stop()
    for root in dict.fromkeys(group.root for group in all_groups()):
        _start_root(root)
    hooks = register_optimizer_step_pre_hook(_before_step), register_optimizer_step_post_hook(_after_step)
    _endings.extend(hook.remove for hook in hooks)


def _start_root(root: Any) -> None:
    observer = root.events.of(ProfilerRanges)
    if observer is not None:
        root.events.follow(observer, "before_free")
        _endings.append(partial(_stop_root, ref(root)))
    _endings.append(watch(root.groups, _ranges))


def _stop_root(reference: ref[Any]) -> None:
    root = reference()
    if root is not None:
        root.events.ignore(root.events.of(ProfilerRanges), "before_free")


def _stop() -> None:
    while _endings:
        _endings.pop()()
    _steps.clear()


def describe_step(optimizer: Optimizer) -> tuple[str, int]:
    """Returns the groups that an optimizer steps on, as text, and the bytes of their parameters on this rank."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    owners = [owner for param in params if isinstance(param, DTensor) and (owner := sharded_owner(param)) is not None]
    names = list(dict.fromkeys(owner.group.name for owner in owners))
    return some_of(names) or type(optimizer).__name__, sum(owner.param.local.nbytes for owner in owners)


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    names, nbytes = describe_step(optimizer)
    _steps[id(optimizer)] = step = record_function(f"fsdp2.optimizer_step {names} {nbytes} bytes")
    step.__enter__()


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    step = _steps.pop(id(optimizer), None)
    if step is not None:
        step.__exit__(None, None, None)
