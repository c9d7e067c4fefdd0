"""Draws ways to train: a model, how it is wrapped, placed, cast, sent and stepped, on a topology. Each must be exact.

A *program* is what a user does around forward, backward and step. It is written once, for a `Side`: on the plain side
it trains a model in one process, which computes every rank's rows one after the other, rounds what ranks would send
and adds it up in their order; on a rank it trains the sharded model, and each value that it shows is compared at once.
A *draw* is one combination of choices, and its name lists them. `sampled` draws so many that nearly each choice
meets each other one; at night there are more. Numbers are compared bit by bit, see `Draw.tolerance`.
"""

import collections
import copy
import dataclasses
import functools
import heapq
import itertools
import operator
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import matrix
from conditional_models import Conditional, Counting, Dropped, Mixture, Multimodal, Nested, Passed
from fsdp2 import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadBudget,
    OffloadPolicy,
    cheapest_placement,
    clip_grad_norm_,
    flatten_optimizer,
    replicate,
    set_checks,
)
from fsdp2.checks.named_comm import NamedPairwiseComm
from fsdp2.collectives.coalesced import CoalescedComm
from fsdp2.collectives.gloo import PairwiseComm
from fsdp2.collectives.meshes import shared_data_mesh
from fsdp2.compression import Compression, Rows, sum_decoded
from fsdp2.devices.streams import AllWork
from fsdp2.engine import buckets, codec
from fsdp2.engine import group as groups
from fsdp2.engine.codec import Cast
from fsdp2.engine.comm import Comm, CommLabel, SoloComm
from fsdp2.engine.state import groups_below
from fsdp2.optim import steps as flat_steps
from fsdp2.optim.probe import probe, signature
from helpers import NIGHTLY, RankError, alone, assert_same, end_of_part, full, own_part, run_ranks, shard_batch
from hostile import hostile
from matrix import NAMES, Topology
from models import (
    Adapted,
    ConvNet,
    ConvStack,
    Experts,
    FewExperts,
    FrozenMix,
    MixedDtypes,
    Normed,
    Odd,
    OddMLP,
    Scaled,
    SharedModule,
    SkippedModule,
    Strided,
    TinyGPT,
    TinyLSTM,
    TinyModel,
    WithNothing,
    mean_loss,
)
from own_collectives import Gather, Scatter
from scenarios import differences
from simulated_device import simulated_device

ROWS = 12  # divides by 1, 2, 3 and 4 ranks
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
EXACT = {"rtol": 0.0, "atol": 0.0}
LONGEST_S = 0.003
"""A rank that is late sleeps so long at most."""


# ---- what is drawn ---------------------------------------------------------------------------------------------------

TOPOLOGIES = {
    "1": Topology(1, lambda: init_device_mesh("cpu", (1,)), has_replicas=False),
    "2": Topology(2, lambda: init_device_mesh("cpu", (2,)), has_replicas=False),
    "1x2": Topology(2, lambda: init_device_mesh("cpu", (1, 2), mesh_dim_names=NAMES), has_replicas=False),
    "4": Topology(4, lambda: init_device_mesh("cpu", (4,)), has_replicas=False),
    "3": Topology(3, lambda: init_device_mesh("cpu", (3,)), has_replicas=False),
    **matrix.TOPOLOGIES,
}
TOPOLOGIES.pop("2x2 of more", None)

MODELS: dict[str, Callable[[], TinyModel]] = {
    **{each.__name__: each for each in (OddMLP, TinyGPT, SharedModule, SkippedModule, FrozenMix, TinyLSTM, ConvNet)},
    **{each.__name__: each for each in (Experts, FewExperts, ConvStack, Odd, Strided, Scaled, WithNothing, Normed)},
    **{each.__name__: each for each in (MixedDtypes, Adapted)},
    "TiedGPT": functools.partial(TinyGPT, tied=True),
}
CONDITIONAL: dict[str, Callable[[], Any]] = {
    **{each.__name__: each for each in (Multimodal, Dropped, Mixture, Nested, Passed, Counting)},
    "Dropped, recomputed": functools.partial(Dropped, recompute=False),
    "Dropped, recomputed reentrantly": functools.partial(Dropped, recompute=True),
}
"""Models of which each rank leaves out other modules in each step."""


def children(model: nn.Module) -> list[nn.Module]:
    """Returns the modules below the root that run by themselves: containers are opened."""
    opened = [list(m) if isinstance(m, nn.ModuleList) else [m] for m in dict.fromkeys(model.children())]
    return [m for modules in opened for m in modules]


WRAPS: dict[str, Callable[[Any], list[Any]]] = {
    "whole": lambda model: [],
    "children": children,
    "pairs": lambda model: [children(model)[i : i + 2] for i in range(0, len(children(model)), 2)],
    "blocks": lambda model: list(getattr(model, "blocks", children(model)[:1])),
    "leaves": lambda model: [m for m in reversed(list(model.modules())) if m is not model and m._parameters],
}
"""What is sharded before the root: modules, or lists of modules that share a group."""


def keep_vectors(param: nn.Parameter) -> torch.dtype | None:
    return param.dtype if param.dim() == 1 else None


@dataclasses.dataclass(frozen=True)
class ToBfloat16:
    """A codec as a user writes one, from the documentation alone: what it sends are bytes for all that others know.

    What it does must be what a compression by `torch.bfloat16` does, bit for bit.
    """

    feedback: bool = False
    exchanges: ClassVar[bool] = True

    def packed_dtype(self, summed: torch.dtype) -> torch.dtype:
        return summed

    def sent_nbytes(self, numel: int, summed: torch.dtype) -> int:
        return 2 * numel

    def encode(self, numbers: Tensor, seed: int) -> Tensor:
        assert not numbers.isnan().any(), "padding holds anything"
        return numbers.bfloat16().view(torch.uint8)

    def decode(self, wire: Tensor, numbers: Tensor) -> None:
        numbers.copy_(wire.view(BF16))

    def sum(self, rows: Rows, total: Tensor) -> None:
        sum_decoded(self, rows, total)


