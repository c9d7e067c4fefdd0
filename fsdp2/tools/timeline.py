"""Draws the timeline of a user's own steps, with the memory over time: `with fsdp2.trace(model, "step.json")`."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..engine.compat import no_torch_function
from ..engine.events import Observer
from ..engine.state import groups_below
from .profiler_ranges import describe_step
from .watched_comms import Collective, watch

__all__ = ["trace"]
# The tracks of a picture.
_PASSES, _MODULES, _HOST, _RESHARDS, _OPTIMIZER = range(1, 6)
_TRACKS = ["passes", "forwards of modules", "host: launches, waits", "reshards", "optimizer steps"]


@contextmanager
def trace(model: nn.Module, path: str | os.PathLike[str]) -> Iterator[None]:
    """Context: records what fsdp2 does in the steps inside, and writes it as a picture for Perfetto or a browser.

    Open the file at https://ui.perfetto.dev, or in chrome://tracing. It shows passes, forwards of modules, each
    collective from its launch until it was waited for, the host's launches and waits, reshards and optimizer steps,
    with the FQNs and bytes of their groups; and counters of memory in bytes: resting shards, unsharded parameters,
    gradients (sharded, unsynchronized, and being reduced), on CUDA also all that is allocated. Times are those of the
    host: on a GPU the work itself runs later, for which torch's profiler is right (it shows the same names).

    It does not communicate. Every rank may enter it; the first writes the file, or each one does, if the path contains
    "{rank}". A file is written also if a step raises. Outside of the context nothing is recorded, and nothing costs
    time. Ranks that record nothing run nothing besides.

    Args:
        model: a sharded module: the root, so that passes are shown, or any module inside.
        path: the file to write, for example "step.json" or "step-{rank}.json".

    Raises:
        TypeError, ValueError: `model` is no module, or has no sharded modules.

    Example:
        ```python
        with fsdp2.trace(model, "step.json"):
            loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        ```
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected an nn.Module, got {type(model).__name__}")
    groups = groups_below(model)
    if not groups:
        raise ValueError(f"model: expected sharded modules, {type(model).__name__} has none")
    rank, text = dist.get_rank(), os.fspath(path)
    if rank and "{rank}" not in text:
        yield
        return
    timeline, roots = _Timeline(groups, rank), dict.fromkeys(group.root for group in groups)
    ends: list[Callable[[], None]] = [watch(groups, timeline)]
    ends.append(register_optimizer_step_pre_hook(timeline.before_step).remove)
    ends.append(register_optimizer_step_post_hook(timeline.after_step).remove)
    for root in roots:
        root.observe([*root.events.observers, timeline])
    try:
        yield
    finally:
        for root in roots:
            root.observe([each for each in root.events.observers if each is not timeline])
        for end in ends:
            end()
        timeline.write(Path(text.replace("{rank}", str(rank))))


