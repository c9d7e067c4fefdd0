"""Compares what a session on a GPU has measured with the phantom and with the prices of the timeline:

    python -m phantom.measured FOLDER [--phantom FOLDER]      (with any Python that has torch)

FOLDER is that of `benchmarks.gpu_session`. The same steps are counted on the phantom, unless the other folder has them
already (`python -m phantom.run -m phantom.calls --memory --out FOLDER`). It prints sections of a report: launches,
memory, times of kernels by kind, gaps between kernels, times of the host's calls, and the time of a step beside the
one that the timeline predicts. Kernels are compared one by one, in the order in which the host has launched them.
"""

import argparse
import gzip
import io
import json
import statistics
import tarfile
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.cuda import kind_of_call
from benchmarks.gpu_session import read_rows
from benchmarks.report import Row

from . import timeline
from .prices import Machine, Prices, kind_of
from .run import run

LIBRARIES = ("plain", "fsdp2", "torch")
DIRECTIONS = {1: "HtoD", 2: "DtoH", 3: "DtoD"}
QUEUED_US = 20.0  # a launch that ended so long before the stream was free did not delay what it launched
SECONDS = 600


class Event(NamedTuple):
    """Is a call of the host, or what the device did for it; times in ns. See `benchmarks.cuda._write_events`."""

    name: str
    where: str
    place: int
    correlation: int
    begin: int
    duration: int

    @property
    def end(self) -> int:
        return self.begin + self.duration

    @property
    def us(self) -> float:
        return self.duration / 1e3


class Launch(NamedTuple):
    """Is a kernel, copy or fill, and the call that launched it."""

    call: Event
    work: Event


@dataclass(frozen=True)
class Measured:
    """Holds the events of one step."""

    events: Sequence[Event]

    @cached_property
    def calls(self) -> list[Event]:
        """The calls of CUDA, in the order in which they began."""
        calls = [event for event in self.events if event.where == "host" and event.name != "meter::step"]
        return sorted(calls, key=lambda event: event.begin)

    @cached_property
    def launches(self) -> list[Launch]:
        """In the order of the calls. Names that the profiler shows on the device have no call."""
        by_correlation = {call.correlation: call for call in self.calls}
        works = [event for event in self.events if event.where == "device" and event.correlation in by_correlation]
        return sorted(
            (Launch(by_correlation[work.correlation], work) for work in works), key=lambda each: each.call.begin
        )

    @cached_property
    def kernels(self) -> list[Event]:
        return [work for _, work in self.launches if not work.name.startswith("Mem")]

    @cached_property
    def busy_ms(self) -> float:
        return sum(work.duration for _, work in self.launches) / 1e6

    def streams(self) -> Iterator[list[Launch]]:
        """Yields what each stream has done, in order."""
        found: dict[int, list[Launch]] = defaultdict(list)
        for launch in sorted(self.launches, key=lambda each: each.work.begin):
            found[launch.work.place].append(launch)
        yield from found.values()

    def gaps_us(self) -> tuple[list[float], list[float]]:
        """Returns the times between two works of a stream where the second had been launched long before, and those from
        the call to the work where the stream was free.
        """
        queued, late = [], []
        for stream in self.streams():
            for before, after in pairwise(stream):
                waited = (before.work.end - after.call.end) / 1e3
                if waited > QUEUED_US:
                    queued.append((after.work.begin - before.work.end) / 1e3)
                elif waited < 0:
                    late.append((after.work.begin - after.call.begin) / 1e3)
        return queued, late

    def fills_before(self) -> Counter[str]:
        """Returns how many fills stand directly before a kernel of each kind on their stream."""
        found: Counter[str] = Counter()
        for stream in self.streams():
            for before, after in pairwise(stream):
                if before.work.name.startswith("Memset"):
                    found[kind_of(after.work.name).label] += 1
        return found


def read_events(folder: Path) -> dict[str, dict[str, Measured]]:
    """Returns model -> library -> events, of the files that a session has in `parts/` or in `parts.tar.gz`."""
    found: dict[str, dict[str, Measured]] = defaultdict(dict)
    for name, data in _parts(folder):
        model, _, library = name.removeprefix("events-").removesuffix(".jsonl.gz").rpartition("-")
        lines = gzip.decompress(data).decode().splitlines()
        found[model][library] = Measured([Event(*json.loads(line)) for line in lines])
    return dict(found)