PRECISIONS = {
    "fp64": MixedPrecisionPolicy(),  # of a model that is stored in fp64
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(BF16, F32),
    "bf16 sums": MixedPrecisionPolicy(BF16, BF16),
    "bf16, sums as stored": MixedPrecisionPolicy(BF16),
    "fp64 of fp32": MixedPrecisionPolicy(F64, F64),
    "fp32 sums": MixedPrecisionPolicy(reduce_dtype=F32),
    "bf16 wire": MixedPrecisionPolicy(BF16, F32, compression=Compression(reduce_scatter=BF16)),
    "only a bf16 wire": MixedPrecisionPolicy(compression=Compression(reduce_scatter=BF16)),
    "fp16 wire, fp64 sums": MixedPrecisionPolicy(BF16, F64, compression=Compression(reduce_scatter=F16)),
    "bf16 wire, fp32 vectors": MixedPrecisionPolicy(
        BF16, F32, compression=Compression(reduce_scatter=BF16), param_dtype_override_fn=keep_vectors
    ),
    "fp16": MixedPrecisionPolicy(F16, F32),
    "fp16, fp32 vectors": MixedPrecisionPolicy(F16, F32, param_dtype_override_fn=keep_vectors),
    "codec, bf16": MixedPrecisionPolicy(BF16, F32, compression=Compression(reduce_scatter=ToBfloat16())),
    "codec": MixedPrecisionPolicy(compression=Compression(reduce_scatter=ToBfloat16())),
    "codec with feedback": MixedPrecisionPolicy(compression=Compression(reduce_scatter=ToBfloat16(feedback=True))),
    "weights in a bf16 wire": MixedPrecisionPolicy(compression=Compression(all_gather=BF16)),
    "weights by a codec": MixedPrecisionPolicy(BF16, F32, compression=Compression(all_gather=ToBfloat16())),
    "codec between replicas": MixedPrecisionPolicy(compression=Compression(all_reduce=ToBfloat16())),
    "codec with feedback between replicas": MixedPrecisionPolicy(
        BF16, F32, compression=Compression(all_reduce=ToBfloat16(feedback=True))
    ),
}
OF_MIXED_DTYPES = ("fp32", "fp32 sums", "only a bf16 wire")
"""The policies for a model whose parameters have two dtypes."""


def sent(codec: Any, numbers: Tensor) -> Tensor:
    """Returns what arrives of a gradient or a weight that travels in a dtype of the policy, or by its codec."""
    is_encoded = codec is not None and sum(size > 1 for size in numbers.shape) > 1
    wire = codec.dtype if type(codec) is Cast else BF16 if is_encoded else None
    return numbers if wire is None else numbers.to(wire).to(numbers.dtype)


Place = Callable[[nn.Parameter], Shard | None]
PLACES: dict[str, Place | None] = {
    "rows": None,
    "largest": lambda p: Shard(max(range(p.dim()), key=lambda d: p.shape[d])) if p.dim() else None,
    "last": lambda p: Shard(-1) if p.dim() else None,
    "second": lambda p: Shard(1) if p.dim() > 1 else None,
    # The parameters of one group along different dims.
    "various": lambda p: Shard(sum(p.shape) % p.dim()) if p.dim() else None,
    "cheapest": lambda p: cheapest()(p),
}


@functools.cache
def cheapest() -> Callable[[nn.Parameter], Shard]:
    """Asked for once on each rank: it makes a mesh."""
    return cheapest_placement()


OFFLOADS: dict[str, Callable[[], Any]] = {
    "on the device": OffloadPolicy,
    "on the CPU": CPUOffloadPolicy,  # on a mesh of CPUs there is nothing to do
    "staged": CPUOffloadPolicy,  # copied to and from a device that is simulated
    "staged, unpinned": functools.partial(CPUOffloadPolicy, pin_memory=False),
    "staged, all but 100 bytes": functools.partial(OffloadBudget, 100),
}
"""Makes what all calls of one model are given."""
TRAVELS = ("packed", "direct", "in pieces", "all to all", "hostile", "late")
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    # By powers of two only: a fused multiply-add in some vector lanes changes no bit.
    "sgd": lambda params: torch.optim.SGD(params, lr=2.0**-2, foreach=True),
    # With a large `eps`: where the true gradient is 0 (a key bias), g / (|g| + 1e-8) would blow rounding up.
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-3, foreach=True),
    "flat adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-3, foreach=True),
}
"""Of a plain model. On ranks those whose name begins with "flat" are flattened."""


verdicts: dict[Any, Any] = {}


def probe_once(optimizer: Any, cls: type, options: dict[str, Any], like: Tensor) -> Any:
    """Asks the probe of flat optimizers once about steps of one kind: it takes 30 ms, and unit/test_flat_probe.py tests
    it. What a state has belongs to the kind.
    """
    has_state = any(optimizer.state.get(param) for param in options["params"])
    key = cls, like.dtype, signature(options), has_state
    if key not in verdicts:
        verdicts[key] = probe(optimizer, cls, options, like)
    return verdicts[key]


