"""Adds up bytes and seconds of a replayed step on one rank of a described machine."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import torch

from ..checks.headers import HEADER_NBYTES
from ..checks.levels import is_on
from ..checks.named_comm import MAX_RIDER_NBYTES
from ..engine.comm import AnyComm, CoalescedComm, SoloComm
from ..engine.gloo import PairwiseComm
from ..engine.layout import MAX_OPERATIONS
from ..engine.streams import costs_launches, exist_on
from .network import NO_LATENCY, Latency, Network
from .recording import Mark

_COMMS: dict[str, Any] = {"nccl": CoalescedComm, "gloo": PairwiseComm, "other": AnyComm}


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
        apart_beyond: reductions among more ranks than that are on a communicator of their own. None: none are.
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
    apart_beyond: int | None = None

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

    @property
    def network(self) -> Network | None:
        """Describes what collectives run over. None: their times are not predicted."""
        if self.link is None:
            return None
        return Network(self.link, self.machine_link, self.ranks_per_machine, self.cards_per_machine, self.latency)

    def reduces_apart(self, num_ranks: int) -> bool:
        """Returns True if gradients are reduced on another communicator than parameters are gathered on."""
        return self.apart_beyond is not None and num_ranks > self.apart_beyond

    def num_launches(self, num_tensors: int, exchanges: bool = False) -> int:
        """Returns in how many launches a collective on so many tensors is issued. `exchanges`: it is an all-to-all."""
        if self.backend == "nccl" and not exchanges:
            return -(-num_tensors // MAX_OPERATIONS)
        return num_tensors

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
    """Holds bytes that are alive, their peaks, bytes moved, and clocks: of computation, communicators, links, copies.

    `doing`: what runs, for the peak. `moved`: bytes by kind of collective, of all ranks; `sent`: bytes that this rank
    sends: of n ranks, each sends (n - 1) / n of what a ring all-gather or reduce-scatter moves, and of an all-reduce
    twice that. `launched`: collectives by kind. The collectives of one communicator follow one another; those of
    several communicators share the links. Computation waits for those it needs.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine, self._network = machine, machine.network
        self.engine = self.activations = 0
        self.doing = ""
        self.now = self.computed = 0.0
        self.flops = 0
        # When each is free: a communicator, by the places of its ranks, and whether reductions have it alone; the links
        # inside and between machines; copies.
        self._free: defaultdict[Any, float] = defaultdict(float)
        self.begin_step()

    def begin_step(self) -> None:
        """Forgets what earlier steps took."""
        self.peak, self.peak_at = 0, ""
        self.moved: Counter[str] = Counter()
        self.launched: Counter[str] = Counter()
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

    def touch(self, nbytes: float) -> float:
        """Reads and writes so many bytes of the device's memory. Returns the seconds."""
        speed = self.machine.memory_link if self.machine.has_speeds else None
        seconds = nbytes / speed if speed else 0.0
        self.now += seconds
        return seconds

    def _note(self, total: int) -> None:
        if total > self.peak:
            self.peak, self.peak_at = total, self.doing

    def communicate(
        self,
        kind: str,
        nbytes: int,
        num_ranks: int,
        span: int = 0,
        after: float = 0.0,
        num_tensors: int = 1,
        exchanges: bool = False,
    ) -> float:
        """Begins a collective on tensors that have so many bytes together: those of all ranks, or of the sum of an
        all-reduce. Returns when it ends.

        `span`: among how many neighbouring ranks its ranks are; 0: they are neighbours. `after`: when it may begin.
        `exchanges`: it runs as an all-to-all.
        """
        if num_ranks == 1:
            return self.now
        machine, network = self.machine, self._network
        launches = machine.num_launches(num_tensors, exchanges)
        self.moved[kind] += nbytes
        self.launched[kind] += launches
        passes = 2 if kind == "all_reduce" else 1
        sent = nbytes * (num_ranks - 1) / num_ranks * passes
        self.sent += sent
        if network is None:
            return self.now
        ranks = network.place(num_ranks, span or num_ranks)
        # A ring: all ranks of a machine send by all its cards. Else each sends to each by the card that is its own.
        is_ring = machine.backend != "gloo" and not exchanges
        inside, between = network.ring_seconds(sent, ranks) if is_ring else network.exchange_seconds(sent, ranks)
        latency = network.latency.seconds(ranks, passes) * launches
        communicator = ranks, kind == "reduce_scatter" and machine.reduces_apart(num_ranks)
        begin = max(self._free[communicator], self.now, after) + latency
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

    def wait(self, end: float) -> None:
        self.now = max(self.now, end)
