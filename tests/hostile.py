"""Simulates a hostile scheduler: every collective completes as late as it may, and memory that must not be read is NaN.

The output of a collective is filled with NaN when it is issued, and with its values in `wait`; its inputs and outputs
must not be freed or changed until then. Storages are filled with NaN before they are freed and after they are
allocated. All of it happens with random pauses. A process group would be allowed to do each of these; the ranks still
issue their collectives in the same order.

All tests on forked ranks can run so, except for two files: tests of the collectives themselves, some of which drop
their memory at once, and counts of compiled graphs, which would include these functions.

    FSDP2_HOSTILE=1 python -m pytest tests/ranks --ignore tests/ranks/test_comm.py --ignore tests/ranks/test_compile.py

Events, for tests that interfere: "issue all_gather", "wait all_gather", ..., "allocate", "free".
"""

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fsdp2.checks.named_comm import NamedPairwiseComm
from fsdp2.collectives.coalesced import CoalescedComm
from fsdp2.devices.streams import CopyWork
from fsdp2.engine.comm import Comm, Rows, Work

POISON = 0xFF
"""As every byte it is NaN in each floating-point dtype."""
LONGEST_S = 0.002
PAUSED = 0.05
"""Which part of the events comes after a pause."""


class _Memory:
    """Holds the bytes of a tensor that must not change. It does not keep them alive: their owner must."""

    def __init__(self, tensor: Tensor, name: str) -> None:
        storage, self._name = tensor.untyped_storage(), name
        self._storage, self._offset = StorageWeakRef(storage), tensor.storage_offset() * tensor.element_size()
        self._nbytes = tensor.numel() * tensor.element_size()
        self.expected = _bytes(storage, self._offset, self._nbytes).clone()

    def find(self) -> Tensor:
        """Returns the bytes themselves.

        Raises:
            AssertionError: they are freed, or have changed.
        """
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        assert storage is not None, f"{self._name} was dropped while the collective was under way"
        assert not self.is_freed(), f"{self._name} was freed while the collective was under way"
        found = _bytes(storage, self._offset, self._nbytes)
        assert torch.equal(found, self.expected), f"{self._name} was written to while the collective was under way"
        return found

    def is_freed(self) -> bool:
        """Returns True if the memory was freed though its storage exists."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        return storage is not None and storage.nbytes() < self._offset + self._nbytes


def _bytes(storage: torch.UntypedStorage, offset: int, nbytes: int) -> Tensor:
    """Returns a tensor of its own over the same bytes, so that autograd does not count writes to it as the caller's."""
    assert storage.nbytes() >= offset + nbytes, "there is no memory"  # `set_` would allocate it
    with torch.inference_mode(False):
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, offset, (nbytes,), (1,))


class HostileWork:
    """Delivers in `wait` the result that another work has put into private memory."""

    def __init__(
        self,
        name: str,
        work: Work,
        memory: Sequence[_Memory],
        private: Sequence[Tensor],
        copies: Sequence[Tensor],
        enemy: "Enemy",
    ) -> None:
        self._name, self._work, self._memory, self._private, self._enemy = name, work, memory, private, enemy
        self._copies_kept_alive = copies

    def wait(self) -> None:
        memory, self._memory = self._memory, ()
        if not memory:
            return
        self._enemy.event(f"wait {self._name}")
        self._work.wait()
        try:
            found = [each.find() for each in memory]
        except AssertionError as error:
            self._enemy.complaints.append(f"{self._name}: {error}")  # lest it is lost, in a destructor say
            raise
        for target, source in zip(found, self._private):  # noqa: B905  the inputs come last
            target.copy_(source.view(torch.uint8))

    def __del__(self) -> None:
        """Given up without a wait: memory may go with it, but not before it."""
        if any(each.is_freed() for each in self._memory):
            self._enemy.complaints.append(f"{self._name}: memory was freed, and nobody has waited")


