"""Trains a small model on the fake device, beside a plain one on the CPU."""

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import fake_gpu
from fsdp2 import CPUOffloadPolicy, accumulate, fully_shard
from helpers import Differences, assert_same, full
from models import TanhBlock

WIDTH, ROWS_OF_RANK, STEPS = 13, 2, 3
EXACT, ROUNDED = {"rtol": 1e-4, "atol": 1e-6}, {"rtol": 5e-2, "atol": 1e-2}
OFFLOAD = {"offload_policy": CPUOffloadPolicy()}


class Net(nn.Module):
    """Blocks, and a tower beside them, which some ranks may leave out.

    `recompute`: whether blocks and tower are checkpointed, and if so, use_reentrant. `side`: on which stream the tower
    runs, if not on the current one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(TanhBlock(WIDTH, inner) for inner in (5, 8))
        self.tower = TanhBlock(WIDTH, 7)
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


def same(
    plain: nn.Module, model: nn.Module, what: str, tolerance: dict[str, float], noted: Differences | None = None
) -> None:
    """Compares gradients or parameters. `noted`: collects differences; None: this raises the first."""
    different = noted or Differences()
    for (name, mine), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        actual, expected = (full(mine.grad), theirs.grad) if what == "grad" else (full(mine), theirs)
        with different.noted():
            assert_same(actual, expected, **tolerance, name=f"{what} of {name}")
    if noted is None:
        different.raise_first()


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
    weighted: dict[str, Any] | None = None,
    in_backward: bool = False,
    has_side: bool = False,
    calls_forward: Callable[..., Any] = call,
    calls_backward: Callable[..., Any] = call,
    **options: Any,
) -> None:
    (plain, model), different = build(**options), Differences()
    conditional, rank, size = options.get("conditional", False), dist.get_rank(), dist.get_world_size()
    model.recompute = recompute
    model.side = torch.Stream(torch.device(fake_gpu.KIND, 1)) if has_side else None
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.5) for each in (plain, model)]
    if in_backward:
        model.set_optimizer_in_backward(optimizers[1])
    for step in range(STEPS):
        for each in range(size):
            (loss_of(plain, step, each, conditional) / size).backward()
        if weighted is not None:
            with accumulate(model, **weighted) as acc:
                for i in range(micro_batches):
                    loss = loss_of(model, step, rank, conditional, slice(i, None, micro_batches))
                    acc.backward(loss * 2, weight=torch.tensor(2, device=fake_gpu.KIND) if i else 2)
                    del loss
        for i in range(micro_batches if weighted is None else 0):
            part = slice(i, None, micro_batches)
            model.set_requires_gradient_sync(i == micro_batches - 1)
            loss = calls_forward(partial(loss_of, model, step, rank, conditional, part))
            calls_backward((loss / micro_batches).backward)
            del loss
        if not in_backward:
            same(plain, model, "grad", tolerance, different)
            optimizers[1].step()
            optimizers[1].zero_grad()
        optimizers[0].step()
        optimizers[0].zero_grad()
    same(plain, model, "value", tolerance, different)
    different.raise_first()


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
