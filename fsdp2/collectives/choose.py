"""Chooses how ranks communicate: which Comm serves a process group, and what a user changes of it for a group."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from ..devices.simulation import SimulatedGroup
from ..devices.streams import exist_on
from ..engine.comm import TORCH_MEMORY, Comm, CommLabel, CommMemory, SoloComm
from ..engine.owners import all_groups
from ..torch_private.internals import backend_name, coalesces, type_of
from .any_group import AnyComm
from .coalesced import CoalescedComm
from .comm_memory import PoolMemory, pool_of_group, symmetric_pool
from .custom import CustomComm
from .gloo import PairwiseComm
from .scatter_hook import HookedComm
from .subgroups import subgroup
from .watching import watcher

if TYPE_CHECKING:
    from ..engine.group import FSDPParamGroup


# A machine has so many GPUs, or more; ranks must agree about it. A ring over more than one machine takes long beside
# the bytes of a group: 0.2 ms with 64 ranks, 1.6 ms with 512 by NCCL's own table. On a communicator of their own,
# reductions take that time while others are gathered. (A model's step of 1B parameters among 512 ranks takes 0.83x of
# the time so, of 8B among 64 the same; not measured.)
RANKS_OF_A_MACHINE = 8
# Backends that are known to coalesce, also where a debug level wraps them. Others say so themselves.
_COALESCING = ("nccl", "xccl", "hccl", "fake")


def make_comm(group: dist.ProcessGroup | None, device: torch.device, comm_label: CommLabel) -> Comm:
    """Returns the Comm for a process group, as checks watch it: over gloo its collectives carry their names, and at the
    debug level ranks compare what they are about to do.
    """
    comm = make_unchecked(group, device, comm_label)
    return watcher().checked(comm, device) if comm.size > 1 and watcher().is_checked(group) else comm


def make_neighbour_comm(group: dist.ProcessGroup, size: int, device: torch.device, comm_label: CommLabel) -> Comm:
    """Returns the Comm of this rank's `size` neighbours in a process group. All of them must call it."""
    return make_comm(subgroup(group, size), device, comm_label)


def make_unchecked(group: dist.ProcessGroup | None, device: torch.device, comm_label: CommLabel) -> Comm:
    """Returns the Comm for a process group, on which ranks compare nothing, whatever the debug level. None: one rank.

    Raises:
        NotImplementedError: gloo with tensors that are not on the CPU, which would crash the process.
        RuntimeError: the group has no backend for `device`.
    """
    if group is None:
        return SoloComm()
    if isinstance(group, SimulatedGroup):
        return group.make_comm(comm_label)
    name = backend_name(group, device)
    if name == "gloo" and type_of(device) == "cpu":
        return watcher().named(group, comm_label) or PairwiseComm(group, comm_label)
    if name == "gloo":
        raise NotImplementedError(
            f"a process group whose backend for {device.type} is gloo can't gather there. Initialise it with the "
            "device's own backend too: init_process_group('cpu:gloo,cuda:nccl'), for example."
        )
    is_coalescing = name in _COALESCING or (name != "" and coalesces(group, device))
    return CoalescedComm(group, comm_label) if is_coalescing else AnyComm(group, comm_label)


