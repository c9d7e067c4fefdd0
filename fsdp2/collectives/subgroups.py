"""Makes process groups of neighbouring ranks, each once."""

from __future__ import annotations

import weakref
from collections import Counter

import torch.distributed as dist

from ..devices.simulation import SimulatedGroup
from ..torch_private.rare_internals import name_of_new_group

# Process group -> size -> the group of so many neighbours of this rank.
_subgroups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int, dist.ProcessGroup]] = weakref.WeakKeyDictionary()
# Default process group -> how many groups of the same ranks `subgroup` has made. These ranks have made equally many.
_num_made: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()


def subgroup(group: dist.ProcessGroup, size: int) -> dist.ProcessGroup:
    """Returns a process group of this rank's `size` neighbours in `group`, which it makes once.

    If `size` is that of `group`, it is a second group over the same ranks. All ranks of the new group must call it. If
    the default group is bound to a device (`init_process_group(device_id=...)`), all ranks of that must, because NCCL
    splits it.
    """
    first = group.rank() // size * size
    if isinstance(group, SimulatedGroup):
        return group.among(range(first, first + size))
    of_size = _subgroups.setdefault(group, {})
    if size not in of_size:
        of_size[size] = _new_group(tuple(dist.get_process_group_ranks(group)[first : first + size]))
    return of_size[size]


def _new_group(ranks: tuple[int, ...]) -> dist.ProcessGroup:
    assert dist.group.WORLD is not None, "there are other groups"
    num_made = _num_made.setdefault(dist.group.WORLD, Counter())
    num_made[ranks] += 1
    with name_of_new_group(f"fsdp2, number {num_made[ranks]} of ranks {ranks}"):
        group: dist.ProcessGroup = dist.new_group([*ranks], use_local_synchronization=True)
    return group
