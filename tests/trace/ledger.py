"""Follows memory that asynchronous collectives use, as streams order it: who touches or frees it too early is named.

There are two streams: the one that computes, and the one beside it (fsdp2/streams.py), whose use the tests pretend.
Each process group has one more, on which its collectives run in order, each behind all that the stream which issued it
was given or has waited for. A collective's memory is in use until a stream has waited for it, or for a later one that
was ordered behind it. Nothing is moved: addresses are all that counts.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup
from torch._ops import OpOverload
from torch._subclasses import FakeTensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fsdp2 import streams

TOUCH_NO_DATA = ("aten.set", "aten.resize", "aten.empty_like", "aten.new_empty", "aten._unsafe_view")


class Race(AssertionError):
    """Memory was touched, freed or moved while somebody else might still use it."""


@dataclass
class Access:
    """Some bytes of one storage: the first, and one past the last, whatever lies between a tensor's elements."""

    storage: StorageWeakRef
    first: int
    last: int
    writes: bool

    def conflicts(self, other: "Access") -> bool:
        return (self.writes or other.writes) and self.first < other.last and other.first < self.last


@dataclass
class Use:
    """What is queued somewhere and may run at any time until a stream has waited for it."""

    what: str
    accesses: list[Access]


@dataclass
class Line:
    """A stream: the uses it is ordered behind."""

    behind: set[int] = field(default_factory=set)