def own_collectives(gathers: bool, is_async: bool) -> Callable[[nn.Module], None]:
    """Returns what gives each sharded module collectives of the user's own; `gathers`: those of parameters alone."""

    def set_all(model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(Gather(is_async))
                if not gathers:
                    module.set_custom_reduce_scatter(Scatter(is_async))

    return set_all


def scatter_hook(group: Any, gradient: Tensor, shard: Tensor) -> None:
    """Averages in the order of ranks, as a hook in the shape of FSDP1's."""
    rows = torch.empty_like(gradient)
    dist.all_to_all_single(rows, gradient, group=group)
    total: Any = 0
    for row in rows.view(group.size(), -1):
        total = total + (row.float() if row.dtype == F16 else row)
    assert not torch.isnan(total).any(), "padding is zeros"
    shard.data = total / group.size()


def reduced_by_a_hook(model: Any) -> None:
    model.register_comm_hook(groups_below(model)[0].comms.reduces.group, scatter_hook)


def at_once(*names: str) -> Callable[[nn.Module], None]:
    return lambda model: [SETTINGS[name](model) for name in names] and None


SETTINGS: dict[str, Callable[[Any], object]] = {
    **matrix.SETTINGS,
    # Twice the usual one, a power of two: gradients are halves, bit for bit.
    "divide factor": lambda model: model.set_gradient_divide_factor(2 * dist.get_world_size(), recurse=True),
    "no unshard_in_backward": lambda model: model.set_unshard_in_backward(False, recurse=True),
    "own gathers": own_collectives(gathers=True, is_async=False),
    "own collectives": own_collectives(gathers=False, is_async=False),
    "own collectives, not waited for": own_collectives(gathers=False, is_async=True),
    "own hook": reduced_by_a_hook,
    # What one has built must not be in another's way.
    "six at once": at_once(
        *("no reshard_after_backward", "prefetch everything", "many reductions", "hook", "separate group"),
        "keep storage",
    ),
    "six others at once": at_once(
        *("prefetch nothing", "a budget of 200 bytes", "sums", "divide factor", "free viewed storage"),
        "no unshard_in_backward",
    ),
}
RECOMPUTED = ("recomputed", "recomputed together")
RESHARDS = {"by default": None, "resharded": True, "kept": False, "half": "half"}


@dataclasses.dataclass(frozen=True)
class Draw:
    """Is one combination of choices."""

    topology: str
    model: str
    wrap: str
    precision: str
    place: str
    reshard: str
    rests: str
    travel: str
    optimizer: str
    setting: str
    program: str

    def __str__(self) -> str:
        return ", ".join(f"{value}" for value in dataclasses.astuple(self))

    @property
    def ranks(self) -> int:
        return TOPOLOGIES[self.topology].ranks

    @property
    def policy(self) -> MixedPrecisionPolicy:
        return PRECISIONS[self.precision]

    @property
    def shards(self) -> int:
        """The number of ranks that gather together, and first reduce together."""
        among_two = dict.fromkeys(("2x2 across", "2x2 at rest"), 2)
        return (among_two | {"2x1": 1, "2 replicas": 1}).get(self.topology, self.ranks)

    @property
    def scale(self) -> float:
        """What a divide factor makes of gradients."""
        return 0.5 if self.setting in ("divide factor", "six others at once") else 1.0

    @property
    def is_staged(self) -> bool:
        return self.rests.startswith("staged")

    def is_valid(self) -> bool:
        """Returns False if something is refused by name, is a choice of two others only, or has no exact oracle."""
        topology, is_low = TOPOLOGIES[self.topology], self.policy.param_dtype in (BF16, F16)
        compression = self.policy.compression
        encodes = compression.reduce_scatter is not None
        return not (
            ((encodes or compression.all_gather is not None) and topology.function is replicate)
            or (compression.all_reduce is not None and (self.topology == "1x2" or not topology.has_replicas))
            or (self.setting.startswith("own") and topology.function is replicate)
            or (self.setting.startswith("own") and self.topology == "2x1")
            or (self.setting.startswith("own collectives") and (encodes or topology.dims is not None))
            or (self.setting == "own hook" and (encodes or topology.has_replicas or self.topology in ("1", "1x2")))
            or (self.reshard == "half" and (self.shards % 2 != 0 or topology.dims is not None))
            or (self.model in CONDITIONAL and topology.dims is not None and topology.dims.outer_shard)
            or (self.model == "MixedDtypes" and self.precision not in OF_MIXED_DTYPES)
            or (self.precision == "fp32 sums" and self.model != "MixedDtypes")
            or ("vectors" in self.precision and self.model != "Odd")
            or (self.precision == "fp16" and self.model != "Normed")
            or (self.program.startswith("ranks that") and self.model not in ("Odd", "SkippedModule"))
            or (self.wrap == "blocks" and "GPT" not in self.model)
            or (self.model in CONDITIONAL and self.program in ("frozen for a step", *RECOMPUTED))
            or (self.model in CONDITIONAL and (self.reshard == "half" or self.travel in ("all to all", "hostile")))
            # The simulated device starts gathers when they are waited for: ranks that join do so in other orders.
            or (self.model in CONDITIONAL and self.is_staged)
            # The kernels of an LSTM round otherwise where its weights lie elsewhere in memory: by one bit.
            or (self.model == "TinyLSTM" and (self.is_staged or self.program in RECOMPUTED))
            # It holds what a module has returned, with its graph.
            or (self.model == "Passed" and self.program == "a deep copy")
            or (self.model == "Strided" and is_low)
            or (self.model == "Adapted" and self.wrap == "leaves")  # its forward reads weights of a module inside
            or (self.program == "clip" and (is_low or encodes or self.model == "MixedDtypes"))
            or (self.program in RECOMPUTED and "GPT" in self.model)  # a reentrant checkpoint needs floats
            # What comes twice in a backward leaves twice, and is rounded by itself.
            or (self.program == "recomputed together" and self.precision != "fp64")
            or (self.program == "another model" and self.model == "SharedModule")  # torch saves one of its names
            or (self.program == "optimizer in backward" and self.setting == "further backwards")
            # torch's own broadcasts, on the group whose collectives are called directly.
            or (self.program == "another model" and self.travel == "all to all")
            # A copy to the simulated device may be made after the model that it is for is gone.
            or (self.program == "another model" and self.is_staged)
            # gloo adds up in no order that is known, where no rank does it.
            or (self.travel == "all to all" and self.shards > 2 and type(compression.reduce_scatter) is not Cast)
            or (self.setting.startswith("own collectives") and self.shards > 2)
        )

    def plain(self, seed: int = 1) -> TinyModel:
        """Returns the same initial model, on every rank and in the plain process."""
        torch.manual_seed(seed)
        model = (MODELS | CONDITIONAL)[self.model]()
        return model.double() if self.precision == "fp64" else model

    def batch(self, model: TinyModel, seed: int) -> Tensor:
        batch = model.example(rows=ROWS, seed=seed)
        return batch.double() if self.precision == "fp64" and batch.is_floating_point() else batch

    def tolerance(self) -> dict[str, float]:
        """A norm adds up squares of other pieces than a plain one does, gradients that come twice are added in another
        order; an unsharded parameter is contiguous.
        """
        if (
            self.program not in ("clip", "recomputed together")
            and self.model != "Strided"
            and self.model not in CONDITIONAL
        ):
            return EXACT
        return {"rtol": 1e-10, "atol": 1e-12} if self.precision == "fp64" else {"rtol": 1e-5, "atol": 1e-6}

    def shard(self, model: TinyModel, mesh: DeviceMesh) -> TinyModel:
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": self.policy}
        if TOPOLOGIES[self.topology].function is not replicate:
            reshard = self.shards // 2 if self.reshard == "half" else RESHARDS[self.reshard]
            options |= {"reshard_after_forward": reshard, "shard_placement_fn": PLACES[self.place]}
            options |= {"offload_policy": OFFLOADS[self.rests](), "dp_mesh_dims": TOPOLOGIES[self.topology].dims}
        if isinstance(model, Conditional):
            for module, conditional in model.groups():
                TOPOLOGIES[self.topology].function(module, conditional=conditional, **options)
        else:
            for each in (*WRAPS[self.wrap](model), model):
                TOPOLOGIES[self.topology].function(each, **options)
        SETTINGS[self.setting](model)
        return model

    def environment(self) -> ExitStack:
        """Context: gradients travel that way, to and from memory that is there."""
        stack = ExitStack()
        stack.enter_context(mock.patch.object(codec, "SMALL_NUMEL", 1))  # these models have no larger ones
        stack.enter_context(mock.patch.object(flat_steps, "probe", probe_once))
        if self.travel == "hostile":
            stack.enter_context(hostile(dist.get_rank()))
        if self.travel == "late":
            stack.enter_context(late(dist.get_rank()))
        if self.is_staged:
            stack.enter_context(simulated_device())
        if self.travel == "all to all":  # the collectives of NCCL and others, on gloo, which has them as well
            stack.enter_context(mock.patch.object(groups, "make_comm", all_to_all))
        if self.travel in ("direct", "in pieces") or self.setting == "small buckets":
            stack.enter_context(mock.patch.object(buckets, "MIN_BUCKET_BYTES", 1))
        if self.travel in ("direct", "in pieces"):
            for comm in (PairwiseComm, NamedPairwiseComm, CoalescedComm):
                stack.enter_context(mock.patch.object(comm, "direct_min_bytes", 16))
        if self.travel == "in pieces":
            stack.enter_context(mock.patch.object(buckets, "MIN_PIECE_BYTES", 16))
            stack.enter_context(mock.patch.object(buckets, "MIN_PIECE_BYTES_OF_RANK", 2))
        return stack


def all_to_all(group: Any, device: torch.device, comm_label: CommLabel) -> Comm:
    return SoloComm() if group is None else CoalescedComm(group, comm_label)


@contextmanager
def late(seed: int) -> Iterator[None]:
    """Context: each rank sleeps for another time before a collective begins and before its result is used."""
    chance = random.Random(seed)

    class Late(AllWork):
        def wait(self) -> None:
            time.sleep(chance.random() * LONGEST_S)
            super().wait()

    def slow(collective: Callable[..., Any]) -> Callable[..., Any]:
        def issue(*args: Any) -> Any:
            time.sleep(chance.random() * LONGEST_S)
            return Late([collective(*args)])

        return issue

    changes = {name: slow(getattr(PairwiseComm, name)) for name in ("all_gather", "reduce_scatter", "all_reduce")}
    with mock.patch.multiple(PairwiseComm, **changes):
        yield


# ---- the two sides of a program --------------------------------------------------------------------------------------


class Side:
    """Is what a program works with. `shown`: the values that it shows, each with its kind and name."""

    model: Any
    optimizer: torch.optim.Optimizer
    # What rounding has taken from the gradient of a parameter, on each rank.
    lost: dict[tuple[int, str], Tensor]
    # Ranks reduce zeros for what nobody uses.
    fills = False

    def __init__(self, draw: Draw) -> None:
        self.draw, self.shown = draw, list[tuple[str, str, Any]]()
        self.steps_in_backward, self.ranks_differ = False, draw.model in CONDITIONAL

    def start(self, model: TinyModel) -> None:
        self.model, self.lost = model, dict[tuple[int, str], Tensor]()
        optimizer = OPTIMIZERS[self.draw.optimizer](model.parameters())
        is_flat = self.draw.optimizer.startswith("flat") and self.sharded
        self.optimizer = flatten_optimizer(optimizer) if is_flat else optimizer

    @property
    def sharded(self) -> Any:
        """Returns the sharded model, or None."""
        return self.model if isinstance(self.model, FSDPModule) else None

    def show(self, kind: str, name: str, value: Any) -> None:
        raise NotImplementedError

    def losses(self, seeds: Sequence[int], recompute: bool | None) -> Any:
        """Runs a forward for each batch, and returns what `backward` needs."""
        raise NotImplementedError

    def backward(self, *seeds: int, mode: str = "reduce", recompute: bool | None = None) -> None:
        """Runs a backward of a forward for each batch. Its gradients wait unsharded ("wait"), within a replica
        ("scatter"), or are reduced. `recompute`: under a checkpoint that is reentrant or is not.
        """
        matrix.set_mode(self.model, mode)
        self.finish(self.losses(seeds, recompute), mode)

    def finish(self, losses: Any, mode: str = "reduce") -> None:
        raise NotImplementedError

    def evaluate(self, seed: int) -> None:
        raise NotImplementedError

    def step(self, name: Any = "") -> None:
        """Shows gradients, steps, shows parameters, and clears gradients."""
        if not self.steps_in_backward:
            for fqn, param in self.model.named_parameters():
                self.show("shard", f"step {name}: {fqn}.grad", param.grad)
        if not (self.steps_in_backward and self.sharded):
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.show_params(f"step {name}")

    def show_params(self, name: str) -> None:
        self.show("value", f"{name}: names", [fqn for fqn, _ in self.model.named_parameters()])
        for fqn, param in self.model.named_parameters():
            self.show("shard", f"{name}: {fqn}", param)


class Plain(Side):
    """Computes what all ranks do, one after the other, in one process."""

    def __init__(self, draw: Draw) -> None:
        super().__init__(draw)
        self.replicas = torch.arange(draw.ranks).view(-1, draw.shards).tolist()
        if draw.topology == "2x2 across":
            self.replicas = [[0, 2], [1, 3]]
        self.waiting: dict[int, dict[str, Tensor]] = {rank: {} for rank in range(draw.ranks)}
        self.partial: list[dict[str, Tensor]] = [{} for _ in self.replicas]
        self.start(draw.plain())

    def show(self, kind: str, name: str, value: Any) -> None:
        self.shown.append((kind, name, value.detach().clone() if isinstance(value, Tensor) else value))

    def cast(self) -> TinyModel:
        """Returns a copy as modules compute with it."""
        low, policy = copy.deepcopy(self.model), self.draw.policy
        for param in low.parameters():
            kept = policy.param_dtype_override_fn(param) if policy.param_dtype_override_fn else None
            arrives = sent(policy.compression.all_gather, param.data)
            param.data, param.grad = arrives.to(kept or policy.param_dtype or param.dtype), None
        return low

    def rows(self, seed: int, rank: int) -> Tensor:
        rows = shard_batch(self.draw.batch(self.model, seed), rank, self.draw.ranks)
        dtype = self.draw.policy.param_dtype
        return rows.to(dtype) if dtype is not None and rows.is_floating_point() else rows

    def losses(self, seeds: Sequence[int], recompute: bool | None) -> Any:
        found = []
        for rank in range(self.draw.ranks):
            low = self.cast()
            if self.ranks_differ:
                low.before_step(seeds[0] + rank)
            found.append((low, [mean_loss(low(self.rows(seed, rank))) for seed in seeds]))
        self.show("own", f"losses of {seeds}", [torch.stack(of_rank).detach() for _, of_rank in found])
        return found

    def finish(self, losses: Any, mode: str = "reduce") -> None:
        policy = self.draw.policy
        mode = "reduce" if mode == "scatter" and not TOPOLOGIES[self.draw.topology].has_replicas else mode
        for rank, (low, of_rank) in enumerate(losses):
            if of_rank:
                sum(of_rank).backward()
            for (name, param), stored in zip(low.named_parameters(), self.model.parameters(), strict=True):
                if param.grad is not None and stored.requires_grad:
                    grad = param.grad.to(policy.reduce_dtype or stored.dtype)
                    self.waiting[rank][name] = self.waiting[rank].get(name, 0) + grad
        if mode != "wait":
            for name, param in self.model.named_parameters():
                if self.fills or any(name in waits for waits in self.waiting.values()):
                    for waits in self.waiting.values():
                        zeros = torch.zeros_like(param, dtype=policy.reduce_dtype or param.dtype)
                        waits.setdefault(name, zeros)
            for row, partial in zip(self.replicas, self.partial, strict=True):
                for name in list(self.waiting[row[0]]):
                    mean = self.mean([self.leave(rank, name) for rank in row])
                    partial[name] = partial.get(name, 0) + mean
        if mode == "reduce":
            for name, param in self.model.named_parameters():
                if name in self.partial[0]:
                    replicas = [
                        self.leave_replica(r, partial.pop(name), name) for r, partial in enumerate(self.partial)
                    ]
                    grad = self.mean(replicas).to(param.dtype) * self.draw.scale
                    param.grad = grad if param.grad is None else param.grad + grad
            if self.steps_in_backward:
                self.optimizer.step()
                self.optimizer.zero_grad()

    def leave(self, rank: int, name: str) -> Tensor:
        """Returns what others get of a gradient. With feedback, what rounding takes away is in the next one."""
        codec = self.draw.policy.compression.reduce_scatter
        return self.leave_by(codec, (rank, name), self.waiting[rank].pop(name))

    def leave_replica(self, replica: int, partial: Tensor, name: str) -> Tensor:
        """Returns what other replicas get of a mean of this one."""
        return self.leave_by(self.draw.policy.compression.all_reduce, (-1 - replica, name), partial)

    def leave_by(self, codec: Any, key: tuple[int, str], whole: Tensor) -> Tensor:
        if codec is not None and codec.feedback:
            whole = whole + self.lost.get(key, 0)
        arrives = sent(codec, whole)
        self.lost[key] = whole - arrives
        return arrives

    @staticmethod
    def mean(parts: list[Tensor]) -> Tensor:
        return functools.reduce(operator.add, parts) / len(parts)

    @torch.no_grad()
    def evaluate(self, seed: int) -> None:
        low, outputs = self.cast(), []
        for rank in range(self.draw.ranks):
            if self.ranks_differ:
                low.before_step(seed + rank)
            outputs.append(low(self.rows(seed, rank)))
        self.show("own", f"evaluated {seed}", outputs)


class Sharded(Side):
    """Does what one rank does, and compares what it shows with what the plain side has shown.

    The differences are kept until the end: a rank that raised early would leave the others waiting.
    """

    def __init__(self, draw: Draw, mesh: DeviceMesh, expected: Sequence[tuple[str, str, Any]]) -> None:
        super().__init__(draw)
        self.users_mesh, self.expected, self.different = mesh, expected, list[str]()
        self.placed: dict[torch.Size, tuple[Placement, ...]] = {}
        self.start(draw.shard(draw.plain(), mesh))
        # Parameters rest on it. It is the same object as long as the model lives.
        dims = TOPOLOGIES[draw.topology].dims
        self.mesh = mesh if dims is None else shared_data_mesh(mesh, dims).mesh

    def show(self, kind: str, name: str, value: Any) -> None:
        self.shown.append((kind, name, value))
        try:
            self.compare(kind, name, value, self.expected[len(self.shown) - 1])
        except AssertionError as error:
            self.different.append(str(error))

    def compare(self, kind: str, name: str, value: Any, expected: tuple[str, str, Any]) -> None:
        assert expected[:2] == (kind, name), f"expected {expected[:2]}, got {(kind, name)}"
        whole, tolerance = expected[2], self.draw.tolerance()
        if kind == "shard":
            self.assert_lies(value, whole, name)
        elif kind == "own":
            assert_same(value, whole[dist.get_rank()], **tolerance, name=name)
        elif isinstance(whole, Tensor):
            assert_same(value, whole, **tolerance, name=name)
        else:
            assert value == whole, f"{name}: expected {whole!r}, got {value!r}"

    def placements(self, whole: Tensor) -> tuple[Placement, ...]:
        if whole.shape not in self.placed:
            self.placed[whole.shape] = self.placements_of(whole)
        return self.placed[whole.shape]

    def placements_of(self, whole: Tensor) -> tuple[Placement, ...]:
        if TOPOLOGIES[self.draw.topology].function is replicate or not whole.dim():
            return (Replicate(),) * self.mesh.ndim
        place = PLACES[self.draw.place]
        shard = (place(whole) if place is not None else None) or Shard(0)  # type: ignore[arg-type]
        return (*[Replicate()] * (self.mesh.ndim - 1), Shard(shard.dim % whole.dim()))

    def assert_lies(self, actual: Any, whole: Tensor | None, name: str) -> None:
        """Asserts that `actual` is a contiguous DTensor on the mesh, placed as drawn, and this rank's part."""
        if actual is None or whole is None:
            return assert_same(actual, whole, **EXACT, name=name)
        assert isinstance(actual, DTensor), f"{name}: {type(actual)}"
        placements = self.placements(whole)
        assert actual.placements == placements, f"{name}: expected {placements}, got {actual.placements}"
        assert actual.device_mesh == self.mesh, f"{name}: {actual.device_mesh}"
        assert actual.shape == whole.shape, f"{name}: expected {whole.shape}, got {actual.shape}"
        assert actual.stride() == whole.stride() or not whole.is_contiguous(), f"{name}: {actual.stride()}"
        local = actual.to_local()
        assert local.is_contiguous(), name
        return assert_same(local, own_part(whole, actual), **self.draw.tolerance(), name=name)

    def own(self, seed: int) -> Tensor:
        return shard_batch(self.draw.batch(self.model, seed), dist.get_rank(), self.draw.ranks)

    def losses(self, seeds: Sequence[int], recompute: bool | None) -> Any:
        found = []
        if self.ranks_differ:
            self.model.before_step(seeds[0] + dist.get_rank())
        for seed in seeds:
            x = self.own(seed)
            if recompute is not None:
                output = checkpoint(self.model, x.requires_grad_(), use_reentrant=recompute)
            else:
                output = self.model(x)
            found.append(mean_loss(output))
        self.show("own", f"losses of {seeds}", torch.stack(found).detach())
        return found

    def finish(self, losses: Any, mode: str = "reduce") -> None:
        sum(losses).backward()

    @torch.no_grad()
    def evaluate(self, seed: int) -> None:
        if self.ranks_differ:
            self.model.before_step(seed + dist.get_rank())
        self.show("own", f"evaluated {seed}", self.model(self.own(seed)))


# ---- programs --------------------------------------------------------------------------------------------------------

PROGRAMS: dict[str, Callable[[Any], None]] = {}


def program(function: Callable[[Any], None]) -> Callable[[Any], None]:
    PROGRAMS[function.__name__.replace("_", " ")] = function
    return function


@program
def steps(side: Side) -> None:
    side.show_params("at first")
    for step in range(3):
        side.model.before_step(step)
        side.backward(step)
        side.step(step)


def micro_batches(side: Side, *steps: Sequence[str]) -> None:
    """Takes a step after one backward for each mode of each of `steps`."""
    for step, modes in enumerate(steps):
        for micro, mode in enumerate(modes):
            side.model.before_step(micro)
            side.backward(10 * step + micro, mode=mode)
        side.step(step)


@program
def accumulation(side: Side) -> None:
    """Gradients that wait add up in the dtype of the sums, are rounded when they leave, and leave once."""
    micro_batches(side, ("wait", "wait", "reduce"), ("wait", "scatter", "reduce"))


@program
def replicas_last(side: Side) -> None:
    """What a replica has summed is rounded no more, neither between passes nor on its way to the other replica."""
    micro_batches(side, ("scatter", "wait", "scatter", "reduce"), ("reduce", "scatter", "reduce"))


@program
def gradients_add_up(side: Side) -> None:
    micro_batches(side, ("reduce", "reduce"), ("reduce", "wait", "reduce"))


@program
def two_forwards(side: Side) -> None:
    for step in range(2):
        side.backward(10 * step, 10 * step + 1)
        side.step(step)


@program
def two_backwards(side: Side) -> None:
    for step in range(2):
        first, second = side.losses([10 * step], None), side.losses([10 * step + 1], None)
        side.finish(first)
        side.finish(second)
        side.step(step)


@program
def evaluation(side: Side) -> None:
    """Before the first step, between a forward and its backward, and behind the last step."""
    side.evaluate(50)
    for step in range(2):
        losses = side.losses([step], None)
        side.evaluate(51 + step)
        side.finish(losses)
        side.step(step)
    side.evaluate(53)


@torch.no_grad()
def halve(side: Side) -> None:
    for param in side.model.parameters():
        param.mul_(0.5)


@program
def a_change(side: Side) -> None:
    """Of the weights, between steps and after a forward that no backward follows: none computes with stale ones."""
    for step in range(2):
        side.backward(step)
        side.step(step)
        halve(side)
        side.losses([10 + step], None)
        halve(side)
        side.evaluate(50 + step)


@program
def by_hand(side: Side) -> None:
    """Gathered, resharded and finished by hand."""
    if side.sharded:
        side.sharded.set_manual_backward_finalization(True)
    for step in range(2):
        if side.sharded:
            side.sharded.unshard()
            if step:
                side.sharded.reshard()
        for micro, mode in enumerate(("reduce", "wait", "reduce")):
            side.backward(10 * step + micro, mode=mode)
        if side.sharded:
            side.sharded.finalize_backward()
        side.step(step)


@program
def clip(side: Side) -> None:
    for step in range(2):
        side.backward(step)
        norm = (clip_grad_norm_ if side.sharded else nn.utils.clip_grad_norm_)(side.model.parameters(), 0.05)
        side.show("value", "norm", full(norm))
        side.step(step)


@program
def optimizer_in_backward(side: Side) -> None:
    side.steps_in_backward = True
    if side.sharded:
        side.sharded.set_optimizer_in_backward(side.optimizer)
    for step in range(2):
        side.backward(10 * step, mode="wait")
        side.backward(10 * step + 1)
        side.step(step)


@program
def frozen_for_a_step(side: Side) -> None:
    """Some parameters have no gradient in the first step, all have one in the second, and again some in the third."""
    params = [param for param in side.model.parameters() if param.requires_grad]
    for step in range(3):
        for i, param in enumerate(params):
            param.requires_grad_(step == 1 or i % 2 == 0)
        side.backward(step)
        side.step(step)


@program
def ranks_that_differ(side: Side) -> None:
    """Each uses other parameters, and reduces zeros for those that it does not use; they carry what was not sent."""
    side.ranks_differ = side.fills = True
    if side.sharded:
        side.sharded.set_reduce_scatter_unused_params(True)
    for step in range(3):
        side.backward(10 * step, mode=("reduce", "wait", "scatter")[step])
        side.backward(10 * step + 1)
        side.step(step)
    side.ranks_differ = side.fills = False
    if side.sharded:
        side.sharded.set_reduce_scatter_unused_params(False)
    side.model.before_step(1)
    side.backward(90)
    side.step("taken back")


@program
def ranks_that_wait(side: Side) -> None:
    """For other gradients: each knows how others' travel, though only on some of them a gradient has waited."""
    for step in range(2):
        side.ranks_differ = True
        for micro in range(2):
            side.backward(10 * step + micro, mode="wait")
        side.ranks_differ = False
        side.model.before_step(0)
        side.backward(10 * step + 2)
        side.step(step)


@program
def a_failed_backward(side: Side) -> None:
    """The next step is exact: nothing of what had failed turns up."""

    def fail(gradient: Tensor) -> None:
        raise ValueError("on purpose")

    for step in range(2):
        if side.sharded:
            output = side.sharded(side.own(90))  # type: ignore[attr-defined]
            output.register_hook(fail)
            try:
                mean_loss(output).backward()
                raise AssertionError("expected an error")
            except ValueError:
                side.optimizer.zero_grad()
        side.backward(step)
        side.step(step)


@program
def recomputed(side: Side) -> None:
    for step in range(2):
        side.backward(step, recompute=bool(step))
        side.step(step)


@program
def recomputed_together(side: Side) -> None:
    """Gradients come twice in one backward; replicas sum them in the next."""
    for step in range(2):
        side.backward(10 * step, 10 * step + 1, mode="scatter", recompute=True)
        side.backward(10 * step + 2)
        side.step(step)


@program
def another_model(side: Side) -> None:
    """A full state dict goes out, and into a model of other weights; then a plain model's, by assignment."""
    side.backward(0)
    side.step(0)
    for seed, assign in ((98, False), (99, True)):
        before, other = side.model, side.draw.plain(seed)
        if not side.sharded:
            other.load_state_dict((side.draw.plain(97) if assign else before).state_dict())
        else:
            other = side.draw.shard(other, side.users_mesh)  # type: ignore[attr-defined]
            if assign:
                other.load_state_dict(side.draw.plain(97).state_dict(), assign=True)
            else:
                options = StateDictOptions(full_state_dict=True, cpu_offload=True)
                state = {k: v.contiguous() for k, v in get_model_state_dict(before, options=options).items()}
                options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
                set_model_state_dict(other, state, options=options)
        side.start(other)
        side.show_params(f"of seed {seed}")
        side.backward(seed)
        side.step(seed)


@program
def a_deep_copy(side: Side) -> None:
    side.backward(0)
    side.start(copy.deepcopy(side.model))
    side.model.zero_grad()
    for step in range(2):
        side.backward(step)
        side.step(step)


# ---- sampling and running --------------------------------------------------------------------------------------------

CHOICES: dict[str, Sequence[str]] = {
    "topology": tuple(TOPOLOGIES),
    "model": tuple(MODELS),
    "wrap": tuple(WRAPS),
    "precision": tuple(PRECISIONS),
    "place": tuple(PLACES),
    "reshard": tuple(RESHARDS),
    "rests": tuple(OFFLOADS),
    "travel": TRAVELS,
    "optimizer": tuple(OPTIMIZERS),
    "setting": tuple(SETTINGS),
    "program": tuple(PROGRAMS),
}


COSTS = {1: 4, 2: 3, 3: 5, 4: 6}
"""What a draw costs, by its ranks. One rank takes least time, but sends nothing: its choices better meet on two."""


def sampled(seed: int = 0, candidates: int = 3000) -> list[Draw]:
    """Returns draws in which nearly each choice meets each other one that it may be drawn with; at night, more.

    Each next draw has the most pairs of choices that no earlier one has, for what it costs.
    """
    generator = random.Random(seed)

    def draw() -> Draw:
        chosen = {name: generator.choice(values) for name, values in CHOICES.items()}
        if TOPOLOGIES[chosen["topology"]].function is replicate:  # it has no such options
            chosen |= {"place": "rows", "reshard": "by default", "rests": "on the device"}
        if generator.random() < 0.1:
            chosen["model"] = generator.choice(tuple(CONDITIONAL))
        if "vectors" in chosen["precision"]:
            chosen["model"] = "Odd"
        if chosen["precision"] == "fp16":
            chosen["model"] = "Normed"
        if chosen["program"].startswith("ranks that"):  # in parameters, not in modules
            chosen |= {"model": generator.choice(("Odd", "SkippedModule")), "wrap": "whole"}
        if chosen["model"] in CONDITIONAL:
            # It says itself what its groups are. When a group is reduced depends on who has used it.
            chosen |= {"wrap": "whole", "precision": "fp64"}
        return Draw(**chosen)

    drawn = (draw() for _ in itertools.count())
    found = list(dict.fromkeys(itertools.islice((each for each in drawn if each.is_valid()), candidates)))
    if NIGHTLY:
        return found[:1000]
    pairs = [{*itertools.combinations(enumerate(dataclasses.astuple(each)), 2)} for each in found]
    missing, chosen = set[Any]().union(*pairs), list[Draw]()
    # The worth of a draw only falls: where the best of old worths is still the best, no other must be computed anew.
    heap = [(-len(of_draw) / COSTS[each.ranks], i) for i, (each, of_draw) in enumerate(zip(found, pairs, strict=True))]
    heapq.heapify(heap)
    while heap:
        _, i = heapq.heappop(heap)
        worth = len(pairs[i] & missing) / COSTS[found[i].ranks]
        if heap and -worth > heap[0][0]:
            heapq.heappush(heap, (-worth, i))
        elif worth >= 5 / 3:
            missing -= pairs[i]
            chosen.append(found[i])
    return chosen


def with_defaults(topology: str, model: str, wrap: str, program: str, **chosen: str) -> Draw:
    usual = {"precision": "fp64", "place": "rows", "reshard": "by default", "rests": "on the device"}
    usual |= {"travel": "packed", "optimizer": "adamw", "setting": "nothing"}
    return Draw(**{**usual, **chosen}, topology=topology, model=model, wrap=wrap, program=program)


CHOSEN = (
    # Four ranks cost most, and are drawn least: what replicas that share what rests do otherwise than HSDP.
    with_defaults("2x2 at rest", "OddMLP", "children", "clip"),
    with_defaults("2x2 at rest", "TinyGPT", "blocks", "replicas last"),
    with_defaults("2x2 at rest", "TinyGPT", "blocks", "accumulation", setting="no reshard_after_backward"),
    with_defaults("2x2 at rest", "TiedGPT", "children", "optimizer in backward"),
    with_defaults("2x2 at rest", "OddMLP", "children", "steps", precision="bf16 wire", setting="hook"),
    with_defaults("2x2 at rest", "OddMLP", "whole", "by hand", precision="only a bf16 wire", travel="in pieces"),
    with_defaults("2x2 at rest", "TinyGPT", "blocks", "evaluation", precision="bf16", setting="divide factor"),
    # Checkpointing keeps weights that backward reads from our notice.
    with_defaults("2", "OddMLP", "children", "recomputed", reshard="resharded", setting="no unshard_in_backward"),
    with_defaults("2", "SharedModule", "whole", "recomputed", reshard="resharded", setting="no unshard_in_backward"),
    # Some ranks, and some micro-batches, use other parameters and modules.
    with_defaults("2", "SkippedModule", "children", "accumulation", setting="a budget of 6000 bytes"),
    with_defaults("2", "TinyGPT", "blocks", "accumulation", setting="a budget of 6000 bytes"),
    with_defaults("2", "OddMLP", "children", "recomputed", reshard="resharded", setting="a budget of 200 bytes"),
    with_defaults("2", "Odd", "whole", "ranks that differ", setting="no reshard_after_backward"),
    with_defaults("2", "SkippedModule", "whole", "two backwards", setting="further backwards"),
    with_defaults("2x1", "OddMLP", "whole", "recomputed together"),
    # What stays after forward is what was decoded.
    with_defaults("4", "OddMLP", "whole", "evaluation", precision="weights by a codec", reshard="half"),
    with_defaults("2x2 at rest", "OddMLP", "children", "steps", precision="weights by a codec", reshard="resharded"),
    # Each piece of a gradient has what earlier ones of it have not sent.
    with_defaults("2", "Odd", "leaves", "steps", precision="codec with feedback", travel="in pieces"),
    # So do zeros for a parameter that this rank has not used.
    with_defaults("2", "Odd", "whole", "ranks that differ", precision="codec with feedback", travel="direct"),
)
"""Draws that always run, for pairs of choices that by day no other has."""


CHECKED = "2x1"
"""The topology on which checks run: in the first steps all are due, and take a third of a rank's time. They have tests
of their own; here they may change nothing, and find nothing in right programs."""


def differing(draws: Iterable[Draw]) -> dict[Draw, list[str]]:
    """Trains each draw plainly, and in one launch on its ranks. All have as many. Returns what differs on any rank."""
    draws = list(draws)

    def plain() -> list[Any]:
        sides = [Plain(draw) for draw in draws]
        for side in sides:
            PROGRAMS[side.draw.program](side)
        return [side.shown for side in sides]

    expected = alone(plain)

    def body(rank: int, _: int) -> list[list[str]]:
        meshes, different = {name: TOPOLOGIES[name].make() for name in dict.fromkeys(d.topology for d in draws)}, []
        for draw, shown in zip(draws, expected, strict=True):
            set_checks("default" if draw.topology == CHECKED else "off")
            print(f"rank {rank}: {draw}", file=sys.stderr, flush=True)  # for the report of a hang
            with draw.environment():
                different.append(train(draw, meshes[draw.topology], shown))
            end_of_part()
        return different

    try:
        of_ranks = run_ranks(draws[0].ranks, body, timeout=150)
    except RankError as error:
        return {draw: [str(error)] for draw in draws}
    found = collections.defaultdict(list)
    for draw, texts in zip(draws, zip(*of_ranks, strict=True), strict=True):
        found[draw] = list(dict.fromkeys(text for of_rank in texts for text in of_rank))
    return found


def train(draw: Draw, mesh: DeviceMesh, shown: Sequence[Any]) -> list[str]:
    try:
        side = Sharded(draw, mesh, shown)
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    found = differences(side, lambda: PROGRAMS[draw.program](side), shown)  # type: ignore[arg-type]
    if found:  # others may wait for this rank
        print(f"rank {dist.get_rank()}: {found[0]}", file=sys.stderr, flush=True)
    return found


def launches(draws: Iterable[Draw], size: int = 20) -> Iterator[list[Draw]]:
    """Returns lists of draws that run on as many ranks: a fault that ends a launch ends no more than one list."""
    by_ranks = sorted(draws, key=lambda draw: draw.ranks)
    for _, group in itertools.groupby(by_ranks, key=lambda draw: draw.ranks):
        same = list(group)
        yield from (same[i : i + size] for i in range(0, len(same), size))
