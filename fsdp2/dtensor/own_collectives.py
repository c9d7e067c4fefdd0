"""A user's own collectives, in forwards and backwards with conditional modules: ranks meet before each of them.

Whoever has left a module out would wait there for others, which wait at the next meeting for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist

from .. import torch_compat
from ..ext.conditional import Agreement
from ..ext.once import once

_NAMES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
)


class Runtime(Protocol):
    """What runs conditional modules: a Context."""

    agreement: Agreement | None
    running: list[Any]
    in_backward: bool


# Of each default process group, for ranks that are threads have one each; in the order in which they came, which is the
# same on all ranks.
_runtimes: WeakKeyDictionary[dist.ProcessGroup, WeakKeyDictionary[Runtime, None]] = WeakKeyDictionary()


def meet_before_collectives(runtime: Runtime) -> None:
    """From now on have ranks meet before those of `torch.distributed` that take all ranks of `runtime`, while it runs,
    if some of its modules are conditional.
    """
    if runtime.agreement is not None:
        _wrap_collectives()
        assert dist.group.WORLD is not None, "ranks agree"
        _runtimes.setdefault(dist.group.WORLD, WeakKeyDictionary()).setdefault(runtime, None)


@once
def _wrap_collectives() -> None:
    for name in _NAMES:
        setattr(dist, name, _behind_a_meeting(getattr(dist, name)))


def _behind_a_meeting(collective: Callable[..., Any]) -> Callable[..., Any]:
    parameters = signature(collective)

    @torch_compat.untraced
    @wraps(collective)
    def meeting(*args: Any, **kwargs: Any) -> Any:
        _meet(parameters.bind(*args, **kwargs).arguments.get("group"))
        return collective(*args, **kwargs)

    return meeting


def _meet(group: dist.ProcessGroup | None) -> None:
    runtimes = _runtimes.get(dist.group.WORLD, ()) if dist.group.WORLD is not None else ()
    agreements = [each.agreement for each in runtimes if each.running or each.in_backward]
    ranks = set(dist.get_process_group_ranks(group)) if agreements else set()
    for agreement in agreements:
        if agreement is not None and agreement.ranks.issubset(ranks):
            agreement.meet_at_collective()
