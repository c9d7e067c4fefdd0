"""Tests that streams are ordered correctly in every way of training: no race, and no memory is reused while it is used.

On a GPU the caching allocator gives freed memory to the next kernel of its stream, and numbers are wrong once in a
while where another stream still uses it. On a CPU other threads write to the outputs of a collective. Here only the
order is judged, whatever the times: see vector_clocks.py.
"""

import dataclasses
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any
from unittest import mock

import pytest
import torch
from simulated_world import SimulatedWork, simulated_world
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint
from vector_clocks import Simulation, Stream

from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, replicate
from fsdp2.collectives import coalesced
from fsdp2.collectives.custom import CustomComm
from fsdp2.compression import Compression
from fsdp2.devices import streams
from fsdp2.devices.owner_stream import GroupStreams
from fsdp2.devices.streams import Transfers
from fsdp2.engine import buckets
from fsdp2.engine import group as groups
from fsdp2.engine.gradients import GradientsOnOwnerStream, GroupGradients
from fsdp2.engine.mesh import DataMesh
from fsdp2.engine.reduce import PendingReduce
from fsdp2.engine.state import groups_of
from helpers import NIGHTLY

RANKS, BLOCKS, DIM = 4, 2, 16
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WIRE = dataclasses.replace(BF16, compression=Compression(reduce_scatter=torch.bfloat16))


