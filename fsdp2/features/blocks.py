"""Blocks that a step of a model may be in: what each has in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

from torch.optim import Optimizer

from ..engine.events import Observer
from ..engine.group import FSDPParamGroup
from ..engine.root import Root


class BlockWatch(Observer):
    """Knows which block of one kind a root is in: `active`, of a subclass for each kind. No optimizer steps inside.

    `refusal`: names the kind, and says why, and where to step instead.
    """

    refusal: ClassVar[str]

    def __init__(self) -> None:
        self.active: Any = None


W = TypeVar("W", bound=BlockWatch)


def watch_of(root: Root, kind: type[W]) -> W:
    """Returns the watch of a root, which follows it from the first block on."""
    watch: W | None = root.events.of(kind)
    if watch is None:
        watch = kind()
        root.add(watch)
    return watch


def refuse_step(optimizer: Optimizer, groups: Sequence[FSDPParamGroup], in_backward: bool) -> None:
    """Raises RuntimeError if an optimizer is about to step on parameters of a model inside of a block."""
    for root in {group.root for group in groups}:
        for kind in BlockWatch.__subclasses__():
            watch = root.events.of(kind)
            if watch is not None and watch.active is not None:
                raise RuntimeError(f"{type(optimizer).__name__}.step: {kind.refusal}")
