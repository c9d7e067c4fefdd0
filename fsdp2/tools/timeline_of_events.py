"""Draws the timeline of models that fsdp2 has sharded, from the events of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..engine.compat import no_torch_function
from ..engine.events import Observer
from ..engine.group import FSDPParamGroup
from ..engine.root import Root
from ..engine.state import groups_below
from .picture import HOST, MODULES, OPTIMIZER, RESHARDS, Picture
from .profiler_ranges import describe_step
from .watched_comms import Collective, watch


@contextmanager
def record_events(model: nn.Module, rank: int, path: Path) -> Iterator[None]:
    """Context: follows the groups in `model`, and writes the picture to `path` at the end."""
    groups = groups_below(model)
    timeline, roots = _Timeline(groups, rank), dict.fromkeys(group.root for group in groups)
    ends: list[Callable[[], None]] = [watch(groups, timeline)]
    ends.append(register_optimizer_step_pre_hook(timeline.before_step).remove)
    ends.append(register_optimizer_step_post_hook(timeline.after_step).remove)
    for root in roots:
        root.add(timeline)
    try:
        yield
    finally:
        for root in roots:
            root.remove(timeline)
        for end in ends:
            end()
        timeline.write(path)


class _Timeline(Observer, Picture):
    """Follows the events and collectives of groups."""

    def __init__(self, groups: list[Any], rank: int) -> None:
        super().__init__(rank)
        self._groups, self._chosen = groups, {*groups}
        self._open: list[tuple[Any, float]] = []  # forwards that run
        self._step_began: dict[int, float] = {}
        self._gradients: dict[Any, int] = {}
        self._resting = 0
        self.refresh()

    # ---- memory

    def refresh(self) -> None:
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
        self.count(counters, self._groups[0].mesh.device)

    # ---- collectives

    @contextmanager
    def launching(self, collective: Collective) -> Iterator[None]:
        began, arguments = self.now(), {"group": collective.name, "bytes": collective.nbytes}
        shown = {"cat": collective.kind, "id": collective.number, "args": arguments}
        self.note("b", f"{collective.kind} {collective.name}", 0, began, **shown)
        self._sample()
        yield
        self.span(f"launch {collective.kind} {collective.name}", HOST, began, **arguments)

    @contextmanager
    def waiting(self, collective: Collective) -> Iterator[None]:
        began, arguments = self.now(), {"group": collective.name, "bytes": collective.nbytes}
        yield
        self.span(f"wait {collective.kind} {collective.name}", HOST, began, **arguments)
        self.note("e", f"{collective.kind} {collective.name}", 0, cat=collective.kind, id=collective.number)

    # ---- events of the engine

    def pass_began(self, root: Root) -> None:
        self.end_pass("forward")
        self.begin_pass("forward")

    def pass_ended(self, root: Root) -> None:
        self.end_pass("forward")

    def pass_failed(self, root: Root, in_backward: bool) -> None:
        self.end_pass("backward" if in_backward else "forward")

    def backward_began(self, root: Root) -> None:
        self.begin_pass("backward")

    def backward_ended(self, root: Root) -> None:
        self.end_pass("backward")

    def forward_began(self, group: FSDPParamGroup) -> None:
        self._open.append((group, self.now()))

    def forward_ended(self, group: FSDPParamGroup, inputs: Any = ()) -> None:
        if any(each is group for each, _ in self._open):
            while self._open:  # those inside that have raised, too
                each, began = self._open.pop()
                self.span(each.name, MODULES, began, bytes=group.nbytes)
                if each is group:
                    return

    forward_failed = forward_ended

    def unsharded(self, group: FSDPParamGroup) -> None:
        self._sample()

    def before_free(self, group: FSDPParamGroup) -> None:
        if group in self._chosen and _is_allocated(group):
            self.note("i", f"reshard {group.name}", RESHARDS, s="t", args={"group": group.name, "bytes": group.nbytes})
            self._sample(freed=group)

    before_reduce = unsharded

    def gradients_delivered(self, group: FSDPParamGroup) -> None:
        if group in self._chosen:
            self._gradients[group] = _gradient_nbytes(group)
        self._sample()

    # ---- optimizers

    def before_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Notes that a step begins."""
        self._step_began[id(optimizer)] = self.now()

    def after_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Notes that a step has ended."""
        began = self._step_began.pop(id(optimizer), None)
        if began is not None:
            names, nbytes = describe_step(optimizer)
            self.span(f"step {type(optimizer).__name__}", OPTIMIZER, began, groups=names, bytes=nbytes)
            self.refresh()


def _is_allocated(group: FSDPParamGroup) -> bool:
    buffers = group.parameters.buffers
    return bool(group.params) and buffers is not None and buffers.hold_memory()


def _gradient_nbytes(group: FSDPParamGroup) -> int:
    """Returns the bytes of `.grad` of the group's shards, which have the dtype of these."""
    with no_torch_function():
        waits = group.gradients.unsynchronized.keys() | group.gradients.partial.keys()
        return sum(
            param.local.nbytes
            for i, param in enumerate(group.params)
            if param.sharded.grad is not None and i not in waits
        )