def _parts(folder: Path) -> Iterator[tuple[str, bytes]]:
    files = sorted((folder / "parts").glob("events-*.jsonl.gz"))
    for path in files:
        yield path.name, path.read_bytes()
    packed = folder / "parts.tar.gz"
    if not files and packed.exists():
        with tarfile.open(fileobj=io.BytesIO(packed.read_bytes())) as archive:
            for member in archive.getmembers():
                file = archive.extractfile(member)
                if file is not None and Path(member.name).name.startswith("events-"):
                    yield Path(member.name).name, file.read()


# ---- launches

Record = Mapping[str, Any]


def counts_on_gpu(measured: Measured) -> Counter[str]:
    counts = Counter(f"kernels: {kind_of(kernel.name).label}" for kernel in measured.kernels)
    counts["kernels"] = len(measured.kernels)
    for _, work in measured.launches:
        if work.name.startswith("Memcpy"):
            counts[f"copies {work.name.split()[1]}{', pageable' * ('Pageable' in work.name)}"] += 1
        counts["fills"] += work.name.startswith("Memset")
    counts.update(kind for call in measured.calls if (kind := kind_of_call(call.name)) in WAITS)
    return counts


WAITS = ("waits between streams", "allocations by the driver")


def counts_on_phantom(record: Record) -> Counter[str]:
    counts = Counter(
        f"kernels: {kind_of(each[2] if each[2] == 'gemm' else each[9]).label}" for each in _kernels(record)
    )
    counts["kernels"] = len(_kernels(record))
    for call in record["calls"]:
        if call[2] in ("cudaMemcpy", "cudaMemcpyAsync"):
            counts[f"copies {DIRECTIONS[call[5]]}{', pageable' * bool(call[6])}"] += 1
        counts["fills"] += call[2] == "cudaMemsetAsync"
    counts.update({kind: record["kinds"].get(kind, 0) for kind in WAITS})
    return counts


def _kernels(record: Record) -> list[Any]:
    return [call for call in record["calls"] if call[2] in ("kernel", "gemm")]


def compare_launches(measured: Mapping[str, Measured], records: Mapping[str, Record]) -> list[str]:
    """Returns lines: counts on the GPU and on the phantom, of whole steps and beyond the plain model's."""
    gpu = {name: counts_on_gpu(each) for name, each in measured.items()}
    phantom = {name: counts_on_phantom(records[name]) for name in measured}
    whats = sorted({what for count in (*gpu.values(), *phantom.values()) for what, n in count.items() if n})
    lines = [
        _line("a step", *(f"{name}, {where}" for name in measured for where in ("GPU", "phantom"))),
        _rule(2 * len(gpu)),
    ]
    for what in whats:
        cells = [str(count[name][what]) for name in measured for count in (gpu, phantom)]
        lines.append(_line(what, *cells))
    lines.append("")
    for name, each in measured.items():
        pairs, differs = align(each, records[name])
        lines.append(
            f"- {name}: {differs}"
            if differs
            else f"- {name}: {len(pairs)} kernels, of the same kinds in the same order"
        )
        before = ", ".join(f"{n} before {label}" for label, n in each.fills_before().most_common())
        lines.append(f"- {name}: fills on the GPU: {before}")
    for name in measured:
        if name != "plain" and "plain" in measured:
            same = all(
                gpu[name][what] - gpu["plain"][what] == phantom[name][what] - phantom["plain"][what] for what in whats
            )
            lines.append(f"- {name}, beyond the plain model: {'equal on both' if same else 'they differ'}")
    return lines


def align(measured: Measured, record: Record) -> tuple[list[tuple[Event, Any]], str]:
    """Returns each kernel with the call of the phantom, and where the first one of another name stands, or "".

    cuBLAS has names of its own for matrix products, and a GPU may choose another attention: their kinds count.
    """
    ours = _kernels(record)
    pairs = [*zip(measured.kernels, ours, strict=False)]
    for i, (kernel, call) in enumerate(pairs):
        name = call[2] if call[2] == "gemm" else call[9]
        readable = record.get("names", {}).get(name, name)
        if kernel.name != readable and kind_of(kernel.name) != kind_of(name):
            return pairs, f"kernel {i} differs: {kernel.name[:80]} on the GPU, {readable[:80]} on the phantom"
    if len(measured.kernels) != len(ours):
        return pairs, f"{len(measured.kernels)} kernels on the GPU, {len(ours)} on the phantom"
    return pairs, ""


