"""Has ranks reach consensus before a user's own collectives, in forwards and backwards with conditional modules.

A rank that has left a module out would wait there for others, which wait at the next consensus for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist

from ..engine.compat import untraced
from ..engine.once import once

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


# Default process group -> (consensus, root), as threads that are ranks have a default group each; in the order in which
# they came, which is the same on all ranks. Roots are held weakly.
_watching: WeakKeyDictionary[dist.ProcessGroup, WeakKeyDictionary[Any, Any]] = WeakKeyDictionary()


def watch_collectives(consensus: Any, root: Any) -> None:
    """Has ranks reach consensus before those collectives of `torch.distributed` that take all ranks of `root`, while it
    runs.
    """
    _wrap_collectives()
    assert dist.group.WORLD is not None, "ranks agree"
    _watching.setdefault(dist.group.WORLD, WeakKeyDictionary())[root] = ref(consensus)


@once
def _wrap_collectives() -> None:
    for name in _NAMES:
        setattr(dist, name, _behind_consensus(getattr(dist, name)))


def _behind_consensus(collective: Callable[..., Any]) -> Callable[..., Any]:
    parameters = signature(collective)

    @untraced
    @wraps(collective)
    def agreed(*args: Any, **kwargs: Any) -> Any:
        _reach_consensus(parameters.bind(*args, **kwargs).arguments.get("group"))
        return collective(*args, **kwargs)

    return agreed


def _reach_consensus(group: dist.ProcessGroup | None) -> None:
    world: Any = dist.group.WORLD
    watching: Any = {} if world is None else _watching.get(world, {})
    running = [consensus() for root, consensus in watching.items() if root.running or root.backward is not None]
    ranks = set(dist.get_process_group_ranks(group)) if running else set()
    for consensus in running:
        if consensus is not None and consensus.ranks.issubset(ranks):
            consensus.before_collective()
