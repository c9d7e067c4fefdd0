"""Runs a few steps of a model on the phantom, and keeps the calls of one of them with the host's times:

    python -m benchmarks.phantom.run -m benchmarks.phantom.record \\
        --out FOLDER [--model 1B] [--ranks 8] [--tokens 4096] ... [LIBRARY ...]

Each library has a process of its own, and they take turns at the steps that are logged. The time between two calls of a
thread is the CPU time that the thread took, and the least of all steps that made the same calls: what else the machine
did does not count. Where the thread changes, it is the least time by the clock. Before each logged step, one is taken
without a log, whose CPU time is kept.
"""

import argparse
import ctypes
import gc
import importlib
import json
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from benchmarks import recipe
from benchmarks.turns import run_in_turns, take_turn

from . import models, stages, timeline

ABOUT = (
    *("model", "layers", "tokens", "rows", "ranks", "replicas", "fp32", "reduce_bf16", "wire_bf16", "offload", "keep"),
    *("reshard", "checkpoint", "shard_dim", "optimizer", "prepare", "blocks"),
    *(
        "wrapping",
        "clip",
        "vocab_parallel_embedding",
        "overlap_with_forward",
        "budget_mib",
        "micro_batches",
        "keep_all",
        "schedule",
        "pipeline",
        "place",
        "ends",
    ),
)
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
    add(
        "--wire-bf16", action="store_true", help="send gradients in bf16, and sum them in the reduce dtype: fsdp2 alone"
    )
    add("--offload", action="store_true")
    add("--keep", action="store_true", help="reshard_after_forward=False")
    add("--reshard", type=int, default=0, help="reshard_after_forward: so many ranks hold the parameters together")
    add("--shard-dim", type=int, default=0, help="the dimension by which experts are sharded")
    add(
        "--wrapping",
        default="blocks",
        choices=["blocks", "protocol"],
        help="groups are blocks and root, or those of benchmarks/PROTOCOL.md",
    )
    add("--blocks", type=int, default=1, help="up to so many blocks are one call: 1, 2, 4, ... (--wrapping blocks)")
    add(
        "--vocab-parallel-embedding",
        action="store_true",
        help="look rows of the embedding up at their owners: fsdp2 alone",
    )
    add("--checkpoint", action="store_true", help="compute blocks again in backward")
    add("--optimizer", action="store_true", help="fused AdamW")
    add("--clip", action="store_true", help="clip the gradients")
    add(
        "--overlap-with-forward", action="store_true", help="it is flat, and steps during the next forward: fsdp2 alone"
    )
    add("--budget-mib", type=int, default=0, help="set_unsharded_budget: fsdp2 alone")
    add("--micro-batches", type=int, default=1, help="forwards and backwards of a step")
    add(
        "--keep-all",
        action="store_true",
        help="reshard_after_forward=False, and set_reshard_after_backward(False) but for the last micro-batch",
    )
    add("--schedule", default="", help="a schedule of torch's pipelining, as 1F1B: trains one rank's stages")
    add("--pipeline", type=int, default=4, help="ranks of the pipeline")
    add("--place", type=int, default=0, help="which of them it is")
    add("--ends", default="0,0", help="embedding and head count as so many blocks when stages are cut, as 2,4")
    add("--all-places", action="store_true", help="records all of them, each in a folder OUT/PLACE")
    add("--steps", type=int, default=9, help="steps that are logged")
    add("--prepare", default="", help="Python that runs first, to change settings of a library")


def start(args: argparse.Namespace) -> Any:
    """Begins the process group, and returns the mesh."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.cuda.set_device(0)
    size, device = args.ranks * args.replicas, torch.device("cuda", 0)
    os.environ["TORCH_NCCL_RANKS_PER_ROOT"] = str(size)  # else rank 128, which isn't there, would also make an id
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=size, device_id=device)
    if args.replicas > 1:
        return dist.init_device_mesh("cuda", (args.replicas, args.ranks), mesh_dim_names=("replicate", "shard"))
    return dist.init_device_mesh("cuda", (args.ranks,))


def build(library: str, args: argparse.Namespace, mesh: Any) -> tuple[nn.Module, models.Shape]:
    """Returns the model, or a list of this rank's stages of it, and the shape of the model."""
    model, shape = models.make(args.model, args.layers)
    model.checkpoints = args.checkpoint
    own = stages.cut(model, args) if args.schedule else []
    for each in own or [model]:
        shard(library, each, args, mesh)
    whole: nn.Module = nn.ModuleList(own) if own else model
    whole.to_empty(device="cpu" if args.offload and library != "plain" else torch.device("cuda", 0))
    models.tie(whole)
    if args.offload:  # CPU arithmetic is real here
        for param in whole.parameters():
            (param.to_local() if isinstance(param, DTensor) else param).data.zero_()
    return whole, shape


