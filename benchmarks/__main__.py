"""Measures fsdp2 beside torch's FSDP2, FSDP1, DDP and a minimal SimpleFSDP; prints tables, writes one dated report.

    python -m benchmarks                           everything, about an hour (two on busy cores)
    python -m benchmarks overlap init              some suites
    python -m benchmarks --quick                   a rougher look
    python -m benchmarks --libraries fsdp2 torch           without the others
    python -m benchmarks --libraries torch-again torch     checks the benchmark: every ratio is 1

Every job runs in fresh processes; inside each, the libraries take turns. Change no code while it runs. Pictures of a
step (suites overlap and memory) are drawn where matplotlib is installed: the extra `viz`. The suite gloo-1gbit needs
root, `ip` and `tc`; the suites timeline and allocator need a phantom GPU (benchmarks/phantom), which is made where it
can be had. They are left out elsewhere.
"""

import argparse
import datetime
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tqdm import tqdm

from . import jobs
from .jobs import Job
from .libraries import MODULES, NAMES, load_library
from .pictures import can_draw
from .places import UnavailableError
from .report import Row, describe_machine, format_table
from .suites import SUITES

RESULTS = Path(__file__).resolve().parent / "results"

NOTES = """\
Ratios of times are taken inside each round and shown as median (smallest to largest); values are medians over rounds.
A step is forward, backward and zero_grad(set_to_none=True), without an optimizer, unless the suite says otherwise; N is
the world size.
`torch` is torch's FSDP2, `fsdp1` its FullyShardedDataParallel with use_orig_params, `ddp` its DistributedDataParallel
(which shards nothing, and casts nothing on CPU), `simple` a minimal SimpleFSDP: a DTensor for each parameter, eager.
`bare` is the model without any library. `limit` is the least that fsdp2's schedule needs, and what stands over it is
the distance: 1 is perfect. `-`: no such number.
"""

NOT_MEASURED = """\
**Not measured:** anything on a GPU; NCCL; more than two real ranks, which share the cores of one machine;
compiled models; fragmentation; libraries that need a GPU (Megatron-FSDP, YaFSDP) or their own loop (DeepSpeed)."""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"{', '.join(SUITES)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and fewer worlds")
    parser.add_argument("--worlds", type=int, nargs="+", help="sizes of the fake process group (default: the suite's)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the dated report and its pictures")
    parser.add_argument("--name", default=None, help="report is YYYY-MM-DD-NAME.md (default: compare, compare-quick)")
    parser.add_argument("--libraries", nargs="+", metavar="NAME", help=f"{', '.join(NAMES)} (default: the suite's)")
    parsed = parser.parse_args(arguments)
    unknown = [name for name in parsed.suites if name not in SUITES]
    if unknown:
        parser.error(f"unknown suites {', '.join(unknown)}: choose from {', '.join(SUITES)}")
    return parsed


def plan_jobs(arguments: argparse.Namespace, pictures: str | None) -> Iterator[Job]:
    for name in arguments.suites or SUITES:
        suite = SUITES[name]
        libraries = suite.choose_libraries(arguments.libraries)
        for worlds in suite.choose_worlds(arguments.quick, arguments.worlds) if libraries else ():
            yield Job(
                name,
                worlds,
                libraries,
                arguments.quick,
                pictures,
                suite.megabits,
                min(suite.turns, 1 if arguments.quick else 3),
            )


def measure(planned: Sequence[Job]) -> tuple[list[Row], list[str], list[str]]:
    """Returns all rows, the failed jobs (one failure must not discard minutes of measurements), and those left out."""
    rows, failed, left_out = [], [], []
    with tqdm(planned, unit="job") as bar:
        for job in bar:
            bar.set_postfix_str(job.label)
            try:
                with tempfile.TemporaryDirectory() as folder, SUITES[job.suite].open_places() as places:
                    rows += jobs.run(job, places, Path(folder))
            except UnavailableError as reason:
                left_out.append(f"{job.label} ({reason})")
            except RuntimeError as error:
                failed.append(job.label)
                bar.write(str(error), file=sys.stderr)
    return rows, failed, left_out


def format_report(
    rows: Sequence[Row], facts: Sequence[str], libraries: Mapping[str, Sequence[str]], pictures: Sequence[Path]
) -> str:
    """Formats the report. `libraries`: those of each suite, in order. `pictures`: their names contain that of
    a suite.
    """
    compared = " beside ".join(next(iter(libraries.values()))[:2])
    lines = [f"# {compared}, {datetime.date.today().isoformat()}", ""]
    lines += [f"- {fact}" for fact in facts]
    lines += ["", NOTES]
    for suite, names in libraries.items():
        own = [row for row in rows if row.suite == suite]
        table, below = format_table(own, names), [f"- {row.note}" for row in own if row.note]
        drawn = [f"![{path.name}]({path.name})" for path in pictures if f"-{suite}-" in path.name]
        lines += [f"## {suite}", "", SUITES[suite].notes, "", table, "", *below, *drawn, ""]
    return "\n".join([*lines, NOT_MEASURED, ""])


def main() -> None:
    arguments = parse_arguments()
    for name in arguments.libraries or MODULES:
        load_library(name)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that whoever has to clean up, does
    arguments.out.mkdir(parents=True, exist_ok=True)
    name = arguments.name or ("compare-quick" if arguments.quick else "compare")
    stem = f"{datetime.date.today().isoformat()}-{name}"
    facts, start = list(describe_machine()), time.monotonic()
    planned = list(plan_jobs(arguments, str(arguments.out.resolve() / stem) if can_draw() else None))
    if not planned:
        raise SystemExit("these suites measure none of these libraries")
    rows, failed, left_out = measure(planned)
    command = " ".join(["python -m benchmarks", *sys.argv[1:]])
    facts.append(f"command `{command}`, {time.monotonic() - start:.0f} s")
    if failed:
        facts.append(f"**failed, so missing below: {', '.join(failed)}**")
    if left_out:
        facts.append(f"left out: {', '.join(left_out)}")
    pictures = sorted(arguments.out.glob(f"{stem}-*.png"))
    report = format_report(rows, facts, {job.suite: job.libraries for job in planned}, pictures)
    (arguments.out / f"{stem}.md").write_text(report)
    print(report)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