# ---- times


def compare_kernels(measured: Mapping[str, Measured], records: Mapping[str, Record], machine: Machine) -> list[str]:
    """Returns lines: ms of each kind of kernel, as they were and by the prices."""
    sums: dict[str, Counter[str]] = {name: Counter() for name in measured}
    priced: dict[str, Counter[str]] = {name: Counter() for name in measured}
    for name, each in measured.items():
        prices = Prices(machine, dict(records[name]["about"]))
        for kernel in each.kernels:
            sums[name][kind_of(kernel.name).label] += kernel.us / 1e3
        for call in _kernels(records[name]):
            *numbers, called = call[4:10]
            us = prices.gemm(*numbers) if call[2] == "gemm" else prices.kernel(called, *numbers)
            priced[name][kind_of(call[2] if call[2] == "gemm" else called).label] += us / 1e3
        others = [work.us / 1e3 for _, work in each.launches if work.name.startswith("Mem")]
        sums[name]["copies and fills"] = sum(others)
        priced[name]["copies and fills"] = machine.floor_us * len(others) / 1e3
    labels = sorted(
        {label for each in (*sums.values(), *priced.values()) for label in each},
        key=lambda label: -max(each[label] for each in sums.values()),
    )
    lines = [
        _line("ms of a step", *(f"{name}, {where}" for name in measured for where in ("GPU", "prices"))),
        _rule(2 * len(sums)),
    ]
    for label in labels:
        lines.append(_line(label, *(f"{each[name][label]:.2f}" for name in measured for each in (sums, priced))))
    lines.append(_line("all", *(f"{sum(each[name].values()):.2f}" for name in measured for each in (sums, priced))))
    return lines


def compare_gaps(measured: Mapping[str, Measured], machine: Machine) -> list[str]:
    """Returns lines: gaps between works of a stream, latency of launches, and how long calls of the host took."""
    lines = []
    for name, each in measured.items():
        queued, late = each.gaps_us()
        told = [
            f"{what} {_spread(times)} ({len(times)})"
            for what, times in (("gap", queued), ("from a call to a free stream", late))
            if times
        ]
        lines.append(f"- {name}, us: {'; '.join(told)} (prices: {machine.gap_us})")
        by_name: dict[str, list[float]] = defaultdict(list)
        for call in each.calls:
            by_name[call.name].append(call.us)
        calls = ", ".join(f"{called} {_spread(times)}" for called, times in sorted(by_name.items()))
        lines.append(f"- {name}, us of the host's calls with the profiler on: {calls}")
    return lines


def _spread(times: Sequence[float]) -> str:
    ordered = sorted(times)
    return (
        f"{statistics.median(ordered):.1f} ({ordered[len(ordered) // 10]:.1f} to {ordered[len(ordered) * 9 // 10]:.1f})"
    )