def shard(library: str, model: Any, args: argparse.Namespace, mesh: Any) -> None:
    """Shards a model, or one stage of it."""
    if library == "plain":
        if not args.fp32:
            model.bfloat16()
        return
    module = importlib.import_module(recipe.MODULES[library])
    options: dict[str, Any] = {"mesh": mesh}
    if not args.fp32:
        reduce_dtype = torch.bfloat16 if args.reduce_bf16 else torch.float32
        codecs = importlib.import_module("fsdp2.compression")
        wire = {"compression": codecs.Compression(reduce_scatter=torch.bfloat16)} if args.wire_bf16 else {}
        options["mp_policy"] = module.MixedPrecisionPolicy(torch.bfloat16, reduce_dtype, **wire)
    if args.keep:
        options["reshard_after_forward"] = False
    if args.reshard:
        options["reshard_after_forward"] = args.reshard
    if args.shard_dim:
        options["shard_placement_fn"] = lambda param: Shard(args.shard_dim) if param.ndim == 3 else None
    if args.offload:
        options["offload_policy"] = module.CPUOffloadPolicy(pin_memory=True)
    if args.vocab_parallel_embedding and library == "fsdp2":
        of_rows = {name: options[name] for name in ("mesh", "mp_policy") if name in options}
        importlib.import_module("benchmarks.phantom.without_numbers").send_rows_evenly()
        module.vocab_parallel_embedding(model.embedding, **of_rows)
    if args.wrapping == "protocol":
        sharded: Any = recipe.shard(library, model, **options)
    else:
        sharded = recipe.shard_blocks(module, model, _together([*model.blocks], args.blocks), **options)
    if args.keep_all:
        sharded.set_reshard_after_forward(False)
    if args.budget_mib and library == "fsdp2":
        sharded.set_unsharded_budget(args.budget_mib * 2**20)


def _together(units: list[nn.Module], most: int) -> Iterator[Any]:
    """Yields what the calls of `fully_shard` get: few blocks at first."""
    first, size = 0, 1
    while first < len(units):
        yield units[first] if size == 1 else units[first : first + size]
        first += size
        size = min(most, first + 1)


def run_pipeline_step(model: Any, run: Callable[[], object], change: Any, mark: Any) -> None:
    """Runs one step of a pipeline, without an optimizer."""
    mark(b"forward")
    run()
    mark(b"optimizer")
    if change is not None:
        change()
    model.zero_grad(set_to_none=True)
    mark(b"end")


def run_step(
    model: Any,
    ids: torch.Tensor,
    optimizer: Any,
    clip: Any,
    mark: Any,
    micro_batches: int = 1,
    keep_all: bool = False,
    change: Any = None,
) -> None:
    for i in range(micro_batches):
        if keep_all:
            model.set_reshard_after_backward(i == micro_batches - 1)
        mark(b"forward")
        loss = F.cross_entropy(model(ids).float().flatten(0, 1), ids.flatten())
        mark(b"backward")
        loss.backward()
        del loss
    mark(b"optimizer")
    if clip is not None:
        clip(model.parameters(), 1.0)
    if optimizer is not None:
        optimizer.step()
    elif change is not None:
        change()
    model.zero_grad(set_to_none=True)
    mark(b"end")


def _count_a_write(model: nn.Module, args: argparse.Namespace) -> Callable[[], object] | None:
    """Returns a function that stands for an optimizer's step, where weights may stay unsharded until there is one: it
    launches nothing, and says that all parameters have changed.
    """
    locals_ = [param.to_local() if isinstance(param, DTensor) else param.data for param in model.parameters()]
    return (lambda: torch.autograd.graph.increment_version(locals_)) if args.budget_mib else None


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


class _Comm(ctypes.Structure):
    """A communicator of the stub library."""

    _fields_ = (("rank", ctypes.c_int), ("ranks", ctypes.c_int), ("id", ctypes.c_int))


def find_communicators() -> dict[int, list[int]]:
    """Returns id -> global ranks of all communicators that there are, and tells the stub library how many these are.

    Of one that is split off another, only the ranks that are not there would know it.
    """
    found = {}
    device = torch.device("cuda", 0)
    for group, ranks in dist.distributed_c10d._world.pg_group_ranks.items():
        is_member = isinstance(group, dist.ProcessGroup) and dist.get_backend(group) == "nccl"
        if is_member and (address := group._get_backend(device)._comm_ptr()):
            comm = _Comm.from_address(address)
            comm.ranks = len(ranks)
            found[comm.id] = sorted(ranks)
    return found


