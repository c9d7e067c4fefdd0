"""Makes process groups of neighbouring ranks, each once."""

from __future__ import annotations

import inspect
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .simulation import SimulatedGroup
from .torch_names import name_of_new_group

# Process group -> size -> the group of so many neighbours of this rank; or ranks -> the group of those in that order.
_subgroups: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[int | tuple[int, ...], dist.ProcessGroup]] = (
    weakref.WeakKeyDictionary()
)
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


def ordered_group(group: dist.ProcessGroup, ranks: Sequence[int]) -> dist.ProcessGroup:
    """Returns a process group of these ranks in this order, which need not be ascending. It makes it once for `group`,
    which has some of them. All of `ranks` must call it.

    Raises:
        NotImplementedError: torch sorts the ranks of each process group, as before 2.13.
    """
    if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        raise NotImplementedError(
            f"dp_mesh_dims: shard_across needs a process group whose ranks are in the order {[*ranks]}, and torch "
            f"{torch.__version__} sorts them. Use torch 2.13 or newer, or leave shard_across out."
        )
    made, order = _subgroups.setdefault(group, {}), tuple(ranks)
    if order not in made:
        made[order] = _new_group(order, sort_ranks=False)
    return made[order]


def _new_group(ranks: tuple[int, ...], **order: Any) -> dist.ProcessGroup:
    assert dist.group.WORLD is not None, "there are other groups"
    num_made = _num_made.setdefault(dist.group.WORLD, Counter())
    num_made[ranks] += 1
    with name_of_new_group(f"fsdp2, number {num_made[ranks]} of ranks {ranks}"):
        group: dist.ProcessGroup = dist.new_group([*ranks], use_local_synchronization=True, **order)
    return group
