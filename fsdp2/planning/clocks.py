"""Describes a machine, and says when what a step does on it ends: computation, collectives, copies to the CPU."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from .links import Behind, End, Links
from .network import NO_LATENCY, Latency, Network

# Bytes on an H100 or H200. On older devices it is a quarter of them. CUBLAS_WORKSPACE_CONFIG changes it.
CUBLAS_WORKSPACE = 32 << 20


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
    def workspace_nbytes(self) -> int:
        """Bytes that torch keeps for cuBLAS on CUDA, once for the thread of forward and once for that of backward."""
        return 2 * CUBLAS_WORKSPACE if self.torch_device.type == "cuda" else 0

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

    A stream runs its work in order, and waits for the collectives and copies that it needs. A collective begins when
    the stream that issues it has come there, and the one before it on its communicator has ended. Those of several
    communicators share the links (`links.py`). So its end is known when all is known that uses the links until then:
    times are computed when `seconds` is asked for.

    `moved`: bytes by kind of collective, of all ranks; `sent`: bytes that this rank sends: of n ranks, each sends
    (n - 1) / n of what a ring all-gather or reduce-scatter moves, and of an all-reduce twice that. `launched`:
    collectives by kind.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine, self._network = machine, machine.network
        self._links = Links()
        # Where the stream is that issues work now: so many seconds behind an end. And streams beside the one that
        # computes, by lane.
        self._at: Behind = (End(0.0), 0.0)
        self._beside: defaultdict[str, Behind] = defaultdict(lambda: (End(0.0), 0.0))
        # The last collective of each communicator, and the last copy.
        self._last: defaultdict[Any, End] = defaultdict(lambda: End(0.0))
        self.begin_step()

    def begin_step(self) -> None:
        """Forgets what earlier steps took."""
        self.moved: Counter[str] = Counter()
        self.launched: Counter[str] = Counter()
        self.sent = self.computed = 0.0
        self.flops = 0
        self._began = self.now()

    @property
    def seconds(self) -> float:
        """The time that the step has taken so far."""
        return self.between(self._began, self.now())

    def between(self, first: End, second: End) -> float:
        """Returns the seconds between two ends, of which all must be known that uses the links until then."""
        self._links.run()
        return _time(second) - _time(first)

    def now(self) -> End:
        """Returns the end of all that the stream was given that issues work now."""
        if self._at[1]:
            self._at = self._links.add([self._at]), 0.0
        return self._at[0]

    def compute(self, flops: int, beside: End | None = None, price: float = 0.0) -> float:
        """Computes; returns the seconds that this takes by itself.

        `beside`: until that end something else runs on the device, each second of which costs `price` seconds more.
        """
        seconds = flops / self.machine.flops if self.machine.flops else 0.0
        self.flops += flops
        self.computed += seconds
        if beside is None:
            return self._spend(seconds)
        self._at = self._links.compute(self.now(), (beside, seconds, price)), 0.0
        return seconds

    def touch(self, nbytes: float) -> float:
        """Reads and writes so many bytes of the device's memory. Returns the seconds."""
        speed = self.machine.memory_link if self.machine.has_speeds else None
        return self._spend(nbytes / speed if speed else 0.0)

    def touch_host(self, nbytes: float, num_ranks: int) -> float:
        """Reads and writes so many bytes of the CPU's memory, while other ranks of the machine do. Returns the seconds.

        `num_ranks`: how many ranks train.
        """
        sharing = min(num_ranks, self.machine.ranks_per_machine)
        return self._spend(nbytes * sharing / self.machine.host_memory_link if self.machine.has_speeds else 0.0)

    def _spend(self, seconds: float) -> float:
        end, more = self._at
        self._at = end, more + seconds
        return seconds

    def wait(self, end: End) -> None:
        if end is not self._at[0]:
            self._at = self._links.add([self._at, (end, 0.0)]), 0.0

    @contextmanager
    def beside(self, lane: str = "") -> Iterator[None]:
        """Context: what is issued and waited for inside is on a stream beside the one that computes, behind all that
        this was given. `lane`: on which of several.
        """
        computes, lanes = self._at, self._beside
        self._at = self._links.add([computes, lanes[lane]]), 0.0
        try:
            yield
        finally:
            lanes[lane], self._at = self._at, computes

    def communicate(
        self,
        kind: str,
        nbytes: int,
        num_ranks: int,
        span: int = 0,
        communicator: object = None,
        launches: int = 1,
        is_ring: bool = True,
    ) -> End:
        """Begins a collective on tensors that have so many bytes together: those of all ranks, or of the sum of an
        all-reduce. Returns its end.

        `span`: among how many neighbouring ranks its ranks are; 0: they are neighbours. `communicator`: what the
        collective runs on, after those before. `launches`: in how many it is issued. `is_ring`: all ranks of a machine
        send by all its cards; else each sends to each by the card that is its own.
        """
        if num_ranks == 1:
            return self.now()
        self.moved[kind] += nbytes
        self.launched[kind] += launches
        passes = 2 if kind == "all_reduce" else 1
        sent = nbytes * (num_ranks - 1) / num_ranks * passes
        self.sent += sent
        network = self._network
        if network is None:
            return self.now()
        ranks = network.place(num_ranks, span or num_ranks)
        demand = network.ring_seconds(sent, ranks) if is_ring else network.exchange_seconds(sent, ranks)
        latency = network.latency.seconds(ranks, passes) * launches
        end, more = self._at
        begin = [(end, more + latency), (self._last[communicator], latency)]
        self._last[communicator] = self._links.add(begin, demand)
        return self._last[communicator]

    def transfer(self, nbytes: int) -> End:
        """Begins a copy between the CPU and the device, behind the one before it. Returns its end."""
        return self.copy("transfers", nbytes, self.now())

    def copy(self, direction: str, nbytes: int, behind: End) -> End:
        """Begins a copy between the CPU and the device, behind `behind` and those before it in the same `direction`.
        Returns its end.
        """
        self.moved["transfer"] += nbytes
        if not self.machine.has_speeds:
            return self.now()
        seconds = nbytes / self.machine.host_link
        self._last[direction] = self._links.add([(behind, seconds), (self._last[direction], seconds)])
        return self._last[direction]

    @contextmanager
    def behind(self, end: End) -> Iterator[None]:
        """Context: what is issued inside runs on another stream, not before `end`."""
        computes = self._at
        self.wait(end)
        try:
            yield
        finally:
            self._at = computes


def _time(end: End) -> float:
    assert end.time is not None, "the links have run"
    return end.time
