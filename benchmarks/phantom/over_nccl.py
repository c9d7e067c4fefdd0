"""Trains in many ways as rank 0 of eight over torch's ProcessGroupNCCL, whose checks of dtypes, of contiguity, of
grouped calls and of communicators are real:

    python -m benchmarks.phantom.run -m benchmarks.phantom.over_nccl [--json FILE] [WAY ...]

FILE gets the counts of the last step of each way, and the bytes that its deleted model leaves.
"""

import argparse
import gc
import json
import os
import tempfile
import time
import traceback
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import one_of_many
from cut_gradients import small_pieces
from fsdp2 import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from fsdp2.compression import Compression
from models import TinyGPT, mean_loss
from one_of_many import WAYS, Way

from . import compare, record

RANKS = 8
BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
FP16 = MixedPrecisionPolicy(torch.float16, torch.float32)


def in_registered_memory(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_allocate_memory_from_process_group_for_comm(True)


MORE: dict[str, Way] = {
    "sent in bf16": Way(
        {
            "mp_policy": MixedPrecisionPolicy(
                torch.bfloat16, torch.float32, compression=Compression(reduce_scatter=torch.bfloat16)
            )
        }
    ),
    "reduced in bf16": Way({"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)}),
    "fp16": Way({"mp_policy": FP16}),
    "fp16, reduced in fp16": Way({"mp_policy": MixedPrecisionPolicy(torch.float16, torch.float16)}),
    "resharded to four": Way({"reshard_after_forward": 4}),
    "divided by 3": Way(after=lambda model: model.set_gradient_divide_factor(3.0)),
    "only sums": Way(after=lambda model: model.set_force_sum_reduction_for_comms(True)),
    "a group for reductions": Way(after=lambda model: model.set_separate_reduce_scatter_group()),
    "registered memory": Way({"mp_policy": BF16}, after=in_registered_memory),
    "registered memory, fp32": Way(after=in_registered_memory),
    "registered memory, HSDP": Way({"reshard_after_forward": False}, mesh=(2, 4), after=in_registered_memory),
    "offloaded, fp16": Way({"offload_policy": CPUOffloadPolicy(), "mp_policy": FP16}),
}
# Ranks would reach consensus by an all-reduce, of which the host reads numbers that no other rank has sent.
IMPOSSIBLE = {"conditional"}


def build(way: Way) -> Any:
    """Returns the sharded model."""
    model = TinyGPT(dim=96, depth=3)
    way.prepare(model)
    axes = ("replicate", "shard") if way.mesh else ("shard",)
    mesh = init_device_mesh("cuda", way.mesh or (RANKS,), mesh_dim_names=axes)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **way.options)
    sharded = fully_shard(model, mesh=mesh, **way.options)
    way.after(sharded)
    return sharded


def train(way: Way) -> tuple["weakref.ref[nn.Module]", dict[str, Any]]:
    """Takes three steps with AdamW. Nothing is compared: no other rank sends anything.

    Returns:
        The model, and the calls of the last step and the peaks, as `record.record` returns them.
    """
    sharded = build(way)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3, foreach=True)
    if way.in_backward:
        sharded.set_optimizer_in_backward(optimizer)
    batches = [sharded.example(rows=2, seed=step).cuda() for step in range(one_of_many.STEPS)]
    for step, batch in enumerate(batches):
        if step == one_of_many.STEPS - 1:
            gc.collect()
            resting = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            record.runtime.phantom_reset(1)
            record.runtime.phantom_mark(b"forward")
        for i in range(way.micro_batches):
            sharded.set_requires_gradient_sync(i == way.micro_batches - 1)
            mean_loss(sharded(batch)).backward()
        if way.evaluates:
            with torch.no_grad():
                sharded(batch)
        _check_gradients(sharded, way)
        if not way.in_backward:
            optimizer.step()
        optimizer.zero_grad()
    with tempfile.NamedTemporaryFile(suffix=".txt") as file:
        record.runtime.phantom_dump(file.name.encode())
        record.runtime.phantom_reset(0)
        counts, calls = record.read_log(file.name)
    memory = {
        "resting": resting,
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }
    return weakref.ref(sharded), {"counts": counts, "calls": record.of_host(calls), "memory": memory}


def bytes_left(model: "weakref.ref[nn.Module]") -> int:
    """Returns what stays on the device of a deleted model."""
    for _ in range(20):  # autograd's thread of the device holds the last graph for some milliseconds
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        if model() is None and not torch.cuda.memory_allocated():
            break
        time.sleep(0.05)
    if model() is not None:
        raise AssertionError("the deleted model is alive")
    return torch.cuda.memory_allocated()


def _check_gradients(model: nn.Module, way: Way) -> None:
    for name, param in model.named_parameters():
        if not way.in_backward and param.grad is None:
            raise AssertionError(f"{name} has no gradient")
        local: Tensor = param.to_local()  # type: ignore[attr-defined]
        wanted = "cpu" if "offload_policy" in way.options else "cuda"
        if local.device.type != wanted:
            raise AssertionError(f"{name}: expected a shard on {wanted}, got {local.device}")


def main() -> int:
    ways = {name: way for name, way in {**WAYS, **MORE}.items() if name not in IMPOSSIBLE}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("ways", nargs="*", default=[*ways])
    args = parser.parse_args()
    failed, counted = [], {}
    for name in args.ways:
        way = ways[name]
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=RANKS)
        try:
            beside = torch.cuda.stream(torch.cuda.Stream()) if way.beside else nullcontext()
            with beside, small_pieces() if way.in_pieces else nullcontext():
                model, result = train(way)
            result["memory"]["left"] = bytes_left(model)
            counted[name] = compare.count(result)
            outcome = "ran" if not result["memory"]["left"] else f"FAILED: {result['memory']['left']} bytes are left"
        except Exception as error:  # the next way may run
            traceback.print_exc()
            outcome = f"FAILED: {type(error).__name__}: {error}"
        if outcome != "ran":
            failed.append(name)
        dist.destroy_process_group()
        print(f"{name}: {outcome}", flush=True)
    print(f"{len(failed)} failed{': ' * bool(failed)}{'; '.join(failed)}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(counted))
    return 1 if failed else 0


if __name__ == "__main__":
    os._exit(main())
