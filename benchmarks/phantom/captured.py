"""Captures whole steps (forward, backward, clipping, AdamW) into CUDA graphs as rank 0 of eight over ProcessGroupNCCL,
in many ways, and prints a line for each: "captured", with the kernels and collectives in the graph, or the error:

    python -m benchmarks.phantom.run -m benchmarks.phantom.captured [WAY ...]

The phantom refuses what CUDA refuses while it captures: waits of the host, queries of events, allocations by the driver
in a thread that captures, dependencies on work outside the graph, and streams that do not join again. Each way runs in
a process of its own, because a capture that fails leaves torch's random generators in it.
"""

import argparse
import multiprocessing
import tempfile
import warnings
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fsdp2
from cut_gradients import small_pieces
from models import TinyGPT, mean_loss
from one_of_many import WAYS, Way

from . import record
from .over_nccl import IMPOSSIBLE, MORE, RANKS

WARM_UP = 4


def _step(model: Any, optimizer: torch.optim.Optimizer | None, batch: torch.Tensor) -> None:
    mean_loss(model(batch)).backward()
    if optimizer is not None:
        fsdp2.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def capture(way: Way) -> dict[str, int]:
    """Returns how many kernels and collectives the graph of a step has.

    Raises:
        Exception: CUDA would refuse a call in it, or fsdp2 does.
    """
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=RANKS)
    torch.manual_seed(0)
    model: Any = TinyGPT(dim=96, depth=3)
    way.prepare(model)
    axes = ("replicate", "shard") if way.mesh else ("shard",)
    mesh = init_device_mesh("cuda", way.mesh or (RANKS,), mesh_dim_names=axes)
    for block in model.blocks:
        fsdp2.fully_shard(block, mesh=mesh, **way.options)
    fsdp2.fully_shard(model, mesh=mesh, **way.options)
    way.after(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable="offload_policy" not in way.options)
    if way.flat:
        fsdp2.flatten_optimizer(optimizer)
    if way.in_backward:
        model.set_optimizer_in_backward(optimizer)
    step = partial(_step, model, None if way.in_backward else optimizer, model.example(rows=2, seed=0).cuda())
    for _ in range(WARM_UP):
        step()
    graph = torch.cuda.CUDAGraph()
    record.runtime.phantom_reset(1)
    with torch.cuda.graph(graph):
        step()
    with tempfile.NamedTemporaryFile(suffix=".txt") as file:
        record.runtime.phantom_dump(file.name.encode())
        counts, _ = record.read_log(file.name)
    graph.replay()
    step()  # eager steps go on
    collectives = sum(count for name, count in counts.items() if name.startswith("nccl") and "Group" not in name)
    return {"kernels": counts["kernel"], "collectives": collectives}


def _tell(name: str, way: Way, pipe: Any) -> None:
    warnings.simplefilter("ignore")
    try:
        with small_pieces() if way.in_pieces else nullcontext():
            found = capture(way)
        pipe.send("captured, " + ", ".join(f"{count} {what}" for what, count in found.items()))
    except Exception as error:  # the next way may be captured
        cause = error
        while cause.__context__ is not None:
            cause = cause.__context__  # the end of a capture fails, too
        pipe.send(f"{type(cause).__name__}: {str(cause).splitlines()[0]}")


def capture_all(names: list[str]) -> dict[str, str]:
    """Returns way -> what became of it."""
    ways = {name: way for name, way in (WAYS | MORE).items() if name not in IMPOSSIBLE and way.micro_batches == 1}
    found = {}
    for name in names or ways:
        ours, theirs = multiprocessing.Pipe()
        child = multiprocessing.get_context("fork").Process(target=_tell, args=(name, ways[name], theirs), daemon=True)
        child.start()
        theirs.close()
        try:
            found[name] = ours.recv() if ours.poll(60) else "hangs"
        except EOFError:
            child.join()
            found[name] = f"the process ended with {child.exitcode}"
        child.kill()
        print(f"{name}: {found[name]}", flush=True)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser("benchmarks.phantom.captured")
    parser.add_argument("ways", nargs="*")
    capture_all(parser.parse_args().ways)
