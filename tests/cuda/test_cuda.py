"""Tests what only a GPU can show: allocation on its caching allocator, asynchronous kernels, and graphs of them.

First comes what decides most, because a session on a GPU may have no time for all.

The tests are skipped where there is no GPU. One is enough: NCCL over one rank, and a fake process group for the memory
of many.
"""

import copy
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.cuda_group import Wire, measure_clock, start_wire_group
from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, clip_grad_norm_, flatten_optimizer, fully_shard
from fsdp2.collectives.coalesced import CoalescedComm
from fsdp2.engine import codec
from fsdp2.engine.comm import CommLabel
from fsdp2.engine.reduce import exchange_and_sum
from fsdp2.engine.state import groups_below
from fsdp2.ranks import compare_ranks
from helpers import assert_same, fake_world, full
from models import TinyGPT, mean_loss

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def nccl() -> Iterator[None]:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_the_host_waits_for_the_device_only_at_steps_of_checks_and_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else it runs ahead of kernels: no copy that blocks, no value that is read, whatever the dtypes. As torch counts:
    see tests/trace/test_host_syncs.py for more ways.
    """
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    monkeypatch.setattr(compare_ranks, "moves_data", lambda *_: True)  # so that ranks compare what they have
    with fake_world(8):
        mesh = init_device_mesh("cuda", (8,))
        model = TinyGPT(dim=64, depth=3)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        batch = model.example(rows=2, seed=0).cuda()
        for number in range(1, 10):
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                try:
                    mean_loss(model(batch)).backward()
                    model.zero_grad()
                finally:
                    torch.cuda.set_sync_debug_mode("default")
            waits = [str(each.message) for each in seen if "synchroniz" in str(each.message)]
            # A backward gathers, too: ranks compare what they have at gathers number 1, 2, 4, ...
            assert len(waits) <= 3, f"step {number}: {waits}"
            assert not waits or number in (1, 2, 4, 8), f"step {number}: {waits}"


@pytest.fixture
def wire() -> Iterator[Wire]:
    yield start_wire_group(8, torch.device("cuda"))
    dist.destroy_process_group()


class Square(nn.Module):
    """Blocks of one matrix; `cycles`: each takes so many of the GPU's clock longer."""

    def __init__(self, blocks: int, dim: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(dim, dim, bias=False) for _ in range(blocks))

    def forward(self, x: torch.Tensor, cycles: int = 0) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            if cycles:
                torch.cuda._sleep(cycles)
        return x


def build_square(mesh: DeviceMesh, **options: Any) -> Any:
    model = Square(blocks=6, dim=1024)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


