"""Runs a few steps of a model on the phantom, and keeps the calls of one of them with the host's times:

    python -m phantom.run -m phantom.record --out FOLDER [--model 1B] [--ranks 8] [--tokens 4096] ... [LIBRARY ...]

Several steps are logged. The time between two calls of a thread is the CPU time that the thread took, and the least of
all steps that made the same calls: what else the machine did does not count. Where the thread changes, it is the least
time by the clock.
"""

import argparse
import ctypes
import gc
import importlib
import json
import os
import pathlib
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from . import models

MODULES = {"fsdp2": "fsdp2", "torch": "torch.distributed.fsdp"}
ABOUT = ("model", "layers", "tokens", "rows", "ranks", "replicas", "fp32", "offload", "checkpoint", "prepare")
runtime = ctypes.CDLL("libcudart.so.13")
Call = list[Any]  # ns, thread, kind, stream, five numbers, name, CPU time of the thread in ns (while it is merged)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="1B", choices=list(models.SHAPES))
    add("--layers", type=int, default=0, help="0: all of the model")
    add("--tokens", type=int, default=4096)
    add("--rows", type=int, default=1)
    add("--ranks", type=int, default=8, help="that parameters are sharded over")
    add("--replicas", type=int, default=1, help="more than 1: HSDP")
    add("--fp32", action="store_true", help="instead of computing in bf16 and reducing in fp32")
    add("--reduce-bf16", action="store_true", help="reduce in bf16, too")
    add("--offload", action="store_true")
    add("--keep", action="store_true", help="reshard_after_forward=False")
    add("--checkpoint", action="store_true", help="compute blocks again in backward")
    add("--optimizer", action="store_true", help="fused AdamW")
    add("--steps", type=int, default=9, help="steps that are logged")
    add("--prepare", default="", help="Python that runs first, to change settings of a library")


def start(args: argparse.Namespace) -> Any:
    """Begins the process group, and returns the mesh."""
    os.environ["PHANTOM_SPLITS"] = f"{args.replicas},{args.ranks}" if args.replicas > 1 else ""
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.cuda.set_device(0)
    size, device = args.ranks * args.replicas, torch.device("cuda", 0)
    os.environ["TORCH_NCCL_RANKS_PER_ROOT"] = str(size)  # else rank 128, which isn't there, would also make an id
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=size, device_id=device)
    if args.replicas > 1:
        return dist.init_device_mesh("cuda", (args.replicas, args.ranks), mesh_dim_names=("replicate", "shard"))
    return dist.init_device_mesh("cuda", (args.ranks,))


def build(library: str, args: argparse.Namespace, mesh: Any) -> tuple[nn.Module, models.Shape]:
    model, shape = models.make(args.model, args.layers)
    model.checkpoints = args.checkpoint
    device = torch.device("cuda", 0)
    if library == "plain":
        model = model if args.fp32 else model.bfloat16()
    else:
        module = importlib.import_module(MODULES[library])
        options: dict[str, Any] = {"mesh": mesh}
        if not args.fp32:
            reduce_dtype = torch.bfloat16 if args.reduce_bf16 else torch.float32
            options["mp_policy"] = module.MixedPrecisionPolicy(torch.bfloat16, reduce_dtype)
        if args.keep:
            options["reshard_after_forward"] = False
        if args.offload:
            options["offload_policy"] = module.CPUOffloadPolicy(pin_memory=True)
            device = torch.device("cpu")
        for unit in models.units(model):
            module.fully_shard(unit, **options)
        module.fully_shard(model, **options)
    model.to_empty(device=device)
    if args.offload:  # CPU arithmetic is real here
        for param in model.parameters():
            (param.to_local() if isinstance(param, DTensor) else param).data.zero_()
    return model, shape


def run_step(model: nn.Module, ids: torch.Tensor, optimizer: Any, mark: Any) -> None:
    mark(b"forward")
    loss = F.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten())
    mark(b"backward")
    loss.backward()
    mark(b"optimizer")
    if optimizer is not None:
        optimizer.step()
    model.zero_grad(set_to_none=True)
    mark(b"end")


def _mark_nothing(name: bytes) -> None:
    pass