class Ledger(TorchDispatchMode):
    """Raises Race from the operation, the collective or the release that comes too early."""

    sees_fsdp2 = True

    def __init__(self) -> None:
        super().__init__()
        self.compute, self.beside = Line(), Line()
        self.current = self.compute
        self.lines: dict[Any, Line] = {}
        self.open: dict[int, Use] = {}
        # What was waited for, and whether the stream that computes did -> how often.
        self.waits: Counter[tuple[str, bool]] = Counter()
        self._last = 0
        # Identity of a storage -> the stream that it was allocated on.
        self._pools: dict[int, Line] = {}

    # ---- what happens

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor takes the op apart; its local ops come back to us
        out = func(*args, **(kwargs or {}))
        if any(issubclass(kind, FakeTensor) for kind in types):
            return out
        self.check_released()
        inputs = {leaf.untyped_storage()._cdata for leaf in _tensors([args, kwargs])}
        for leaf in _tensors(out):
            if leaf.untyped_storage()._cdata not in inputs:
                self._pools[leaf.untyped_storage()._cdata] = self.current
        if not _touches_no_data(func):
            accesses = _accesses(func, args, kwargs or {})
            self.check(str(func), accesses, self.current)
            if self.current is self.beside:
                self._enter(str(func), accesses, self.beside)
        return out

    def issue(self, group: Any, what: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> "LedgerWork":
        line = self.lines.setdefault(id(group), Line())
        line.behind |= self.current.behind
        self.check_released()
        accesses = [*_touch(inputs, writes=False), *_touch(outputs, writes=True)]
        self.check(what, accesses, line)
        self._enter(what, accesses, line)
        return LedgerWork(self, what, frozenset(line.behind))

    def waited(self, what: str, behind: frozenset[int]) -> None:
        self.check_released()
        self.waits[what, self.current is self.compute] += 1
        self.current.behind |= behind
        for number in self.compute.behind & self.open.keys():
            del self.open[number]

    @contextmanager
    def on_the_other_stream(self, _: torch.device) -> Iterator[None]:
        """Stands for `streams.beside`."""
        self.beside.behind |= self.compute.behind
        before, self.current = self.current, self.beside
        try:
            yield
        finally:
            self.current = before

    def _enter(self, what: str, accesses: list[Access], line: Line) -> None:
        self._last += 1
        self.open[self._last] = Use(what, accesses)
        line.behind.add(self._last)

    # ---- what must not

    def check(self, what: str, accesses: Sequence[Access], line: Line) -> None:
        for use in self._running_beside(line):
            if any(one.conflicts(other) for one in use.accesses for other in accesses):
                raise Race(f"{what} touches what may still be used by {use.what}")

    def check_resized(self, storage: torch.UntypedStorage) -> None:
        for use in self._running_beside(self.current):
            if any(access.storage.cdata == storage._cdata for access in use.accesses):
                raise Race(f"storage resized that may still be used by {use.what}")

    def check_released(self) -> None:
        for number, use in self.open.items():
            for access in [each for each in use.accesses if each.storage.expired()]:
                # Freed memory is taken again by the stream that it was allocated on.
                if number not in self._pools.get(access.storage.cdata, self.compute).behind:
                    raise Race(f"memory freed that may still be used by {use.what}")
                use.accesses.remove(access)

    def _running_beside(self, line: Line) -> list[Use]:
        return [use for number, use in self.open.items() if number not in line.behind]


class LedgerWork(dist.Work):
    def __init__(self, ledger: Ledger, what: str, behind: frozenset[int]) -> None:
        super().__init__()
        self._ledger, self._what, self._behind = ledger, what, behind

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._ledger.waited(self._what, self._behind)
        return True


class LedgerGroup(dist.ProcessGroup):
    """Writes its collectives into a ledger; its Works own no tensor."""

    ledger: Ledger

    def _gather(self, output: Tensor, own: Tensor, *_: Any) -> dist.Work:
        return self.ledger.issue(self, "all-gather", [output], [own])

    def _gather_all(self, outputs: list[Tensor], own: list[Tensor], *_: Any) -> dist.Work:
        return self.ledger.issue(self, "all-gather", outputs, own)

    def _reduce(self, output: Tensor, whole: Tensor, *_: Any) -> dist.Work:
        return self.ledger.issue(self, "reduce-scatter", [output], [whole])

    def _reduce_all(self, outputs: list[Tensor], whole: list[Tensor], *_: Any) -> dist.Work:
        return self.ledger.issue(self, "reduce-scatter", outputs, whole)

    def _exchange(self, output: Tensor, whole: Tensor, *_: Any) -> dist.Work:
        return self.ledger.issue(self, "all-to-all", [output], [whole])

    def allreduce(self, tensors: list[Tensor], *_: Any) -> dist.Work:
        return self.ledger.issue(self, "all-reduce", tensors, tensors)

    # Old and new names of the same call; torch uses one or the other, by version.
    _allgather_base = all_gather_single = _gather
    _reduce_scatter_base = reduce_scatter_single = _reduce
    alltoall_base = all_to_all_single = _exchange
    allgather_into_tensor_coalesced = all_gather_single_coalesced = _gather_all
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced = _reduce_all


def _create(ledger: Ledger, common: Any, _options: Any) -> LedgerGroup:
    group = LedgerGroup(common.group_rank, common.group_size)
    group.ledger = ledger
    backend = FakeProcessGroup._create_internal(common.group_rank, common.group_size)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    return group


@contextmanager
def ledger_world(world_size: int, monkeypatch: Any, with_streams: bool) -> Iterator[Ledger]:
    """A default process group of any size, and the ledger of what is in flight on it and its subgroups."""
    ledger = Ledger()
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> Any:
        ledger.check_resized(storage)
        return resize(storage, size)

    monkeypatch.setattr(torch.UntypedStorage, "resize_", resize_)
    if with_streams:
        monkeypatch.setattr(streams, "exist_on", lambda device: True)
        monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: "the stream that computes")
        monkeypatch.setattr(streams, "beside", ledger.on_the_other_stream)
    dist.Backend.register_backend("ledger", partial(_create, ledger), extended_api=True, devices=["cpu"])
    dist.init_process_group("ledger", store=dist.HashStore(), rank=0, world_size=world_size)
    try:
        yield ledger
    finally:
        dist.destroy_process_group()


def _touches_no_data(func: OpOverload) -> bool:
    returned = func._schema.returns
    is_view = bool(returned) and returned[0].alias_info is not None and not returned[0].alias_info.is_write
    return is_view or str(func.overloadpacket).rstrip("_") in TOUCH_NO_DATA


def _accesses(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Access]:
    accesses = []
    for index, argument in enumerate(func._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        accesses += _touch(_tensors(value), writes)
    return accesses


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _touch(tensors: Sequence[Tensor], writes: bool) -> list[Access]:
    accesses = []
    for tensor in tensors:
        if tensor.numel():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            first, end = tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()
            accesses.append(Access(StorageWeakRef(tensor.untyped_storage()), first, end, writes))
    return accesses
