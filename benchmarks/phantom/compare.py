"""Counts what each library makes CUDA and NCCL do in a step, and what its caching allocator holds:

    python -m benchmarks.phantom.run -m benchmarks.phantom.compare \\
        [--model 1B] [--layers 0] [--ranks 8] [--tokens 4096] [LIBRARY ...]
    python -m benchmarks.phantom.run -m benchmarks.phantom.compare --all

`--all`: 1B, 8B, a model of experts and GPT-2, over 8, 64, 512 ranks.

Each library is counted in a process of its own. All options: --help. What a step would take: `phantom.timeline`.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
from collections import Counter
from typing import Any

from . import models, record

GIB = 2**30
COLLECTIVES = {"ncclAllGather": "all-gathers", "ncclReduceScatter": "reduce-scatters", "ncclAllReduce": "all-reduces"}
DIRECTIONS = {1: "HtoD", 2: "DtoH", 3: "DtoD"}


def count(result: dict[str, Any]) -> dict[str, float]:
    """Returns quantity -> number of what `record.record` has returned."""
    counts, calls, memory = Counter(result["counts"]), result["calls"], result["memory"]
    kernels = Counter("compute" if call[3] == 0 else "other" for call in calls if call[2] in ("kernel", "gemm"))
    launches = _count_launches(calls)
    copies = Counter(
        DIRECTIONS.get(call[5], "other") + " pageable" * bool(call[6]) for call in calls if call[2] == "cudaMemcpyAsync"
    )
    waits = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMemcpy")
    return {
        "kernels": kernels["compute"] + kernels["other"],
        "kernels (other streams)": kernels["other"],
        **{f"copies {kind}": number for kind, number in sorted(copies.items())},
        "memsets": counts["cudaMemsetAsync"],
        **{f"{name}: launches": launches[kind] for kind, name in COLLECTIVES.items()},
        **{f"{name}: operations": counts[kind] for kind, name in COLLECTIVES.items()},
        "stream waits": counts["cudaStreamWaitEvent"],
        "event records": counts["cudaEventRecord"],
        "events made": counts["cudaEventCreate"],
        "host waits": sum(counts[kind] for kind in waits),
        "cudaMalloc": counts["cudaMalloc"],
        "resting GiB": memory["resting"] / GIB,
        "peak allocated GiB": memory["allocated"] / GIB,
        "peak reserved GiB": memory["reserved"] / GIB,
        "left GiB": memory["left"] / GIB,
    }


def _count_launches(calls: list[record.Call]) -> Counter[str]:
    """Counts kernels of NCCL by kind: operations of one group are one."""
    launches: Counter[str] = Counter()
    depth, kinds = 0, set[str]()
    for call in calls:
        if call[2] == "ncclGroupStart":
            depth += 1
        elif call[2] == "ncclGroupEnd":
            depth -= 1
        elif call[2] in COLLECTIVES:
            kinds.add(call[2])
        if depth == 0:
            launches.update(kinds)
            kinds = set()
    return launches


def table(args: argparse.Namespace, results: dict[str, dict[str, float]]) -> str:
    lines = [
        f"{args.model}, {args.layers or 'all'} layers, {args.ranks} ranks x {args.replicas}, "
        f"{args.rows} x {args.tokens} tokens, "
        + ("fp32" if args.fp32 else f"bf16, reduced in {'bf16' if args.reduce_bf16 else 'fp32'}")
        + ", offloaded" * args.offload,
        "",
        "| a step | " + " | ".join(results) + " |",
        "|" + "---|" * (len(results) + 1),
    ]
    for what in dict.fromkeys(what for found in results.values() for what in found):
        cells = (found.get(what, 0) for found in results.values())
        shown = (f"{cell:.2f}" if "GiB" in what else f"{cell:,}" for cell in cells)
        lines.append(f"| {what} | {' | '.join(shown)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    record.add_arguments(parser)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--json", type=pathlib.Path, help="write the counts to this file")
    parser.add_argument("libraries", nargs="*", default=["plain", "fsdp2", "torch"])
    args = parser.parse_intermixed_args()
    if args.all:
        rest = [argument for argument in sys.argv[1:] if argument != "--all"]
        for model in models.SHAPES:
            for ranks in ("8", "64", "512"):
                command = [
                    sys.executable,
                    "-m",
                    "benchmarks.phantom.compare",
                    *rest,
                    "--model",
                    model,
                    "--ranks",
                    ranks,
                ]
                subprocess.run(command, check=False)
        return
    args.steps = min(args.steps, 2)
    with tempfile.TemporaryDirectory() as folder:
        found = record.record_all(args, args.libraries, pathlib.Path(folder))
    results = {name: count(result) for name, result in found.items()}
    if args.json:
        args.json.write_text(json.dumps(results))
    print(table(args, results), flush=True)


if __name__ == "__main__":
    main()
