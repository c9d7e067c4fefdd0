"""Measures by the protocol and checks all that needs a GPU, in one command of nine minutes on one GPU:

    PYTHONUNBUFFERED=1 python -m benchmarks.gpu_session --out FOLDER

It needs torch built for CUDA. Parts run in this order, each in processes of its own and with a limit of its own; what
exceeds it is killed, with all processes that it has started, and the next part begins.

    part      limit  what it runs; what it decides
    start      30 s  versions; three steps beside a plain model, on simulated ranks and on one of NCCL: is it alive
    protocol  320 s  PROTOCOL.md: memory and time of whole steps of fsdp2 and torch's FSDP2, each in a process of its
                     own, and traces for Perfetto
    ways       60 s  tests/one_of_many.py, 44 ways beside a plain model: numbers on real streams and memory
    nccl-2     75 s  tests/cuda/ranks_program.py on two ranks of NCCL that share the GPU: NCCL's sums, grouped calls,
                     gathers in place, offload
    nccl-4     45 s  the same on four, if two took less than 30 s: HSDP of two by two
    registered 25 s  two ranks of NCCL whose collectives run in memory that it registers
    tests      60 s  tests/cuda: captured steps, pinned copies, waits of the host
    models     60 s  tests/cuda/real_models.py: models of transformers and timm on two ranks of NCCL
    example    40 s  examples/train_gpt.py as it is
    calls      90 s  launches, copies and waits of a step, by the profiler: do counts on a simulated GPU hold
    schedules 110 s  whole steps: late steps, vocabulary-parallel embedding and states on the CPU, alone and together
    beside     25 s  what kernels on two streams cost each other: the price that simulated schedules depend on

All end after 555 s at most (`--seconds`). What has no time left is left out: name these parts in another session.

Results are in FOLDER at once, in four files: `session.log` has all output, `rows.jsonl` one row of numbers a line,
`report.md` how parts have ended and tables of the rows, and `parts.tar.gz` what parts have written besides. The last
two are written again after each part. If a part fails or is killed, the results of the others remain, and its own up
to then.

`--dry` tries all of this with tiny models and on CPU if there is no GPU: gloo ranks train, and a part that hangs on
purpose is killed. Its numbers mean nothing. `--unchecked` compares shapes and dtypes only, for a simulated GPU whose
kernels compute nothing (`benchmarks/phantom`).
"""

import argparse
import contextlib
import io
import json
import os
import signal
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from .jobs import ROOT
from .limited import Ended, run_limited
from .report import Row, describe_machine, format_table

SECONDS = 555.0  # of ten minutes, with the time that the machine takes to begin and to return files
# With less time left than this, no part begins: it takes as long to import torch and to find the GPU.
LEAST_S = 10.0
# The order of columns.
COLUMNS = (
    *("fsdp2", "torch", "fsdp2-best", "torch-best", "flat", "late", "rows", "late, rows", "states on the CPU"),
    "plain",
)
_TAIL_LINES, _TAIL_LINES_OF_FAILED = 5, 40


@dataclass(frozen=True)
class Facts:
    """Says what parts run on, and where they write.

    Args:
        kind: "cuda" or "cpu".
        is_dry: models are tiny.
        is_unchecked: values are not compared.
        rows: the file to which measuring parts append.
        files: a folder for what parts write besides.
    """

    kind: str
    is_dry: bool
    is_unchecked: bool
    rows: Path
    files: Path

    @property
    def checker(self) -> tuple[str, ...]:
        """Arguments of Python before those that name a program which reads values."""
        return ("-m", "benchmarks.phantom.unchecked") if self.is_unchecked else ()


@dataclass(frozen=True)
class Part:
    """Is one part of a session.

    Args:
        limit: seconds.
        command: returns the arguments of Python.
        environment: variables beside those of all parts.
        why_not: returns a reason to leave it out, given how earlier parts have ended; "" if there is none.
        by_name: it runs only where it is named.
    """

    limit: float
    command: Callable[[Facts], Sequence[str]]
    environment: Callable[[Facts], Mapping[str, str]] = lambda facts: {}
    why_not: Callable[[Mapping[str, Ended]], str] = lambda ended: ""
    by_name: bool = False


def _measure(part: str) -> Callable[[Facts], Sequence[str]]:
    def command(facts: Facts) -> Sequence[str]:
        dry = ("--dry",) if facts.is_dry else ()
        files = ("--files", str(facts.files))
        return (*facts.checker, "-m", "benchmarks.cuda", part, str(facts.rows), "--device", facts.kind, *files, *dry)

    return command


