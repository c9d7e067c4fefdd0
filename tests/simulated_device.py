"""Simulates a device in the CPU's own memory, for machines without an accelerator.

Copies to it and from it arrive as late as they may, so that a reader that does not wait gets NaN, and a write to memory
that is being copied an error.
"""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fsdp2.engine import group as groups
from fsdp2.engine.group_parameters import GroupParameters
from fsdp2.engine.mesh import DataMesh

DEVICE = torch.device("cpu", 0)
"""Not equal to `cpu`, where shards rest."""


class LateTransfer:
    """A Transfer that is made when it is waited for. Meanwhile its target holds NaN."""

    def __init__(self, owner: "SimulatedTransfers", target: Tensor, source: Tensor, then: Callable[[], Any]) -> None:
        self.source = source
        self._owner, self._target, self._then = owner, target, then
        self._as_it_was = source.clone()
        target.view(torch.uint8).fill_(255)  # NaN in each floating dtype
        self._has_run, self._result = False, None

    def run(self) -> None:
        assert not self._has_run, "a transfer is made once"
        self._has_run = True
        self.check()
        self._target.copy_(self.source)
        self._result = self._then()

    def check(self) -> None:
        same = torch.equal(self.source.view(torch.uint8), self._as_it_was.view(torch.uint8))
        assert same, "written to before the copy of it was through"

    def wait(self) -> Any:
        self._owner.run_until(self)
        return self._result

    pass_on = wait  # nothing was launched before

    def finish(self) -> Tensor:
        if not self._has_run:
            self._owner.land(self)
        return self._result


class SimulatedTransfers:
    """Takes the place of Transfers. Each direction is a queue, of which nothing runs before somebody waits for it.

    `log`: what is copied, and when that is known to have been done, as the lines that `recorder.py` writes:
        in, wait      a copy to the device begins; the device waits for it
        out, land     a copy to the CPU begins; the host waits for it
        host waits    for all copies to the device that it does not know to have been made
    `live`, `peak`: bytes of the CPU's memory that it has allocated and that are in use; and the most of them.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.live = self.peak = 0
        self._inward: deque[LateTransfer] = deque()
        self._outward: set[LateTransfer] = set()
        # What the device has waited for, but the host, as yet, not for the device.
        self._arrived: list[LateTransfer] = []
        # Steps in backward run on another thread.
        self._lock = threading.RLock()

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(numel, dtype=dtype)
        with self._lock:
            self.live += tensor.nbytes
            self.peak = max(self.peak, self.live)
        weakref.finalize(tensor.untyped_storage(), self._release, tensor.nbytes)
        return tensor

    def _write(self, event: str, tensor: Tensor) -> None:
        self.log.append(f"{event:6}       {tensor.nbytes}")

    def _release(self, nbytes: int) -> None:
        with self._lock:
            self.live -= nbytes

    def start_in(self, target: Tensor, source: Tensor, then: Callable[[], Any]) -> LateTransfer:
        transfer = LateTransfer(self, target, source, then)
        self._write("in", source)
        self._inward.append(transfer)
        return transfer

    def run_until(self, transfer: LateTransfer) -> None:
        """The device waits: for all that was begun before, too."""
        self._write("wait", transfer.source)
        while transfer in self._inward:
            self._run_first()

    def _run_first(self) -> None:
        first = self._inward.popleft()
        first.run()
        with self._lock:
            self._arrived.append(first)

    def start_out(self, source: Tensor) -> LateTransfer:
        target = self.allocate(source.numel(), source.dtype)
        self._write("out", source)
        with self._lock:
            arrived = tuple(self._arrived)

        def landed() -> Tensor:
            self._forget(arrived)
            return target

        transfer = LateTransfer(self, target, source, landed)
        with self._lock:
            self._outward.add(transfer)
        return transfer

    def land(self, transfer: LateTransfer) -> None:
        """The host waits: for what the device had waited for before, too. Then others take the device's memory."""
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.002)  # and nobody may count on the other thread's being fast
        transfer.run()
        self._write("land", transfer.source)
        transfer.source.view(torch.uint8).fill_(255)
        with self._lock:
            self._outward.remove(transfer)

    def settle(self) -> None:
        if self._inward or self._arrived:
            self.log.append("host waits")
        while self._inward:
            self._run_first()
        self._forget(tuple(self._arrived))

    def check_end(self) -> None:
        """Nothing was given up, or written to, while it was copied."""
        self.settle()
        assert not self._outward, "nobody has waited for a copy to the CPU"

    def _forget(self, transfers: tuple[LateTransfer, ...]) -> None:
        """The host knows that they have been made: from now on it may write to what was copied."""
        with self._lock:
            for transfer in transfers:
                if transfer in self._arrived:
                    transfer.check()
                    self._arrived.remove(transfer)


@contextmanager
def simulated_device() -> Iterator[SimulatedTransfers]:
    """In it, models are sharded on the stand-in: with CPUOffloadPolicy, shards and gradients rest apart from it.

    No tensor says that it lies on the stand-in. So what does not rest apart from it is expected on `cpu`, too.
    """
    transfers = SimulatedTransfers()

    def on_cpu(group: Any, storage_device: Any) -> Any:
        return GroupParameters(group, torch.device("cpu"))

    with (
        mock.patch.object(DataMesh, "device", DEVICE),
        mock.patch.object(groups, "GroupParameters", on_cpu),
        mock.patch.object(groups, "make_transfers", return_value=transfers),
    ):
        yield transfers
        transfers.check_end()


class Stream:
    """A torch.Stream that writes down how it is used; and the events that it records."""

    def __init__(self, name: str, lines: list[str]) -> None:
        self.name, self.lines = name, lines
        self.is_through = False

    def wait_stream(self, other: Any) -> None:
        self.lines.append(f"{self.name} waits for {other.name}")

    def __enter__(self) -> None:
        self.lines.append(f"enter {self.name}")

    def __exit__(self, *_: object) -> None:
        self.lines.append(f"leave {self.name}")

    def record_event(self) -> Any:
        self.lines.append(f"event on {self.name}")
        return self

    def wait(self) -> None:
        self.lines.append(f"current waits for the event on {self.name}")

    def query(self) -> bool:
        return self.is_through

    def synchronize(self) -> None:
        self.lines.append(f"host waits for {self.name}")
