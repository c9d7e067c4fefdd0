"""Has ranks reach consensus before a user's own collectives: from a forward with conditional modules to the end of its
backward.

A rank that has left a module out would wait there for others, which wait at the next consensus for it. Functions of
torch.distributed are replaced while a model with such modules is alive.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from threading import RLock, get_ident
from typing import Any, NamedTuple, Protocol
from weakref import WeakKeyDictionary, finalize, ref

import torch.distributed as dist

from ..engine.compat import untraced
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

    `is_open`: also between passes, on the thread of the last forward. `among`: what is left of it when the root is
    freed; it has `ranks`, `is_open`, `thread` and `answer`.
    """

    among: Any

    @property
    def ranks(self) -> frozenset[int]: ...

    @property
    def is_open(self) -> bool: ...

    def before_collective(self) -> None: ...


class _Watch(NamedTuple):
    """Holds who is asked before collectives that take all ranks of a root, weakly.

    `end`: ends it; it is called when the root is freed.
    """

    consensus: ref[_Consensus]
    end: finalize[Any, Any]


class _Collectives:
    """Replaces torch's functions while a root that is alive needs that, and knows whom to ask before they run.

    `watches`: default process group -> root -> its watch, as threads that are ranks have a default group each; in the
    order in which they came, which is the same on all ranks. Roots are held weakly.
    `left`: default process group -> what is left of roots that were freed while their consensus was open, and what
    restores torch's functions when ranks have asked about it, or the process group is freed.
    `functions`: name -> (torch's function, the one in its place); empty while torch's are in their places.
    """

    def __init__(self) -> None:
        self.watches: WeakKeyDictionary[dist.ProcessGroup, WeakKeyDictionary[Root, _Watch]] = WeakKeyDictionary()
        self.left: WeakKeyDictionary[dist.ProcessGroup, dict[Any, finalize[Any, Any]]] = WeakKeyDictionary()
        self.functions: dict[str, tuple[Any, Any]] = {}
        # How many roots need them.
        self._num_roots = 0
        # Threads may be ranks; a root may be freed while this thread holds the lock.
        self._lock = RLock()

    def replace(self) -> None:
        """Puts functions that ask first in the places of torch's, for one more root."""
        with self._lock:
            self._num_roots += 1
            if self._num_roots > 1:
                return
            for name in _NAMES:
                usual = getattr(dist, name)
                self.functions[name] = usual, _behind_consensus(usual)
                setattr(dist, name, self.functions[name][1])

    def restore(self) -> None:
        """Puts torch's functions back if no other root needs these, except where another program has replaced them
        since.
        """
        with self._lock:
            self._num_roots -= 1
            if self._num_roots:
                return
            for name, (usual, asking) in self.functions.items():
                if getattr(dist, name) is asking:
                    setattr(dist, name, usual)
            self.functions.clear()

    def end(self, among: Any, world: ref[dist.ProcessGroup]) -> None:
        """Is called when a root is freed. Other ranks may still have theirs, and ask."""
        group = world()
        if among.is_open and group is not None:
            with self._lock:
                forgets = finalize(group, self.restore)
                forgets.atexit = False
                self.left.setdefault(group, {})[among] = forgets
        else:
            self.restore()

    def restore_behind(self, among: Any) -> None:
        """Forgets what was left of a root, about which no rank asks any more."""
        with self._lock:
            found = [each.pop(among) for each in self.left.values() if among in each]
        for forgets in found:
            forgets()


_collectives = _Collectives()


def watch_collectives(consensus: _Consensus, root: Root) -> None:
    """Has ranks reach consensus before those collectives of `torch.distributed` that take all ranks of `root`, while it
    runs. When the last such root is freed, torch's functions are in their places again.
    """
    _collectives.replace()
    assert dist.group.WORLD is not None, "ranks agree"
    end = finalize(root, _collectives.end, consensus.among, ref(dist.group.WORLD))
    end.atexit = False
    watches = _collectives.watches.setdefault(dist.group.WORLD, WeakKeyDictionary())
    watches[root] = _Watch(ref(consensus), end)


def _behind_consensus(collective: Callable[..., Any]) -> Callable[..., Any]:
    parameters = signature(collective)

    @untraced
    @wraps(collective)
    def agreed(*args: Any, **kwargs: Any) -> Any:
        _reach_consensus(parameters.bind(*args, **kwargs).arguments.get("group"))
        return collective(*args, **kwargs)

    return agreed


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
        and (root.running or root.backward is not None or _is_open(consensus, root))
        and not _runs_a_hook(root)
    ]
    left = [] if world is None else [each for each in _collectives.left.get(world, ()) if each.thread == get_ident()]
    ranks = set(dist.get_process_group_ranks(group)) if asked or left else set()
    for consensus in asked:
        if consensus.ranks.issubset(ranks):
            consensus.before_collective()
    for among in left:
        if among.ranks.issubset(ranks):
            _collectives.restore_behind(among)
            among.answer()


def _is_open(consensus: _Consensus, root: Root) -> bool:
    """Returns True between passes where a consensus is asked for. Another thread, which saves a checkpoint for example,
    communicates in an order of its own.
    """
    return consensus.is_open and root.forward.thread == get_ident()