def _on_ranks(
    size: int, program: str = "tests/cuda/ranks_program.py", *options: str
) -> Callable[[Facts], Sequence[str]]:
    launch = ("-m", "benchmarks.gpu_ranks", str(size))
    return lambda facts: (*launch, *facts.checker, program, facts.kind, *options)


def _run_tests(facts: Facts) -> Sequence[str]:
    # Not the ini file of the project, which asks for pytest 9 and its plugins.
    options = ("-c", "tests/cuda/gpu.ini", "--confcutdir=tests", "-q", "-rs")
    computing = ("-m", "not computes") if facts.is_unchecked else ()
    return (*facts.checker, "-m", "pytest", *options, *computing, "tests/cuda")


def _run_example(facts: Facts) -> Sequence[str]:
    return (
        "examples/train_gpt.py",
        "--tiny",
        "--device",
        facts.kind,
        "--log-file",
        f"{facts.files}/train_gpt.jsonl",
        "--save",
        "",
    )


def _nccl_log(facts: Facts) -> Mapping[str, str]:
    return {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,NET", "NCCL_DEBUG_FILE": f"{facts.files}/nccl-%p.log"}


def _if_two_ranks_were_fast(ended: Mapping[str, Ended]) -> str:
    two = ended.get("nccl-2")
    return "" if two is None or (two.is_done and two.seconds < 30) else f"two ranks: {two}"


PARTS: dict[str, Part] = {
    "start": Part(30, lambda facts: (*facts.checker, "-m", "benchmarks.gpu_start", facts.kind)),
    "protocol": Part(320, _measure("protocol")),
    "ways": Part(60, lambda facts: (*facts.checker, "tests/one_of_many.py", facts.kind)),
    "nccl-2": Part(75, _on_ranks(2), environment=_nccl_log),
    "nccl-4": Part(45, _on_ranks(4), environment=_nccl_log, why_not=_if_two_ranks_were_fast),
    "registered": Part(25, _on_ranks(2, "tests/cuda/ranks_program.py", "registered"), environment=_nccl_log),
    "tests": Part(60, _run_tests),
    "models": Part(60, _on_ranks(2, "tests/cuda/real_models.py")),
    "example": Part(40, _run_example),
    "calls": Part(90, _measure("calls")),
    "schedules": Part(110, _measure("schedules")),
    "beside": Part(25, _measure("beside")),
    # It hangs, with a child in a session of its own: to try what becomes of both.
    "hang": Part(5, lambda facts: ("-m", "benchmarks.gpu_session_hang", str(facts.files)), by_name=True),
}
ORDER = tuple(name for name, part in PARTS.items() if not part.by_name)
DRY_ORDER = ("start", "hang", *ORDER[1:])


class Session:
    """Runs parts one after the other, and keeps their results in a folder.

    Args:
        scale: limits are multiplied by it.
        seconds: what has not ended by then is stopped.
    """

    def __init__(
        self,
        out: Path,
        kind: str,
        is_dry: bool = False,
        is_unchecked: bool = False,
        scale: float = 1.0,
        seconds: float = SECONDS,
    ) -> None:
        self.out, self.scale = out.resolve(), scale
        self.out.mkdir(parents=True, exist_ok=True)
        self.log, self.report = self.out / "session.log", self.out / "report.md"
        self._folder = tempfile.TemporaryDirectory(prefix="gpu_session_")
        self.facts = Facts(kind, is_dry, is_unchecked, self.out / "rows.jsonl", Path(self._folder.name))
        self.ended: dict[str, Ended] = {}
        self._texts: dict[str, str] = {}
        self._deadline = time.monotonic() + seconds

    def run(self, names: Sequence[str]) -> bool:
        """Returns True if no part has failed."""
        try:
            for name in names:
                self._run_part(name)
                self.write()
        finally:
            self.write()
            self._folder.cleanup()
        return all(each.is_done for name, each in self.ended.items() if name != "hang")

    def _run_part(self, name: str) -> None:
        part = PARTS[name]
        left = self._deadline - time.monotonic()
        reason = part.why_not(self.ended) or ("" if left > LEAST_S else "no time left")
        if reason:
            self._texts[name] = f"left out: {reason}"
            self._say(f"== {name}: left out: {reason}\n")
            return
        limit = min(part.limit * self.scale, left)
        self._say(f"== {name}, at most {limit:.0f} s\n")
        before = self.log.stat().st_size
        command = (sys.executable, *part.command(self.facts))
        self.ended[name] = ended = run_limited(command, limit, self.log, self._environment(part))
        with self.log.open("rb") as file:
            file.seek(before)
            lines = file.read().decode(errors="replace").splitlines()
        tail = "\n".join(lines[-(_TAIL_LINES if ended.is_done else _TAIL_LINES_OF_FAILED) :])
        self._texts[name] = f"{ended}" + (f"\n\n```\n{tail}\n```" if tail else "")
        self._say(f"== {name}: {ended}\n")
        print(f"{name}: {ended}\n{tail}", flush=True)

    def _environment(self, part: Part) -> dict[str, str]:
        paths = [str(ROOT / "tests"), str(ROOT), os.environ.get("PYTHONPATH", "")]
        own = {
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            # A machine without a network may have no other interface, and no name that resolves.
            "GLOO_SOCKET_IFNAME": "lo",
            "NCCL_SOCKET_IFNAME": "lo",
        }
        return {**os.environ, **own, **part.environment(self.facts)}

    def _say(self, text: str) -> None:
        with self.log.open("a") as log:
            log.write(text)

    def write(self) -> None:
        """Writes the report and what parts have left, in place of the earlier ones."""
        _replace(self.report, format_session(self._texts, read_rows(self.facts.rows), self._notes()).encode())
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            archive.add(self.facts.files, "parts")
        _replace(self.out / "parts.tar.gz", packed.getvalue())

    def _notes(self) -> list[str]:
        notes = []
        if self.facts.is_dry:
            notes.append("**Dry run**: models are tiny, and no number here is a measurement.")
        if self.facts.is_unchecked:
            notes.append("**Unchecked**: values were not compared with a plain model's, only shapes and dtypes.")
        return notes


def _replace(path: Path, content: bytes) -> None:
    """Writes a file so that it is complete whenever it is read."""
    new = path.with_name(path.name + ".new")
    new.write_bytes(content)
    new.replace(path)


def read_rows(path: Path) -> list[Row]:
    """Returns the rows so far. A part that was killed may have left half a line."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(Row(**json.loads(line)))
    return rows


def format_session(texts: Mapping[str, str], rows: Sequence[Row], notes: Sequence[str] = ()) -> str:
    lines = ["# On one GPU", "", *(f"{note}\n" for note in notes), *(f"- {fact}" for fact in describe_machine("?")), ""]
    lines += [f"**{part}**: {text}\n" for part, text in texts.items()]
    for table in _tables(rows):
        known = [name for name in COLUMNS if any(name in row.values for row in table)]
        others = dict.fromkeys(name for row in table for name in row.values if name not in known)
        lines += [format_table(table, [*others, *known]), ""]
    return "\n".join(lines)


def _tables(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Yields the rows that have the same columns."""
    tables: dict[frozenset[str], list[Row]] = {}
    for row in rows:
        tables.setdefault(frozenset(row.values), []).append(row)
    yield from tables.values()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.gpu_session", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="what has not ended by then is stopped")
    parser.add_argument("--scale", type=float, default=1.0, help="limits of parts are multiplied by it")
    parser.add_argument("--dry", action="store_true", help="tiny models, also without a GPU: numbers mean nothing")
    parser.add_argument("--unchecked", action="store_true", help="compare no values: for a simulated GPU")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: {', '.join(ORDER)})")
    parsed = parser.parse_args(arguments)
    unknown = [part for part in parsed.parts if part not in PARTS]
    if unknown:
        parser.error(f"unknown parts {', '.join(unknown)}: choose from {', '.join(PARTS)}")
    # The number of devices is asked for without a context of CUDA in this process, which would take turns with parts.
    kind = "cuda" if torch.cuda.device_count() else "cpu"
    if kind == "cpu" and not parsed.dry:
        print("skipped: there is no CUDA device (try it with --dry)")
        return 0
    session = Session(parsed.out, kind, parsed.dry, parsed.unchecked, parsed.scale, parsed.seconds)
    signal.signal(signal.SIGTERM, _stop)  # the part that runs is ended, and what is known is written
    is_good = session.run(parsed.parts or (DRY_ORDER if parsed.dry else ORDER))
    print(session.report.read_text())
    return 0 if is_good else 1


def _stop(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    raise SystemExit(main())
