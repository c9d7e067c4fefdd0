"""Lists the suites: what each measures, on which sizes of process groups, and what its limits are."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from .alignment import measure_alignment
from .allocator import measure_allocator
from .gloo_group import measure_gloo
from .host import measure_host
from .jobs import Job
from .launches import measure_launches
from .libraries import PEERS, Library
from .memory import measure_memory
from .overlap import measure_overlap
from .phantom_gpu import open_phantom
from .places import Place, open_throttled_link
from .recipe import ROWS
from .report import Row
from .step import measure_step
from .timeline import measure_timeline
from .traffic import measure_traffic
from .wrapping import measure_init


@dataclass(frozen=True)
class Suite:
    """Describes one suite of measurements.

    Args:
        measure: the function that is called in the fresh processes of a job.
        notes: the meaning of the numbers, and of `limit`.
        worlds: sizes of process groups.
        quick_worlds: the sizes for a quick run.
        fixed: True if `--worlds` does not change these.
        together: True if one job measures all sizes, instead of one each.
        num_ranks: the number of processes of a job.
        megabits: the bandwidth of the link between ranks, in megabits a second. 0: as fast as this machine.
        turns: how often each library is measured, in turns, in processes of its own. 0: the suite sees to that itself.
        peers: further libraries that it can measure, and does by default.
        needs_phantom: True if it runs on the phantom GPU of benchmarks/phantom.
    """

    measure: Callable[[Job, Sequence[Library]], list[Row]]
    notes: str
    worlds: tuple[int, ...] = (8, 64, 512)
    quick_worlds: tuple[int, ...] = (64,)
    fixed: bool = False
    together: bool = False
    num_ranks: int = 1
    megabits: int = 0
    turns: int = 1
    peers: tuple[str, ...] = ()
    needs_phantom: bool = False

    def choose_worlds(self, quick: bool, asked: Sequence[int] | None) -> list[tuple[int, ...]]:
        """Returns the sizes of each job."""
        worlds = self.quick_worlds if quick else self.worlds
        if asked and not self.fixed:
            worlds = tuple(sorted(asked))
        return [worlds] if self.together else [(world,) for world in worlds]

    def choose_libraries(self, asked: Sequence[str] | None) -> tuple[str, ...]:
        """Returns the libraries. The first is compared with each other one."""
        names = asked or (*ROWS, *self.peers)
        return tuple(name for name in names if name not in PEERS or name in self.peers)

    def open_places(self) -> AbstractContextManager[Sequence[Place]]:
        """Yields a place for each rank of a job.

        Raises:
            UnavailableError: now or on entry, if this machine lacks what they need.
        """
        if self.needs_phantom:
            return open_phantom()
        return open_throttled_link(self.megabits) if self.megabits else nullcontext([Place()] * self.num_ranks)


_ALIGNMENT_WORLDS = (2, 3, 4, 6, 7, 8, 12, 16, 24, 32, 48, 64)
_TWO_RANKS: dict[str, Any] = {
    "worlds": (2,),
    "quick_worlds": (2,),
    "fixed": True,
    "num_ranks": 2,
    "turns": 3,
    "peers": ("fsdp1", "ddp", "simple"),
}
SUITES = {
    "host": Suite(
        measure_host,
        "CPU time of the process above the plain model's, on a process group that writes nothing (since 2.13, torch's "
        "own fake group writes every rank's slice, which costs more than the libraries do); Python functions called, "
        "an exact count. Limit: casts and collectives issued group by group, with no hooks and no parameters around "
        "them, measured in the same rounds.",
        quick_worlds=(8, 64, 512),
        turns=3,
        peers=("fsdp1", "ddp", "simple"),
    ),
    "step": Suite(
        measure_step,
        "CPU time of the process in the phases of a training step, on a process group that writes nothing: hooks "
        "(forward and backward above the plain model's), `clip_grad_norm_`, a step of AdamW, `zero_grad`. All clip by "
        "torch's function but `fsdp2-best`, which clips by fsdp2's own, and whose optimizer is flat, and `fsdp1`, "
        "which clips by its method; `ddp` holds all elements on each rank. Limit: AdamW on one plain tensor of as "
        "many elements. The last rows are of a rank that holds many elements. Freed memory stays with the "
        "process: which phase would pay for returning it to the system is chance.",
        worlds=(64,),
        quick_worlds=(64,),
        turns=3,
        peers=("fsdp1", "ddp"),
    ),
    "traffic": Suite(
        measure_traffic,
        "Copies and wire of one step on torch's fake process group, exact. Limit: gathers and reductions straight into "
        "place, one cast each way; two all-gathers and one reduce-scatter in the dtypes asked for (less, if the last "
        "block is kept for backward); DDP, which gathers nothing, and `simple`, which gathers once, send less.",
        peers=("fsdp1", "ddp", "simple"),
    ),
    "alignment": Suite(
        measure_alignment,
        "bf16 all-gathers of the blocks of Llama-3-8B, Qwen3-4B, Qwen2.5-7B, GPT-OSS (attention) and GPT-2-XL; for the "
        "bytes also of two models' experts, as `Shard(0)`, and planned by `cheapest_placement`. Limit: no padding.",
        worlds=_ALIGNMENT_WORLDS,
        quick_worlds=_ALIGNMENT_WORLDS,
        fixed=True,
        together=True,
        peers=("fsdp1", "simple"),
    ),
    "memory": Suite(
        measure_memory,
        "Every allocation of the CPU allocator on torch's fake process group, exact, in unsharded blocks of the "
        "compute dtype. Limit: one group in use, one prefetched, in backward also a quarter of a group's gradients on "
        "their way and the sharded gradients of all groups that are done (a reference for four sub-buckets rather than "
        "a bound). FSDP1 rests with more than its shards; what it takes above that says less.",
        peers=("fsdp1", "ddp", "simple"),
    ),
    "overlap": Suite(
        measure_overlap,
        "Wall time of a step outside compute, above the plain model's, in one process, with blocks that compute asleep "
        "and a link that collectives occupy one by one; and the same in simulated time, in which all else takes none, "
        "exact. Limit: the first gather, the last reduction, and what is longer than the block beside it, with one "
        "reduction per block: one that is sent in parts can be below. On CPU, torch waits for each collective where it "
        "issues it, unless told otherwise: on GPUs its streams overlap, which is not measured here.",
        worlds=(8,),
        quick_worlds=(8,),
        fixed=True,
        peers=("fsdp1", "simple"),
    ),
    "gloo": Suite(
        measure_gloo,
        "Two real ranks over this machine's loopback: wall time of the slower one; wire in units of all compute-dtype "
        "parameters (P), where a reduce-scatter counts twice, because gloo sends an all-reduce. Limit and bare: the "
        "plain model on each rank.",
        **_TWO_RANKS,
    ),
    "gloo-1gbit": Suite(
        measure_gloo,
        "The same over a link of 1 Gbit/s each way, between two network namespaces; wire as the interface has counted "
        "it, headers included. Bare: the plain model on each rank. Limit: that, or the wire's limit over the link's "
        "bandwidth, whichever is longer.",
        megabits=1000,
        **_TWO_RANKS,
    ),
    "init": Suite(
        measure_init,
        "CPU time of the process for `fully_shard` on 48 blocks of 16 parameters and on the root, and for the first "
        "forward, on a process group that writes nothing; the model is built before. "
        "Growth from the smallest world to the largest has the limit 1.",
        worlds=(8, 512, 4096),
        quick_worlds=(8, 64),
        together=True,
        turns=3,
        peers=("fsdp1", "ddp", "simple"),
    ),
    "launches": Suite(
        measure_launches,
        "What a block in steady state would launch on a GPU, counted on one of N simulated ranks with the sizes of "
        "real models, in which nothing large is computed. Launches: kernels, copies and fills, those included by which "
        "operations on lists of tensors upload addresses, collectives not; a foreach operation is one for each tensor "
        "unless all are alike, as in torch 2.13. A reduction is what a training step takes beside two gathers.",
        worlds=(8, 64, 1024),
        quick_worlds=(8,),
    ),
    "timeline": Suite(
        measure_timeline,
        "No GPU: the calls of CUDA and NCCL in a step of real sizes, recorded on the phantom GPU (torch's CUDA build, "
        "whose kernels do nothing), are replayed in a model of machines of 8 H100, each with a card of 50 GB/s. "
        "benchmarks/phantom/README.md has its prices and limits: compare libraries, and trust no absolute time. "
        "bf16/fp32, one sequence; a step is forward, backward and fused AdamW, without clipping. Where there are more "
        "ranks than experts, both libraries shard these by their second dimension. Bare: the plain model with the same "
        "optimizer, and nothing sent. Exposed: how long the compute stream waits for it. CPU time of the host: of a "
        "process on the phantom, without a driver, in turns.",
        turns=0,
        needs_phantom=True,
    ),
    "allocator": Suite(
        measure_allocator,
        "What torch's CUDACachingAllocator holds on the phantom GPU in steady state, each library in a process of its "
        "own; bf16/fp32, one sequence, without an optimizer. Bare: the plain model in bf16, unsharded.",
        turns=0,
        needs_phantom=True,
    ),
}
