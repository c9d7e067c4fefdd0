"""Says how long a kernel, a copy and a collective take in a model of a machine. Nothing here was measured on a GPU.

README.md explains the prices and where they come from.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from . import models

ITEM = {0: 1, 1: 1, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2}  # bytes of an element, by NCCL's dtype


@dataclass(frozen=True)
class Machine:
    """Describes GPUs, the machines that hold them, and the host.

    `latency` multiplies the latency of a collective: `base_us`, and `inside_us` or `between_us` for each hop of its
    ring inside a machine or between two. `nvlink` and `card` are GB/s; `cards` is how many a machine has for its ranks.
    """

    host_scale: float = 1.0  # of the measured host times
    launch_us: float = 2.0  # the driver's time for a kernel or copy
    event_us: float = 0.5  # for an event recorded, waited for, made or asked
    nccl_us: float = 5.0  # for a group of collectives,
    nccl_op_us: float = 1.0  # and for each of them
    latency: float = 1.0
    base_us: float = 11.0
    inside_us: float = 2.6
    between_us: float = 7.5
    ranks_per_machine: int = 8
    cards: int = 8
    card: float = 50.0
    nvlink: float = 370.0
    decay: float = 0.05  # by what fraction the cards' bandwidth falls whenever the number of machines doubles
    flops: float = 0.6 * 989e12
    fp32_flops: float = 0.6 * 67e12
    attention: float = 0.4 * 989e12
    memory: float = 0.8 * 3.35e12  # bytes per second
    strided: float = 0.5  # of it, for copies between differently strided tensors
    pcie: float = 50e9
    floor_us: float = 2.5  # no kernel takes less
    optimizer: float = 28.0  # bytes for each element of the shard, where no optimizer was recorded: fused AdamW
    wait_us: float = 0.0  # a stream's own time for a wait on another stream's event
    contention: float = 0.0  # by what fraction computing slows down while a collective runs,
    copy_contention: float = 1.0  # and while a copy runs on another stream; 1: they take turns at the memory
    parallel_comm: bool = False  # collectives of one communicator on two streams run at once
    own_links: bool = False  # communicators do not share links
    sync: bool = False  # the host waits for the GPU at the end of each step


@dataclass(frozen=True)
class Ring:
    """Describes the ranks of a communicator and where they are.

    Args:
        ranks: how many there are.
        machines: on how many machines they are.
        local: how many are on this rank's machine.
    """

    ranks: int
    machines: int
    local: int

    @classmethod
    def of(cls, ranks: Sequence[int], machine: Machine) -> "Ring":
        """Returns the ring of these global ranks. Machines have ranks in a row, and the first rank is this one."""
        places = Counter(rank // machine.ranks_per_machine for rank in ranks)
        return cls(len(ranks), len(places), places[ranks[0] // machine.ranks_per_machine])

    def latency(self, machine: Machine, kind: str) -> float:
        """Returns the time in us of a collective without bytes. An all-reduce goes round the ring twice."""
        if self.ranks == 1:
            return machine.latency * machine.base_us
        between = self.machines - 1
        inside = self.ranks - 1 - between
        if kind in ("ncclSend", "ncclRecv"):
            inside, between = (0, 1) if between else (1, 0)
        hops = (inside * machine.inside_us + between * machine.between_us) * (2 if kind == "ncclAllReduce" else 1)
        return machine.latency * (machine.base_us + hops)

    def gbs_of_rank(self, machine: Machine) -> float:
        """Returns GB/s of one rank's share of its machine's cards. The other ranks need the rest at the same time."""
        reached = max(0.1, 1 - machine.decay * math.log2(self.machines))
        return machine.card * machine.cards / machine.ranks_per_machine * reached

    def busy(self, machine: Machine, kind: str, nbytes: float) -> dict[str, float]:
        """Returns link -> how long it is busy with the bytes of a collective, in us.

        A ring enters a machine once, by the cards of all its ranks there. In an all-to-all each rank sends to each
        other one, to those of other machines by its own card.

        Args:
            nbytes: as NCCL counts: those of one rank, or for one rank, or of the whole in all other kinds.
        """
        others = self.ranks - 1
        if not others or kind == "ncclRecv":  # both directions of a link work at once; what is sent counts
            return {}
        if kind in ("ncclAlltoAll", "ncclSend"):
            each = nbytes / (others if kind == "ncclSend" else 1)
            near, far = each * (self.local - 1), each * (self.ranks - self.local)
        else:
            if kind in ("ncclAllGather", "ncclReduceScatter"):
                moved = nbytes * others
            elif kind == "ncclAllReduce":
                moved = 2 * nbytes * others / self.ranks
            else:
                moved = nbytes
            near, far = moved if self.local > 1 else 0.0, moved / self.local if self.machines > 1 else 0.0
        times = {"NVLink": near / machine.nvlink / 1e3, "card": far / self.gbs_of_rank(machine) / 1e3}
        return {link: time for link, time in times.items() if time}

    def time(self, machine: Machine, kind: str, nbytes: float) -> float:
        """Returns the time of the bytes in us, without latency, if no other collective uses the links."""
        return max(self.busy(machine, kind, nbytes).values(), default=0.0)


class Prices:
    """Prices of what one rank does, for a record of `about`."""

    def __init__(self, machine: Machine, about: dict[str, Any]) -> None:
        self.machine, self.fp32 = machine, about["fp32"]
        self.shape, self.tokens = models.SHAPES[about["model"]], about["tokens"] * about["rows"]
        self._bytes: dict[tuple[Any, ...], float] = {}
        self.guessed: Counter[str] = Counter()

    def gemm(self, m: int, n: int, k: int, batch: int, dtype: int) -> float:
        if not m:
            self.guessed["matrix product of unknown size"] += 1
        flops = 2.0 * m * n * k * max(batch, 1)
        item = 4 if dtype == 0 else 2
        nbytes = item * max(batch, 1) * (m * n + m * k + k * n)
        rate = self.machine.fp32_flops if dtype == 0 else self.machine.flops
        return max(flops / rate * 1e6, nbytes / self.machine.memory * 1e6, self.machine.floor_us)

    def copy(self, nbytes: int, direction: int) -> float:
        rate = self.machine.memory / 2 if direction == 3 else self.machine.pcie
        return max(nbytes / rate * 1e6, self.machine.floor_us)

    def kernel(self, name: str, x: int, y: int, z: int, threads: int, n: int) -> float:
        m = self.machine
        if (flops := self._attention(name, x, y, z)) is not None:
            return max(flops / m.attention * 1e6, m.floor_us)
        key = (name, x, y, z, threads, n)
        if key not in self._bytes:
            self._bytes[key] = self._bytes_of(name, x * y * z, threads, n)
        return max(self._bytes[key] / m.memory * 1e6, m.floor_us)

    @staticmethod
    def _attention(name: str, x: int, y: int, z: int) -> float | None:
        found = re.search(r"flash_(fwd_kernel|bwd_dq_dk_dv).*?traitsILi(\d+)ELi(\d+)ELi(\d+)", name)
        if not found:
            return None
        forward, head, rows, columns = found[1] == "fwd_kernel", int(found[2]), int(found[3]), int(found[4])
        length = x * (rows if forward else columns)
        return 4.0 * length**2 / 2 * head * y * z * (1 if forward else 2.5)  # causal

    def _bytes_of(self, name: str, grid: int, threads: int, n: int) -> float:
        item = 2 if "BFloat16" in name else 4
        tokens, dim = self.tokens, self.shape.dim
        if "elementwise_kernel" in name and n:
            arrays = re.search(r"arrayIPcLm(\d)E", name)
            if "copy_kernel" in name:
                moved = n * (8 if self.fp32 else 6)
            else:
                moved = n * item * (int(arrays[1]) if arrays else 2)
            return moved / (self.machine.strided if "18elementwise_kernelI" in name else 1)
        if "multi_tensor_apply" in name:
            if "CopyFunctor" in name:
                both = re.search(r"CopyFunctorI(f|N3c108BFloat16E)(f|N3c108BFloat16E|S\w*_)", name)
                return n * (6 if both and ("f" in both.groups()) and "BFloat16" in name else 2 * item)
            lists = re.search(r"TensorListMetadataILi(\d)E", name)
            return n * 4 * 7 if "Adam" in name else n * item * (int(lists[1]) if lists else 2)
        if "CatArrayBatchedCopy" in name and n:
            moved = 2 * n * int((re.search(r"OpaqueTypeILj(\d+)E", name) or ["", "4"])[1])
            return moved / (1 if "vectorized" in name or "contig" in name else self.machine.strided)
        if "split_with_sizes" in name:
            return 2 * n
        if "chunk_cat" in name:
            return grid * threads * 16 * (1.5 if "kernelIfN3c108BFloat16E" in name else 2)
        if "layer_norm" in name:
            return grid * dim * item * (3 if "grad" in name else 2)
        if "GammaBetaBackward" in name:
            return tokens * dim * item * 2
        if "softmax_warp" in name:  # of a router
            return tokens * max(self.shape.experts, 1) * item * (3 if "backward" in name else 2)
        if "SoftMaxForward" in name:
            return grid * self.shape.vocab * 4 * 2
        if "SoftMaxBackward" in name:
            return grid * self.shape.vocab * 4 * 3
        if "gather_kernel" in name or "EmbeddingBackward" in name:
            return tokens * dim * item * 2
        if "reduce_kernel" in name:
            return tokens * dim * item * 1.25
        if "flash_bwd_dot_do_o" in name or "flash_bwd_convert_dq" in name:
            return tokens * dim * 6
        if "radix_sort" in name or "scan" in name or "nll_loss" in name or "unique" in name:
            return 0
        self.guessed[name[:100]] += 1
        return grid * threads * 4 * 2 * item  # four elements of two operands a thread
