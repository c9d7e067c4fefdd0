"""Measures fsdp2 beside torch's FSDP2, prints one table, and writes one dated report.

    python -m benchmarks                           everything, about 10 minutes (20 on busy cores)
    python -m benchmarks overlap init              some suites
    python -m benchmarks --quick                   a rougher look
    python -m benchmarks --libraries torch-again torch     checks the benchmark: every ratio is 1

Every job runs in fresh processes; inside each, the libraries take turns. Change no code while it runs. Pictures of a
step (suites overlap and memory) are drawn where matplotlib is installed: the extra `viz`.
"""

import argparse
import datetime
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from . import jobs
from .jobs import Job
from .libraries import MODULES, load_library
from .pictures import can_draw
from .report import Row, describe_machine, format_table
from .suites import SUITES

RESULTS = Path(__file__).resolve().parent / "results"

NOTES = """\
Ratios of times are taken inside each round and shown as median (smallest to largest); values are medians over rounds.
A step is forward, backward and zero_grad(set_to_none=True), without an optimizer; N is the world size.
`limit` is the least that the same schedule needs, and what stands over it is the distance: 1 is perfect. `-`: no such
number.
"""

NOT_MEASURED = """\
**Not measured:** anything on a GPU; NCCL; overlap of communication with compute on a real link; more than two real
ranks; limited bandwidth (gloo ran over the loopback of one machine); optimizers; compiled models; fragmentation."""


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suites", nargs="*", metavar="SUITE", help=f"{', '.join(SUITES)} (default: all)")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, and fewer worlds")
    parser.add_argument("--worlds", type=int, nargs="+", help="sizes of the fake process group (default: the suite's)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the dated report and its pictures")
    parser.add_argument("--name", default=None, help="report is YYYY-MM-DD-NAME.md (default: compare, compare-quick)")
    parser.add_argument("--libraries", nargs="+", default=["fsdp2", "torch"], metavar="NAME", help=", ".join(MODULES))
    parsed = parser.parse_args(arguments)
    unknown = [name for name in parsed.suites if name not in SUITES]
    if unknown:
        parser.error(f"unknown suites {', '.join(unknown)}: choose from {', '.join(SUITES)}")
    return parsed


def plan_jobs(arguments: argparse.Namespace, pictures: str | None) -> Iterator[Job]:
    for name in arguments.suites or SUITES:
        if SUITES[name].is_left_out:
            continue
        for worlds in SUITES[name].choose_worlds(arguments.quick, arguments.worlds):
            yield Job(name, worlds, tuple(arguments.libraries), arguments.quick, pictures)


def measure(planned: Sequence[Job]) -> tuple[list[Row], list[str]]:
    """All rows, and the jobs that failed: one failure must not throw away minutes of measurements."""
    rows, failed = [], []
    with tqdm(planned, unit="job") as bar:
        for job in bar:
            bar.set_postfix_str(job.label)
            try:
                with tempfile.TemporaryDirectory() as folder:
                    rows += jobs.run(job, SUITES[job.suite].num_ranks, Path(folder))
            except RuntimeError as error:
                failed.append(job.label)
                bar.write(str(error), file=sys.stderr)
    return rows, failed


def format_report(
    rows: Sequence[Row], facts: Sequence[str], names: Sequence[str], suites: Sequence[str], pictures: Sequence[str]
) -> str:
    lines = [f"# {names[0]} beside {names[-1]}, {datetime.date.today().isoformat()}", ""]
    lines += [f"- {fact}" for fact in facts]
    lines += ["", format_table(rows, names), "", *(f"![{name}]({name})" for name in pictures), ""]
    lines += ["## How to read this", "", NOTES]
    lines += [f"- **{name}**: {SUITES[name].notes}" for name in suites]
    return "\n".join([*lines, "", NOT_MEASURED, ""])


def main() -> None:
    arguments = parse_arguments()
    for name in arguments.libraries:
        load_library(name)
    arguments.out.mkdir(parents=True, exist_ok=True)
    name = arguments.name or ("compare-quick" if arguments.quick else "compare")
    stem = f"{datetime.date.today().isoformat()}-{name}"
    facts, start = list(describe_machine()), time.monotonic()
    planned = list(plan_jobs(arguments, str(arguments.out.resolve() / stem) if can_draw() else None))
    rows, failed = measure(planned)
    command = " ".join(["python -m benchmarks", *sys.argv[1:]])
    facts.append(f"command `{command}`, {time.monotonic() - start:.0f} s")
    left_out = [name for name in arguments.suites or SUITES if SUITES[name].is_left_out]
    if left_out:
        facts.append(f"left out, as there is no CUDA device: {', '.join(left_out)}")
    if failed:
        facts.append(f"**failed, so missing below: {', '.join(failed)}**")
    suites = list(dict.fromkeys(job.suite for job in planned))
    pictures = [path.name for suite in suites for path in sorted(arguments.out.glob(f"{stem}-{suite}-*.png"))]
    report = format_report(rows, facts, arguments.libraries, suites, pictures)
    (arguments.out / f"{stem}.md").write_text(report)
    print(report)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
