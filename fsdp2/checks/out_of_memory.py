"""Adds to errors of memory that ran out where that was: the group and the pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..engine.events import Observer
from ..engine.group import FSDPParamGroup
from ..engine.owners import roots_of_thread
from ..engine.root import Root
from ..engine.state import FSDPState

_BEGIN = "fsdp2: memory ran out in "
_ADVICE = (
    "fsdp2.plan(model, ranks=..., batch=...) says which settings need less: checkpointing, smaller blocks, "
    "reshard_after_forward=True, CPUOffloadPolicy(); or fewer rows a rank."
)


class OutOfMemory(Observer):
    """Adds a note to errors of memory that runs out in forwards. Their types, and their texts, stay as they are."""

    def call_failed(
        self, state: FSDPState, module: nn.Module, name: str | None, inputs: Any, error: RuntimeError
    ) -> None:
        if _is_out_of_memory(error) and state.groups:
            again = ", which runs again in backward," if state.root.backward is not None else ""
            self.explain(error, f"the forward of {_text(state.groups[0])}{again}", state.root)

    def explain(self, error: RuntimeError, where: str, root: Root) -> None:
        """Adds the note, unless an inner module has added one."""
        if any(note.startswith(_BEGIN) for note in getattr(error, "__notes__", ())) or _BEGIN in str(error):
            return
        resting = sum(param.local.nbytes for group in root.groups for param in group.params)
        note = f"{_BEGIN}{where} on this rank. Its shards of the model take {_size(resting)}. {_ADVICE}"
        if hasattr(error, "add_note"):
            error.add_note(note)
        else:  # Python 3.10
            error.args = (f"{error}\n{note}", *error.args[1:])


def explain_backward(error: RuntimeError) -> None:
    """Adds a note to an error that a backward has raised, if memory ran out. It is called before roots recover."""
    if not _is_out_of_memory(error):
        return
    for root in roots_of_thread():
        watcher = root.events.of(OutOfMemory)
        if root.backward is not None and watcher is not None:
            reached = [group for group in root.groups if group.reached_by is root.backward and group is not root.group]
            group = reached[0] if reached else root.group  # the last that backward has come to, against the order
            watcher.explain(error, f"the backward of {_text(group)}", root)


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def _text(group: FSDPParamGroup) -> str:
    return f"{group.purpose.label} ({_size(group.nbytes)} of unsharded parameters)"


def _size(nbytes: float) -> str:
    unit, size = next(
        ((unit, size) for unit, size in (("GiB", 2**30), ("MiB", 2**20)) if nbytes >= size), ("KiB", 1024)
    )
    return f"{nbytes / size:.1f} {unit}"