class _Timeline(Observer):
    """Collects the events of a Chrome trace. Several threads may add some."""

    def __init__(self, groups: list[Any], rank: int) -> None:
        self._groups, self._chosen, self._rank = groups, {*groups}, rank
        self._began = time.perf_counter_ns()
        self._lock = Lock()
        self.events: list[dict[str, Any]] = []
        self._open: list[tuple[Any, float]] = []  # forwards that run
        self._pass_began: dict[str, float] = {}
        self._step_began: dict[int, float] = {}
        self._gradients: dict[Any, int] = {}
        self._resting = 0
        size = dist.get_world_size()
        self._note("M", "process_name", 0, args={"name": f"rank {rank} of {size}"})
        for track, name in enumerate(_TRACKS, 1):
            self._note("M", "thread_name", track, args={"name": name})
        self._refresh()

    # ---- writing

    def _now(self) -> float:
        return (time.perf_counter_ns() - self._began) / 1000

    def _note(self, phase: str, name: str, track: int, when: float | None = None, **more: Any) -> None:
        event = {
            "ph": phase,
            "name": name,
            "pid": self._rank,
            "tid": track,
            "ts": self._now() if when is None else when,
        }
        with self._lock:
            self.events.append(event | more)

    def _span(self, name: str, track: int, began: float, **arguments: Any) -> None:
        self._note("X", name, track, began, dur=self._now() - began, args=arguments)

    def write(self, path: Path) -> None:
        """Writes the file."""
        for name in [*self._pass_began]:  # a step has raised
            self._end_pass(name)
        self._refresh()
        path.write_text(json.dumps({"traceEvents": self.events, "displayTimeUnit": "ms"}))

    # ---- memory

    def _refresh(self) -> None:
        self._resting = sum(param.local.nbytes for group in self._groups for param in group.params)
        for group in self._groups:
            self._gradients[group] = _gradient_nbytes(group)
        self._sample()

    def _sample(self, freed: Any = None) -> None:
        """Notes the memory now. `freed`: a group whose unsharded parameters are freed next."""
        gradients = [group.gradients for group in self._groups]
        waiting = [t.nbytes for each in gradients for t in (*each.unsynchronized.values(), *each.partial.values())]
        queues = {id(group.queue): group.queue for group in self._groups}
        counters = {
            "resting": self._resting,
            "unsharded": sum(group.nbytes for group in self._groups if group is not freed and _is_allocated(group)),
            "gradients": sum(self._gradients.values()) + sum(waiting),
            "reducing": sum(entry.pending.nbytes for queue in queues.values() for entry in [*queue.running]),
        }
        for name, nbytes in counters.items():
            self._note("C", name, 0, args={"bytes": nbytes})
        device = self._groups[0].mesh.device
        if device.type == "cuda":
            self._note("C", "allocated", 0, args={"bytes": torch.cuda.memory_allocated(device)})

    # ---- collectives

    @contextmanager
    def launching(self, collective: Collective) -> Iterator[None]:
        began, arguments = self._now(), {"group": collective.name, "bytes": collective.nbytes}
        shown = {"cat": collective.kind, "id": collective.number, "args": arguments}
        self._note("b", f"{collective.kind} {collective.name}", 0, began, **shown)
        self._sample()
        yield
        self._span(f"launch {collective.kind} {collective.name}", _HOST, began, **arguments)

    @contextmanager
    def waiting(self, collective: Collective) -> Iterator[None]:
        began, arguments = self._now(), {"group": collective.name, "bytes": collective.nbytes}
        yield
        self._span(f"wait {collective.kind} {collective.name}", _HOST, began, **arguments)
        self._note("e", f"{collective.kind} {collective.name}", 0, cat=collective.kind, id=collective.number)

    # ---- events of the engine

    def _begin_pass(self, name: str) -> None:
        self._pass_began.setdefault(name, self._now())
        self._refresh()

    def _end_pass(self, name: str) -> None:
        began = self._pass_began.pop(name, None)
        if began is not None:
            self._span(name, _PASSES, began)
            self._refresh()

    def pass_began(self, root: Any) -> None:
        self._end_pass("forward")
        self._begin_pass("forward")

    def pass_ended(self, root: Any) -> None:
        self._end_pass("forward")

    pass_failed = pass_ended

    def backward_began(self, root: Any) -> None:
        self._begin_pass("backward")

    def backward_ended(self, root: Any) -> None:
        self._end_pass("backward")

    backward_failed = backward_ended

    def forward_began(self, group: Any) -> None:
        self._open.append((group, self._now()))

    def forward_ended(self, group: Any) -> None:
        if any(each is group for each, _ in self._open):
            while self._open:  # those inside that have raised, too
                each, began = self._open.pop()
                self._span(each.name, _MODULES, began, bytes=group.nbytes)
                if each is group:
                    return

    forward_failed = forward_ended

    def gathered(self, group: Any) -> None:
        self._sample()

    def before_free(self, group: Any) -> None:
        if group in self._chosen and _is_allocated(group):
            self._note(
                "i", f"reshard {group.name}", _RESHARDS, s="t", args={"group": group.name, "bytes": group.nbytes}
            )
            self._sample(freed=group)

    before_reduce = gathered

    def gradients_delivered(self, group: Any, params: Any, of_pass: object) -> None:
        if group in self._chosen:
            self._gradients[group] = _gradient_nbytes(group)
        self._sample()

    # ---- optimizers

    def before_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Notes that a step begins."""
        self._step_began[id(optimizer)] = self._now()

    def after_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Notes that a step has ended."""
        began = self._step_began.pop(id(optimizer), None)
        if began is not None:
            names, nbytes = describe_step(optimizer)
            self._span(f"step {type(optimizer).__name__}", _OPTIMIZER, began, groups=names, bytes=nbytes)
            self._refresh()


def _is_allocated(group: Any) -> bool:
    buffers = group.parameters.buffers
    return bool(group.params) and buffers is not None and buffers.hold_memory()


def _gradient_nbytes(group: Any) -> int:
    """Returns the bytes of `.grad` of the group's shards, which have the dtype of these."""
    with no_torch_function():
        waits = group.gradients.unsynchronized.keys() | group.gradients.partial.keys()
        return sum(
            param.local.nbytes
            for i, param in enumerate(group.params)
            if param.sharded.grad is not None and i not in waits
        )
