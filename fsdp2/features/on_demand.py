"""Serves all-gathers on demand inside of a block of `accumulate`: a rank reads the shards of the others when it needs
them, from memory that they share, and no rank waits for another.

An all-gather is a meeting: a rank whose micro-batch is long makes all others wait, at each group of each micro-batch.
But shards do not change before the optimizer steps. So all ranks meet when the block begins, and write what each would
send into memory that the processes of a machine share. Inside of the block each copies from there. They meet again when
gradients are reduced, at its end. Nobody writes while others read: ranks write when all have left the block before, and
read when all have written.
"""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate as running_sums
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..engine.collectives import choice_of, make_comm
from ..engine.comm import AllWork, Comm, DelegatingComm, Purpose, Work, all_gather_now
from ..engine.events import Observer
from ..engine.group import FSDPParamGroup
from ..engine.rank_facts import gather_objects, moves_data
from ..engine.root import Root
from .running_stats import find_running_stats

_CPU = torch.device("cpu")
_SHARED_FOLDER = Path("/dev/shm")
# Where a rank's part of the memory begins: what is copied together lies on a line of the cache of its own.
_ALIGNMENT = 64
_KEEP = (
    "If there is memory, keep weights unsharded over the block, which saves as much time: call "
    "set_reshard_after_forward(False) and set_reshard_after_backward(False)."
)


class OnDemandGathers(Observer):
    """Serves the gathers of a root's groups, between `publish` and `withdraw`. The memory stays for the next block.

    Checks follow its gathers as those of any Comm, but for those that compare ranks: they do so when ranks `publish`.
    """

    def __init__(self) -> None:
        self._purpose = Purpose("shards that are read on demand")
        self._memories: dict[dist.ProcessGroup, _SharedMemory] = {}
        # Group -> its Comm, while it serves; the versions of the shards that others read; its Comm of before.
        self._serving: dict[FSDPParamGroup, tuple[SharedComm, tuple[int, ...], Comm]] = {}

    @property
    def nbytes(self) -> int:
        """How many bytes this rank has put into memory that is shared."""
        return sum(memory.nbytes for memory in self._memories.values())

    def attached(self, root: Root) -> None:
        self._purpose.root = weakref.ref(root)

    def before_gather(self, group: FSDPParamGroup) -> None:
        """
        Raises:
            RuntimeError: parameters are others than those that other ranks read; or they are not gathered on demand.
        """
        serving = self._serving.get(group)
        if serving is None:
            return
        comm, versions, _ = serving
        if group.shard_versions() != versions or not comm.serves(group):
            raise RuntimeError(
                f"{group}: a parameter was written to, or replaced, inside of a block of accumulate(on_demand=True), "
                "while other ranks read it. Write to parameters behind the block."
            )
        if group.comms.gathers is not comm:
            raise RuntimeError(
                f"{group}: how it communicates was changed inside of a block of accumulate(on_demand=True). Call "
                "set_debug_level and the like before the block, or behind it."
            )

    def publish(self, root: Root) -> None:
        """Has all ranks write what they send in gathers, and read what others have written from then on. All ranks must
        call it.

        Raises:
            NotImplementedError, ValueError, RuntimeError: on all ranks, see `accumulate`.
        """
        for group in root.groups:
            group.adopt_replacements(may_be_meta=False)
        _refuse(root)
        together: dict[dist.ProcessGroup, list[FSDPParamGroup]] = {}
        for group in root.groups:
            process_group = group.comms.gathers.group
            if group.params and process_group is not None and group.comms.gathers.size > 1:
                together.setdefault(process_group, []).append(group)
        for process_group, groups in together.items():
            if process_group not in self._memories:
                self._memories[process_group] = _SharedMemory(process_group, self._purpose)
            memory = self._memories[process_group]
            parts = memory.open([[sent.nbytes for sent in _sent_by(group)] for group in groups])
            for group, operations in zip(groups, parts, strict=True):
                self._write(group, operations)
            memory.meet()

    def _write(self, group: FSDPParamGroup, operations: Sequence[Sequence[Tensor]]) -> None:
        """Has a gather of the group begin, whose Comm writes, and drops it."""
        before = group.comms.gathers
        comm = SharedComm(before, _sent_by(group), operations)
        group.use_comms(group.comms._replace(gathers=comm))
        try:
            group.start_unshard(ahead=False)
            group.reshard()
        except BaseException:
            group.use_comms(group.comms._replace(gathers=before))
            raise
        comm.reads_alone = True
        self._serving[group] = comm, group.shard_versions(), before

    def withdraw(self) -> None:
        """Has groups gather as before."""
        serving, self._serving = self._serving, {}
        for group, (comm, _, before) in serving.items():
            if group.comms.gathers is comm:  # else a user has chosen another one inside of the block
                group.use_comms(group.comms._replace(gathers=before))


