"""Counts the machine instructions of one training step, and of the start.

    python -m benchmarks.instructions              needs valgrind; about 5 minutes on two cores

Times on a shared machine can't show small differences. Steps run under valgrind's callgrind, with ATen's generic
kernels (valgrind does not support AVX-512). The counts, without the plain model's, repeat to about 1 %, whatever the
load of the machine. Instructions are not time: waits for memory do not count. `bare` is the plain model, `limit` that
of the host suite. The start is `fully_shard` on 16 blocks of 16 parameters and on the root, and the first forward; per
parameter, N=8: torch's grows with N.
"""

import argparse
import datetime
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from .host import HOST_SHAPES, build_steps
from .libraries import NAMES, Library, load_library
from .models import PRECISIONS, able, make_vectors
from .quiet_group import start_quiet_group
from .report import Row, describe_machine, format_table
from .timing import repeat
from .wrapping import LAYERS, Chain

HERE = Path(__file__).resolve().parent
WARMUP, STEPS = 4, 3  # at steps 1, 2, 4, 8, ... checks are due
START, START_WORLD, START_BLOCKS, START_DIM = "at the start", 8, 16, 16
# Callgrind counts while this function of the interpreter runs: the operator `@=`, which nothing else uses.
WATCHED = "PyNumber_InPlaceMatrixMultiply"


class Watched:
    """Calls a function by `watched @= call`."""

    def __imatmul__(self, call: Callable[[], object]) -> "Watched":
        call()
        return self


def train(precision: str, worlds: Sequence[int], names: Sequence[str]) -> None:
    """Is the program that valgrind runs. It prints a label for each count, in order."""
    torch.set_num_threads(1)
    gc.disable()
    libraries = able([load_library(name) for name in names], precision)
    for world_size in worlds:
        start_quiet_group(world_size)
        for label, shape in HOST_SHAPES.items():
            for name, step in build_steps(shape, precision, libraries).items():
                repeat(WARMUP, step)
                setting = f"N={world_size} {precision}, {label}"
                watch(partial(repeat, STEPS, step), setting, name, STEPS * shape.groups)
        dist.destroy_process_group()
    if precision == "fp32":
        watch_starts(libraries)
    os._exit(0)  # taking everything down would take minutes


def watch(call: Callable[[], object], setting: str, name: str, per: int) -> None:
    """Counts the instructions of `call`, which `name` runs in `setting`, and divides them by `per`."""
    watched = Watched()
    gc.collect()
    watched @= call
    print(json.dumps([setting, name, per]), flush=True)


def watch_starts(libraries: Sequence[Library]) -> None:
    start_quiet_group(START_WORLD)
    for name, start in build_starts(libraries).items():
        for _ in range(WARMUP):
            start()()
        watch(start(), f"N={START_WORLD} {START}", name, 2 * LAYERS * START_BLOCKS)


def build_starts(libraries: Sequence[Library]) -> dict[str, Callable[[], Callable[[], object]]]:
    """Returns, for each library and the "plain" model, a function that shards a new model and runs it for the first
    time.
    """
    mesh, batch = dist.init_device_mesh("cpu", (dist.get_world_size(),)), make_vectors(START_DIM)

    def start(shard: Callable[..., nn.Module] | None) -> Callable[[], object]:
        model = Chain(START_DIM, START_BLOCKS)
        return lambda: (model if shard is None else shard(model, mesh))(batch)

    shards = {library.name: library.shard for library in libraries}
    return {name: partial(start, shard) for name, shard in {**shards, "plain": None}.items()}


def count(precision: str, worlds: Sequence[int], names: Sequence[str]) -> Iterator[Row]:
    job = json.dumps([precision, worlds, names])
    with run_watched([sys.executable, "-m", __spec__.name, "--train", job]) as (labels, folder):
        counts = read_counts(labels, folder)
    return (make_row(setting, values) for setting, values in counts.items())


@contextmanager
def run_watched(program: Sequence[str]) -> Iterator[tuple[list[str], Path]]:
    """Runs `program` under valgrind. Yields what it printed, a label for each count, and the folder of the counts."""
    with tempfile.TemporaryDirectory() as folder:
        toggle = [f"--toggle-collect={WATCHED}", f"--dump-after={WATCHED}", "--collect-atstart=no"]
        command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={folder}/counts", *toggle, *program]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "ATEN_CPU_CAPABILITY": "default"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=HERE.parent)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
        yield done.stdout.splitlines(), Path(folder)


def read_counts(labels: Sequence[str], folder: Path) -> dict[str, dict[str, float]]:
    """Returns setting -> name -> thousand instructions of one."""
    counts: dict[str, dict[str, float]] = {}
    for index, line in enumerate(labels, start=1):
        setting, name, per = json.loads(line)
        counts.setdefault(setting, {})[name] = total(folder / f"counts.{index}") / per / 1e3
    return counts


def total(dump: Path) -> int:
    """Returns the number of instructions in one of callgrind's files."""
    (line,) = (line for line in dump.read_text().splitlines() if line.startswith("totals:"))
    return int(line.split()[1])


def make_row(setting: str, values: Mapping[str, float]) -> Row:
    above = {name: value - values["plain"] for name, value in values.items() if name not in ("plain", "floor")}
    what = "thousand instructions per " + ("parameter" if setting.endswith(START) else "group and step")
    return Row("instructions", what, setting, above, bare=values["plain"], limit=values.get("floor"))


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.instructions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--worlds", type=int, nargs="+", default=[64], help="sizes of the fake process group")
    names = ["fsdp2", "torch", "fsdp1", "ddp"]
    parser.add_argument("--libraries", nargs="+", default=names, metavar="NAME", help=", ".join(NAMES))
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the dated report")
    parser.add_argument("--train", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train(*arguments.train)
    if not shutil.which("valgrind"):
        raise SystemExit("needs valgrind")
    with ThreadPoolExecutor(len(PRECISIONS)) as pool:
        count_precision = partial(count, worlds=arguments.worlds, names=arguments.libraries)
        rows = [row for of_precision in pool.map(count_precision, PRECISIONS) for row in of_precision]
    command = " ".join(["python -m benchmarks.instructions", *sys.argv[1:]])
    lines = [f"# Instructions per group and step, {datetime.date.today().isoformat()}", ""]
    lines += [*(f"- {fact}" for fact in describe_machine()), f"- command `{command}`", ""]
    lines += [format_table(rows, arguments.libraries), "", *(__doc__ or "").splitlines()[4:], ""]
    report = "\n".join(lines)
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / f"{datetime.date.today().isoformat()}-instructions.md").write_text(report)
    print(report)


if __name__ == "__main__":
    main()
