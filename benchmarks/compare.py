"""Measures fsdp2 beside torch's FSDP2 and writes one dated report.

    python benchmarks/compare.py                   everything, about 4 minutes (8 on busy cores)
    python benchmarks/compare.py --quick           a rougher look, about 1 minute (2 to 3 on busy cores)
    python benchmarks/compare.py --libraries torch-again torch     checks the benchmark: every ratio is 1

Every job runs in fresh processes; inside each, the libraries take turns. Change no code while it runs.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from libraries import MODULES, load_library
from report import Row, describe_machine, format_table

HERE = Path(__file__).resolve().parent
JOB_TIMEOUT_SECONDS = 600  # several times what a job takes on a quiet machine

TABLES = {
    "host": "Host CPU time (quiet fake process group, process time above the plain model)",
    "traffic": "Copies, wire and payloads of one step (torch's fake process group, exact)",
    "memory": "Memory (torch's fake process group, every allocation of the CPU allocator, exact)",
    "gloo": "Two real ranks on gloo (wall time of the slower rank; wire in units of all compute-dtype parameters)",
}

NOTES = """\
Ratios of times are taken inside each round and shown as median (smallest to largest); values are medians over rounds.
A step is forward, backward and zero_grad(set_to_none=True), without an optimizer; N is the world size.

`limit` is the least that the same schedule needs. Host: casts and collectives issued group by group, with no hooks and
no parameters around them, measured in the same rounds. Copies: gathers and reductions straight into place, one cast
each way. Wire: two all-gathers and one reduce-scatter in the dtypes asked for (less, if the last block is kept for
backward). Memory: one group in use, one prefetched, in backward also a quarter of a group's gradients on their way and
the sharded gradients of all groups that are done (a reference for four sub-buckets rather than a bound). gloo step: the
plain model on each rank. `-`: no such number. A group of memory is one unsharded block in the compute dtype.

Host time uses a process group that writes nothing: since 2.13, torch's own fake group writes every rank's slice, which
costs more than the libraries do. Wire on gloo counts a reduce-scatter twice, because gloo sends an all-reduce. Common
blocks are those of Llama-3-8B, Qwen3-4B, Qwen2.5-7B, GPT-OSS (attention) and GPT-2-XL; bf16 all-gathers only.

**Not measured:** anything on a GPU; NCCL; overlap of communication with compute on a real link; more than two real
ranks; limited bandwidth (gloo ran over the loopback of one machine); optimizers; compiled models; fragmentation."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds; exact counts at the middle world only")
    parser.add_argument("--worlds", type=int, nargs="+", default=[8, 64, 512], help="sizes of the fake process group")
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder of the dated report")
    parser.add_argument("--name", default=None, help="report is YYYY-MM-DD-NAME.md (default: compare, compare-quick)")
    parser.add_argument("--libraries", nargs="+", default=["fsdp2", "torch"], metavar="NAME", help=", ".join(MODULES))
    parser.add_argument("--only", nargs="+", choices=["host", "bytes", "gloo"], default=["host", "bytes", "gloo"])
    return parser.parse_args()


def plan_jobs(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    worlds = sorted(arguments.worlds)
    exact_worlds = [worlds[len(worlds) // 2]] if arguments.quick else worlds
    common = {"libraries": arguments.libraries, "quick": arguments.quick}
    for job, sizes in (("host", worlds), ("bytes", exact_worlds)):
        if job in arguments.only:
            yield from ({"job": job, "world_size": size, **common} for size in sizes)
    if "bytes" in arguments.only:
        yield {"job": "alignment", **common}
    if "gloo" in arguments.only:
        yield {"job": "gloo", **common}


def run_job(job: dict[str, Any], folder: Path) -> list[Row]:
    """Start the job's processes (two for gloo), wait for all, and read what rank 0 measured."""
    num_ranks = 2 if job["job"] == "gloo" else 1
    ranks = [{**job, "rank": rank, "store": str(folder / "store")} for rank in range(num_ranks)]
    logs = [folder / f"{job['job']}-{rank}.log" for rank in range(len(ranks))]
    processes = [_start_worker(spec, folder / f"rows-{rank}.json", logs[rank]) for rank, spec in enumerate(ranks)]
    try:
        _wait(processes)
    except RuntimeError as error:
        output = "\n".join(log.read_text() for log in logs)
        raise RuntimeError(f"{job}: {error}\n{output}") from None
    return [Row(**row) for row in json.loads((folder / "rows-0.json").read_text())]


def _start_worker(job: dict[str, Any], rows: Path, log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(HERE / "worker.py"), json.dumps(job), str(rows)]
    environment = {"GLOO_SOCKET_IFNAME": "lo", **os.environ, "OMP_NUM_THREADS": "1"}
    # The profiler writes notes to stderr; they are shown only when the job fails.
    with log.open("wb") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """A failed or late rank takes the others with it, which would wait for it forever."""
    deadline = time.monotonic() + JOB_TIMEOUT_SECONDS
    try:
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                break
            if time.monotonic() > deadline:
                raise RuntimeError(f"no result after {JOB_TIMEOUT_SECONDS} s")
            time.sleep(0.05)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    if any(process.returncode for process in processes):
        raise RuntimeError(f"worker ended with {[process.returncode for process in processes]}")


def measure(jobs: Iterator[dict[str, Any]]) -> tuple[list[Row], list[str]]:
    """All rows, and the jobs that failed: one failure must not throw away minutes of measurements."""
    rows, failed, start = [], [], time.monotonic()
    for job in jobs:
        label = f"{job['job']} {job.get('world_size', '')}".strip()
        try:
            with tempfile.TemporaryDirectory() as folder:
                rows += run_job(job, Path(folder))
        except RuntimeError as error:
            failed.append(label)
            print(error, file=sys.stderr)
        print(f"{time.monotonic() - start:4.0f} s {label}", file=sys.stderr, flush=True)
    return rows, failed


def format_report(rows: Sequence[Row], facts: Sequence[str], names: Sequence[str]) -> str:
    lines = [f"# {names[0]} beside {names[-1]}, {datetime.date.today().isoformat()}", ""]
    lines += [f"- {fact}" for fact in facts] + [""]
    for table, title in TABLES.items():
        selected = [row for row in rows if row.table == table]
        if selected:
            lines += [f"## {title}", "", format_table(selected, names), ""]
    return "\n".join([*lines, "## How to read this", "", NOTES, ""])


def main() -> None:
    arguments = parse_arguments()
    for name in arguments.libraries:
        load_library(name)
    facts, start = list(describe_machine()), time.monotonic()
    rows, failed = measure(plan_jobs(arguments))
    command = " ".join(["python benchmarks/compare.py", *sys.argv[1:]])
    facts.append(f"command `{command}`, {time.monotonic() - start:.0f} s")
    if failed:
        facts.append(f"**failed, so missing below: {', '.join(failed)}**")
    report = format_report(rows, facts, arguments.libraries)
    name = arguments.name or ("compare-quick" if arguments.quick else "compare")
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / f"{datetime.date.today().isoformat()}-{name}.md").write_text(report)
    print(report)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