def _sent_by(group: FSDPParamGroup) -> Sequence[Tensor]:
    buffers = group.parameters.buffers
    assert buffers is not None, "shards are on the device"
    return buffers.sent


class SharedComm(DelegatingComm):
    """Is the Comm of a group whose gathers are served on demand. All else is done by the Comm of before.

    `reads_alone`: False while ranks write what they send. True: each reads what all have written, when it wants.

    Args:
        inner: the Comm of before.
        sent: what the group sends: the same list in each of its gathers. Any other gather is a collective, as ever.
        operations: for each of these, memory of each rank.
    """

    def __init__(self, inner: Comm, sent: Sequence[Tensor], operations: Sequence[Sequence[Tensor]]) -> None:
        super().__init__(inner)
        self._sent, self._operations = sent, operations
        self.reads_alone = False
        if hasattr(inner, "compare"):  # see compare_first
            self.compare = inner.compare

    def serves(self, group: FSDPParamGroup) -> bool:
        """Returns True if the group still sends what was written."""
        return group.parameters.buffers is not None and group.parameters.buffers.sent is self._sent

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
        if inputs is not self._sent:
            return self.inner_comm.all_gather(outputs, inputs)
        for output, own, of_all in zip(outputs, inputs, self._operations, strict=True):
            if not self.reads_alone:
                of_all[self.rank].copy_(own)
                continue
            for slot, theirs in zip(output.view(self.size, -1), of_all, strict=True):
                slot.copy_(theirs)
        return AllWork([])


