"""Has ranks reach consensus before a user's own collectives: from a forward with conditional modules to the end of its
backward, and wherever they come in a block of `join`.

A rank that has left a module out would wait there for others, which wait at the next consensus for it. Functions of
torch.distributed are replaced while a model with such modules is alive. In a block of `join` the function that says
which process group a functional collective takes is replaced, too: operations on DTensors communicate by these. Tools
ask by themselves (`before_tools_communicate`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from inspect import signature
from math import prod
from threading import RLock, get_ident
from types import ModuleType
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary, finalize, ref

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..engine.compat import FUNCTIONAL_COLLECTIVES, RESOLVES_GROUP, group_of_name, untraced
from ..engine.root import Root

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


class _Consensus(Protocol):
    """Has `ranks`, those of a root, reach consensus before a collective of a user that takes all of them.

    `is_open`: also between passes, on the thread of the last forward.
    """

    ranks: frozenset[int]
    is_open: bool

    def before_collective(self) -> None: ...


class _Watch(NamedTuple):
    """Holds who is asked before collectives that take all ranks of a root, weakly. `always`: also between passes.
    `end`: ends it; it is called when the root is freed.
    """

    consensus: ref[_Consensus]
    always: bool
    end: finalize[Any, Any]


class _Collectives:
    """Replaces torch's functions while a root that is alive needs that, and knows whom to ask before they run.

    `watches`: default process group -> root -> its watch, as threads that are ranks have a default group each; in the
    order in which they came, which is the same on all ranks. Roots are held weakly.
    `functions`: (module, name) -> (torch's function, the one in its place); empty while torch's are in their places.
    """

    def __init__(self) -> None:
        self.watches: WeakKeyDictionary[dist.ProcessGroup, WeakKeyDictionary[Root, _Watch]] = WeakKeyDictionary()
        self.functions: dict[tuple[ModuleType, str], tuple[Any, Any]] = {}
        # How many roots need those of torch.distributed; and those of functional collectives.
        self._num_roots = self._num_always = 0
        # Threads may be ranks; a root may be freed while this thread holds the lock.
        self._lock = RLock()

    def replace(self, always: bool) -> None:
        """Puts functions that ask first in the places of torch's, for one more root."""
        with self._lock:
            self._num_roots += 1
            self._num_always += always
            if self._num_roots == 1:
                for name in _NAMES:
                    self._put(dist, name, _behind_consensus)
            if always and self._num_always == 1:
                self._put(FUNCTIONAL_COLLECTIVES, RESOLVES_GROUP, _group_behind_consensus)

    def restore(self, always: bool) -> None:
        """Puts torch's functions back if no other root needs these, except where another program has replaced them
        since.
        """
        with self._lock:
            self._num_roots -= 1
            self._num_always -= always
            for module, name in [*self.functions]:
                if not (self._num_roots if module is dist else self._num_always):
                    usual, asking = self.functions.pop((module, name))
                    if getattr(module, name) is asking:
                        setattr(module, name, usual)

    def _put(self, module: ModuleType, name: str, make: Callable[[Any], Any]) -> None:
        usual = getattr(module, name)
        self.functions[module, name] = usual, make(usual)
        setattr(module, name, self.functions[module, name][1])


_collectives = _Collectives()


def watch_collectives(consensus: _Consensus, root: Root, always: bool = False) -> None:
    """Has ranks reach consensus before those collectives of `torch.distributed` that take all ranks of `root`, while it
    runs. `always`: also between its passes. When the last such root is freed, torch's functions are in their places
    again. Another consensus of the root is asked no more.
    """
    unwatch_collectives(root)
    _collectives.replace(always)
    end = finalize(root, _collectives.restore, always)
    end.atexit = False
    assert dist.group.WORLD is not None, "ranks agree"
    watches = _collectives.watches.setdefault(dist.group.WORLD, WeakKeyDictionary())
    watches[root] = _Watch(ref(consensus), always, end)


def unwatch_collectives(root: Root) -> None:
    """Asks nobody any more before collectives that take all ranks of `root`."""
    world = dist.group.WORLD
    watch = None if world is None else _collectives.watches.get(world, WeakKeyDictionary()).pop(root, None)
    if watch is not None:
        watch.end()


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


def _group_behind_consensus(resolve: Callable[..., Any]) -> Callable[..., Any]:
    @untraced
    @wraps(resolve)
    def asking(group: Any, *args: Any, **kwargs: Any) -> Any:
        found = resolve(group, *args, **kwargs)
        ranks = dist.get_process_group_ranks(group_of_name(found) if isinstance(found, str) else found)
        # An operation on a DTensor, which takes all ranks of its mesh, communicates along one axis after the other.
        is_axis = isinstance(group, tuple) and isinstance(group[0], DeviceMesh)
        of_mesh = group[0].mesh.flatten().tolist() if is_axis else ranks
        _ask(lambda own: own.issubset(ranks) or (own.issuperset(ranks) and own.issubset(of_mesh)))
        return found

    return asking


def before_tools_communicate(groups: Sequence[dist.ProcessGroup]) -> None:
    """Is called before a tool communicates over process groups, one for each axis of a mesh, outside of passes.

    Raises:
        RuntimeError: on all ranks: some of these have run out of batches, in a block of `join`.
    """
    if _collectives.watches and groups:
        rows = [dist.get_process_group_ranks(group) for group in groups]
        _ask(lambda own: prod(len(row) for row in rows if own.issuperset(row)) >= len(own) or own.issubset(rows[0]))


def _ask(takes_all: Callable[[frozenset[int]], bool]) -> None:
    """Has those reach consensus that ask between passes, too, before all of their ranks communicate.

    `takes_all`: says of the ranks of one of them if it does so.
    """
    world = dist.group.WORLD
    watches = None if world is None else _collectives.watches.get(world)
    for root, watch in [*(watches or {}).items()]:
        consensus = watch.consensus() if watch.always and not _runs_a_hook(root) else None
        if consensus is not None and takes_all(consensus.ranks):
            consensus.before_collective()


def _runs_a_hook(root: Root) -> bool:
    """Returns True while gradients are reduced by a user's hook: ranks have reached consensus before."""
    hooks = (group.settings.comm_hook for group in root.groups)
    return any(hook is not None and hook.is_running for hook in hooks)


def _reach_consensus(group: dist.ProcessGroup | None) -> None:
    world = dist.group.WORLD
    watches = None if world is None else _collectives.watches.get(world)
    asked = [
        consensus
        for root, watch in (watches or {}).items()
        if (consensus := watch.consensus()) is not None
        and (watch.always or root.running or root.backward is not None or _is_open(consensus, root))
        and not _runs_a_hook(root)
    ]
    ranks = set(dist.get_process_group_ranks(group)) if asked else set()
    for consensus in asked:
        if consensus.ranks.issubset(ranks):
            consensus.before_collective()


def _is_open(consensus: _Consensus, root: Root) -> bool:
    """Returns True between passes where a consensus is asked for. Another thread, which saves a checkpoint for example,
    communicates in an order of its own.
    """
    return consensus.is_open and root.forward.thread == get_ident()
