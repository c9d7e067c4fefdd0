"""Has ranks reach consensus before a user's own collectives inside a forward or backward with conditional modules.

A rank that has left a module out would wait there for ranks that wait in the module for it. While such a pass runs,
functions of torch.distributed are replaced by ones that ask first: those that are called as attributes of the module.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from threading import RLock, get_ident
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

import torch.distributed as dist

from ..engine.root import Root
from ..torch_private.internals import untraced

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
    """A consensus of `root`, whose ranks are `ranks`."""

    root: Root
    ranks: frozenset[int]

    def before_collective(self) -> None: ...


# Those that are in a pass -> the default process group of their thread.
_in_pass: WeakKeyDictionary[_Consensus, ref[dist.ProcessGroup]] = WeakKeyDictionary()
# Name -> (torch's function, the one in its place); empty while none is in a pass.
_replaced: dict[str, tuple[Any, Any]] = {}
_lock = RLock()  # threads may be ranks


def pass_began(consensus: _Consensus) -> None:
    """Puts functions that ask `consensus` first in the places of torch's, until `pass_ended`."""
    with _lock:
        assert dist.group.WORLD is not None, "there are other ranks"
        _in_pass[consensus] = ref(dist.group.WORLD)
        for name in () if _replaced else _NAMES:
            usual = getattr(dist, name)
            _replaced[name] = usual, _asking(usual)
            setattr(dist, name, _replaced[name][1])


def pass_ended(consensus: _Consensus) -> None:
    """Puts torch's functions back if no other consensus is in a pass, except where a program has replaced them."""
    with _lock:
        _in_pass.pop(consensus, None)
        if _in_pass:
            return
        for name, (usual, asking) in _replaced.items():
            if getattr(dist, name) is asking:
                setattr(dist, name, usual)
        _replaced.clear()


def _asking(collective: Callable[..., Any]) -> Callable[..., Any]:
    parameters = signature(collective)

    @untraced
    @wraps(collective)
    def asks(*args: Any, **kwargs: Any) -> Any:
        passes = [*_in_pass.items()]
        asked = [each for each, world in passes if world() is dist.group.WORLD and _asks(each.root)]
        if asked:
            group = parameters.bind(*args, **kwargs).arguments.get("group")
            ranks = {*dist.get_process_group_ranks(group)}
            for consensus in asked:
                if consensus.ranks <= ranks:
                    consensus.before_collective()
        return collective(*args, **kwargs)

    return asks


def _asks(root: Root) -> bool:
    """Returns True if a collective on this thread belongs to a pass of `root`, and not to a hook that reduces
    gradients, for which ranks have reached consensus before. A thread that saves a checkpoint has an order of its own.
    """
    if root.backward is None and (not root.running or root.forward.thread != get_ident()):
        return False
    hooks = (group.settings.comm_hook for group in root.groups)
    return not any(hook is not None and hook.is_running for hook in hooks)
