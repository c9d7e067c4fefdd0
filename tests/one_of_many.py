"""Trains on one of eight simulated ranks, and on one real rank, beside a plain model.

    python tests/one_of_many.py cuda

`benchmarks.gpu_session` runs it first, because one GPU is enough. All ranks hold the same values as this one. So an
all-gather returns this rank's shard many times, of which the plain model is built before each step, and the mean of all
ranks' gradients is this rank's own. The program prints a line for each way as soon as it ends; the exit status says
whether all are equal to the plain model. With `cpu` in place of `cuda` the program itself is tried.
"""

import copy
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1])]

from benchmarks.cuda_group import start_wire_group
from benchmarks.cuda_wrapping import step_with_overlap
from cut_gradients import small_pieces
from fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, flatten_optimizer, fully_shard
from fsdp2.compression import Compression, Float8
from helpers import assert_same
from models import TinyGPT, mean_loss

SIZE, STEPS = 8, 3
COARSE = 0.25  # relative error of a gradient whose weights had 4 bits of precision
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
CYCLES = 20_000_000  # some milliseconds of a GPU's clock


@dataclass(frozen=True)
class Way:
    """Describes how a model is sharded and trained.

    `mesh`: the sizes of its axes, if there are two; `prepare`, `after`: functions called before and after fully_shard;
    `beside`: True if all runs on a stream of its own; `coarse`: True if weights travel with a few bits only, so that
    errors are compared with norms; `flat`: True if AdamW steps on whole groups, which `flatten` has it do.
    """

    options: dict[str, Any] = field(default_factory=dict)
    mesh: tuple[int, ...] | None = None
    prepare: Callable[[Any], object] = lambda model: None
    after: Callable[[Any], object] = lambda model: None
    in_pieces: bool = False
    in_backward: bool = False
    micro_batches: int = 1
    evaluates: bool = False
    beside: bool = False
    coarse: bool = False
    flat: bool = False
    flatten: Callable[[Any], object] = flatten_optimizer

    @property
    def tolerance(self) -> dict[str, float]:
        return {"rtol": 5e-2, "atol": 1e-2} if "mp_policy" in self.options else {"rtol": 1e-4, "atol": 1e-5}


def recomputed(use_reentrant: bool) -> Callable[[Any], None]:
    def prepare(model: Any) -> None:
        for block in model.blocks:
            forward = block.forward
            block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=use_reentrant)

    return prepare


