"""Runs an optimizer's step group by group on another stream, and has all readers of shards wait for it.

The stream that computes does not wait for such a step as a whole: the next forward gathers the first group as soon as
that one was stepped on, and computes while the others are. What may read or write meanwhile waits in one of three ways:

- a group's gathers, and all else that calls `root.waits_before_read`: the current stream waits for the group's step
- whoever else has a sharded parameter: reads of its local tensor, of which each operation has one, go through
  `_local_tensor`; while a parameter is late, its class is a subclass whose `_local_tensor` makes the host wait first
- writes to sharded parameters and their gradients, which are announced (devices/write_notices.py): the host waits

Memory that something else has a view of when the step begins could be read unseen: then nothing is late. After a read
that has made the host wait, some steps are not late either: the program may read after each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..calls.nested import tensors_in
from ..devices import streams
from ..devices.write_notices import notices
from ..engine.group import FSDPParamGroup
from ..engine.owners import sharded_owner
from ..engine.root import Root
from ..torch_private.internals import peek_local, set_local_unseen, storage_uses

# The attribute of a late parameter that holds a weak reference to its LateStep: Python finds no cycle through a tensor
# that C++ holds, too.
_STEP = "_fsdp2_late_step"
# After reads that have made the host wait, at most so many steps are not late.
_MOST_USUAL_STEPS = 63


class LateStep:
    """Is the part of one step that writes to the shards of one group.

    Args:
        steps: of the group's root.
        parameters: the sharded ones that are stepped on.
        kept: what the step reads and writes. It stays alive until the stream that had it allocated has waited.
        home: the stream on which the optimizer was called.
        event: is recorded behind the step, on the stream beside.
    """

    def __init__(
        self, steps: LateSteps, parameters: Sequence[Tensor], kept: Sequence[Tensor], home: torch.Stream, event: Any
    ) -> None:
        self.steps, self.event = steps, event
        self._parameters, self._kept, self._home = parameters, kept, home
        self._device = kept[0].device
        self._waited: list[torch.Stream] = []
        for parameter in parameters:
            vars(parameter)[_STEP] = ref(self)
            parameter.__class__ = _late_class(type(parameter))

    def wait(self) -> bool:
        """Makes the current stream wait, once. Returns True if the step has ended, as far as the host knows."""
        stream = torch.accelerator.current_stream(self._device)
        if stream in self._waited:
            return bool(self.event.query())
        self.event.wait()
        self._waited.append(stream)
        if stream == self._home:
            self._kept = ()
        return False

    def is_waited_for(self) -> bool:
        """Returns True if the current stream is behind the step."""
        return torch.accelerator.current_stream(self._device) in self._waited

    def end(self) -> None:
        """Gives the parameters their class again: who reads them from now on is behind the step."""
        parameters, self._parameters = self._parameters, ()
        for parameter in parameters:
            if vars(parameter).pop(_STEP, None) is not None:
                parameter.__class__ = type(parameter).__base__  # type: ignore[assignment]
        self._kept = ()

    def __del__(self) -> None:
        if self._kept:  # the model is deleted: its memory goes back behind the step
            with suppress(RuntimeError):
                self.event.synchronize()
            self.end()  # of those that a user keeps


class LateSteps:
    """Holds what is late under one root. It is one of the root's `writers`."""

    def __init__(self) -> None:
        self._late: dict[FSDPParamGroup, LateStep] = {}
        # How many steps are not to be late, and how many were not because of the last read.
        self.usual_steps = self._last_usual = 0

    def __call__(self, group: FSDPParamGroup) -> None:
        """Makes the current stream wait for what writes to the shards of `group`."""
        late = self._late.get(group)
        if late is not None and late.wait():
            late.end()
            del self._late[group]

    def add(self, group: FSDPParamGroup, late: LateStep) -> None:
        """Notes that the step on a group has been issued."""
        self._late[group] = late

    def read(self) -> None:
        """Makes the host wait for all: the shards, gradients or states may be read or written from now on, on any
        stream.
        """
        if self._late:
            if not self._are_waited_for():
                self._last_usual = self.usual_steps = min(2 * self._last_usual + 1, _MOST_USUAL_STEPS)
            for late in self._late.values():
                late.event.synchronize()
            self._end()

    def before_write(self) -> None:
        """Makes the host wait for all, unless the current stream, on which something is about to be written, has."""
        if self._late and not self._are_waited_for():
            self.read()

    def _are_waited_for(self) -> bool:
        return all(late.is_waited_for() for late in self._late.values())

    def begin(self) -> None:
        """Makes the current stream wait for all, before the next step."""
        if self._late:
            self._last_usual = 0
            for late in self._late.values():
                late.wait()
            self._end()

    def _end(self) -> None:
        late, self._late = self._late, {}
        for each in late.values():
            each.end()