class _SharedMemory:
    """Is memory that the ranks of one process group share: each writes its own part, and reads those of all.

    A part is a file in memory, which has no name any more when all have opened it: it is gone when they are.
    """

    def __init__(self, group: dist.ProcessGroup, purpose: Purpose) -> None:
        self._group, self._comm = group, make_comm(group, _CPU, purpose)
        self._of_all: list[Tensor] = []
        self.nbytes = 0

    def open(self, sizes: Sequence[Sequence[int]]) -> list[list[list[Tensor]]]:
        """Returns memory for operations of these sizes: [group][operation][rank]. It waits until all ranks call it: so
        nobody reads what was written before.

        Raises:
            NotImplementedError: ranks share no memory; on all of them.
            RuntimeError: there is too little of it; on all ranks.
        """
        flat = [-(-each // _ALIGNMENT) * _ALIGNMENT for of_group in sizes for each in of_group]
        *starts, nbytes = running_sums(flat, initial=0)
        has_it = bool(self._of_all) and self.nbytes == nbytes
        told = all_gather_now(nbytes.to_bytes(8, "little") + bytes([has_it]), self._comm, _CPU)
        assert len({each[:8] for each in told}) == 1, "checks have compared what ranks hold"
        if not all(each[8] for each in told):
            self._make(nbytes)
        places = iter(zip(starts, (each for of_group in sizes for each in of_group), strict=True))
        return [
            [[part[start : start + size] for part in self._of_all] for start, size in (next(places) for _ in of_group)]
            for of_group in sizes
        ]

    def meet(self) -> None:
        """Waits until all ranks call it."""
        all_gather_now(b"\0", self._comm, _CPU)

    def _make(self, nbytes: int) -> None:
        self._of_all, self.nbytes = [], nbytes
        name, problem = "", ""
        try:
            name = _make_file(max(1, nbytes))
        except OSError as error:
            problem = f"{type(error).__name__}: {error}"
        try:
            told = gather_objects((dist.get_rank(), name, problem), [self._group], _CPU)  # by ranks of the group
            for rank, _, text in told:
                if text:
                    raise RuntimeError(
                        f"accumulate(on_demand=True): rank {rank} could not get {nbytes} bytes of shared memory "
                        f"({text}). Make {_folder()} larger (docker run --shm-size), or leave on_demand out."
                    )
            mapped = [_map_file(each, max(1, nbytes)) for _, each, _ in told]
            shares = gather_objects(all(each is not None for each in mapped), [self._group], _CPU)
        finally:
            if name:
                with suppress(OSError):
                    os.unlink(name)
        if not all(shares):
            raise NotImplementedError(
                "accumulate(on_demand=True): expected ranks that share memory, got ranks on several machines or in "
                f"several containers: {[rank for rank, *_ in told]}. {_KEEP}"
            )
        self._of_all = [each for each in mapped if each is not None]


def _folder() -> Path:
    return _SHARED_FOLDER if _SHARED_FOLDER.is_dir() else Path(tempfile.gettempdir())


def _make_file(nbytes: int) -> str:
    """Returns the name of a new file whose memory is there: else a rank that writes to it would be killed."""
    descriptor, name = tempfile.mkstemp(prefix="fsdp2-", dir=_folder())
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, nbytes)
        else:
            os.truncate(descriptor, nbytes)
    except OSError:
        os.unlink(name)
        raise
    finally:
        os.close(descriptor)
    return name


def _map_file(name: str, nbytes: int) -> Tensor | None:
    """Returns the memory of a file of another rank, or None if this machine has no such file."""
    try:
        return torch.from_file(name, shared=True, size=nbytes, dtype=torch.uint8)
    except RuntimeError:
        return None


def _refuse(root: Root) -> None:
    """Raises, alike on all ranks, if gathers can't be served on demand."""

    def refuse(why: str) -> Any:
        return NotImplementedError(f"accumulate(on_demand=True): {why}")

    if root.consensus is not None:
        raise refuse(
            "conditional modules and blocks of fsdp2.join are not supported: before each gather, their ranks agree "
            "which one it is"
        )
    training = [name for module, name in find_running_stats(root).items() if module.training]
    if training and root.settings.averages_running_stats and root.group.mesh.num_ranks > 1:
        raise refuse(
            f"ranks would average the running statistics of {training[0]} in each forward. Call "
            "model.set_running_stats_averaging(False), or have it evaluate."
        )
    for group in root.groups:
        process_group = group.comms.gathers.group
        if process_group is None or group.comms.gathers.size == 1:
            continue
        if group.mesh.device.type != "cpu" or not moves_data([process_group], group.mesh.device):
            raise refuse(
                f"expected parameters on CPUs of one machine, got {group} on {group.mesh.device.type}, over "
                f"{type(process_group).__name__}. What is missing for devices: that ranks read each other's memory "
                f"there (CUDA IPC, symmetric memory). {_KEEP}"
            )
        if group.parameters.extension is not None:
            raise refuse(f"{group.parameters.extension.params[0].name} has fsdp_pre_all_gather, which gathers itself")
        if group.comms.post_forward is not None:
            raise refuse(
                f"{group} restores parameters among neighbours. Use a bool or None for reshard_after_forward, and no "
                "shard_at_rest."
            )
        if choice_of(group).all_gather is not None:
            raise refuse(f"{group} has an all-gather of yours (set_custom_all_gather)")


def serve(root: Root) -> OnDemandGathers:
    """Has the gathers of a root served on demand, until `withdraw`. All ranks must call it."""
    gathers: OnDemandGathers | None = root.events.of(OnDemandGathers)
    if gathers is None:
        gathers = OnDemandGathers()
        root.add(gathers)
    try:
        gathers.publish(root)
    except BaseException:
        gathers.withdraw()
        raise
    return gathers
