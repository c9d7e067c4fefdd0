"""Does on the phantom what the parts `calls` and `protocol` of a session on a GPU do, to compare calls and memory:

    python -m benchmarks.phantom.run -m benchmarks.phantom.calls [--dry] [--memory] [--out FOLDER]

It prints the kernels by name and the rows that these parts print. `--memory`: peaks, too. `--out`: FOLDER gets
`rows.jsonl`, as that of a session, and `LABEL.json` for each step, a record for `phantom.timeline` and
`phantom.measured`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from unittest import mock

import torch

from benchmarks import cuda
from benchmarks.report import Row, format_table
from benchmarks.timing import Call

from . import record
from .without_numbers import try_optimizers_on_cpu

STEPS = 5  # that are logged: the host's times are the least of them


def count_calls(
    step: Call, setup: cuda.Setup, label: str = "", out: Path | None = None
) -> tuple[Counter[str], Counter[str]]:
    """Stands in for `benchmarks.cuda.count_calls`, whose profiler sees nothing here. It writes `out`/LABEL.json."""
    steps = []
    with tempfile.NamedTemporaryFile(suffix=".txt") as file:
        for _ in range(STEPS):
            record.runtime.phantom_reset(1)
            step()
            record.runtime.phantom_dump(file.name.encode())
            record.runtime.phantom_reset(0)
            steps.append(record.read_log(file.name)[1])
    kinds: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    for call in steps[-1]:
        name = {"kernel": "cudaLaunchKernel", "gemm": "cudaLaunchKernel"}.get(call[2], call[2])
        kind = cuda.kind_of_call(name)
        if kind is not None:
            kinds[kind] += 1
        if name == "cudaLaunchKernel":
            kernels[call[9] or "matrix product"] += 1
    names = _demangled(kernels)
    if out is not None:
        calls, same = record.merge([record.of_host(each) for each in steps])
        about = {"ranks": setup.world_size, "replicas": 1, "rows": 1, "fp32": False, "layers": 0, "optimizer": True}
        for model, shape in setup.llamas.items():
            about |= {"model": model.removeprefix("Llama "), "tokens": shape.tokens}
        kept = {"about": about, "kinds": kinds, "names": names, "same": same, "calls": calls}
        (out / f"{label}.json").write_text(json.dumps(kept))
    return kinds, Counter({names[name]: count for name, count in kernels.items()})


def _demangled(names: Iterable[str]) -> dict[str, str]:
    names = [*names]
    told = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    return dict(zip(names, told.splitlines(), strict=True))


def choose_attention() -> None:
    """Leaves out cuDNN's attention, which a GPU may choose: there is no cuDNN here."""
    torch.backends.cuda.enable_cudnn_sdp(False)


def measure(setup: cuda.Setup, library: str, with_memory: bool, out: Path | None) -> Iterator[Row]:
    """Yields the rows of one library."""
    choose_attention()
    try_optimizers_on_cpu()
    if with_memory:
        yield from cuda.measure_protocol(replace(setup, rounds=1, in_a_row=1), library)
    with mock.patch.object(cuda, "count_calls", partial(count_calls, out=out)):
        yield from cuda.measure_calls(setup, library)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="tiny models")
    parser.add_argument("--memory", action="store_true", help="also peaks, of each model")
    parser.add_argument("--out", type=Path, help="a folder for records and rows")
    parser.add_argument("--library", help=argparse.SUPPRESS)  # is one of the processes
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
    if args.library:
        device = torch.device("cuda", 0)
        setup = cuda.tiny_setup(device) if args.dry else cuda.Setup(device=device)
        rows = [*measure(setup, args.library, args.memory and args.library != "plain", args.out)]
        args.into.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
        return
    names = ("plain", "fsdp2", "torch")
    rows = cuda.run_libraries(names)
    print(format_table(rows, names[1:]), flush=True)
    if args.out:
        (args.out / "rows.jsonl").write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
