"""Defines the jobs of measuring processes, starts these and waits for them."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from .libraries import processes_of
from .places import Place
from .report import Row, merge_rows

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_SECONDS = 1800  # several times what a job takes on a quiet machine


@dataclass(frozen=True)
class Job:
    """Describes one suite in fresh processes, one for each rank and library; rank 0 reports.

    Args:
        suite: its name in `suites.SUITES`.
        worlds: sizes of process groups.
        libraries: names in `libraries.MODULES`.
        pictures: the prefix of the names of picture files. None: no pictures.
        megabits: the bandwidth of the link between ranks, in megabits a second. 0: as fast as this machine.
        turns: how often each library's processes run, in turns. 0: the suite starts a process for each library itself.
        store: path of the file by which ranks find each other.
    """

    suite: str
    worlds: tuple[int, ...]
    libraries: tuple[str, ...]
    quick: bool
    pictures: str | None = None
    megabits: int = 0
    turns: int = 1
    rank: int = 0
    store: str = ""

    @property
    def label(self) -> str:
        return f"{self.suite} {self.worlds[0]}" if len(self.worlds) == 1 else self.suite


def run(job: Job, places: Sequence[Place], folder: Path) -> list[Row]:
    """Runs the job of each library in processes of its own, and returns the rows of all.

    Raises:
        RuntimeError: a process failed, or was late. The message has its output.
    """
    rows = []
    for turn in range(max(job.turns, 1)):
        for names in processes_of(job.libraries) if job.turns else [job.libraries]:
            own = folder / f"{turn}-{names[0]}"
            own.mkdir()
            rows += _run_processes(replace(job, libraries=names), places, own)
    return merge_rows(rows)


def _run_processes(job: Job, places: Sequence[Place], folder: Path) -> list[Row]:
    """Starts processes, one in each place, waits for all, and reads the results of rank 0.

    Raises:
        RuntimeError: a process failed, or was late. The message has its output.
    """
    logs = [folder / f"{rank}.log" for rank in range(len(places))]
    jobs = [replace(job, rank=rank, store=str(folder / "store")) for rank in range(len(places))]
    processes = [
        _start(each, place, folder / f"rows-{each.rank}.json", log)
        for each, place, log in zip(jobs, places, logs, strict=True)
    ]
    try:
        _wait(processes)
    except RuntimeError as error:
        output = "\n".join(log.read_text() for log in logs)
        raise RuntimeError(f"{job}: {error}\n{output}") from None
    return [Row(**row) for row in json.loads((folder / "rows-0.json").read_text())]


def _start(job: Job, place: Place, rows: Path, log: Path) -> subprocess.Popen[bytes]:
    command = [*place.prefix, sys.executable, "-m", "benchmarks.worker", json.dumps(asdict(job)), str(rows)]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": place.interface, "OMP_NUM_THREADS": "1"}
    # The profiler writes notes to stderr; they are shown only when the job fails.
    with log.open("wb") as output:
        return subprocess.Popen(command, env=environment, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Waits for all ranks. If one fails or is late, it ends the others, which would wait for it forever."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    try:
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                break
            if time.monotonic() > deadline:
                raise RuntimeError(f"no result after {TIMEOUT_SECONDS} s")
            time.sleep(0.05)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    if any(process.returncode for process in processes):
        raise RuntimeError(f"worker ended with {[process.returncode for process in processes]}")
