"""Training on a device that is not the CPU, on autograd's own threads and streams, beside a plain model on the CPU.

The clocks judge all of it: what a GPU would have run in an order in which numbers may be wrong is a failure, too.
"""

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import fake_gpu
from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, bucket, comm, fully_shard, reduce_plan, transfers
from helpers import assert_same, full, run_checks

WIDTH, ROWS_OF_RANK, STEPS = 13, 2, 3
EXACT, ROUNDED = {"rtol": 1e-4, "atol": 1e-6}, {"rtol": 5e-2, "atol": 1e-2}


class Block(nn.Module):
    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner), nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.down(torch.tanh(self.up(x))))


class Net(nn.Module):
    """Blocks, and a tower beside them, which some ranks may leave out.

    `recompute`: whether blocks and tower are checkpointed, and if so, use_reentrant. `side`: on which stream the tower
    runs, if not on the current one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(inner) for inner in (5, 8))
        self.tower = Block(7)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.recompute: bool | None = None
        self.side: torch.Stream | None = None

    def forward(self, x: Tensor, has_tower: bool = True) -> Tensor:
        x = self.stem(x)
        beside = self._beside(x) if has_tower else None
        for block in self.blocks:
            x = self._run(block, x)
        if beside is not None:
            if self.side is not None:
                current = torch.accelerator.current_stream()
                current.wait_stream(self.side)
                beside.record_stream(current)
            x = x + beside
        return x * self.scale

    def _beside(self, x: Tensor) -> Tensor:
        if self.side is None:
            return self._run(self.tower, x)
        self.side.wait_stream(torch.accelerator.current_stream())
        with self.side:
            x.record_stream(self.side)
            return self._run(self.tower, x)

    def _run(self, module: nn.Module, x: Tensor) -> Tensor:
        return module(x) if self.recompute is None else checkpoint(module, x, use_reentrant=self.recompute)


def build(mesh: tuple[int, ...] | None = None, conditional: bool = False, **options: Any) -> tuple[Net, Any]:
    """A plain model on the CPU, and the same one sharded on the device."""
    torch.manual_seed(0)
    plain = Net()
    model: Any = copy.deepcopy(plain)
    shape = mesh or (dist.get_world_size(),)
    names = ("replicate", "shard")[-len(shape) :]
    options["mesh"] = init_device_mesh(fake_gpu.KIND, shape, mesh_dim_names=names)
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model.tower, conditional=conditional, **options)
    return plain, fully_shard(model, **options)


def loss_of(model: nn.Module, step: int, rank: int, is_conditional: bool, part: slice = slice(None)) -> Tensor:
    """Of the rows of one rank. If `is_conditional`, the tower runs on one rank, each step on another."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(ROWS_OF_RANK, WIDTH, generator=generator)[part]
    has_tower = not is_conditional or rank == step % dist.get_world_size()
    return (model(x, has_tower) - 0.5).float().square().mean()


def same(plain: nn.Module, model: nn.Module, what: str, tolerance: dict[str, float]) -> None:
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        if what == "grad":
            assert_same(full(mine.grad), theirs.grad, **tolerance, name=f"gradient of {name}")
        else:
            assert_same(full(mine), theirs, **tolerance, name=name)


def call(function: Callable[[], Any]) -> Any:
    return function()