def record(library: str, args: argparse.Namespace, mesh: Any, turn: Callable[[], object]) -> dict[str, Any]:
    """Trains and logs. It calls `turn` before each step that is measured."""
    if args.schedule and library == "fsdp2":
        importlib.import_module("fsdp2").patch_torch()  # torch's schedules then know its stages
    model, shape = build(library, args, mesh)
    optimizer: Any = None
    if args.optimizer:
        importlib.import_module("benchmarks.phantom.without_numbers").try_optimizers_on_cpu()
        optimizer = recipe.make_optimizer(library, model)
    if args.overlap_with_forward and library == "fsdp2":
        optimizer = importlib.import_module("benchmarks.cuda_wrapping").step_with_overlap(optimizer)
    ids = models.make_ids(shape, args.rows, args.tokens)
    clip, change = recipe.clip_function(library) if args.clip else None, _count_a_write(model, args)
    passes = {"micro_batches": args.micro_batches, "keep_all": args.keep_all, "change": change}
    take_step = partial(run_step, model, ids, optimizer, clip, **passes)
    if args.schedule:
        take_step = partial(run_pipeline_step, model, stages.prepare([*model], shape, ids, args), change)
    for _ in range(3):
        take_step(_mark_nothing)
    gc.collect()
    torch.cuda.empty_cache()
    resting = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        take_step(_mark_nothing)
    memory = {
        "resting": resting,
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "retries": torch.cuda.memory_stats()["num_alloc_retries"],
    }
    comms = find_communicators()
    steps, counts, cpu_ms = [], {}, []
    with tempfile.NamedTemporaryFile(suffix=".txt") as file:
        for _ in range(args.steps):
            turn()
            gc.collect()
            runtime.phantom_reset(0)
            begin = time.process_time()
            take_step(_mark_nothing)
            cpu_ms.append((time.process_time() - begin) * 1e3)
            gc.collect()
            before: list[Call] = []
            if args.overlap_with_forward:  # forward waits for what this step issues
                runtime.phantom_reset(1)
                take_step(runtime.phantom_mark)
                runtime.phantom_dump(file.name.encode())
                before = of_host(read_log(file.name)[1])
            runtime.phantom_reset(1)
            take_step(runtime.phantom_mark)
            runtime.phantom_dump(file.name.encode())
            runtime.phantom_reset(0)
            counts, calls = read_log(file.name)
            steps.append(of_host(calls))
            if before:
                timeline.link_events(before, steps[-1])
    calls, same = merge(steps)
    del model, optimizer, ids, take_step, passes, change
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    memory["left"] = torch.cuda.memory_allocated()
    return {
        "library": library,
        "about": {name: getattr(args, name) for name in ABOUT},
        "comms": comms,
        "memory": memory,
        "counts": counts,
        "same": same,
        "host_ms": [(step[-1][0] - step[0][0]) / 1e6 for step in steps],
        "cpu_ms": cpu_ms,
        "calls": calls,
    }


# ---- a process for each library


def options_of(args: argparse.Namespace) -> list[str]:
    """Returns the options of `add_arguments` that differ from their defaults, as they are written."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    written = []
    for name, default in vars(parser.parse_args([])).items():
        value, option = getattr(args, name), "--" + name.replace("_", "-")
        if value != default:
            written += [option] if value is True else [option, str(value)]
    return written


def record_all(args: argparse.Namespace, libraries: Sequence[str], out: pathlib.Path) -> dict[str, dict[str, Any]]:
    """Writes `out`/LIBRARY.json for each library, and returns the contents by library.

    With `--all-places` it writes `out`/PLACE/LIBRARY.json, and returns the contents for the first place.

    Raises:
        RuntimeError: a process has failed. It has written why to stderr.
    """
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-W", "ignore", "-m", __spec__.name, *options_of(args), "--turns", "--out", str(out)]
    run_in_turns({library: [*command, library] for library in libraries})
    first = out / "0" if args.all_places else out
    return {library: json.loads((first / f"{library}.json").read_text()) for library in libraries}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="folder for LIBRARY.json")
    parser.add_argument("--turns", action="store_true", help=argparse.SUPPRESS)  # is one of these processes
    parser.add_argument("libraries", nargs="*", default=["plain", "fsdp2", "torch"])
    args = parser.parse_intermixed_args()
    if args.turns:
        mesh = start(args)
        exec(args.prepare, {})
        (library,) = args.libraries
        for place in range(args.pipeline) if args.all_places else [args.place]:
            args.place = place
            folder = args.out / str(place) if args.all_places else args.out
            folder.mkdir(exist_ok=True)
            (folder / f"{library}.json").write_text(json.dumps(record(library, args, mesh, take_turn)))
        os._exit(0)  # no other rank takes part in the end of the process group
    for library, result in record_all(args, args.libraries, args.out).items():
        memory = {what: round(nbytes / 2**30, 3) for what, nbytes in result["memory"].items()}
        merged, spans = result["calls"][-1][0] / 1e6, " ".join(f"{span:.1f}" for span in result["host_ms"])
        same = f"same calls in {result['same']} of {args.steps} steps"
        print(f"{library} {memory}, {same}, host ms: {merged:.1f} merged, {spans}", flush=True)


if __name__ == "__main__":
    main()
