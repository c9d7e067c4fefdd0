"""Counts the machine instructions of one training step: what times on a shared machine can't tell apart.

    python -m benchmarks.instructions              needs valgrind; about 8 minutes a world size on two cores

A step runs under valgrind's callgrind, with ATen's generic kernels (valgrind knows no AVX-512). What it costs is the
difference of two runs that differ in their number of steps alone, so imports and set-up drop out. The number repeats
to about 0.1 %, however busy the machine is. Instructions are not time: waiting for memory does not count.
"""

import argparse
import datetime
import gc
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from .libraries import load_library
from .models import PRECISIONS, Shape, build_plain, build_sharded, make_batch, run_step
from .quiet_group import start_quiet_group
from .report import describe_machine

HERE = Path(__file__).resolve().parent
SHAPE = Shape(blocks=8, dim=8, hidden=16, tokens=4)
FEW, MANY, WARMUP = 2, 22, 4
LIBRARIES = ("plain", "torch", "fsdp2")


def train(library: str, world_size: int, precision: str, steps: int) -> None:
    """What valgrind watches."""
    from torch.distributed.device_mesh import init_device_mesh

    torch.set_num_threads(1)
    start_quiet_group(world_size)
    if library == "plain":
        model = build_plain(SHAPE, precision)
    else:
        mesh = init_device_mesh("cpu", (world_size,))
        model = build_sharded(SHAPE, precision, load_library(library), mesh)
    batch = make_batch(SHAPE, precision)
    gc.disable()
    for _ in range(WARMUP + steps):
        run_step(model, batch)
    os._exit(0)  # without the instructions of taking everything down


def count(library: str, world_size: int, precision: str, steps: int) -> int:
    script = [sys.executable, "-m", __spec__.name, "--train", library, str(world_size), precision, str(steps)]
    command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", *script]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "ATEN_CPU_CAPABILITY": "default"}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=HERE.parent)
    for line in finished.stderr.splitlines():
        if "Collected :" in line:
            return int(line.split()[-1])
    raise SystemExit(f"{' '.join(command)} failed:\n{finished.stderr[-2000:]}")


def per_group(library: str, world_size: int, precision: str) -> float:
    many, few = (count(library, world_size, precision, steps) for steps in (MANY, FEW))
    return (many - few) / (MANY - FEW) / SHAPE.groups


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, nargs="+", default=[8, 64, 512], help="sizes of the fake process group")
    parser.add_argument("--train", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        library, world_size, precision, steps = arguments.train
        train(library, int(world_size), precision, int(steps))
    cases = [
        (library, world, precision) for world in arguments.world for precision in PRECISIONS for library in LIBRARIES
    ]
    with ThreadPoolExecutor(2) as pool:
        counted = dict(zip(cases, pool.map(lambda case: per_group(*case), cases), strict=True))
    lines = [f"# Instructions per group and step, {datetime.date.today().isoformat()}", ""]
    lines += [f"- {fact}" for fact in describe_machine()]
    lines += [f"- {SHAPE}, N ranks of which one runs, `python -m benchmarks.instructions`", ""]
    lines += ["| N | thousands, above the plain model | fsdp2 | torch | fsdp2 / torch |", "|---|---|---|---|---|"]
    for world in arguments.world:
        for precision in PRECISIONS:
            plain, theirs, ours = (counted[library, world, precision] / 1e3 for library in LIBRARIES)
            row = (world, precision, f"{ours - plain:.0f}", f"{theirs - plain:.0f}")
            lines.append(f"| {' | '.join(map(str, row))} | {(ours - plain) / (theirs - plain):.3f}x |")
    report = "\n".join([*lines, "", *(__doc__ or "").strip().splitlines()[4:], ""])
    (HERE / "results" / f"{datetime.date.today().isoformat()}-instructions.md").write_text(report)
    print(report)


if __name__ == "__main__":
    main()