@pytest.mark.computes
@pytest.mark.parametrize("keep", [False, True], ids=["freed", "kept"])
def test_a_captured_step_trains_as_eager_ones_do(wire: Wire, keep: bool) -> None:
    """Forward, backward and collectives in one graph, between which an optimizer writes to the shards it reads."""
    wire.moves = True
    mesh, x = init_device_mesh("cuda", (8,)), torch.randn(4, 1024, device="cuda", dtype=torch.bfloat16)
    eager, captured = (build_and_warm_up(mesh, x, keep) for _ in range(2))
    graph = torch.cuda.CUDAGraph()
    wire.settle()
    with torch.cuda.graph(graph):
        captured_loss = square_loss(captured, x)
        captured_loss.backward()
    wire.settle()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (eager, captured)]
    for _ in range(3):
        graph.replay()
        eager.zero_grad()
        loss = square_loss(eager, x)
        loss.backward()
        assert_same(captured_loss, loss, rtol=1e-5, atol=0, name="loss")
        for (name, p), q in zip(eager.named_parameters(), captured.parameters(), strict=True):
            assert p.grad.to_local().abs().sum() > 0
            assert_same(q.grad.to_local(), p.grad.to_local(), rtol=1e-5, atol=1e-8, name=f"{name}.grad")
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.computes
@pytest.mark.parametrize("flat", [False, True], ids=["parameters", "flat"])
def test_a_captured_whole_step_trains_as_eager_ones_do(wire: Wire, flat: bool) -> None:
    """With clipping and the optimizer in the graph, warmed up on the stream of all other work."""
    wire.moves = True
    mesh, x = init_device_mesh("cuda", (8,)), torch.randn(4, 1024, device="cuda", dtype=torch.bfloat16)
    torch.manual_seed(0)
    eager = build_square(mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    captured = build_square(mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    captured.set_keep_unsharded_storage(True)
    with torch.no_grad():
        for p, q in zip(eager.parameters(), captured.parameters(), strict=True):
            q.copy_(p)
    steps = []
    for model in (eager, captured):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
        if flat:
            flatten_optimizer(optimizer)
        steps.append(partial(whole_step, model, optimizer, x))
    for step in steps:
        for _ in range(3):
            step()
    graph = torch.cuda.CUDAGraph()
    wire.settle()
    with torch.cuda.graph(graph):
        steps[1]()
    wire.settle()
    for _ in range(3):
        graph.replay()
        steps[0]()
    for (name, p), q in zip(eager.named_parameters(), captured.named_parameters(), strict=True):
        assert_same(q[1].to_local(), p.to_local(), rtol=1e-5, atol=1e-7, name=name)


def whole_step(model: Any, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    square_loss(model, x).backward()
    clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()


def square_loss(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()


def build_and_warm_up(mesh: DeviceMesh, x: torch.Tensor, keep: bool) -> Any:
    """On a stream of its own, as everything that is to be captured."""
    torch.manual_seed(0)
    model = build_square(mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    model.set_keep_unsharded_storage(keep)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            square_loss(model, x).backward()
            model.zero_grad()
    torch.cuda.current_stream().wait_stream(side)
    return model


def test_a_captured_part_reads_the_parameters_of_each_step(nccl: None) -> None:
    """set_keep_unsharded_storage: a graph that reads a full parameter finds what each gather has put there."""
    torch.manual_seed(0)
    whole = nn.Linear(64, 64, bias=False).cuda()
    sharded = fully_shard(copy.deepcopy(whole), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    sharded.set_keep_unsharded_storage(True)
    x = torch.randn(8, 64, device="cuda", dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        sharded(x)
        sharded.unshard()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            result = x @ sharded.weight.t()
        sharded.reshard()
        for _ in range(2):
            for param in (whole.weight, sharded.weight):
                param.mul_(2)
            sharded(x)  # gathers
            graph.replay()
            assert_same(result, x @ whole.weight.bfloat16().t(), rtol=0, atol=0, name="replayed")


def big_layers(dim: int = 2048, blocks: int = 6) -> nn.Sequential:
    """Groups whose copies take the link longer than the host takes to go on."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(dim, dim) for _ in range(blocks)])


@pytest.mark.parametrize("pin", [True, False], ids=["pinned", "pageable"])
@pytest.mark.parametrize("mode", ["", "gradients add up", "in backward"])
def test_offloaded_training_matches_the_plain_model(nccl: None, mode: str, pin: bool) -> None:
    """A copy that is not waited for shows in the numbers; so does a shard that is stepped on while it is copied."""
    plain, sharded = big_layers().cuda(), big_layers()
    for layer in sharded:
        fully_shard(layer, offload_policy=CPUOffloadPolicy(pin_memory=pin))
    fully_shard(sharded, offload_policy=CPUOffloadPolicy(pin_memory=pin))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (plain, sharded)]
    if mode == "in backward":
        sharded.set_optimizer_in_backward(optimizers[1])
    for _ in range(4):
        for _ in range(2 if mode == "gradients add up" else 1):
            batch = torch.randn(8, 2048)
            mean_loss(plain(batch.cuda())).backward()
            mean_loss(sharded(batch)).backward()
        for optimizer in optimizers[: 1 if mode == "in backward" else 2]:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():  # as soon as forward has returned, shards may be written to
            sharded(batch)
            for p, q in zip(plain.parameters(), sharded.parameters(), strict=True):
                p.mul_(1.01)
                q.mul_(1.01)
    for (name, p), q in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        assert q.to_local().device.type == "cpu"
        assert_same(q.to_local(), p.detach().cpu(), rtol=1e-4, atol=1e-5, name=name)


def test_offloaded_memory_is_page_locked(nccl: None) -> None:
    model = big_layers()
    for layer in model:
        fully_shard(layer, offload_policy=CPUOffloadPolicy())
    fully_shard(model, offload_policy=CPUOffloadPolicy())
    mean_loss(model(torch.randn(8, 2048))).backward()
    for group in groups_below(model):
        assert group.parameters.buffers is not None
        assert group.parameters.buffers.shards.is_pinned() or not group.params
    assert all(param.grad.to_local().is_pinned() for param in model.parameters())


@pytest.mark.parametrize("policy", [None, MixedPrecisionPolicy(torch.bfloat16, torch.float32)], ids=["fp32", "bf16"])
def test_training_matches_the_plain_model(nccl: None, policy: MixedPrecisionPolicy | None) -> None:
    """Storage that is freed while a kernel still reads it would show as wrong gradients."""
    torch.manual_seed(0)
    plain = TinyGPT().cuda()
    torch.manual_seed(0)
    sharded = TinyGPT()
    for block in sharded.blocks:
        fully_shard(block, mp_policy=policy or MixedPrecisionPolicy())
    fully_shard(sharded, mp_policy=policy or MixedPrecisionPolicy())
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if policy is None else {"rtol": 5e-2, "atol": 5e-3}
    for seed in range(3):
        batch = plain.example(rows=4, seed=seed)
        mean_loss(plain(batch.cuda())).backward()
        mean_loss(sharded(batch)).backward()  # the root moves its inputs
        for (name, p), q in zip(plain.named_parameters(), sharded.parameters(), strict=True):
            assert_same(full(q.grad), p.grad, **tolerance, name=f"{name}.grad")
        plain.zero_grad()
        sharded.zero_grad()


def test_gradients_sent_in_bf16_are_summed_in_fp32(nccl: None) -> None:
    """The exchange as NCCL has it, then a sum whose parts are not all cast first: that would be twice their memory."""
    sent, output = torch.randn(1024, device="cuda").bfloat16(), torch.empty(1024, device="cuda")
    exchange_and_sum(CoalescedComm(dist.group.WORLD, CommLabel()), [output], [sent], 2.0).wait()
    assert_same(output, sent.float() / 2, 0, 0, name="of one rank")
    parts, total = torch.randn(16, 1 << 20, device="cuda").bfloat16(), torch.empty(1 << 20, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    codec.sum_rows(parts, total)
    assert torch.cuda.max_memory_allocated() - before < parts.nbytes
    assert_same(total, parts.float().sum(0), rtol=1e-5, atol=1e-5, name="of many")


def test_forward_holds_two_groups() -> None:
    """As on the CPU, on the allocator that matters: 64 ranks, one of them real, its collectives fake."""
    dim, blocks = 1024, 6
    with fake_world(64):
        mesh = init_device_mesh("cuda", (64,))
        model = nn.Sequential(*[nn.Linear(dim, dim, bias=False) for _ in range(blocks)])
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        batch = torch.ones(1, dim, device="cuda", requires_grad=True)
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            resting = torch.cuda.memory_allocated()
            loss = model(batch).sum()
            peak = torch.cuda.max_memory_allocated() - resting
            loss.backward()
            model.zero_grad()
        group = dim * dim * 4
        assert 2 * group <= peak <= 2.05 * group


def milliseconds(step: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


@pytest.mark.computes
def test_gathers_run_beside_the_block_before(wire: Wire) -> None:
    """Each block's gather takes 5 ms of the wire, each block computes for 10: all but the first gather is hidden."""
    model = build_square(init_device_mesh("cuda", (8,)))
    wire.bandwidth = 1024**2 * 4 * 7 / 8 / 5e-3
    x, cycles = torch.ones(1, 1024, device="cuda"), int(measure_clock() * 10e-3)
    compute = min(milliseconds(lambda: [torch.cuda._sleep(cycles) for _ in model.blocks]) for _ in range(3))
    with torch.no_grad():
        times = [milliseconds(lambda: model(x, cycles)) for _ in range(4)]
    assert compute < min(times) < compute + 2 * 5, "one after the other, they would take 30 ms longer"


@pytest.mark.computes
def test_copies_run_beside_compute(nccl: None) -> None:
    """Kernels and copies overlap in time on the device: read off the profiler's trace."""
    model = big_layers(dim=4096)
    for layer in model:
        fully_shard(layer, offload_policy=CPUOffloadPolicy())
    fully_shard(model, offload_policy=CPUOffloadPolicy())
    batch = torch.randn(16384, 4096)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            mean_loss(model(batch)).backward()
            model.zero_grad()
    spans = [(e.name, e.time_range) for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    copies = [span for name, span in spans if "Memcpy HtoD" in name and span.elapsed_us() > 1000]
    kernels = [span for name, span in spans if not name.startswith("Mem") and span.elapsed_us() > 1000]
    beside = [copy for copy in copies if any(k.start < copy.end and copy.start < k.end for k in kernels)]
    assert len(beside) >= len(copies) / 2, "all but the first of a pass, and those of the batch"
