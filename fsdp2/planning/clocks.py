"""Describes a machine, and says when what a step does on it ends: computation, collectives, copies to the CPU."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from .network import NO_LATENCY, Latency, Network


@dataclass(frozen=True)
class Machine:
    """Describes what each rank computes and communicates with.

    Args:
        device: type of the device, "cuda" or "cpu".
        backend: of the process group: "nccl" for all backends that coalesce collectives, "gloo", or "other".
        link, machine_link, ranks_per_machine, cards_per_machine, latency: see `Network`. Without `link` no times are
            predicted.
        flops: floating-point operations per second that a rank reaches in matrix products.
        host_link: bytes per second between the CPU's memory and the device, for offload.
        memory_link: bytes per second between the device and its memory, for the optimizer's step. None: it takes no
            time.
        host_memory_link: bytes per second between the CPUs of a machine and their memory, which its ranks share, for
            the optimizer's step with offload.
    """

    device: str
    backend: str
    link: float | None = None
    flops: float | None = None
    host_link: float = 25e9
    machine_link: float | None = None
    ranks_per_machine: int = 8
    cards_per_machine: int | None = None
    latency: Latency = NO_LATENCY
    memory_link: float | None = None
    host_memory_link: float = 100e9

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)

    @property
    def can_offload(self) -> bool:
        """True if the device is not where offloaded shards rest."""
        return self.torch_device != torch.device("cpu")

    @property
    def has_speeds(self) -> bool:
        return self.link is not None and self.flops is not None

    @property
    def network(self) -> Network | None:
        """Describes what collectives run over. None: their times are not predicted."""
        if self.link is None:
            return None
        return Network(self.link, self.machine_link, self.ranks_per_machine, self.cards_per_machine, self.latency)


class Clocks:
    """Holds what a step has taken so far: seconds, operations, bytes moved, collectives.

    `now`: when the stream that issues work now is through. The collectives of one communicator follow one another;
    those of several communicators share the links. A stream waits for the collectives and copies that it needs.
    `moved`: bytes by kind of collective, of all ranks; `sent`: bytes that this rank sends: of n ranks, each sends
    (n - 1) / n of what a ring all-gather or reduce-scatter moves, and of an all-reduce twice that. `launched`:
    collectives by kind.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine, self._network = machine, machine.network
        self.now = 0.0
        # When each stream beside the one that computes is through.
        self._beside: defaultdict[str, float] = defaultdict(float)
        # When each is free: a communicator; the links inside and between machines; copies.
        self._free: defaultdict[Any, float] = defaultdict(float)
        self.begin_step()

    def begin_step(self) -> None:
        """Forgets what earlier steps took."""
        self.moved: Counter[str] = Counter()
        self.launched: Counter[str] = Counter()
        self.sent = self.computed = 0.0
        self.flops = 0
        self.began = self.now

    def compute(self, flops: int) -> None:
        seconds = flops / self.machine.flops if self.machine.flops else 0.0
        self.flops += flops
        self.now += seconds
        self.computed += seconds

    def touch(self, nbytes: float) -> float:
        """Reads and writes so many bytes of the device's memory. Returns the seconds."""
        speed = self.machine.memory_link if self.machine.has_speeds else None
        seconds = nbytes / speed if speed else 0.0
        self.now += seconds
        return seconds

    def touch_host(self, nbytes: float, num_ranks: int) -> float:
        """Reads and writes so many bytes of the CPU's memory, while other ranks of the machine do. Returns the seconds.

        `num_ranks`: how many ranks train.
        """
        sharing = min(num_ranks, self.machine.ranks_per_machine)
        seconds = nbytes * sharing / self.machine.host_memory_link if self.machine.has_speeds else 0.0
        self.now += seconds
        return seconds

    def wait(self, end: float) -> None:
        self.now = max(self.now, end)

    @contextmanager
    def beside(self, lane: str = "") -> Iterator[None]:
        """Context: what is issued and waited for inside is on a stream beside the one that computes, behind all that
        this was given. `lane`: on which of several.
        """
        computes, self.now = self.now, max(self.now, self._beside[lane])
        try:
            yield
        finally:
            self._beside[lane], self.now = self.now, computes

    def communicate(
        self,
        kind: str,
        nbytes: int,
        num_ranks: int,
        span: int = 0,
        communicator: object = None,
        launches: int = 1,
        is_ring: bool = True,
    ) -> float:
        """Begins a collective on tensors that have so many bytes together: those of all ranks, or of the sum of an
        all-reduce. Returns when it ends.

        `span`: among how many neighbouring ranks its ranks are; 0: they are neighbours. `communicator`: what the
        collective runs on, after those before. `launches`: in how many it is issued. `is_ring`: all ranks of a machine
        send by all its cards; else each sends to each by the card that is its own.
        """
        if num_ranks == 1:
            return self.now
        self.moved[kind] += nbytes
        self.launched[kind] += launches
        passes = 2 if kind == "all_reduce" else 1
        sent = nbytes * (num_ranks - 1) / num_ranks * passes
        self.sent += sent
        network = self._network
        if network is None:
            return self.now
        ranks = network.place(num_ranks, span or num_ranks)
        inside, between = network.ring_seconds(sent, ranks) if is_ring else network.exchange_seconds(sent, ranks)
        begin = max(self._free[communicator], self.now) + network.latency.seconds(ranks, passes) * launches
        for link, seconds in (("inside", inside), ("between", between)):
            if seconds:
                begin = max(begin, self._free[link])
        self._free["inside"] = max(self._free["inside"], begin + inside)
        self._free["between"] = max(self._free["between"], begin + between)
        self._free[communicator] = begin + max(inside, between)
        return self._free[communicator]

    def transfer(self, nbytes: int) -> float:
        """Begins a copy between the CPU and the device. Returns when it ends."""
        self.moved["transfer"] += nbytes
        if not self.machine.has_speeds:
            return self.now
        self._free["transfers"] = max(self._free["transfers"], self.now) + nbytes / self.machine.host_link
        return self._free["transfers"]

    @contextmanager
    def behind(self, end: float) -> Iterator[None]:
        """Context: what is issued inside runs on another stream, not before `end`."""
        computes, self.now = self.now, max(self.now, end)
        try:
            yield
        finally:
            self.now = computes
