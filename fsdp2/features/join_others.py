"""Has ranks without a batch take part in what other sharded models gather in the loop of a block of `join`: those of a
teacher, for example, in distillation.

Such a model is in no block itself. While the block lasts, its root has an observer, which asks the consensus of the
block before each gather. Ranks that have joined find the same model by its number, since all ranks apply fully_shard in
one order, and gather with their shards. They can't take part in anything else of it.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Protocol

import torch.distributed as dist

from ..engine.events import Observer
from ..engine.group import FSDPParamGroup, Hold
from ..engine.owners import roots_of_thread
from ..engine.rank_facts import ranks_of
from ..engine.root import BackwardPass, Root
from .running_stats import find_running_stats


class Asked(Protocol):
    """Is the consensus of a block of join, over `ranks`."""

    ranks: frozenset[int]

    def lasts(self) -> bool: ...

    def before_other(self, group: FSDPParamGroup, follows: bool) -> None: ...


# How many roots there have been over a process group, also those that are freed; and which one each root is.
_counts: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
_numbers: weakref.WeakKeyDictionary[Root, int] = weakref.WeakKeyDictionary()
# Consensus of a block that lasts -> its root, which has the consensus.
_blocks: weakref.WeakKeyDictionary[Asked, weakref.ref[Root]] = weakref.WeakKeyDictionary()


class OtherModel(Observer):
    """Asks the consensus of a block, weakly held, before another root than that of the block communicates."""

    def __init__(self, consensus: Asked, root: Root) -> None:
        self.consensus = weakref.ref(consensus)
        self._root = weakref.ref(root)
        self._checksum: int | None = None

    def before_gather(self, group: FSDPParamGroup) -> None:
        gathers, consensus = group.comms.gathers, self.consensus()
        # Ranks that read on demand (features/on_demand.py) need nobody.
        if consensus is not None and group.params and gathers.size > 1 and not getattr(gathers, "reads_alone", False):
            consensus.before_other(group, can_follow(group))

    def before_reduce(self, group: FSDPParamGroup) -> None:
        consensus = self.consensus()
        if consensus is not None:
            consensus.before_other(group, False)

    def checksum(self) -> int:
        """Returns a number for the names and shapes of the model's parameters."""
        root = self._root()
        if self._checksum is None and root is not None:
            params = [(param.name, *param.sharded.shape) for group in root.groups for param in group.params]
            self._checksum = zlib.crc32(repr(params).encode())
        return self._checksum or 0


def can_follow(group: FSDPParamGroup) -> bool:
    """Returns True if ranks that do not run a model can gather this group as those do that run it."""
    root = group.root
    averages = root.settings.averages_running_stats and any(module.training for module in find_running_stats(root))
    keeps_part = group.comms.post_forward is not None or group.mesh.shards_at_rest
    return root.consensus is None and not keeps_part and not averages


def begin_to_watch(consensus: Asked, root: Root) -> None:
    """Has all other roots of this thread, and those that it makes, ask `consensus`, that of `root`, from now on."""
    _blocks[consensus] = weakref.ref(root)
    for other in roots_of_thread():
        if _asks(consensus, root, other):
            other.observe([OtherModel(consensus, other), *other.events.observers])  # ahead of checks that communicate


def end_to_watch(consensus: Asked) -> None:
    """Has other roots ask `consensus` no more."""
    _blocks.pop(consensus, None)
    for other in roots_of_thread():
        other.forward.has_grad = False  # ranks have run different numbers of forwards: see checks/named_comm.py
        for each in _watches(other):
            if each.consensus() is consensus:
                other.remove(each)


def block_beside(root: Root) -> Root | None:
    """Returns another root of this thread that is in a block on some of the same ranks."""
    ranks = ranks_of(root.group.mesh)
    for consensus, reference in [*_blocks.items()]:
        own = reference()
        is_other = own is not None and own is not root and own.forward.thread == root.forward.thread
        if is_other and consensus.lasts() and not consensus.ranks.isdisjoint(ranks):
            return own
    return None


def make_watch(root: Root) -> OtherModel | None:
    """Numbers a new root. Returns its observer, if a block of this thread lasts."""
    for process_group in root.group.mesh.axis_groups[:1]:
        _counts[process_group] = _numbers[root] = _counts.get(process_group, 0) + 1
    found = [each for each, ref in [*_blocks.items()] if (own := ref()) is not None and _asks(each, own, root)]
    return OtherModel(found[-1], root) if found else None


def _asks(consensus: Asked, root: Root, other: Root) -> bool:
    is_other = other is not root and other.forward.thread == root.forward.thread
    return is_other and not {*root.groups} & {*other.groups} and consensus.ranks <= ranks_of(other.group.mesh)


def _watches(root: Root) -> Iterator[OtherModel]:
    return (each for each in root.events.observers if isinstance(each, OtherModel))


# ---- which group, in numbers

_BY_HAND, _IN_FORWARD, _IN_BACKWARD = range(3)
NUM_NUMBERS = 5


def number_of(consensus: Asked, group: FSDPParamGroup) -> list[int]:
    """Returns what tells a group of another root from all others: how many roots were made since that of the block, the
    checksum of the model and the index of the group; and where the root is, which ranks compare at the debug level.
    """
    root = group.root
    checksum = next(each.checksum() for each in _watches(root) if each.consensus() is consensus)
    where = _IN_BACKWARD if root.backward else _IN_FORWARD if root.running else _BY_HAND
    return [_distance(consensus, root), checksum, root.groups.index(group), where, root.num_backwards]


def _distance(consensus: Asked, root: Root) -> int:
    """Returns how many roots were made since that of the block: ranks may have made others before that."""
    own = _blocks[consensus]()
    return _numbers.get(root, 0) - (0 if own is None else _numbers.get(own, 0))


def group_of(consensus: Asked, numbers: Sequence[int]) -> FSDPParamGroup | None:
    """Returns the group of which `number_of` has said `numbers` on another rank, or None: this one has none."""
    number, checksum, index = numbers[:3]
    found = [
        root
        for root in roots_of_thread()
        if _distance(consensus, root) == number
        and any(each.consensus() is consensus and each.checksum() == checksum for each in _watches(root))
    ]
    return found[0].groups[index] if len(found) == 1 and index < len(found[0].groups) else None


def gather_for_others(group: FSDPParamGroup, numbers: Sequence[int]) -> None:
    """Gathers with this rank's shards where the others are, as `number_of` says, and keeps nothing."""
    root = group.root
    where, root.num_backwards = numbers[3:]
    if where == _IN_FORWARD:
        root.running.append(root.state)
    elif where == _IN_BACKWARD:
        root.backward = BackwardPass(-1)
    try:
        _gather(group)
    finally:
        root.running.clear()
        root.backward = None


def _gather(group: FSDPParamGroup) -> None:
    if group.is_resting:
        group.unshard(registers=False)
    else:
        group.unshard_again()
    group.hold = Hold.NOTHING
    group.reshard(free=group.root.frees_memory)


def forget(roots: Iterable[Root]) -> None:
    """Drops what ranks have recorded and kept of `roots`: those that have joined have other orders and groups."""
    for root in roots:
        root.prefetcher.forget_order()
        root.prefetcher.drop()
        for group in root.groups:
            with suppress(RuntimeError):  # a peer is gone
                group.reshard_if_idle()
