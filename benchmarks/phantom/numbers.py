"""Compares numbers: trains linear layers over torch's ProcessGroupNCCL beside a plain model on the CPU.

    PHANTOM_COMPUTE=1 python -m benchmarks.phantom.run -m benchmarks.phantom.numbers [WAY ...]

The stub libraries compute what such a model takes: matrix products, copies, casts, sums, what packs gradients and what
unpacks gathers. All ranks hold the values of this one, as in `one_of_many`, whose ways these are. A kernel that is not
computed is named, and fails the way.
"""

import copy
import os
import sys
import tempfile
import traceback
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import one_of_many
from cut_gradients import small_pieces
from fsdp2 import fully_shard
from helpers import assert_same
from one_of_many import WAYS, Way

from . import record
from .over_nccl import IMPOSSIBLE, MORE, RANKS

# The stubs do not compute what sums gradients that arrive in another dtype than they are summed in, nor the largest
# numbers of rows, by which fp8 weights are scaled.
NOT_COMPUTED = {"sent in bf16", "weights in fp8"}


# Equal gradients of all ranks are divided by other numbers than eight, those of the root's own parameters only.
FACTORS = {"divided by 3": RANKS / 3}


class Block(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, hidden, bias=False)
        self.down = nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x))


class Chain(nn.Module):
    def __init__(self, hidden: int, dim: int = 16, depth: int = 3) -> None:
        super().__init__()
        self.enter = nn.Linear(dim, dim, bias=False)
        self.blocks = nn.ModuleList(Block(dim, hidden) for _ in range(depth))
        self.leave = nn.Linear(dim, dim, bias=False)
        for weight in self.parameters():  # values that neither grow nor shrink from layer to layer
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def backward(model: nn.Module, x: Tensor, gradient: Tensor) -> None:
    y = model(x)
    y.backward(gradient.to(y.dtype))


def compare(plain: nn.Module, model: nn.Module, way: Way, what: str, gradients: bool) -> None:
    """Compares rank 0's shards with the plain model's first rows. bf16 and fp16 round at each of eight layers."""
    tolerance = 3e-2 if "mp_policy" in way.options else 1e-5
    for (name, whole), param in zip(plain.named_parameters(), model.parameters(), strict=True):
        value, expected = (param.grad, whole.grad) if gradients else (param, whole)
        own, rows = value.to_local().cpu(), expected.detach()  # type: ignore[union-attr]
        atol = tolerance * rows.abs().max().item()
        assert_same(own, rows[: len(own)], rtol=tolerance, atol=atol, name=f"{what}: {name}{'.grad' * gradients}")


def train(name: str, way: Way) -> None:
    """Takes three steps with SGD.

    Raises:
        AssertionError: a gradient or a parameter differs from the plain model's.
    """
    torch.manual_seed(0)
    # 20 rows over eight ranks are uneven. Fewer ranks would hold other rows, which are not those of this one.
    plain: Any = Chain(24 if name == "resharded to four" else 20)
    model: Any = copy.deepcopy(plain)
    way.prepare(model)
    axes = ("replicate", "shard") if way.mesh else ("shard",)
    mesh = init_device_mesh("cuda", way.mesh or (RANKS,), mesh_dim_names=axes)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **way.options)
    fully_shard(model, mesh=mesh, **way.options)
    way.after(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=1e-3) for each in (plain, model)]
    if way.in_backward:
        model.set_optimizer_in_backward(optimizers[1])
    for step in range(one_of_many.STEPS):
        one_of_many._copy_from(plain, model)
        parts = [(torch.randn(4, 16), torch.randn(4, 16)) for _ in range(way.micro_batches)]
        for i, (x, gradient) in enumerate(parts, 1):
            model.set_requires_gradient_sync(i == len(parts))
            backward(plain, x, gradient)
            backward(model, x.cuda(), gradient.cuda())
        if way.evaluates:
            with torch.no_grad():
                found, expected = model(parts[0][0].cuda()), plain(parts[0][0])
            assert_same(found.cpu(), expected, rtol=1e-4, atol=1e-5, name=f"step {step}: output")
        for weight in (plain.enter.weight, plain.leave.weight):
            weight.grad *= FACTORS.get(name, 1.0)
        if not way.in_backward:
            compare(plain, model, way, f"step {step}", gradients=True)
        for optimizer in optimizers[: 1 if way.in_backward else 2]:
            optimizer.step()
            optimizer.zero_grad()
        compare(plain, model, way, f"step {step}", gradients=False)


def main(names: list[str]) -> int:
    ways = {name: way for name, way in {**WAYS, **MORE}.items() if name not in IMPOSSIBLE | NOT_COMPUTED}
    failed = []
    for name in names or ways:
        way = ways[name]
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=RANKS)
        record.runtime.phantom_reset(1)
        try:
            beside = torch.cuda.stream(torch.cuda.Stream()) if way.beside else nullcontext()
            with beside, small_pieces(piece_bytes=256) if way.in_pieces else nullcontext():
                train(name, way)
            outcome = "as the plain model"
        except Exception as error:  # the next way may be right
            traceback.print_exc()
            outcome = f"FAILED: {type(error).__name__}: {error}"
        with tempfile.NamedTemporaryFile(suffix=".txt") as file:
            record.runtime.phantom_dump(file.name.encode())
            _, calls = record.read_log(file.name)
        record.runtime.phantom_reset(0)
        if unknown := {call[9] for call in calls if call[2] == "not computed"}:
            outcome = f"FAILED: not computed: {'; '.join(sorted(unknown))} ({outcome})"
        if outcome != "as the plain model":
            failed.append(name)
        dist.destroy_process_group()
        print(f"{name}: {outcome}", flush=True)
    print(f"{len(failed)} failed{': ' * bool(failed)}{'; '.join(failed)}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))
