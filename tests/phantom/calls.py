"""Counts the calls of `benchmarks.cuda calls` on the phantom, to be compared with what a profiler counts on a GPU:

    python -m phantom.run -m phantom.calls [--dry]

The kernels by name and the rows are those that the part `calls` of a session prints.
"""

import os
import subprocess
import sys
import tempfile
from collections import Counter
from unittest import mock

import torch

from benchmarks import cuda
from benchmarks.report import format_table
from benchmarks.timing import Call

from . import record


def count_calls(step: Call, setup: cuda.Setup, label: str = "") -> tuple[Counter[str], Counter[str]]:
    """Stands in for `benchmarks.cuda.count_calls`, whose profiler sees nothing here."""
    del setup
    with tempfile.NamedTemporaryFile(suffix=".txt") as file:
        record.runtime.phantom_reset(1)
        step()
        record.runtime.phantom_dump(file.name.encode())
        record.runtime.phantom_reset(0)
        _, calls = record.read_log(file.name)
    kinds: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    for call in calls:
        name = {"kernel": "cudaLaunchKernel", "gemm": "cudaLaunchKernel"}.get(call[2], call[2])
        kind = cuda.kind_of_call(name)
        if kind is not None:
            kinds[kind] += 1
        if name == "cudaLaunchKernel":
            kernels[call[9] or "matrix product"] += 1
    return kinds, _demangled(kernels)


def _demangled(kernels: Counter[str]) -> Counter[str]:
    names = [*kernels]
    told = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True).stdout
    return Counter(dict(zip(told.splitlines(), kernels.values(), strict=True)))


def main(*options: str) -> None:
    device = torch.device("cuda", 0)
    setup = cuda.tiny_setup(device) if "--dry" in options else cuda.Setup(device=device)
    torch.backends.cuda.enable_cudnn_sdp(False)
    with mock.patch.object(cuda, "count_calls", count_calls):
        rows = [*cuda.measure_calls(cuda.replace(setup, llamas=dict([*setup.llamas.items()][:1])))]
    print(format_table(rows, setup.names), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)