def require_backend(group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Checks that a process group can communicate tensors on `device`. None: one rank.

    Raises:
        RuntimeError: it has no backend for the device.
    """
    if group is not None and not isinstance(group, SimulatedGroup):
        backend_name(group, device)


@dataclass(frozen=True)
class CommChoice:
    """A user's choices for the collectives of a group, in place of the usual ones.

    Args:
        all_gather, reduce_scatter: the user's own, as `CustomComm` calls them.
        separate: reduce on a process group of its own. None: as `_separates` decides.
        force_sum: sum and divide afterwards, even if the backend can average.
        checked: have ranks compare what they are about to do, before each collective.
        memory: what gathers and reductions send and fill lies in memory that the "communicator" registers, or in
            torch's "symmetric" memory. None: in that of torch's allocator.
    """

    all_gather: Any = None
    reduce_scatter: Any = None
    separate: bool | None = None
    force_sum: bool = False
    checked: bool = False
    memory: Literal["communicator", "symmetric"] | None = None


def choice_of(group: FSDPParamGroup) -> CommChoice:
    """Returns what a user has chosen for the collectives of a group."""
    choice = group.settings.collectives
    return CommChoice() if choice is None else choice


def choose(group: FSDPParamGroup, **changes: Any) -> None:
    """Changes a user's choice for a group (see `CommChoice`), which communicates so from now on. Every rank must call
    it, between steps.
    """
    choice = replace(choice_of(group), **changes)
    group.set(collectives=choice)
    if "checked" in changes:
        watcher().note_level(group.mesh.axis_groups, group.comm_label, choice.checked)
    follow(group)


def follow(group: FSDPParamGroup) -> None:
    """Has a group communicate as chosen. Every rank must call it."""
    choice, device, checks = choice_of(group), group.mesh.device, watcher()
    gathers: Comm = checks.unchecked(group.usual_comms.gathers)
    reduces: Comm = checks.unchecked(group.usual_comms.reduces)
    separates = _separates(group, reduces) if choice.separate is None else choice.separate
    if separates and reduces.group is not None and reduces.size > 1:
        reduces = make_unchecked(subgroup(reduces.group, reduces.size), device, group.comm_label)
    memory = _memory_of(group, choice)
    # As of NCCL 2.29, what it does on symmetric memory only sums.
    gathers, reduces = _over(gathers, memory), _over(reduces, memory, choice.force_sum)
    if choice.all_gather is not None:
        gathers = CustomComm(gathers, choice.all_gather, None)
    if choice.reduce_scatter is not None:
        reduces = CustomComm(reduces, None, choice.reduce_scatter)
    if group.scatter_hook is not None:
        reduces = HookedComm(reduces, group.scatter_hook)
    now = group.comms
    others = [
        None if each is None else _complete(_over(checks.unchecked(each), memory), choice, device)
        for each in (now.replicas, now.secondary)
    ]
    group.use_comms(type(now)(_complete(gathers, choice, device), _complete(reduces, choice, device), *others))


def _memory_of(group: FSDPParamGroup, choice: CommChoice) -> CommMemory:
    """Returns where what is sent and filled comes from: one pool for all groups of a device."""
    usual = watcher().unchecked(group.usual_comms.gathers)
    is_one = usual.size == 1 or isinstance(usual.group, SimulatedGroup)
    if choice.memory is None or is_one or type(usual) is not CoalescedComm:
        return TORCH_MEMORY
    is_symmetric, device = choice.memory == "symmetric", group.mesh.device
    pools = (each.comms.gathers.memory for each in all_groups())
    for pool in pools:
        if isinstance(pool, PoolMemory) and pool.device == device and pool.is_symmetric == is_symmetric:
            return pool
    return (symmetric_pool(device) if is_symmetric else pool_of_group(usual.group, device)) or TORCH_MEMORY


def require_nccl(group: FSDPParamGroup) -> None:
    """Refuses symmetric memory where a group's collectives do not run on NCCL.

    Raises:
        RuntimeError: they do not.
    """
    device, usual = group.mesh.device, group.usual_comms
    for each in (usual.gathers, usual.replicas):
        if each is None or each.group is None or each.size == 1 or isinstance(each.group, SimulatedGroup):
            continue
        backend = backend_name(each.group, device)
        if backend != "nccl":
            raise RuntimeError(
                f"{group.comm_label.label}: symmetric memory is for collectives that run on NCCL; they run on "
                f"{backend} for tensors on {device.type}. Leave set_symm_mem_for_comm out there."
            )


def _over(comm: Comm, memory: CommMemory, sums: bool = True) -> Comm:
    """Returns a Comm of the same ranks over that memory. `sums`: it only sums, and never averages."""
    memory = TORCH_MEMORY if memory.is_symmetric and not sums else memory
    if comm.memory is memory or type(comm) is not CoalescedComm:
        return comm
    if isinstance(memory, PoolMemory):
        memory.join(comm)
    return CoalescedComm(comm.group, comm.comm_label, memory)


def _separates(group: FSDPParamGroup, usual: Comm) -> bool:
    """Returns True if gradients are reduced on a process group of their own although the user has not chosen that.

    So it is on devices, beyond one machine, where it is sure that all ranks that must take part in making it do: NCCL
    splits the group of all ranks if that is bound to a device, and other ranks of the program may shard nothing now.
    """
    mesh, world = group.mesh, dist.group.WORLD
    if usual.size <= RANKS_OF_A_MACHINE or not exist_on(mesh.device) or not isinstance(usual, CoalescedComm):
        return False
    if isinstance(usual.group, SimulatedGroup):
        return True
    return world is not None and (world.bound_device_id is None or mesh.num_ranks == world.size())


def _complete(comm: Comm, choice: CommChoice, device: torch.device) -> Comm:
    """Returns `comm` as chosen: checked, or no longer; summing only, or no longer."""
    plain = watcher().unchecked(comm)
    plain.force_sum = choice.force_sum
    return watcher().checked(plain, device) if choice.checked and plain.size > 1 else plain


def separate_where_usual(group: FSDPParamGroup) -> None:
    """Has a group reduce on a process group of its own, where that is the default, when it is first attached. Every
    rank must call it.
    """
    usual = watcher().unchecked(group.usual_comms.reduces)
    is_untouched = group.comms is group.usual_comms and choice_of(group).separate is None
    if is_untouched and _separates(group, usual):
        follow(group)
