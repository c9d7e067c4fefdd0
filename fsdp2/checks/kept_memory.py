"""Warns where memory of unsharded parameters is not freed, because something outside the engine can still read it."""

from __future__ import annotations

import gc
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..engine.compat import PLAIN, has_storage, num_dispatch_modes, storage_address
from ..engine.group import FSDPParamGroup
from ..engine.owners import some_of
from ..engine.root import Root
from .due import Check

_CONTAINERS = (list, tuple, dict)
_ONE_SEARCH = threading.Lock()


class KeptMemory(Check):
    """Warns once for each root, and names parameters that something has kept since a forward, or a view of them.

    It says nothing after a pass that has failed: the error's traceback keeps what it met.
    """

    def __init__(self) -> None:
        self._is_said = False
        self._num_seen = 0

    def pass_failed(self, root: Root, in_backward: bool) -> None:
        self._is_said = True

    def memory_kept(self, group: FSDPParamGroup) -> None:
        if self._is_said or num_dispatch_modes():  # such as CommDebugMode keep the data of all parameters
            return
        self._num_seen += 1
        if self._num_seen & (self._num_seen - 1):  # 1, 2, 4, ...: to search takes long
            return
        names = some_of(dict.fromkeys(_kept_names(group)))
        if names:  # else a process group has not let go of it yet, for example
            self._is_said = True
            warnings.warn(
                f"{names}: something has kept the unsharded parameter, or a view of it, since a forward (an attribute, "
                "a list, `ctx` of an autograd function, hooks for saved tensors). So the memory of its group, "
                f"{group.nbytes:,} bytes, is not freed before backward has ended, nor while there is a view. A view "
                "does not follow later writes to the parameter. Keep a copy (`weight.detach().clone()`), or give the "
                "parameter to `ctx.save_for_backward`. If only the backward of its own module reads it, call "
                "model.set_free_viewed_storage(True): the memory is freed then. This is said once.",
                stacklevel=2,
            )


def _kept_names(group: FSDPParamGroup) -> list[str]:
    kept = [group.params[i].name for i in group.parameters.kept]
    with _no_other_thread():
        return kept or list(_names_of_views(group))


@contextmanager
def _no_other_thread() -> Iterator[None]:
    """Context: no other thread runs Python. A list of all objects is a reference to each, which a rank in another
    thread would count as something that has kept its parameters.
    """
    with _ONE_SEARCH:
        interval = sys.getswitchinterval()
        sys.setswitchinterval(10)
        try:
            if threading.active_count() > 1:
                time.sleep(4 * interval)  # those that wait for their turn by the old interval get it
            yield
        finally:
            sys.setswitchinterval(interval)


def _names_of_views(group: FSDPParamGroup) -> Iterator[str]:
    parameters = group.parameters
    buffers = parameters.buffers
    if buffers is not None:
        own = _tensors_of([buffers, parameters.bases, parameters.views, parameters.unsharded])
        for each in gc.get_objects():
            is_other = type(each) in PLAIN and id(each) not in own and has_storage(each)
            if is_other and storage_address(each) == buffers.storage_id:
                indices = [i for i in parameters.indices_of(each) if parameters.bases[i].dtype is each.dtype]
                yield from (group.params[i].name for i in indices)  # collectives see bytes


def _tensors_of(roots: list[Any]) -> set[int]:
    """Returns the identities of the tensors that lie in `roots`: in lists, and in objects of fsdp2 such as plans."""
    found: set[int] = set()
    seen: set[int] = set()
    while roots:
        each = roots.pop()
        if isinstance(each, Tensor):
            found.add(id(each))
        elif id(each) not in seen and (
            isinstance(each, _CONTAINERS) or type(each).__module__.startswith(f"{__package__.partition('.')[0]}.")
        ):
            seen.add(id(each))
            roots += [part for part in gc.get_referents(each) if not isinstance(part, (type, torch.nn.Module))]
    return found
