"""Has ranks reach consensus before a user's own collectives, in forwards and backwards with conditional modules.

A rank that has left a module out would wait there for others, which wait at the next consensus for it. Functions of
torch.distributed are replaced while a model with such modules is alive.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from inspect import signature
from threading import RLock
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary, finalize, ref

import torch.distributed as dist

from ..engine.compat import untraced

_NAMES = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
)


class _Watch(NamedTuple):
    """Holds who is asked before collectives that take all ranks of a root, weakly. `always`: also between passes.
    `end`: ends it; it is called when the root is freed.
    """

    consensus: ref[Any]
    always: bool
    end: finalize[Any, Any]


# Default process group -> root -> its watch, as threads that are ranks have a default group each; in the order in which
# they came, which is the same on all ranks. Roots are held weakly.
_watching: WeakKeyDictionary[dist.ProcessGroup, WeakKeyDictionary[Any, _Watch]] = WeakKeyDictionary()


class _Replaced:
    """Holds what is replaced: name -> (torch's function, the one in its place); for how many roots that are alive."""

    functions: ClassVar[dict[str, tuple[Any, Any]]] = {}
    num_roots = 0
    # Threads may be ranks; a root may be freed while this thread holds the lock.
    lock = RLock()


def watch_collectives(consensus: Any, root: Any, always: bool = False) -> None:
    """Has ranks reach consensus before those collectives of `torch.distributed` that take all ranks of `root`, while it
    runs. `always`: also between its passes. When the last such root is freed, torch's functions are in their places
    again. Another consensus of the root is asked no more.
    """
    unwatch_collectives(root)
    with _Replaced.lock:
        _Replaced.num_roots += 1
        if not _Replaced.functions:
            for name in _NAMES:
                usual = getattr(dist, name)
                _Replaced.functions[name] = usual, _behind_consensus(usual)
                setattr(dist, name, _Replaced.functions[name][1])
    end = finalize(root, _end)
    end.atexit = False
    assert dist.group.WORLD is not None, "ranks agree"
    _watching.setdefault(dist.group.WORLD, WeakKeyDictionary())[root] = _Watch(ref(consensus), always, end)


def unwatch_collectives(root: Any) -> None:
    """Asks nobody any more before collectives that take all ranks of `root`."""
    world = dist.group.WORLD
    watch = None if world is None else _watching.get(world, WeakKeyDictionary()).pop(root, None)
    if watch is not None:
        watch.end()


def _end() -> None:
    """Puts torch's functions back if no root needs the others, except where another program has replaced them since."""
    with _Replaced.lock:
        _Replaced.num_roots -= 1
        if not _Replaced.num_roots:
            for name, (usual, agreed) in _Replaced.functions.items():
                if getattr(dist, name) is agreed:
                    setattr(dist, name, usual)
            _Replaced.functions.clear()


def _behind_consensus(collective: Callable[..., Any]) -> Callable[..., Any]:
    parameters = signature(collective)

    @untraced
    @wraps(collective)
    def agreed(*args: Any, **kwargs: Any) -> Any:
        # torch's Join counts ranks by such a collective.
        if sys._getframe(1).f_globals.get("__name__") != "torch.distributed.algorithms.join":
            _reach_consensus(parameters.bind(*args, **kwargs).arguments.get("group"))
        return collective(*args, **kwargs)

    return agreed


def _runs_a_hook(root: Any) -> bool:
    """Returns True while gradients are reduced by a user's hook: ranks have reached consensus before."""
    hooks = (group.settings.comm_hook for group in root.groups)
    return any(hook is not None and hook.is_running for hook in hooks)


def _reach_consensus(group: dist.ProcessGroup | None) -> None:
    world: Any = dist.group.WORLD
    watching: Any = {} if world is None else _watching.get(world, {})
    asked = [
        watch.consensus()
        for root, watch in watching.items()
        if (watch.always or root.running or root.backward is not None) and not _runs_a_hook(root)
    ]
    ranks = set(dist.get_process_group_ranks(group)) if asked else set()
    for consensus in asked:
        if consensus is not None and consensus.ranks.issubset(ranks):
            consensus.before_collective()