def read_log(path: str) -> tuple[dict[str, int], list[Call]]:
    counts, calls = {}, []
    with open(path) as file:
        for line in file:
            parts = line.rstrip("\n").split("\t")
            if parts[0] == "#count":
                counts[parts[1]] = int(parts[2])
            else:
                ns, cpu, thread, kind, *numbers, name = parts
                calls.append([int(ns), int(thread), kind, *map(int, numbers), name, int(cpu)])
    return counts, calls


HOST_ONLY = {
    "cudaEventQuery",
    "cudaEventCreate",
    "cudaStreamQuery",
    "cudaMalloc",
    "cudaFree",
    "cudaHostAlloc",
    "cudaFreeHost",
}


def of_host(calls: list[Call]) -> list[Call]:
    """Leaves out the threads that issue no work, as NCCL's watchdog, and calls that order nothing, whose number differs
    from step to step.
    """
    calls = [c for c in calls if c[2] not in HOST_ONLY]
    threads = {c[1] for c in calls if c[2] == "kernel" or c[2] == "mark"}
    return [c for c in calls if c[1] in threads]


def gap(before: Call, call: Call) -> int:
    by_clock = call[0] - before[0]
    return min(by_clock, call[10] - before[10]) if call[1] == before[1] else by_clock


def merge(steps: list[list[Call]]) -> tuple[list[Call], int]:
    """Returns one step, beginning at 0 ns, and how many made the same calls as it."""
    keys = [[(c[2], c[3], c[9]) for c in step] for step in steps]
    most = max(keys, key=keys.count)
    alike = [step for step, key in zip(steps, keys, strict=True) if key == most]
    out, now = [], 0
    for i, call in enumerate(alike[-1]):
        if i:
            now += min(gap(step[i - 1], step[i]) for step in alike)
        out.append([now, *call[1:10]])
    return out, len(alike)


def record(library: str, args: argparse.Namespace, mesh: Any) -> dict[str, Any]:
    model, shape = build(library, args, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True) if args.optimizer else None
    ids = torch.randint(shape.vocab, (args.rows, args.tokens)).cuda()
    for _ in range(3):
        run_step(model, ids, optimizer, _mark_nothing)
    gc.collect()
    torch.cuda.empty_cache()
    resting = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        run_step(model, ids, optimizer, _mark_nothing)
    memory = {
        "resting": resting,
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "retries": torch.cuda.memory_stats()["num_alloc_retries"],
    }
    steps, counts = [], {}
    with tempfile.NamedTemporaryFile(suffix=".txt") as file:
        for _ in range(args.steps):
            gc.collect()
            runtime.phantom_reset(1)
            run_step(model, ids, optimizer, runtime.phantom_mark)
            runtime.phantom_dump(file.name.encode())
            runtime.phantom_reset(0)
            counts, calls = read_log(file.name)
            steps.append(of_host(calls))
    calls, same = merge(steps)
    del model, optimizer, ids
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    memory["left"] = torch.cuda.memory_allocated()
    return {
        "library": library,
        "about": {name: getattr(args, name) for name in ABOUT},
        "memory": memory,
        "counts": counts,
        "same": same,
        "host_ms": [(step[-1][0] - step[0][0]) / 1e6 for step in steps],
        "calls": calls,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for LIBRARY.json")
    parser.add_argument("libraries", nargs="*", default=["plain", "fsdp2", "torch"])
    args = parser.parse_intermixed_args()
    mesh = start(args)
    exec(args.prepare, {})
    args.out.mkdir(parents=True, exist_ok=True)
    for library in args.libraries:
        result = record(library, args, mesh)
        (args.out / f"{library}.json").write_text(json.dumps(result))
        memory = {what: round(nbytes / 2**30, 3) for what, nbytes in result["memory"].items()}
        merged, spans = result["calls"][-1][0] / 1e6, " ".join(f"{span:.1f}" for span in result["host_ms"])
        same = f"same calls in {result['same']} of {args.steps} steps"
        print(f"{library} {memory}, {same}, host ms: {merged:.1f} merged, {spans}", flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # no other rank takes part in the end of the process group
