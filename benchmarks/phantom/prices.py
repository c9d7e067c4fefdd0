"""Says how long a kernel, a copy and a collective take in a model of a machine.

Times of kernels are those of an H100 (80 GB HBM3, 700 W, torch 2.11, 26 November 2026): `python -m
benchmarks.phantom.measured` compares them with a step there. Not measured are all about links and NCCL.
README.md explains the prices.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from . import models

ITEM = {0: 1, 1: 1, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2}  # bytes of an element, by NCCL's dtype
BLOCK = 65536  # elements that one block of a foreach kernel handles


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
    flops: float = 0.8 * 989e12  # of matrix products in bf16 (H100: 787 TFLOP/s),
    gemm_us: float = 3.0  # each of which takes so much longer (H100: 2 to 6),
    fp32_flops: float = 51e12  # and of those in fp32 (H200: 51.1 TFLOP/s)
    attention: float = 0.37 * 989e12  # H100, cuDNN's, 64 numbers a head: 365 TFLOP/s forward, 371 backward
    memory: float = 3.35e12  # bytes per second, of which each kind of kernel reaches its share
    strided: float = 0.5  # of it, for copies between differently strided tensors (H100: gradients packed in halves)
    pcie: float = 55e9  # H200: 55.3 GB/s one way, 44.8 each way at once
    floor_us: float = 1.0  # no kernel takes less (H100: 1.0 to 1.5),
    gap_us: float = 1.3  # and so long no kernel runs on a stream before the next one (H100: 0.9 to 2.2)
    optimizer: float = 28.0  # bytes for each element of the shard, where no optimizer was recorded: fused AdamW
    wait_us: float = 0.0  # a stream's own time for a wait on another stream's event
    contention: float = 0.0  # by what fraction computing slows down while a collective runs,
    copy_contention: float = 1.0  # and while a copy runs on another stream; 1: they take turns (H200: 0.5 to 1)
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


@dataclass(frozen=True)
class Kind:
    """Is a kind of kernel, as its name says, mangled or not.

    Args:
        share: what it reaches of the memory's bandwidth. None: its operations count.
        full_block_us: the least time of one that has a block of 65,536 elements.
    """

    label: str
    pattern: str
    share: float | None
    full_block_us: float = 0.0


# The first that fits. Shares are of an H100, for the bytes that `Prices` counts; those of tensors of less than 50 MB
# are larger there, because its cache holds them.
KINDS = (
    Kind("matrix products", r"^gemm|^cublas|^nvjet|gemm_.*_(tn|nt|nn)_", None),
    Kind("attention, forward", r"flash_fwd(?!_splitkv_combine)|flash_fprop", None),
    Kind("attention, backward", r"flash_bwd_dq_dk_dv|flash_bprop", None),
    Kind("attention, dot products and casts", r"dot_do_o|convert_dq|flash_fwd_splitkv_combine", 0.65),
    Kind("sums", r"reduce_kernel<|reduce_kernelI|fmha_reduce_head", 0.64),
    Kind("fills", r"FillFunctor", 0.98),
    Kind("sorts and small ones", r"radix_sort|scan|unique|segment|nll_loss|elementwise_kernel_with_index", 0.8),
    Kind("strided copies", r"(18|::)elementwise_kernel[I<]", None),
    Kind("casts to fp32", r"unrolled_elementwise_kernel.*direct_copy", 0.58),
    Kind("element by element", r"elementwise_kernel", 0.92),
    Kind("foreach casts", r"CopyFunctor(<c10::BFloat16, float|<float, c10|IN3c108BFloat16Ef|IfN3c10)", 0.54, 15.0),
    Kind("foreach copies", r"CopyFunctor|UnaryOpFunctor.*Copy[I<]", 0.54, 8.0),
    Kind("foreach", r"multi_tensor_apply", 0.8),
    Kind("concatenations", r"CatArrayBatchedCopy", 0.8),
    Kind("split of a gathered buffer", r"split_with_sizes", 0.83),
    Kind("packing of gradients", r"chunk_cat", 0.6),
    Kind("norm, gradient of the weight", r"GammaBetaBackward", 0.41),
    Kind("norm, gradient of the input", r"layer_norm_grad", 0.83),
    Kind("norm", r"layer_norm_kernel[I<]|LayerNormForward", 0.95),
    Kind("softmax of a router", r"softmax_warp", 0.8),
    Kind("cross entropy", r"SoftMaxForward|SoftMaxBackward", 0.88),
    Kind("embedding", r"gather_kernel", 0.85),
    Kind("embedding, gradient", r"compute_grad_weight|sum_and_scatter|embedding_backward_feature", 0.16),
)
OTHER = Kind("other", "", 0.8)


@cache
def kind_of(name: str) -> Kind:
    return next((kind for kind in KINDS if re.search(kind.pattern, name)), OTHER)


class Prices:
    """Prices of what one rank does, for a record of `about`."""

    def __init__(self, machine: Machine, about: dict[str, Any]) -> None:
        self.machine, self.fp32 = machine, about["fp32"]
        self.shape, self.length = models.SHAPES[about["model"]], about["tokens"]
        self.tokens = self.length * about["rows"]
        self._us: dict[tuple[Any, ...], float] = {}
        self.guessed: Counter[str] = Counter()

    def gemm(self, m: int, n: int, k: int, batch: int, dtype: int) -> float:
        if not m:
            self.guessed["matrix product of unknown size"] += 1
        flops = 2.0 * m * n * k * max(batch, 1)
        item = 4 if dtype == 0 else 2
        nbytes = item * max(batch, 1) * (m * n + m * k + k * n)
        rate = self.machine.fp32_flops if dtype == 0 else self.machine.flops
        return max(flops / rate * 1e6, nbytes / self.machine.memory * 1e6) + self.machine.gemm_us

    def copy(self, nbytes: int, direction: int) -> float:
        rate = self.machine.memory / 2 if direction == 3 else self.machine.pcie
        return max(nbytes / rate * 1e6, self.machine.floor_us)

    def fill(self, nbytes: int) -> float:
        return max(nbytes / self.machine.memory * 1e6, self.machine.floor_us)

    def optimizer(self, elements: float) -> float:
        return self.machine.optimizer * elements / (OTHER.share or 1) / self.machine.memory * 1e6

    def kernel(self, name: str, x: int, y: int, z: int, threads: int, n: int) -> float:
        key = (name, x, y, z, threads, n)
        if key not in self._us:
            self._us[key] = self._time(*key)
        return self._us[key]

    def _time(self, name: str, x: int, y: int, z: int, threads: int, n: int) -> float:
        m, kind = self.machine, kind_of(name)
        if kind.label in ("attention, forward", "attention, backward"):
            flops = 4.0 * self.tokens * self.length / 2 * self.shape.dim  # causal
            return max(flops * (1 if kind.label.endswith("forward") else 2.5) / m.attention * 1e6, m.floor_us)
        share = m.strided if kind.label == "strided copies" else kind.share or 1.0
        us = self._bytes(kind, name, x * y * z, threads, n) / share / m.memory * 1e6
        return max(us, kind.full_block_us * min(1.0, n / BLOCK), m.floor_us)

    def _bytes(self, kind: Kind, name: str, grid: int, threads: int, n: int) -> float:
        """Returns the bytes that a kernel moves, by the elements of its arguments or by the shape of the model."""
        item = 2 if "BFloat16" in name else 4
        tokens, dim, label = self.tokens, self.shape.dim, kind.label
        of_tokens = tokens * dim * (4 if self.fp32 else 2)
        if label in ("fills", "strided copies", "casts to fp32", "element by element") and n:
            if "copy_kernel" in name:
                return n * (8 if self.fp32 else 6)
            arrays = re.search(r"arrayIPcLm(\d)E", name)
            return n * item * (int(arrays[1]) if arrays else 2)
        if label in ("foreach casts", "foreach copies"):
            return n * (6 if label == "foreach casts" else 2 * item)
        if label == "foreach":
            lists = re.search(r"TensorListMetadataILi(\d)E", name)
            return n * 4 * 7 if "Adam" in name else n * item * (int(lists[1]) if lists else 2)
        if label == "concatenations" and n:
            moved = 2 * n * int((re.search(r"OpaqueTypeILj(\d+)E", name) or ["", "4"])[1])
            fast = "vectorized" in name or "contig" in name
            return moved * (1 if fast else (kind.share or 1.0) / self.machine.strided)
        if label == "split of a gathered buffer":
            return 2 * n
        if label == "packing of gradients":
            return grid * threads * 16 * (1.5 if "kernelIfN3c108BFloat16E" in name else 2)
        if label == "softmax of a router":
            return tokens * max(self.shape.experts, 1) * item * (3 if "backward" in name else 2)
        if (
            label == "cross entropy"
        ):  # forward reads the logits three times; backward reads two tensors, one of them twice
            return grid * self.shape.vocab * 4 * 4
        passes = {
            "attention, dot products and casts": 3.0,
            "sums": 1.25,
            "norm": 2.0,
            "norm, gradient of the input": 3.0,
            "norm, gradient of the weight": 2.0,
            "embedding": 2.0,
            "embedding, gradient": 2.0,
            "sorts and small ones": 0.0,
        }
        if label in passes:
            return of_tokens * passes[label]
        self.guessed[name[:100]] += 1
        return grid * threads * 4 * 2 * item  # four elements of two operands a thread
