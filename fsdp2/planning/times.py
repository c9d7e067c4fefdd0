"""Predicts the time of a step from what it computes and sends, by a formula that a reader can check by hand.

    time = first + max(compute, communication) of forward + max(compute, communication) of backward + last + optimizer

`first` is the communication that the first computation waits for, `last` that which begins after the last computation:
nothing hides these. All other communication runs during the computation of its pass. The collectives of one
communicator run one after the other; those of several communicators share the links, but not the latencies. So the
communication of a pass takes as long as its busiest communicator or link does.

No number of this file was measured between GPUs. Latencies are what NCCL's own model estimates for a ring
(`src/graph/tuning.cc`). The share of its network cards that a ring reaches falls with the number of machines as users
report it for machines of eight H100s with a card of 50 GB/s each (NVIDIA/nccl#1229: 340 GB/s on 8 machines, 280 on 64).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from math import log2
from typing import Any, NamedTuple

import torch

from .settings import read_bytes

# Seconds of each launch over NCCL: a base, and for each hop of the ring inside a machine, and between two machines. 29
# us on 8 ranks, 209 us on 64, 1.65 ms on 512: between NCCL's protocols LL128 (14, 1.9 and 4 us) and Simple (8.4, 3.4
# and 14 us).
LATENCY, HOP_INSIDE, HOP_BETWEEN = 11e-6, 2.6e-6, 7.5e-6
# What a ring loses of the network with each doubling of the machines, and the share that it reaches on any number.
LOST_BY_DOUBLING, LEAST_SHARE = 0.05, 0.25
# Bytes per second that an optimizer's step moves: 80 % of what the memory of an H100 can move; and in the memory of a
# machine's CPUs, which its ranks share, about what ZeRO-Offload (Ren et al. 2021) reports of DeepSpeed's CPU Adam.
MEMORY, HOST_MEMORY = 0.8 * 3.35e12, 100e9
# Bytes that torch keeps for cuBLAS on an H100 or H200, for each of the two threads of a step.
CUBLAS_WORKSPACE = 32 << 20


@dataclass(frozen=True)
class Machine:
    """The machine that a plan is for: its devices, and what connects them.

    Sizes and speeds are numbers of bytes, or text: "80GB" is 80 * 10**9, "80GiB" is 80 * 2**30, "50GB/s". A plan
    predicts times if it knows `flops` and `link`.

    Args:
        memory: bytes of a device's memory. None: the plan does not say what fits.
        flops: floating-point operations per second that a rank reaches in a whole step. Operations other than matrix
            products, convolutions and attention count as nothing, so this is best `PlanRow.flops` divided by the time
            of the plain model without communication; an H100 reached 5.5e14 with a Llama of 1 B parameters.
        link: bytes per second that a rank sends to ranks of its own machine (NVLink of an H100: "370GB/s").
        network: bytes per second that a rank sends to other machines by its share of the network cards (eight cards of
            50 GB/s for eight ranks: "50GB/s"). None: all ranks are on one machine.
        ranks_per_machine: how many neighbouring ranks are on one machine.
        host_memory: bytes of a machine's CPU memory, which its ranks share, for CPU offload. None: not compared.
        host_link: bytes per second, in each direction, between the CPU's memory and a device, for CPU offload; on an
            H200, 55e9 were measured.
        headroom: the share of the memory that is kept for what a plan does not count: the context of the device,
            buffers of NCCL, fragmentation, scratch memory of kernels, temporary tensors of the optimizer's step.
        device: type of the device. "cpu" has no offload, no latencies, and an optimizer's step that takes no time.
        backend: of the process group: "nccl" for all backends that coalesce collectives, or "gloo". None: gloo on CPUs,
            else nccl.

    Raises:
        TypeError, ValueError: an argument.
    """

    memory: str | float | None = None
    flops: float | None = None
    link: str | float | None = None
    network: str | float | None = None
    ranks_per_machine: int = 8
    host_memory: str | float | None = None
    host_link: str | float = 25e9
    headroom: float = 0.1
    device: str = "cuda"
    backend: str | None = None

    def __post_init__(self) -> None:
        for name in ("memory", "flops", "link", "network", "host_memory", "host_link"):
            object.__setattr__(self, name, read_bytes(name, getattr(self, name)))
        ranks, headroom, backend = self.ranks_per_machine, self.headroom, self.backend
        if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
            raise ValueError(f"ranks_per_machine: expected an int of 1 or more, got {ranks!r}")
        if isinstance(headroom, bool) or not isinstance(headroom, int | float):
            raise TypeError(f"headroom: expected a share of the memory, 0.1 for example, got {headroom!r}")
        if not 0 <= headroom < 1:
            raise ValueError(f"headroom: expected a share of the memory from 0 to 1, got {headroom}")
        if not isinstance(self.device, str):
            raise TypeError(f'device: expected the type of a device, "cuda" for example, got {self.device!r}')
        if backend not in (None, "nccl", "gloo"):
            raise ValueError(f'backend: expected "nccl", "gloo" or None, got {backend!r}')
        object.__setattr__(self, "backend", backend or ("gloo" if self.device == "cpu" else "nccl"))

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)

    @property
    def can_offload(self) -> bool:
        """True if the device is not where offloaded shards lie."""
        return self.torch_device != torch.device("cpu")

    @property
    def has_speeds(self) -> bool:
        return self.link is not None and self.flops is not None

    @property
    def room(self) -> float | None:
        """Bytes of a device that a plan may fill."""
        return None if self.memory is None else _number(self.memory) * (1 - self.headroom)

    @property
    def workspace_nbytes(self) -> int:
        """Bytes that torch keeps for cuBLAS on CUDA, once for the thread of forward and once for that of backward."""
        return 2 * CUBLAS_WORKSPACE if self.torch_device.type == "cuda" else 0


def _number(value: Any) -> float:
    """Returns a size or a speed that `Machine.__post_init__` has read."""
    found: float = value
    return found


class Message(NamedTuple):
    """What one collective or copy takes: seconds until its bytes begin to pass, and seconds on each link."""

    latency: float
    seconds_on: dict[str, float]


def message_of(
    machine: Machine, nbytes: float, num_ranks: int, span: int, passes: int = 1, is_ring: bool = True
) -> Message:
    """Returns what one launch of a collective takes.

    Args:
        nbytes: bytes that a rank sends.
        num_ranks: how many ranks take part.
        span: among how many neighbouring ranks these lie, equally far apart.
        passes: how often the ring goes round: twice for an all-reduce.
        is_ring: each rank sends to the next, so that all ranks of a machine share its cards. Else each rank sends
            equally much to each other, and to those on other machines by its own card.
    """
    machines = min(num_ranks, -(-span // machine.ranks_per_machine))
    on_each = -(-num_ranks // machines)
    link = _number(machine.link)
    reached = max(LEAST_SHARE, 1 - LOST_BY_DOUBLING * log2(machines))
    network = (link if machines == 1 else _number(machine.network)) * reached
    if is_ring:
        inside, between = nbytes if on_each > 1 else 0.0, nbytes / on_each if machines > 1 else 0.0
    else:
        to_each = nbytes / (num_ranks - 1)
        inside, between = to_each * (on_each - 1), to_each * (num_ranks - on_each)
    hops = (num_ranks - machines) * HOP_INSIDE + (machines - 1) * HOP_BETWEEN
    latency = LATENCY + passes * hops if machine.can_offload and machine.backend == "nccl" else 0.0
    return Message(latency, {"inside": inside / link, "between": between / network})


@dataclass
class _Sent:
    """One collective or copy of a step. `begun` and `needed` count the computations before it, and before its end."""

    lane: Any
    message: Message
    in_backward: bool
    begun: int
    needed: int | None = None


class InFlight:
    """What the engine holds of a collective or copy until it waits for it. `wait` returns `result`."""

    def __init__(self, traffic: Traffic, sent: _Sent | None, held: Any = None, result: Any = None) -> None:
        self._traffic, self._sent, self._held, self._result = traffic, sent, held, result

    def wait(self) -> Any:
        if self._sent is not None and self._sent.needed is None:
            self._sent.needed = self._traffic.num_computed
        return self._result

    finish = pass_on = wait


class Traffic:
    """What one step of a rank has computed and sent so far.

    `moved`: bytes by kind of collective, in the tensors of all ranks, and under "transfer" those copied between the
    device and the CPU. `launched`: collectives by kind. `sent`: bytes that this rank sends; of n ranks, each sends
    (n - 1) / n of the bytes of an all-gather or reduce-scatter, and twice that of an all-reduce.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.begin_step()

    def begin_step(self) -> None:
        """Forgets earlier steps."""
        self.moved: Counter[str] = Counter()
        self.launched: Counter[str] = Counter()
        self.sent = 0.0
        self.in_backward = False
        self.num_computed = 0
        self._flops = {False: 0, True: 0}
        self._sent: list[_Sent] = []

    @property
    def flops(self) -> int:
        return sum(self._flops.values())

    def compute(self, flops: int) -> None:
        if flops:
            self._flops[self.in_backward] += flops
            self.num_computed += 1

    def communicate(
        self,
        kind: str,
        nbytes: int,
        num_ranks: int,
        span: int,
        communicator: object,
        launches: int = 1,
        is_ring: bool = True,
        held: Any = None,
    ) -> InFlight:
        """Begins a collective. See `message_of`.

        Args:
            kind: its name.
            nbytes: bytes of its tensors: those of all ranks, or those of the sum of an all-reduce.
            num_ranks, span, is_ring: as for `message_of`.
            communicator: what the collective runs on, after those before it.
            launches: how many collectives it is issued in.
            held: what it keeps alive.
        """
        if num_ranks == 1:
            return InFlight(self, None, held)
        passes = 2 if kind == "all_reduce" else 1
        sent = nbytes * (num_ranks - 1) / num_ranks * passes
        self.moved[kind] += nbytes
        self.launched[kind] += launches
        self.sent += sent
        if not self._machine.has_speeds:
            return InFlight(self, None, held)
        message = message_of(self._machine, sent, num_ranks, span, passes, is_ring)
        return self._add(communicator, message._replace(latency=launches * message.latency), held)

    def copy(self, direction: str, nbytes: int, held: Any, result: Any) -> InFlight:
        """Begins a copy between the device and the CPU, after those before it in the same direction."""
        self.moved["transfer"] += nbytes
        return self._add(direction, Message(0.0, {direction: nbytes / _number(self._machine.host_link)}), held, result)

    def _add(self, lane: Any, message: Message, held: Any, result: Any = None) -> InFlight:
        self._sent.append(_Sent(lane, message, self.in_backward, self.num_computed))
        return InFlight(self, self._sent[-1], held, result)

    def times(self, optimizer: float) -> Times | None:
        """Returns the time of the step, with an optimizer's step of so many seconds; None if speeds are not known."""
        if self._machine.flops is None or not self._machine.has_speeds:
            return None
        first = [each for each in self._sent if each.needed == 0]
        last = [each for each in self._sent if each.needed != 0 and each.begun == self.num_computed]
        hidden = [each for each in self._sent if each.needed != 0 and each.begun < self.num_computed]
        forward, backward = (
            Pass(
                self._flops[which] / self._machine.flops, _seconds(each for each in hidden if each.in_backward == which)
            )
            for which in (False, True)
        )
        return Times(_seconds(first), forward, backward, _seconds(last), optimizer)


def _seconds(sent: Iterable[_Sent]) -> float:
    """Returns the time that the busiest communicator or link takes."""
    busy: defaultdict[Any, float] = defaultdict(float)
    for each in sent:
        busy["lane", each.lane] += each.message.latency + max(each.message.seconds_on.values())
        for link, seconds in each.message.seconds_on.items():
            busy["link", link] += seconds
    return max(busy.values(), default=0.0)


class Pass(NamedTuple):
    """Seconds of the computation of a forward or a backward, and of the communication that runs during it."""

    compute: float
    communication: float


@dataclass(frozen=True)
class Times:
    """The time of a step as the addends of the formula, in seconds.

    Args:
        first: communication that the first computation waits for.
        forward, backward: computation, and the communication that runs during it.
        last: communication that begins after the last computation.
        optimizer: the optimizer's step.
    """

    first: float
    forward: Pass
    backward: Pass
    last: float
    optimizer: float

    @property
    def compute(self) -> float:
        return self.forward.compute + self.backward.compute

    @property
    def exposed(self) -> float:
        """Seconds by which communication makes the step longer."""
        return self.total - self.compute - self.optimizer

    @property
    def total(self) -> float:
        return self.first + max(self.forward) + max(self.backward) + self.last + self.optimizer