WAYS: dict[str, Way] = {
    "fp32": Way(),
    "bf16/fp32": Way({"mp_policy": BF16}),
    "kept for backward": Way({"reshard_after_forward": False}),
    "kept over steps": Way(after=lambda model: model.set_reshard_after_backward(False)),
    "storage kept": Way(after=lambda model: model.set_keep_unsharded_storage(True)),
    "recomputed": Way(prepare=recomputed(use_reentrant=False)),
    "recomputed, reentrant": Way(prepare=recomputed(use_reentrant=True)),
    "accumulated": Way(micro_batches=3),
    "evaluated between steps": Way(evaluates=True),
    "in pieces": Way(in_pieces=True),
    "bf16/fp32 in pieces": Way({"mp_policy": BF16}, in_pieces=True),
    "HSDP": Way(mesh=(2, SIZE // 2)),
    "HSDP, bf16/fp32 in pieces": Way({"mp_policy": BF16}, mesh=(2, SIZE // 2), in_pieces=True),
    "replicated": Way(mesh=(SIZE, 1)),
    "weights in fp8": Way({"mp_policy": replace(BF16, compression=Compression(all_gather=Float8()))}, coarse=True),
    "flat AdamW": Way(flat=True),
    "flat AdamW, offloaded": Way({"offload_policy": CPUOffloadPolicy()}, flat=True),
    "gathered far ahead": Way({"mp_policy": BF16}, after=lambda model: model.set_unsharded_budget(2**20)),
    "flat AdamW, states on the CPU": Way(flat=True, flatten=partial(flatten_optimizer, offload_states=True)),
    "flat AdamW beside forward": Way(flat=True, flatten=step_with_overlap),
    "offloaded": Way({"offload_policy": CPUOffloadPolicy()}),
    "offloaded, pageable": Way({"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    "offloaded, bf16/fp32 in pieces": Way({"offload_policy": CPUOffloadPolicy(), "mp_policy": BF16}, in_pieces=True),
    "stepped in backward": Way(in_backward=True),
    "stepped in backward, offloaded": Way({"offload_policy": CPUOffloadPolicy()}, in_backward=True),
    "on a stream of its own": Way(beside=True),
    "conditional": Way({"conditional": True}),
}


@contextmanager
def simulated(kind: str) -> Iterator[int]:
    """Context: eight ranks, which all hold the values of this one."""
    start_wire_group(SIZE, torch.device(kind)).moves = True
    try:
        yield SIZE
    finally:
        dist.destroy_process_group()


@contextmanager
def alone(kind: str) -> Iterator[int]:
    """Context: one rank, over the backend of the device."""
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield 1
    finally:
        dist.destroy_process_group()


WORLDS = {"one of 8 simulated ranks": simulated, "one rank": alone}


def ways_in(world: str) -> list[str]:
    """Returns the ways to train. A single rank does not have all of them."""
    return [name for name, way in WAYS.items() if world != "one rank" or (way.mesh is None and name != "conditional")]


def run(kind: str, world: str, name: str) -> None:
    """Trains in one way.

    Raises:
        AssertionError: a result differs from the plain model's.
    """
    way = WAYS[name]
    with WORLDS[world](kind) as size, small_pieces() if way.in_pieces else nullcontext():
        if kind == "cuda" and way.beside:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                _train(kind, size, way)
            torch.cuda.current_stream().wait_stream(side)
        else:
            _train(kind, size, way)


def _train(kind: str, size: int, way: Way) -> None:
    torch.manual_seed(0)
    plain: Any = TinyGPT(dim=96, depth=3)
    model: Any = copy.deepcopy(plain)
    plain = plain.to(kind)
    way.prepare(model)
    mesh = init_device_mesh(
        kind, way.mesh or (size,), mesh_dim_names=("replicate", "shard") if way.mesh else ("shard",)
    )
    common = {name: value for name, value in way.options.items() if name != "conditional"}
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **way.options)
    fully_shard(model, mesh=mesh, **common)
    way.after(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (plain, model)]
    if way.flat:
        optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01, fused=kind == "cuda") for each in (plain, model)]
        way.flatten(optimizers[1])
    if way.in_backward:
        model.set_optimizer_in_backward(optimizers[1])
    for step in range(STEPS):
        _copy_from(plain, model)
        parts = [plain.example(rows=2, seed=10 * step + i).to(kind) for i in range(way.micro_batches)]
        if kind == "cuda":  # what is issued now runs when the host is far ahead
            torch.cuda._sleep(CYCLES)
        for i, part in enumerate(parts, 1):
            model.set_requires_gradient_sync(i == len(parts))
            mean_loss(plain(part)).backward()
            mean_loss(model(part)).backward()
        if way.evaluates:
            with torch.no_grad():
                assert_same(model(parts[0]), plain(parts[0]), **way.tolerance, name=f"step {step}: output")
        if not way.in_backward:
            _compare(plain, model, step, way, gradients=True)
        for optimizer in optimizers[: 1 if way.in_backward else 2]:
            optimizer.step()
            optimizer.zero_grad()
        _compare(plain, model, step, way, gradients=False)


def _copy_from(plain: nn.Module, model: nn.Module) -> None:
    """Copies to the plain model the values that a gather would return."""
    with torch.no_grad():
        for whole, param in zip(plain.parameters(), model.parameters(), strict=True):
            own: Tensor = param.to_local()  # type: ignore[attr-defined]
            times = -(-len(whole) // len(own))
            whole.copy_(torch.cat([own] * times)[: len(whole)])


def _compare(plain: nn.Module, model: nn.Module, step: int, way: Way, gradients: bool) -> None:
    for (name, whole), param in zip(plain.named_parameters(), model.parameters(), strict=True):
        value, expected = (param.grad, whole.grad) if gradients else (param, whole)
        assert value is not None, name
        assert expected is not None, name
        own = value.to_local()  # type: ignore[attr-defined]
        what = f"step {step}: {name}{'.grad' * gradients}"
        own, expected = own.detach().to(expected.device), expected.detach()[: len(own)]
        if way.coarse:
            error, largest = (own - expected).norm(), COARSE * float(expected.norm())
            assert_same(error, torch.zeros_like(error), rtol=0, atol=largest, name=f"norm of the error of {what}")
        else:
            assert_same(own, expected, **way.tolerance, name=what)


def main(kind: str) -> int:
    failed = []
    for world in WORLDS:
        for name in ways_in(world):
            try:
                run(kind, world, name)
                outcome = "as the plain model"
            except Exception as error:  # the next way may be right
                traceback.print_exc()
                failed.append(f"{world}, {name}")
                outcome = f"FAILED: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
            print(f"{world}, {name}: {outcome}", flush=True)
    print(f"{len(failed)} failed{': ' * bool(failed)}{'; '.join(failed)}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