class Enemy:
    """Acts at each event, and collects the faults that it finds."""

    def __init__(self, seed: int, on_event: Callable[[str], None] | None) -> None:
        self._chance, self._on_event = random.Random(seed), on_event
        self.complaints: list[str] = []

    def event(self, name: str) -> None:
        if self._chance.random() < PAUSED:
            time.sleep(self._chance.random() * LONGEST_S)
        if self._on_event is not None:
            self._on_event(name)

    def issue(self, name: str, start: Callable[..., Work], outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
        """Runs `start(private outputs, private inputs)`; poisons the outputs, except for an input that is
        part of one.
        """
        self.event(f"issue {name}")
        private = [torch.empty_like(output) for output in outputs]
        copies = [each.clone() for each in inputs]
        for output in outputs:
            _bytes(*_place(output)).fill_(POISON)
        for own, copy in zip(inputs, copies, strict=True):
            _bytes(*_place(own)).copy_(copy.view(torch.uint8))
        memory = [_Memory(output, f"output {i}") for i, output in enumerate(outputs)]
        memory += [_Memory(own, f"input {i}") for i, own in enumerate(inputs)]
        return HostileWork(name, start(private, copies), memory, private, copies, self)


def _place(tensor: Tensor) -> tuple[torch.UntypedStorage, int, int]:
    itemsize = tensor.element_size()
    return tensor.untyped_storage(), tensor.storage_offset() * itemsize, tensor.numel() * itemsize


def _changes(enemy: Enemy, cls: type[Any]) -> dict[str, Callable[..., Any]]:
    """Returns the collectives of a kind of Comm, each replaced by a hostile one that uses it."""
    gather, scatter, sum_all, swap = cls.all_gather, cls.reduce_scatter, cls.all_reduce, cls.exchange

    def all_gather(comm: Comm, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Work:
        return enemy.issue("all_gather", lambda *private: gather(comm, *private), outputs, inputs)

    def reduce_scatter(
        comm: Comm, outputs: Sequence[Tensor], inputs: Sequence[Tensor], divisor: float, what: str = ""
    ) -> Work:
        return enemy.issue("reduce_scatter", lambda *private: scatter(comm, *private, divisor, what), outputs, inputs)

    def all_reduce(comm: Comm, tensor: Tensor, divisor: float, what: str = "") -> Work:
        def start(outputs: Sequence[Tensor], _: Sequence[Tensor]) -> Work:
            outputs[0].copy_(own)
            return sum_all(comm, outputs[0], divisor, what)

        own = tensor.clone()
        return enemy.issue("all_reduce", start, [tensor], [])

    def exchange(comm: Comm, sent: Sequence[Tensor], what: str = "") -> tuple[Work, Sequence[Rows]]:
        def start(received: Sequence[Tensor], copies: Sequence[Tensor]) -> Work:
            work, rows = swap(comm, copies, what)
            targets = [row for each in received for row in each.view(comm.size, -1)]
            return CopyWork([work], [*zip(targets, [row for each in rows for row in each], strict=True)], copies)

        received = [torch.empty_like(each) for each in sent]
        work = enemy.issue("reduce_scatter", start, received, sent)
        return work, [each.view(comm.size, -1) for each in received]

    return {"all_gather": all_gather, "reduce_scatter": reduce_scatter, "all_reduce": all_reduce, "exchange": exchange}


def _poisoning_resize(enemy: Enemy) -> Callable[[torch.UntypedStorage, int], Any]:
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, nbytes: int) -> Any:
        before = storage.nbytes()
        enemy.event("allocate" if nbytes > before else "free")
        if nbytes < before:
            _bytes(storage, nbytes, before - nbytes).fill_(POISON)
        result = resize(storage, nbytes)
        if nbytes > before:
            _bytes(storage, before, nbytes - before).fill_(POISON)
        return result

    return resize_


@contextlib.contextmanager
def hostile(seed: int, on_event: Callable[[str], None] | None = None) -> Iterator[Enemy]:
    """Context: all collectives of this process are hostile.

    Raises:
        AssertionError: at the end, if memory of a collective was changed or freed while it was in flight.
    """
    enemy = Enemy(seed, on_event)
    mode = torch.get_deterministic_debug_mode()
    with contextlib.ExitStack() as stack:
        for cls in (NamedPairwiseComm, CoalescedComm):
            for name, change in _changes(enemy, cls).items():
                stack.enter_context(mock.patch.object(cls, name, change))
        stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", _poisoning_resize(enemy)))
        stack.callback(torch.set_deterministic_debug_mode, mode)
        # New tensors hold NaN, see torch.utils.deterministic. (use_deterministic_algorithms imports inductor.)
        torch.set_deterministic_debug_mode("error")
        yield enemy
    assert not enemy.complaints, "\n".join(enemy.complaints)
