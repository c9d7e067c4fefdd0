"""Checks and measures all that needs a GPU, in one command of about nine minutes:

    python -m benchmarks.gpu_session --out FOLDER

Correctness comes first, then launches, memory and times. Each part runs in its own process, and its results are in
FOLDER at once: a log of each (`correctness.log` has a line for each way of training, as it ends), `rows.jsonl` (one row
a line), and `report.md`, which is written again after each part. If a part fails or has no time left, the numbers of
the others remain.
It needs torch built for CUDA and, for the tests, pytest 9. Without a GPU it says so, and ends.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import IO

import torch

from .cuda import PARTS
from .jobs import ROOT
from .report import Row, describe_machine, format_table

# In a short session the first ones matter most; what is left of it goes to the last, which takes as long as it may.
ORDER = ("correctness", "tests", *PARTS)
# Training beside a plain model in many ways, on a simulated world and on one rank of NCCL.
CORRECTNESS = ("tests/one_of_many.py", "cuda")
TESTS = ("-m", "pytest", "-q", "-rs", "-o", "addopts=", "-W", "default", "tests/cuda")
# The library that all others are compared with comes last.
COLUMNS = ("fsdp2", "fsdp1", "ddp", "torch")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.gpu_session", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--minutes", type=float, default=9.0, help="what has not ended by then is stopped")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(ORDER)} (default: all)")
    parsed = parser.parse_args(arguments)
    parts = parsed.parts or ORDER
    unknown = [part for part in parts if part not in ORDER]
    if unknown:
        parser.error(f"unknown parts {', '.join(unknown)}: choose from {', '.join(ORDER)}")
    if not torch.cuda.is_available():
        print("skipped: there is no CUDA device")
        return 0
    parsed.out.mkdir(parents=True, exist_ok=True)
    deadline, outcomes = time.monotonic() + 60 * parsed.minutes, {}
    for part in parts:
        outcomes[part] = run_part(part, parsed.out, deadline)
        report = format_session(outcomes, read_rows(parsed.out))
        (parsed.out / "report.md").write_text(report)
    print(report)
    return 1 if any(outcome.startswith("failed") for outcome in outcomes.values()) else 0


def run_part(part: str, out: Path, deadline: float) -> str:
    """Runs a part, and returns its outcome in words."""
    checks = {"correctness": CORRECTNESS, "tests": TESTS}
    measures = ("-m", "benchmarks.cuda", part, str((out / "rows.jsonl").resolve()))
    command = [sys.executable, *checks.get(part, measures)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    start, log = time.monotonic(), out / f"{part}.log"
    with log.open("wb") as output:
        result = _run(command, environment, output, deadline - start)
    outcome = f"{result}, {time.monotonic() - start:.0f} s"
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-(5 if result == "done" else 40) :])
    print(f"{part}: {outcome}\n{tail}", flush=True)
    return f"{outcome}\n\n```\n{tail}\n```" if tail else outcome


def _run(command: Sequence[str], environment: dict[str, str], output: IO[bytes], seconds: float) -> str:
    try:
        run = partial(subprocess.run, cwd=ROOT, env=environment, stdout=output, stderr=output)
        code = run(command, timeout=max(0.0, seconds)).returncode
        return "done" if code == 0 else f"failed ({code})"
    except subprocess.TimeoutExpired:
        return "stopped: no time left"


def read_rows(out: Path) -> list[Row]:
    path = out / "rows.jsonl"
    return [Row(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def format_session(outcomes: dict[str, str], rows: Sequence[Row]) -> str:
    lines = ["# On one GPU", "", *(f"- {fact}" for fact in describe_machine()), ""]
    lines += [f"**{part}**: {outcome}\n" for part, outcome in outcomes.items()]
    for quantities in _tables(rows):
        names = [name for name in COLUMNS if any(name in row.values for row in quantities)]
        lines += [format_table(quantities, names), ""]
    return "\n".join(lines)


def _tables(rows: Sequence[Row]) -> list[list[Row]]:
    """Returns the tables. Those of batches have more libraries."""
    batches = [row for row in rows if "ddp" in row.values or "fsdp1" in row.values]
    return [table for table in ([row for row in rows if row not in batches], batches) if table]


if __name__ == "__main__":
    raise SystemExit(main())