def on_a_thread(function: Callable[[], Any]) -> Any:
    """A new one, whose current device nobody has set."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    assert results, "the thread raised"
    return results[0]


def train(
    *,
    tolerance: dict[str, float] = EXACT,
    recompute: bool | None = None,
    micro_batches: int = 1,
    in_backward: bool = False,
    has_side: bool = False,
    calls_forward: Callable[..., Any] = call,
    calls_backward: Callable[..., Any] = call,
    **options: Any,
) -> None:
    plain, model = build(**options)
    conditional, rank, size = options.get("conditional", False), dist.get_rank(), dist.get_world_size()
    model.recompute = recompute
    model.side = torch.Stream(torch.device(fake_gpu.KIND, 1)) if has_side else None
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.5) for each in (plain, model)]
    if in_backward:
        model.set_optimizer_in_backward(optimizers[1])
    for step in range(STEPS):
        for each in range(size):
            (loss_of(plain, step, each, conditional) / size).backward()
        for i in range(micro_batches):
            part = slice(i, None, micro_batches)
            model.set_requires_gradient_sync(i == micro_batches - 1)
            loss = calls_forward(partial(loss_of, model, step, rank, conditional, part))
            calls_backward((loss / micro_batches).backward)
            del loss
        if not in_backward:
            same(plain, model, "grad", tolerance)
            optimizers[1].step()
            optimizers[1].zero_grad()
        optimizers[0].step()
        optimizers[0].zero_grad()
    same(plain, model, "value", tolerance)


@contextmanager
def judged(expected: str = "") -> Iterator[None]:
    """What runs inside is to have no problem; or, if `expected`, one of this kind."""
    fake_gpu.start_clocks()
    yield
    problems = fake_gpu.take_problems()
    if expected:
        assert any(problem.startswith(expected) for problem in problems), (expected, problems[:3])
    else:
        assert not problems, f"{len(problems)} problems:\n" + "\n".join(problems[:5])


@contextmanager
def small_pieces() -> Iterator[None]:
    """Gradients travel one by one, in pieces; parameters are gathered straight into place: as large ones are."""
    with (
        mock.patch.object(bucket, "MIN_BUCKET_BYTES", 1),
        mock.patch.object(reduce_plan, "MIN_PIECE_BYTES", 64),
        mock.patch.object(comm.CoalescedComm, "direct_min_bytes", 64),
    ):
        yield


BF16 = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32), "tolerance": ROUNDED}
SENT_IN_BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32, wire_dtype=torch.bfloat16)
OFFLOAD = {"offload_policy": CPUOffloadPolicy()}
WAYS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": BF16,
    "sent in bf16": {"mp_policy": SENT_IN_BF16, "tolerance": ROUNDED},
    "kept": {"reshard_after_forward": False},
    "recomputed": {"recompute": False},
    "recomputed, reentrant": {"recompute": True},
    "offloaded": OFFLOAD,
    "offloaded, not pinned": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "offloaded, recomputed": {**OFFLOAD, "recompute": False},
    "offloaded, bf16": {**OFFLOAD, **BF16},
    "conditional": {"conditional": True},
    "conditional, recomputed": {"conditional": True, "recompute": False},
    "accumulated": {"micro_batches": 2},
    "optimizer in backward": {"in_backward": True},
    "optimizer in backward, offloaded": {"in_backward": True, **OFFLOAD},
    "backward on a thread": {"calls_backward": on_a_thread},
    "forward on a thread": {"calls_forward": on_a_thread},
    "both on threads": {"calls_forward": on_a_thread, "calls_backward": on_a_thread},
}
REPLICAS: dict[str, dict[str, Any]] = {"HSDP": {}, "HSDP, bf16": BF16, "HSDP, offloaded": OFFLOAD}
TWO_STREAMS: dict[str, dict[str, Any]] = {
    "two streams": {},
    "two streams, recomputed": {"recompute": False},
    "two streams, offloaded": OFFLOAD,
    "two streams, bf16": BF16,
}


def in_way(options: dict[str, Any], pieces: bool = False) -> None:
    with judged(), small_pieces() if pieces else nullcontext():
        train(**options)


def test_all_ways_on_two_ranks() -> None:
    checks = [(way, partial(in_way, options)) for way, options in WAYS.items()]
    checks += [(f"{way}, in pieces", partial(in_way, WAYS[way], pieces=True)) for way in ("fp32", "bf16", "offloaded")]
    checks += [("replicated", partial(in_way, {"mesh": (2, 1)}))]
    run_checks(2, checks, device=fake_gpu.KIND)


def test_replicas_on_four_ranks() -> None:
    checks = [(way, partial(in_way, {"mesh": (2, 2), **options})) for way, options in REPLICAS.items()]
    checks += [("HSDP, in pieces", partial(in_way, {"mesh": (2, 2), **BF16}, pieces=True))]
    run_checks(4, checks, device=fake_gpu.KIND)


def test_a_tower_on_a_stream_of_its_own() -> None:
    """Its parameters are gathered, its gradients computed and reduced beside those of the other blocks."""
    checks = [(way, partial(in_way, {"has_side": True, **options})) for way, options in TWO_STREAMS.items()]
    run_checks(2, checks, device=fake_gpu.KIND)


# ---- what the clocks must find ---------------------------------------------------------------------------------------


def planted(problem: str, *patch: Any, **options: Any) -> None:
    """Something is left out. `problem`: what the clocks say then; "": the numbers are wrong."""
    with mock.patch.object(*patch):
        try:
            train(**options)
            is_wrong = False
        except AssertionError:
            is_wrong = True
    found = fake_gpu.take_problems()
    assert is_wrong or problem, "expected wrong numbers"
    assert any(each.startswith(problem) for each in found) or not problem, f"expected a {problem}, found {found[:3]}"


def beside_unordered(net: Net, x: Tensor) -> Tensor:
    """A tower that reads on another stream what the current one computes, and does not wait for that."""
    with torch.Stream(x.device):
        return net.tower(x)


def start_in_unordered(copies: transfers.Transfers, target: Tensor, source: Tensor, then: Any) -> Any:
    """The gather does not wait for the copy to the device."""
    with copies._inward:
        target.copy_(source, non_blocking=True)
    return transfers.Transfer(copies._inward.record_event(), (target, source), then())


def write_to_shards(is_settled: bool) -> None:
    """A program does so after a forward. `is_settled`: the host waits for copies to the device before."""
    _, model = build(**OFFLOAD)
    settle = mock.patch.object(transfers.Transfers, "settle", lambda _: None)
    with torch.no_grad(), nullcontext() if is_settled else settle, judged("" if is_settled else "pinned"):
        for _ in range(5):  # at the first ones ranks compare what they hold, which the host waits for
            loss_of(model, 0, dist.get_rank(), False)
        for param in model.parameters():
            param.to_local().add_(1)
        torch.accelerator.synchronize()


class Forgotten:
    """A collective that nobody waits for."""

    def __init__(self, *_: Any) -> None:
        pass

    def wait(self) -> None:
        pass


def test_what_is_planted_is_found() -> None:
    """Where nothing is deferred most numbers stay right: the clocks see it, or NaN in memory that is not there yet."""
    gather, copies = comm.CoalescedComm.all_gather, transfers.Transfers

    def forget(*args: Any) -> Forgotten:
        works.append(gather(*args))
        return Forgotten()

    works: list[Any] = []
    checks = [
        ("a copy in", partial(planted, "race", copies, "start_in", start_in_unordered, **OFFLOAD)),
        ("shards that are written to", partial(write_to_shards, is_settled=False)),
        ("shards that are not copied any more", partial(write_to_shards, is_settled=True)),
        ("a copy out", partial(planted, "", transfers.Transfer, "finish", lambda each: each._result, **OFFLOAD)),
        ("a collective", partial(planted, "", comm.CoalescedComm, "all_gather", forget)),
        ("a tower", partial(planted, "race", Net, "_beside", beside_unordered)),
    ]

    run_checks(2, [("start", fake_gpu.start_clocks), *checks], device=fake_gpu.KIND)


# ---- failed backwards ------------------------------------------------------------------------------------------------


def fails_at(loss: Tensor, depth: int) -> None:
    """Backward raises at a node that is so many nodes below the loss, or at the last one there is."""

    def fail(*_: Any) -> None:
        raise MemoryError("on purpose")

    node: Any = loss.grad_fn
    for _ in range(depth):
        below = [each for each, _ in node.next_functions if each is not None and each.next_functions]
        if not below:
            break
        node = below[0]
    node.register_prehook(fail)
    del node
    try:
        loss.backward()
    except MemoryError:
        return
    raise AssertionError("expected backward to fail")


def test_each_step_after_a_failed_backward_is_exact() -> None:
    """"Catch out of memory, retry": the device's thread drops what the failed backward held when it likes, in the
    middle of the next forward or backward.
    """

    def check(recompute: bool | None, **options: Any) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        plain, model = build(**options)
        model.recompute = recompute
        for each in range(size):
            (loss_of(plain, 0, each, False) / size).backward()
        for i in range(20):
            fails_at(loss_of(model, 0, rank, False), 3 + i % 13)
            model.zero_grad()
            loss_of(model, 0, rank, False).backward()
            same(plain, model, "grad", EXACT)
            model.zero_grad()

    checks = [("plain", partial(check, None)), ("recomputed", partial(check, False))]
    run_checks(2, [*checks, ("offloaded", partial(check, None, **OFFLOAD))], device=fake_gpu.KIND)
