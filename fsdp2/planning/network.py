"""Describes what collectives run over, and how long they take there: latencies by ranks, and bytes by links.

No number of this file was measured by this project. A latency is what NCCL's own model estimates for a ring
(`src/graph/tuning.cc`): a base, and a time for each hop inside a machine and between two. The share of its cards that a
ring reaches falls with the number of machines as users report it for machines of eight H100s with a card of 50 GB/s
each (NVIDIA/nccl#1229: 340 GB/s on 8 machines, 280 on 64).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2
from typing import NamedTuple

# What a ring loses with each doubling of the machines; and the share that it reaches on any number of them.
LOST_BY_DOUBLING = 0.05
LEAST_SHARE = 0.25


class Ranks(NamedTuple):
    """Says where the ranks of one collective are: how many there are, on how many machines, how many on each."""

    number: int
    machines: int
    on_each: int


@dataclass(frozen=True)
class Latency:
    """Holds the seconds that a collective takes besides those of its bytes: a base, and hops of its ring."""

    base: float
    inside: float = 0.0
    between: float = 0.0

    def seconds(self, ranks: Ranks, passes: int = 1) -> float:
        """Returns the latency of one collective. `passes`: how often its ring goes round, of an all-reduce two."""
        hops_between = ranks.machines - 1
        hops_inside = ranks.number - 1 - hops_between
        return self.base + passes * (hops_inside * self.inside + hops_between * self.between)


NO_LATENCY = Latency(0.0)
# 29 us on one machine of 8 ranks, 209 us on 8 of them, 1.65 ms on 64: between what NCCL's table has for its protocols
# LL128 (14, 1.9 and 4 us) and Simple (8.4, 3.4 and 14 us).
NCCL_LATENCY = Latency(11e-6, 2.6e-6, 7.5e-6)


@dataclass(frozen=True)
class Network:
    """Describes machines of several ranks, and the cards that connect them.

    Args:
        link: bytes per second that one card sends to other machines.
        machine_link: bytes per second that a rank can send to ranks of its own machine. None: as `link`.
        ranks_per_machine: how many neighbouring ranks are on one machine.
        cards_per_machine: how many cards they share. None: one for each rank.
        latency: of a collective.
    """

    link: float
    machine_link: float | None = None
    ranks_per_machine: int = 8
    cards_per_machine: int | None = None
    latency: Latency = NO_LATENCY

    def place(self, number: int, span: int) -> Ranks:
        """Returns where `number` ranks are that lie equally far apart among `span` neighbouring ones."""
        machines = min(number, -(-span // self.ranks_per_machine))
        return Ranks(number, machines, -(-number // machines))

    def ring_seconds(self, nbytes: float, ranks: Ranks) -> tuple[float, float]:
        """Returns how long the links inside machines, and the cards between them, are busy with a ring in which each
        rank sends `nbytes` to the next. The bytes enter each machine once, by the cards of all its ranks in the ring.
        """
        inside = 0.0 if ranks.on_each == 1 else nbytes / (self.machine_link or self.link)
        return inside, self._between(nbytes / ranks.on_each, ranks)

    def exchange_seconds(self, nbytes: float, ranks: Ranks) -> tuple[float, float]:
        """Returns the same of an exchange in which each rank sends `nbytes` to all others together, equally much to
        each, and to those of other machines by its own card.
        """
        to_each = nbytes / (ranks.number - 1)
        inside = to_each * (ranks.on_each - 1) / (self.machine_link or self.link)
        return inside, self._between(to_each * (ranks.number - ranks.on_each), ranks)

    def _between(self, nbytes: float, ranks: Ranks) -> float:
        """Returns how long a rank's share of the cards is busy with so many bytes."""
        if ranks.machines == 1:
            return 0.0
        cards = self.ranks_per_machine if self.cards_per_machine is None else self.cards_per_machine
        reached = max(LEAST_SHARE, 1 - LOST_BY_DOUBLING * log2(ranks.machines))
        return nbytes / (self.link * cards / self.ranks_per_machine * reached)
