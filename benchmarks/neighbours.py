"""Counts what a process pays for fsdp2 where it does not use it: the machine instructions of code on plain tensors, of
torch's FSDP2 and of other DTensors on the mesh of sharded parameters, before and after the first `fully_shard`.

    python -m benchmarks.neighbours                needs valgrind; about 3 minutes
"""

import argparse
import copy
import datetime
import gc
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as fully_shard_of_torch
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from .instructions import HERE, read_counts, run_watched, watch
from .quiet_group import start_quiet_group
from .report import Row, describe_machine, format_table
from .timing import repeat

WARMUP, STEPS = 4, 3
DIM, LAYERS = 16, 72  # 144 parameters


def build_programs(mesh: DeviceMesh) -> dict[str, Callable[[], object]]:
    """Returns the programs, each of which has its own tensors."""
    model = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(LAYERS)))
    batch = torch.ones(4, DIM)
    model(batch).sum().backward()
    adam, sgd = torch.optim.AdamW(model.parameters(), foreach=True), torch.optim.SGD(model.parameters(), foreach=False)
    parallel = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    plan = {str(i): ColwiseParallel() if i % 2 == 0 else RowwiseParallel() for i in range(8)}
    parallelize_module(parallel, mesh, plan)
    inputs = torch.ones(4, 64)
    parallel(inputs).sum().backward()
    parallel_adam = torch.optim.AdamW(parallel.parameters(), foreach=True)
    of_torch = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(LAYERS)))
    fully_shard_of_torch(of_torch, mesh=mesh)
    of_torch(batch).sum().backward()
    adam_of_torch = torch.optim.AdamW(of_torch.parameters(), foreach=True)
    matrix = distribute_tensor(torch.ones(64, 64), mesh, [Shard(0)], src_data_rank=None)

    def operate() -> None:
        with torch.no_grad():
            for _ in range(20):
                matrix.mul_(0.5).add_(matrix)
                (matrix * 2 + matrix).view(64, 8, 8).sum((1, 2)).detach()
                matrix.t()
                matrix[:, :8]
                matrix.to_local()

    return {
        "AdamW(foreach=True).step(), 144 plain parameters": adam.step,
        "SGD(foreach=False).step(), 144 plain parameters": sgd.step,
        "backward of 72 plain layers, and the forward": lambda: model(batch).sum().backward(),
        "copy.deepcopy of a plain module": lambda: copy.deepcopy(model),
        "clip_grad_norm_, 144 plain parameters": lambda: nn.utils.clip_grad_norm_(model.parameters(), 1e9),
        "clip_grad_norm_ of torch's FSDP2": lambda: nn.utils.clip_grad_norm_(of_torch.parameters(), 1e9),
        "AdamW(foreach=True).step() of torch's FSDP2": adam_of_torch.step,
        "a step of 8 layers under tensor parallelism": lambda: parallel(inputs).sum().backward(),
        "AdamW(foreach=True).step() of these layers": parallel_adam.step,
        "copy.deepcopy of these layers": lambda: copy.deepcopy(parallel),
        "180 operations on a DTensor": operate,
    }


def train() -> None:
    """Is the program that valgrind runs. It prints a label for each count, in order."""
    torch.set_num_threads(1)
    gc.disable()
    start_quiet_group(4)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    programs = build_programs(mesh)
    for when in ("first", "before", "behind"):  # the first two tell what a difference means
        if when == "behind":
            from fsdp2 import fully_shard

            kept = fully_shard(nn.Linear(DIM, DIM), mesh=mesh)
            kept(torch.ones(2, DIM)).sum().backward()
        for label, program in programs.items():
            repeat(WARMUP, program)
            watch(partial(repeat, STEPS, program), label, when, STEPS)
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.neighbours", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the dated report")
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train()
    if not shutil.which("valgrind"):
        raise SystemExit("needs valgrind")
    with run_watched([sys.executable, "-m", "benchmarks.neighbours", "--train"]) as (labels, folder):
        counts = read_counts(labels, folder)
    rows = [Row("neighbours", "thousand instructions", label, values) for label, values in counts.items()]
    lines = [f"# What other code pays for fsdp2, {datetime.date.today().isoformat()}", ""]
    lines += [*(f"- {fact}" for fact in describe_machine()), "- command `python -m benchmarks.neighbours`", ""]
    lines += [format_table(rows, ["behind", "before", "first"]), "", *(__doc__ or "").splitlines()[:2], ""]
    report = "\n".join(lines)
    (arguments.out / f"{datetime.date.today().isoformat()}-neighbours.md").write_text(report)
    print(report)


if __name__ == "__main__":
    main()