def compare_steps(
    rows: Iterable[Row], measured: Mapping[str, Measured], records: Mapping[str, Record], machine: Machine
) -> list[str]:
    """Returns lines: the step as measured on a wire that takes no time, and as the timeline predicts it.

    "Its calls": each takes as long as the median there, with the profiler on; the time between calls is that of the
    machine which recorded them. "As slow as it": the time between calls is stretched until the host takes as long as
    the least that was measured.
    """
    found = {row.quantity: row for row in rows if row.quantity in ("step ms", "ms until all is issued")}
    lines = [_line("ms", *measured), _rule(len(measured))]

    def add(label: str, values: Mapping[str, float | None]) -> None:
        lines.append(_line(label, *(f"{value:.1f}" if (value := values.get(name)) else "" for name in measured)))

    least = {what: {name: min(times) for name, times in row.rounds.items()} for what, row in found.items()}
    step, issued = least.get("step ms", {}), least.get("ms until all is issued", {})
    if step:  # of the plain model sessions keep the median alone
        add("measured, least", step)
        add("measured, median", {**found["step ms"].values, "plain": found["step ms"].limit})
        add("measured, least until the host has issued all", issued)
    add("measured: kernels, copies and fills", {name: each.busy_ms for name, each in measured.items()})

    def replay(name: str, machine: Machine) -> dict[str, Any]:
        return timeline.replay(dict(records[name]), machine)

    of_host = {name: with_host_of(each, machine) for name, each in measured.items()}
    steps = {
        "a host without cost": {name: replay(name, timeline.without_host(machine)) for name in measured},
        "the host of its own prices": {name: replay(name, machine) for name in measured},
        "this host, its calls": {name: replay(name, of_host[name]) for name in measured},
    }
    slow = {}
    for name, results in steps["this host, its calls"].items():
        if name in issued:
            between_ms = records[name]["calls"][-1][0] / 1e6
            scale = 1 + max(0.0, issued[name] - results["host"] / 1e3) / between_ms
            slow[name] = replay(name, replace(of_host[name], host_scale=scale))
    steps["this host, as slow as it"] = slow
    for label, results in steps.items():
        add(f"timeline: {label}", {name: each["step"] / 1e3 for name, each in results.items()})
    add(
        "timeline: this host, its calls, until all is issued",
        {name: each["host"] / 1e3 for name, each in steps["this host, its calls"].items()},
    )
    return lines


def with_host_of(measured: Measured, machine: Machine) -> Machine:
    """Returns the machine with the median times of launches, and of events' waits, in these events."""
    launches = [call.us for call in measured.calls if "Launch" in call.name or "Mem" in call.name]
    events = [call.us for call in measured.calls if "Event" in call.name]
    launch_us = statistics.median(launches) if launches else machine.launch_us
    return replace(machine, launch_us=launch_us, event_us=statistics.median(events) if events else machine.event_us)


# ---- memory


def compare_memory(rows: Iterable[Row], ours: Iterable[Row]) -> list[str]:
    """Returns lines: GiB on the GPU and on the phantom."""
    counted = {(row.quantity, row.setting): row.values for row in ours}
    lines = []
    for row in rows:
        if not row.quantity.endswith("GiB"):
            continue
        names = [*row.values]
        if not lines:
            lines = [
                _line("what", "setting", *(f"{name}, {where}" for name in names for where in ("GPU", "phantom"))),
                _rule(1 + 2 * len(names)),
            ]
        other = counted.get((row.quantity, row.setting), {})
        cells = [f"{values[name]:.3f}" if name in values else "" for name in names for values in (row.values, other)]
        lines.append(_line(row.quantity, row.setting, *cells))
    return lines or ["No memory was measured."]


# ---- all


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _rule(columns: int) -> str:
    return "|---" * (columns + 1) + "|"


def report(folder: Path, phantom: Path, machine: Machine) -> str:
    """Returns the sections of a report."""
    rows, ours = read_rows(folder / "rows.jsonl"), read_rows(phantom / "rows.jsonl")
    lines = ["## Memory, beside the phantom", "", *compare_memory(rows, ours)]
    for model, found in read_events(folder).items():
        paths = {name: phantom / f"{model}-{name}.json" for name in LIBRARIES}
        measured = {name: found[name] for name in LIBRARIES if name in found and paths[name].exists()}
        records = {name: json.loads(paths[name].read_text()) for name in measured}
        if measured:
            title = model.replace("-", " ")
            lines += ["", f"## Launches of {title}, beside the phantom", "", *compare_launches(measured, records)]
            lines += ["", f"## Kernels of {title}, beside the prices", "", *compare_kernels(measured, records, machine)]
            lines += ["", f"## Gaps and the host's calls, {title}", "", *compare_gaps(measured, machine)]
            of_model = [row for row in rows if row.setting.startswith(title)]
            lines += ["", f"## A step of {title}", "", *compare_steps(of_model, measured, records, machine)]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="of the session")
    parser.add_argument("--phantom", type=Path, help="a folder for what the phantom counts: what is there is kept")
    timeline.add_machine(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        phantom = (args.phantom or Path(temporary)).resolve()
        if not (phantom / "rows.jsonl").exists():
            run(["-W", "ignore", "-m", "phantom.calls", "--memory", "--out", str(phantom)], SECONDS)
        print(report(args.folder, phantom, timeline.machine_of(args)))


if __name__ == "__main__":
    main()
