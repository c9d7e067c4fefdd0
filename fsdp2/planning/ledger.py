"""Adds up bytes and seconds of a replayed step on one rank of a described machine."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch

from ..checks.headers import HEADER_NBYTES
from ..checks.levels import is_on
from ..checks.named_comm import MAX_RIDER_NBYTES
from ..core.comm import AnyComm, CoalescedComm, SoloComm
from ..core.streams import costs_launches, exist_on
from ..ext.gloo import PairwiseComm
from .recording import Mark

_COMMS: dict[str, Any] = {"nccl": CoalescedComm, "gloo": PairwiseComm, "other": AnyComm}


@dataclass(frozen=True)
class Machine:
    """Describes what each rank computes and communicates with.

    Args:
        device: type of the device, "cuda" or "cpu".
        backend: of the process group: "nccl" for all backends that coalesce collectives, "gloo", or "other".
        link: bytes per second that a rank can send. None: no times are predicted.
        flops: floating-point operations per second that a rank reaches in matrix products.
        host_link: bytes per second between the CPU's memory and the device, for offload.
        machine_link: bytes per second that a rank can send to ranks of the same machine. None: as for `link`.
        ranks_per_machine: how many neighbouring ranks are on one machine.
    """

    device: str
    backend: str
    link: float | None = None
    flops: float | None = None
    host_link: float = 25e9
    machine_link: float | None = None
    ranks_per_machine: int = 8

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)

    @property
    def has_streams(self) -> bool:
        return exist_on(self.torch_device)

    @property
    def can_offload(self) -> bool:
        """True if the device is not where offloaded shards rest."""
        return self.torch_device != torch.device("cpu")

    @property
    def has_speeds(self) -> bool:
        return self.link is not None and self.flops is not None

    @property
    def launches(self) -> bool:
        return costs_launches(self.torch_device)

    def direct_min_bytes(self, num_ranks: int) -> int:
        """Returns from how many bytes on a parameter is gathered on its own among so many ranks."""
        if num_ranks == 1:
            return SoloComm.direct_min_bytes
        minimum: int = _COMMS[self.backend].direct_min_bytes
        return minimum

    def messages_nbytes(self, num_ranks: int, rider_nbytes: int) -> int:
        """Returns the bytes of the messages with headers that one collective over gloo sends and receives besides
        (checks/named_comm.py). `rider_nbytes`: what of its last tensor goes to each other rank; little travels in them.
        """
        if self.backend != "gloo" or num_ranks == 1 or not is_on("headers"):
            return 0
        others = num_ranks - 1
        most = MAX_RIDER_NBYTES // others
        sent = HEADER_NBYTES + rider_nbytes if 0 < rider_nbytes <= most else 0
        return others * (HEADER_NBYTES + most + sent)

    def sums_on_arrival(self, num_ranks: int) -> bool:
        return num_ranks > 1 and self.backend == "gloo"


class Ledger:
    """Holds bytes that are alive, their peaks, bytes moved, and two clocks: of computation and of communication.

    `doing`: what runs, for the peak. `moved`: bytes by kind of collective, of all ranks; `sent`: bytes that this rank
    sends: of n ranks, each sends (n - 1) / n of what a ring all-gather or reduce-scatter moves, and of an all-reduce
    twice that. Collectives follow one another on one clock; computation waits for those it needs.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.engine = self.activations = 0
        self.doing = ""
        self.now = self.computed = 0.0
        self.flops = 0
        self._links = {"collectives": 0.0, "transfers": 0.0}
        self.begin_step()

    def begin_step(self) -> None:
        """Forgets what earlier steps took."""
        self.peak, self.peak_at = 0, ""
        self.moved: Counter[str] = Counter()
        self.sent = 0.0
        self.began, self.computed, self.flops = self.now, 0.0, 0

    def add(self, nbytes: int) -> None:
        self.engine += nbytes
        self._note(self.engine + self.activations)

    def drop(self, nbytes: int) -> None:
        self.engine -= nbytes

    def follow(self, mark: Mark) -> None:
        """Takes what the model has computed until this mark."""
        self.compute(mark.peak, mark.flops)
        self.activations = mark.live

    def compute(self, peak: int, flops: int) -> None:
        self._note(self.engine + peak)
        self.flops += flops
        seconds = flops / self.machine.flops if self.machine.flops else 0.0
        self.now += seconds
        self.computed += seconds

    def _note(self, total: int) -> None:
        if total > self.peak:
            self.peak, self.peak_at = total, self.doing

    def communicate(self, kind: str, nbytes: int, num_ranks: int, span: int = 0, after: float = 0.0) -> float:
        """Begins a collective on tensors that have so many bytes together: those of all ranks, or of the sum of an
        all-reduce. Returns when it ends.

        `span`: among how many neighbouring ranks its ranks are; 0: they are neighbours. `after`: when it may begin.
        """
        if num_ranks == 1:
            return self.now
        self.moved[kind] += nbytes
        sent = nbytes * (num_ranks - 1) / num_ranks * (2 if kind == "all_reduce" else 1)
        self.sent += sent
        machine = self.machine
        is_inside = (span or num_ranks) <= machine.ranks_per_machine and machine.machine_link is not None
        return self._occupy("collectives", sent, machine.machine_link if is_inside else machine.link, after)

    def transfer(self, nbytes: int) -> float:
        """Begins a copy between the CPU and the device. Returns when it ends."""
        self.moved["transfer"] += nbytes
        return self._occupy("transfers", nbytes, self.machine.host_link if self.machine.has_speeds else None)

    def _occupy(self, link: str, nbytes: float, speed: float | None, after: float = 0.0) -> float:
        if speed is None:
            return self.now
        self._links[link] = max(self._links[link], self.now, after) + nbytes / speed
        return self._links[link]

    def wait(self, end: float) -> None:
        self.now = max(self.now, end)