class Block(nn.Module):
    """Parameters that are gathered on their own, and packed ones; one that doesn't divide by the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 2 * DIM + 1)
        self.down = nn.Linear(2 * DIM + 1, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """A lone parameter at either end, which is reduced in pieces where it is cast or padded."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.last = nn.Linear(DIM, DIM + 1, bias=False)
        self.skips = False
        # How blocks are called.
        self.call: Callable[..., Tensor] = lambda block, x: block(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = self.call(block, x)
        return x if self.skips else self.last(x)


def build(shard: Callable[..., Any] = fully_shard, *, blocks: dict[str, Any] | None = None, **options: Any) -> Any:
    model = Net()
    for module in (model.first, model.last):
        shard(module, **options)
    for block in model.blocks:
        shard(block, **options, **(blocks or {}))
    return shard(model, **options)


def hsdp(**options: Any) -> Any:
    return build(mesh=init_device_mesh("cpu", (2, RANKS // 2), mesh_dim_names=("r", "s")), **options)


def change(model: Any, setting: str, *values: Any, **options: Any) -> Any:
    getattr(model, setting)(*values, **options)
    return model


def checkpointed(model: Any, use_reentrant: bool) -> Any:
    model.call = partial(checkpoint, use_reentrant=use_reentrant)
    return model


class Allocating:
    """A user's own collective, as `set_custom_all_gather` and `set_custom_reduce_scatter` want it."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool, op: Any = None) -> Any:
        return (group._allgather_base if op is None else group._reduce_scatter_base)(output_tensor, input_tensor)


class OnCurrentStream(Allocating):
    """A user's own collective that runs on the current stream, and returns no work."""

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool, op: Any = None) -> Any:
        size = group.size()
        if op is None:
            output_tensor.view(size, -1).copy_(input_tensor.clone())
        else:
            output_tensor.copy_(input_tensor.view(size, -1)[group.rank()])


def own_collectives(model: Any, kind: type[Allocating] = Allocating) -> Any:
    for block in model.blocks:
        block.set_custom_all_gather(kind())
        block.set_custom_reduce_scatter(kind())
    return model


def hooked(model: Any) -> Any:
    """Reduces by a hook in the shape of FSDP1's, which computes before and behind its collective."""

    def hook(group: Any, gradient: Tensor, shard: Tensor) -> None:
        gradient.div_(2)
        group._reduce_scatter_base(shard, gradient).wait()
        shard.div_(2)

    model.register_comm_hook(groups_of(model)[0].mesh.shard_group, hook)
    return model


class InBF16(Tensor):
    """A weight that is stored in fp32 and gathered in bf16, by its own methods."""

    @staticmethod
    def __new__(cls, stored: Tensor) -> Any:
        return Tensor._make_wrapper_subclass(cls, stored.shape, strides=stored.stride(), dtype=torch.float32)

    def __init__(self, stored: Tensor) -> None:
        self.stored = stored

    def __tensor_flatten__(self) -> Any:
        return ["stored"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], *_: Any) -> Any:
        return cls(parts["stored"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def stored(values: Any) -> Any:
            return torch.utils._pytree.tree_map_only(cls, lambda value: value.stored, values)

        result = func(*stored(args), **stored(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            return args[0]
        if isinstance(result, (list, tuple)):
            return [cls(each) for each in result]
        return cls(result) if isinstance(result, Tensor) else result

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.stored.bfloat16(),), None

    def fsdp_post_all_gather(self, outputs: Any, _: Any, param_dtype: torch.dtype, *, out: Any = None) -> Any:
        value = outputs[0].to(param_dtype)
        if out is not None:
            out.copy_(value)
            return None
        return value, (value,)


def self_gathering() -> Any:
    model = Net()
    for block in model.blocks:
        block.up = nn.Linear(DIM, 2 * DIM)
        block.down = nn.Linear(2 * DIM, DIM)
        block.up.weight = nn.Parameter(InBF16(block.up.weight.detach()))
        fully_shard(block)
    return fully_shard(model)


def offloaded(build: Callable[..., Any] = build) -> Any:
    """Shards rest on the CPU, and the device is the CPU's own memory under another name."""
    with (
        mock.patch.object(DataMesh, "device", torch.device("cpu", 0)),
        mock.patch.object(groups, "make_transfers", Transfers),
    ):
        return build(offload_policy=CPUOffloadPolicy(pin_memory=False))


MODELS = {
    "fp32": build,
    "bf16": lambda: build(mp_policy=BF16),
    "wire": lambda: build(mp_policy=WIRE),
    "kept part": lambda: build(reshard_after_forward=2),
    "kept": lambda: build(reshard_after_forward=False),
    "replicate": lambda: build(replicate),
    "hsdp": hsdp,
    "hsdp bf16": lambda: hsdp(mp_policy=BF16),
    "hsdp wire": lambda: hsdp(mp_policy=WIRE),
    "hsdp sums": lambda: change(hsdp(), "set_force_sum_reduction_for_comms", True, recurse=True),
    "hsdp own": lambda: own_collectives(hsdp()),
    "own": lambda: own_collectives(build()),
    "hook": lambda: hooked(build(mp_policy=BF16)),
    "offload hook": lambda: hooked(offloaded(build)),
    "sums": lambda: change(build(), "set_force_sum_reduction_for_comms", True, recurse=True),
    "prefetch all": lambda: change(build(mp_policy=BF16), "set_unsharded_budget", 1 << 30),
    "more in flight": lambda: change(hsdp(mp_policy=BF16), "set_reduce_scatter_max_input_buffers", 3),
    "kept storage": lambda: change(build(), "set_keep_unsharded_storage", True),
    "unused": lambda: change(build(), "set_reduce_scatter_unused_params", True),
    "checkpoint": lambda: checkpointed(build(mp_policy=BF16), use_reentrant=False),
    "reentrant checkpoint": lambda: checkpointed(build(mp_policy=BF16), use_reentrant=True),
    "conditional": lambda: build(blocks={"conditional": True}),
    "extensions": self_gathering,
    "offload": offloaded,
    "offload hsdp": lambda: offloaded(hsdp),
    "offload hsdp own": lambda: own_collectives(offloaded(hsdp), OnCurrentStream),
    "hsdp own here": lambda: own_collectives(hsdp(), OnCurrentStream),
}


@pytest.fixture(autouse=True)
def _many_small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coalesced.CoalescedComm, "direct_min_bytes", 16)
    monkeypatch.setattr(buckets, "MIN_BUCKET_BYTES", 64)
    monkeypatch.setattr(buckets, "MIN_PIECE_BYTES", 64)


class Program:
    """Trains a model in the simulation."""

    def __init__(self, simulation: Simulation, model: Any) -> None:
        self.simulation, self.model, self.side = simulation, model, simulation.stream("side")
        self.batch = torch.ones(2, DIM, requires_grad=True)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(self) -> Tensor:
        return self.model(self.batch).float().sum()

    def step(self) -> None:
        self.loss().backward()
        self.update()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def on_side(self, what: Callable[[], Any]) -> Any:
        """`what` on the other stream, between what the current one was given before and is given later; beside it, the
        current one goes on with something else, which takes memory.
        """
        before = self.simulation.current
        self.side.wait_stream(before)
        with self.side:
            result = what()
        torch.ones(1).add_(1)
        before.wait_stream(self.side)
        return result

    # ---- the programs

    def usual(self) -> None:
        """Steps, one of them in two parts, of which the first is not reduced; evaluation; one without a layer that was
        gathered ahead; one that fails; one after it.
        """
        for synchronises in (True, True, False, True):
            self.model.set_requires_gradient_sync(synchronises)
            self.loss().backward()
            if synchronises:
                self.update()
        with torch.no_grad():
            self.loss()
        self.model.skips = True
        self.loss().backward()
        self.fail()
        self.model.skips = False
        self.step()

    def fail(self) -> None:
        handle = self.batch.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            self.loss().backward()
        handle.remove()

    def all_on_side(self) -> None:
        """After one step on the main stream, all is done on another, and at the end on the main stream again."""
        self.step()
        self.on_side(self.usual)
        self.step()

    def in_turns(self) -> None:
        """Each part of a pass on another stream than the one before: what is left there is used elsewhere."""
        for _ in range(2):
            self.on_side(self.step)
            self.model.set_requires_gradient_sync(False)
            self.loss().backward()
            self.model.set_requires_gradient_sync(True)
            self.on_side(self.step)
            with torch.no_grad():
                self.on_side(self.loss)
            self.fail()
            self.optimizer.zero_grad()
            self.on_side(self.step)
            self.step()

    def backward_elsewhere(self) -> None:
        """Backward is called on another stream than forward; autograd computes on that of forward."""
        main = self.simulation.current
        for synchronises in (True, False, True):
            self.model.set_requires_gradient_sync(synchronises)
            loss = self.simulation.on_stream(self.loss(), backward=main)
            self.on_side(loss.backward)
        self.update()
        self.on_side(self.fail)
        self.step()
        self.model.set_requires_gradient_sync(False)
        self.loss().backward()
        self.model.set_requires_gradient_sync(True)
        self.model.skips = True  # what waits of the last layer is reduced at the end
        self.on_side(self.simulation.on_stream(self.loss(), backward=main).backward)
        self.model.skips = False
        self.step()

    def backward_on_side(self) -> None:
        """Backward computes on another stream than forward."""
        for synchronises in (True, False, True):
            self.model.set_requires_gradient_sync(synchronises)
            self.on_side(self.loss().backward)
        self.update()
        self.step()

    def by_hand(self) -> None:
        """Gathers and deliveries that a user starts on one stream, and ends on another."""
        for _ in range(2):
            handle = self.model.unshard(async_op=True)
            self.on_side(handle.wait)
            self.step()
            self.on_side(partial(self.model.unshard, async_op=True))
            self.model.reshard()
            self.model.unshard()
            self.on_side(self.model.reshard)
        self.model.set_requires_gradient_sync(False)
        self.loss().backward()
        self.model.set_requires_gradient_sync(True)
        self.on_side(self.step)


PROGRAMS = [
    *(Program.usual, Program.all_on_side, Program.in_turns),
    *(Program.backward_elsewhere, Program.backward_on_side, Program.by_hand),
]


pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # in evaluation


def judge(simulation: Simulation) -> None:
    assert not simulation.problems, "\n".join(f"{n} x {text}" for text, n in simulation.problems.most_common(10))


# Each model runs as usual, and another program that is dealt to it. The nightly run takes all.
PAIRS = [
    pytest.param(name, program, id=f"{name}-{program.__name__}")
    for i, name in enumerate(MODELS)
    for j, program in enumerate(PROGRAMS)
    if NIGHTLY or j in (0, 1 + i % (len(PROGRAMS) - 1))
]


@pytest.mark.parametrize(("name", "program"), PAIRS)
def test_one_model(name: str, program: Callable[[Program], None]) -> None:
    with simulated_world(RANKS) as simulation:
        model = MODELS[name]()
        with simulation:
            program(Program(simulation, model))
        assert simulation.collective_waits.total() > 20
        judge(simulation)


# What differs in the collectives that it waits for, or in what follows them.
WITHOUT_STREAMS = [
    *("fp32", "wire", "kept part", "hsdp bf16", "own", "hook", "prefetch all", "unused", "reentrant checkpoint"),
    *("conditional", "extensions", "offload", "offload hsdp own"),
]


@pytest.mark.parametrize("name", MODELS if NIGHTLY else WITHOUT_STREAMS)
def test_without_streams(name: str) -> None:
    """As on a CPU: the caller itself waits for collectives, which alone run beside it."""
    with simulated_world(RANKS, has_streams=False) as simulation:
        model = MODELS[name]()
        with simulation:
            Program(simulation, model).usual()
        judge(simulation)


class Towers(nn.Module):
    """Two towers of blocks, whose blocks are called in turns: those of the first on the stream that called forward, the
    others on a second one. Each ends in a module that both share, if `shares`, or in one of its own.
    """

    def __init__(self, simulation: Simulation, side: Stream, shares: bool) -> None:
        super().__init__()
        self.left, self.right = (nn.ModuleList(Block() for _ in range(2)) for _ in range(2))
        self.heads = nn.ModuleList([Block(), Block()])
        if shares:
            self.heads[1] = self.heads[0].requires_grad_(False)  # autograd adds gradients of two streams by itself
        self.simulation, self.side = simulation, side

    def forward(self, x: Tensor) -> Tensor:
        simulation, side, main = self.simulation, self.side, self.simulation.current
        side.wait_stream(main)
        left, right = simulation.fork(x, side)
        first = self.heads[0] if self.heads[0] is self.heads[1] else None
        for one, other in [*zip(self.left, self.right, strict=True), self.heads]:
            if one is first:
                left = one(left)
            with side:
                right = other(simulation.on_stream(right, backward=main, waits=False))
                right = simulation.on_stream(right, backward=side, waits=other is self.heads[1])
            if one is not first:
                left = one(left)
        simulation.record_stream(right, main)
        main.wait_stream(side)
        return left + right


def towers(simulation: Simulation, side: Stream, shares: bool, **options: Any) -> Any:
    model = Towers(simulation, side, shares)
    for block in dict.fromkeys([*model.left, *model.right, *model.heads]):
        fully_shard(block, **options)
    return fully_shard(model, **options)


OPTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "fp32": dict,
    "bf16": lambda: {"mp_policy": BF16},
    "kept": lambda: {"reshard_after_forward": False},
    "kept part": lambda: {"reshard_after_forward": 2},
    "hsdp": lambda: {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s")), "mp_policy": BF16},
}


@pytest.mark.parametrize(
    ("name", "shares"),
    [(name, shares) for i, name in enumerate(OPTIONS) for shares in (False, True) if NIGHTLY or shares == i % 2],
)
def test_two_towers_on_two_streams(name: str, shares: bool) -> None:
    with simulated_world(RANKS) as simulation:
        side = simulation.stream("tower")
        model = towers(simulation, side, shares, **OPTIONS[name]())
        with simulation:
            program = Program(simulation, model)
            program.usual()
            program.all_on_side()
        judge(simulation)


class Beside(nn.Module):
    """A block of two layers in one group, the second of which runs on another stream, beside the first, and is issued
    before it or behind it, and behind what has no parameters.
    """

    def __init__(self, simulation: Simulation, side: Stream, is_first: bool) -> None:
        super().__init__()
        self.is_first = is_first
        self.dense, self.expert = Block(), Block()
        self.frozen = nn.Linear(DIM, DIM).requires_grad_(False)
        self.simulation, self.side = simulation, side

    def forward(self, x: Tensor) -> Tensor:
        simulation, side, main = self.simulation, self.side, self.simulation.current
        side.wait_stream(main)
        x, y = simulation.fork(x, side)
        with side:
            y = torch.tanh(simulation.on_stream(y, backward=main, waits=False))
            y = simulation.on_stream(y, backward=side, waits=False)
        if not self.is_first:
            x = self.dense(x)
        with side:
            y = self.frozen(self.expert(simulation.on_stream(y, backward=main, waits=False)))
            y = simulation.on_stream(y, backward=side)
        simulation.record_stream(y, main)
        if self.is_first:
            x = self.dense(x)
        main.wait_stream(side)
        return x + y


def beside(simulation: Simulation, **options: Any) -> None:
    """Trains three of them, all of whose gradients of one dtype are reduced together."""
    side = simulation.stream("expert")
    with mock.patch.object(buckets, "MIN_BUCKET_BYTES", 1 << 20):
        blocks = [Beside(simulation, side, is_first) for is_first in (True, False, True)]
        model: Any = nn.Sequential(*(fully_shard(block, **options) for block in blocks))
        Program(simulation, fully_shard(model, **options)).usual()


@pytest.mark.parametrize("name", OPTIONS)
def test_shared_expert_beside_the_block(name: str) -> None:
    """One group is read, and its gradients are computed, on two streams."""
    with simulated_world(RANKS) as simulation, simulation:
        beside(simulation, **OPTIONS[name]())
        judge(simulation)


def two_models(simulation: Simulation, name: str, other: Stream) -> None:
    """In turns, the second one on the `other` stream, with no order between them."""
    programs = [(Program(simulation, MODELS[name]()), stream) for stream in (simulation.main, other)]
    other.wait_stream(simulation.main)
    for _ in range(3):
        losses = []
        for program, stream in programs:
            with stream:
                losses.append(program.loss())
        for (program, stream), loss in zip(programs, losses, strict=True):
            with stream:
                loss.backward()
                program.update()


@pytest.mark.parametrize(
    ("name", "on_one_stream"), [("bf16", False), ("hsdp bf16", True), ("wire", False), ("offload", True)]
)
def test_two_models(name: str, on_one_stream: bool) -> None:
    with simulated_world(RANKS) as simulation, simulation:
        two_models(simulation, name, simulation.main if on_one_stream else simulation.stream("other"))
        judge(simulation)


def test_a_single_stream_does_not_wait() -> None:
    """But for a stream beside it, which waits for it."""
    with simulated_world(RANKS) as simulation:
        for name in ("fp32", "kept part", "hsdp bf16", "extensions"):
            model = MODELS[name]()
            with simulation:
                Program(simulation, model).usual()
        assert {by for by, _ in simulation.stream_waits}.isdisjoint({"main", "side"}), simulation.stream_waits


@pytest.mark.parametrize("name", ["hsdp", "hsdp bf16", "replicate"])
def test_compute_waits_for_sums_between_replicas_only(name: str) -> None:
    """What begins them, when the reduce-scatter is through, is not the stream that computes."""
    with simulated_world(RANKS) as simulation:
        model = MODELS[name]()
        with simulation:
            Program(simulation, model).usual()
        assert simulation.collective_waits["reduce-scatter", "main"] == 0
        assert simulation.collective_waits["all-reduce", "main"] > 10


def test_compute_does_not_wait_until_chunks_are_sent() -> None:
    """Those of a lone, cast gradient are packed and sent one after the other, beside the backward that goes on."""
    with simulated_world(RANKS) as simulation:
        program = Program(simulation, MODELS["bf16"]())
        with simulation:
            program.loss().backward()
        beside = [
            count
            for (what, stream), count in simulation.collective_waits.items()
            if what == "reduce-scatter" and stream != "main"
        ]
        pieces = 2 * DIM * DIM * 4 // buckets.MIN_PIECE_BYTES
        assert sum(beside) >= min(pieces, buckets.MAX_PIECES) - 2 * buckets.PIECES_IN_FLIGHT


def delete(program: Program) -> None:
    del program.model, program.optimizer
    gc.collect()


def test_models_deleted_in_flight() -> None:
    """A model goes with reductions that nobody has waited for: their memory, of several streams, is not used again
    before they are through. Likewise where the last backward ran on another stream, or the model is
    deleted on one.
    """
    with simulated_world(RANKS) as simulation, simulation:
        for runs_on_side, dies_on_side in ((False, False), (True, False), (False, True)):
            program = Program(simulation, change(MODELS["bf16"](), "set_manual_backward_finalization", True))
            loss = program.loss()
            program.on_side(loss.backward) if runs_on_side else loss.backward()
            del loss
            program.on_side(partial(delete, program)) if dies_on_side else delete(program)
            torch.ones(1).add_(1)
        judge(simulation)


# ---- faults that must be found


class Unwaited(GroupStreams):
    """Nobody waits before it reads parameters."""

    def wait_here(self) -> None:
        pass


class Apart(GroupStreams):
    """The engine works on the stream that calls it, whichever that is."""

    def are_apart(self) -> bool:
        return False


class Forgetful(GroupStreams):
    """Streams on which gradients were computed are not noted."""

    def note(self) -> None:
        pass


class Lonely(GroupStreams):
    """Work on the owner stream begins and ends without the other streams."""

    @contextmanager
    def on_owner_stream(self, joins: bool = True) -> Iterator[None]:
        with super().on_owner_stream(joins=False):
            yield


class Hasty(GroupStreams):
    """The owner stream changes while memory is in use there."""

    def choose_owner(self, ahead: bool, holds_memory: Callable[[], bool]) -> bool:
        return super().choose_owner(ahead, lambda: False)


class Stale(GroupStreams):
    """Who has waited once for the owner stream reads all later gathers."""

    def choose_owner(self, ahead: bool, holds_memory: Callable[[], bool]) -> bool:
        readers = [*self._readers]
        result = super().choose_owner(ahead, holds_memory)
        self._readers = readers
        return result


class Possessive(GroupStreams):
    """Gradients are given to users of other streams, and the allocator does not know."""

    def record_streams(self, tensor: Tensor) -> None:
        pass


def of_streams(kind: type[GroupStreams]) -> Any:
    return mock.patch.object(streams, "GroupStreams", kind)


def sums_not_waited_for() -> Any:
    """`run_mutations.py` plants that gathers, and reductions, are not."""
    wait = SimulatedWork.wait
    pretend: Any = lambda work, *_: work._what == "all-reduce" or wait(work)  # noqa: E731  a method
    return mock.patch.object(SimulatedWork, "wait", pretend)


@contextmanager
def unordered(device: torch.device, waits: bool = True) -> Iterator[None]:
    """`streams.side_stream` without its wait."""
    with streams._side_stream_of(torch.accelerator.current_stream(device), device):
        yield


def one_for_all() -> Any:
    only = cache(lambda *_: torch.Stream())
    return mock.patch.object(streams, "_side_stream_of", lambda stream, device: only(device))


def finishes_where_called() -> Any:
    """Reductions end on the stream that calls."""
    return mock.patch.object(GradientsOnOwnerStream, "receive", GroupGradients.receive)


def drops_inputs() -> Any:
    """What a collective beside the stream that computes reads is held by nobody."""
    begin = PendingReduce.__init__

    def forgetful(pending: PendingReduce, *args: Any, **kwargs: Any) -> None:
        begin(pending, *args, **kwargs)
        pending._in_use.clear()

    return mock.patch.object(PendingReduce, "__init__", forgetful)


def follows_no_copy() -> Any:
    """A user's all-gather does not wait for the copy into the memory that it is called with."""
    begin = CustomComm.__init__

    def make(self: Any, *args: Any) -> None:
        begin(self, *args)
        self.is_stream_ordered = True

    return mock.patch.object(CustomComm, "__init__", make)


def run_program(name: str, program: Callable[[Program], None]) -> Callable[[Simulation], None]:
    return lambda simulation: program(Program(simulation, MODELS[name]()))


def run_beside(simulation: Simulation) -> None:
    beside(simulation, mp_policy=BF16)


def run_towers(simulation: Simulation) -> None:
    model = towers(simulation, simulation.stream("tower"), shares=True, reshard_after_forward=False)
    Program(simulation, model).usual()


def run_two_models(simulation: Simulation) -> None:
    two_models(simulation, "bf16", simulation.stream("other"))


PLANTED: dict[str, tuple[Callable[[], Any], str, Callable[[Simulation], None]]] = {
    "a sum is not waited for": (sums_not_waited_for, "race", run_program("hsdp", Program.step)),
    "inputs are dropped": (drops_inputs, "early free", run_program("hsdp", Program.usual)),
    "beside, without its wait": (
        lambda: mock.patch.object(streams, "side_stream", unordered),
        "race",
        run_program("bf16", Program.step),
    ),
    "a gather that does not follow its copy": (
        follows_no_copy,
        "race",
        run_program("offload hsdp own", Program.step),
    ),
    "one stream beside two": (one_for_all, "early free", run_two_models),
    "parameters freed where they were used": (
        lambda: of_streams(Apart),
        "early free",
        run_program("kept", Program.in_turns),
    ),
    "parameters read before they are there": (lambda: of_streams(Unwaited), "race", run_towers),
    "gradients read before they are there": (lambda: of_streams(Forgetful), "race", run_beside),
    "gradients freed before they are read": (lambda: of_streams(Lonely), "early free", run_beside),
    "home moves too early": (lambda: of_streams(Hasty), "early free", run_program("kept", Program.in_turns)),
    "an earlier wait counts": (lambda: of_streams(Stale), "race", run_program("kept part", Program.backward_on_side)),
    "gradients given away": (lambda: of_streams(Possessive), "early free", run_program("fp32", Program.in_turns)),
    "delivered where backward was called": (
        finishes_where_called,
        "early free",
        run_program("fp32", Program.backward_elsewhere),
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_fault_is_found(name: str) -> None:
    plant, kind, run = PLANTED[name]
    with simulated_world(RANKS) as simulation:
        with plant(), simulation:
            run(simulation)
        assert any(problem.startswith(kind) for problem in simulation.problems), simulation.problems


def test_use_of_freed_memory_is_found() -> None:
    with simulated_world(RANKS) as simulation, simulation:
        tensor = torch.ones(4)
        tensor.untyped_storage().resize_(0)
        tensor.detach().view(2, 2)  # touches nothing
        assert not simulation.problems
        simulation.run("add_", [], [tensor], simulation.main)
        assert [*simulation.problems] == ["use of freed memory: add_ (user) on main"]