def late_steps_of(root: Root) -> LateSteps:
    """Returns the LateSteps of a root, which it has from then on."""
    found = next((each for each in root.waits_before_read if isinstance(each, LateSteps)), None)
    if found is None:
        found = LateSteps()
        root.waits_before_read.append(found)
        notices.before_each_seen_write(found.before_write)
    return found


def group_of(parameter: Tensor) -> FSDPParamGroup | None:
    """Returns the group of a sharded parameter."""
    owner = sharded_owner(parameter) if isinstance(parameter, DTensor) else None
    return None if owner is None else owner.group


def in_forwards_order(groups: Iterable[FSDPParamGroup]) -> list[FSDPParamGroup]:
    """Returns groups in the order of the last forward pass; those that did not run come last."""
    found = dict.fromkeys(groups)
    ran = [each for root in dict.fromkeys(group.root for group in found) for each in root.prefetcher.last_order]
    return [*dict.fromkeys([*(each for each in ran if each in found), *found])]


def may_be_late(groups: Sequence[FSDPParamGroup]) -> bool:
    """Returns True if a step on these groups may run beside what is computed next."""
    roots = {group.root for group in groups}
    if len(roots) != 1 or len({group.mesh.device for group in groups}) != 1:
        return False
    (root,), device = roots, groups[0].mesh.device
    if (
        not notices.sees_operations
        or not streams.exist_on(device)
        or any(group.transfers is not None for group in groups)
    ):
        return False
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return False
    steps = late_steps_of(root)
    if steps.usual_steps:
        steps.usual_steps -= 1
        return False
    return root.backward is None and not root.running


def are_ours_alone(tensors: Sequence[Tensor]) -> bool:
    """Returns True if nothing has a view of the memory of `tensors` but these, which are distinct, and their bases."""
    objects = [tensor.untyped_storage() for tensor in tensors]  # one for each storage, which is a use of it, too
    storages = [each._cdata for each in objects]
    num_views = Counter(storages)
    bases = [tensor._base is not None for tensor in tensors]
    return all(storage_uses(each) <= num_views[each] + base + 1 for each, base in zip(storages, bases, strict=True))


@contextmanager
def stepping_late(
    groups: Sequence[FSDPParamGroup],
) -> Iterator[Callable[[FSDPParamGroup, Sequence[Tensor], Sequence[Tensor]], None]]:
    """Context: work that is issued inside runs beside what the current stream is given later. `groups`: those that are
    stepped on, all under one root.

    It yields a function to call behind the work of each group: (group, its parameters that are stepped on, all tensors
    that the step reads and writes).
    """
    steps, device = late_steps_of(groups[0].root), groups[0].mesh.device
    home = torch.accelerator.current_stream(device)

    def issued(group: FSDPParamGroup, parameters: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
        event = torch.accelerator.current_stream(device).record_event()
        steps.add(group, LateStep(steps, parameters, kept, home, event))

    with streams.side_stream(device):
        try:
            yield issued
        except BaseException:
            torch.accelerator.current_stream(device).record_event().synchronize()
            steps.read()
            raise


# ---- parameters that are late


def _read(parameter: Any) -> Tensor:
    _end_of(parameter)
    return peek_local(parameter)


def _write(parameter: Any, local: Tensor) -> None:
    _end_of(parameter)
    set_local_unseen(parameter, local)


def _end_of(parameter: Any) -> None:
    reference = vars(parameter).get(_STEP)
    late = None if reference is None else reference()
    if late is not None:
        late.steps.read()


@cache
def _late_class(kind: type) -> Any:
    """Returns the class of late parameters whose class is `kind` otherwise."""

    def dispatch(cls: type, op: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        for each in tensors_in(args, kwargs):
            if isinstance(each, DTensor):
                _end_of(each)
        return op(*args, **(kwargs or {}))

    attributes = {
        "_local_tensor": property(_read, _write),
        "__torch_dispatch__": classmethod(dispatch),
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
    }
    return type(kind.__name__, (kind,), attributes)
