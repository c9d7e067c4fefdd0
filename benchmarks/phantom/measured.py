"""Compares what a session on a GPU has measured with the phantom and with the prices of the timeline:

    python -m benchmarks.phantom.measured FOLDER [--phantom FOLDER]      (with any Python that has torch)

FOLDER is that of `benchmarks.gpu_session`. The same steps are counted on the phantom, unless the other folder has them
already (`python -m benchmarks.phantom.run -m benchmarks.phantom.calls --memory --out FOLDER`). It prints sections of a
report: memory, launches, times of kernels by kind, gaps between kernels and times of the host's calls, and the time of
a step beside the one that the timeline predicts. Kernels are compared one by one, in the order in which the host has
launched them.
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
COUNTED_CALLS = ("waits between streams", "allocations by the driver")
RECORDS = "events recorded"
QUEUED_US = 20.0  # a launch that ended so long before the stream was free did not delay what it launched
SECONDS = 600
Record = Mapping[str, Any]  # see `phantom.record`


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

    @property
    def is_kernel(self) -> bool:
        return not self.name.startswith("Mem")


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
        """In the order of the calls. Ranges with names, which the profiler shows on the device, have no call."""
        calls = {call.correlation: call for call in self.calls}
        works = [event for event in self.events if event.where == "device" and event.correlation in calls]
        return sorted((Launch(calls[work.correlation], work) for work in works), key=lambda each: each.call.begin)

    @cached_property
    def kernels(self) -> list[Event]:
        return [work for _, work in self.launches if work.is_kernel]

    @property
    def busy_ms(self) -> float:
        return sum(work.us for _, work in self.launches) / 1e3

    def streams(self) -> Iterator[list[Launch]]:
        """Yields what each stream has done, in order."""
        found: dict[int, list[Launch]] = defaultdict(list)
        for launch in sorted(self.launches, key=lambda each: each.work.begin):
            found[launch.work.place].append(launch)
        yield from found.values()

    def gaps_us(self) -> tuple[list[float], list[float]]:
        """Returns the times between two works of a stream where the second one had been launched long before, and those
        from the call to the work where the stream was free.
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
                if before.work.name.startswith("Memset") and after.work.is_kernel:
                    found[kind_of(after.work.name).label] += 1
        return found


def read_events(folder: Path) -> dict[str, dict[str, Measured]]:
    """Returns model -> library -> events, of the files that a session has in `parts/` or in `parts.tar.gz`."""
    found: dict[str, dict[str, Measured]] = defaultdict(dict)
    for name, data in _files(folder):
        model, _, library = name.removeprefix("events-").removesuffix(".jsonl.gz").rpartition("-")
        lines = gzip.decompress(data).decode().splitlines()
        found[model][library] = Measured([Event(*json.loads(line)) for line in lines])
    return dict(found)


def _files(folder: Path) -> Iterator[tuple[str, bytes]]:
    files, packed = sorted((folder / "parts").glob("events-*.jsonl.gz")), folder / "parts.tar.gz"
    if files or not packed.exists():
        yield from ((path.name, path.read_bytes()) for path in files)
        return
    with tarfile.open(fileobj=io.BytesIO(packed.read_bytes())) as archive:
        for member in archive.getmembers():
            name, file = Path(member.name).name, archive.extractfile(member)
            if file is not None and name.startswith("events-"):
                yield name, file.read()


# ---- launches


def counts_on_gpu(measured: Measured) -> Counter[str]:
    counts = Counter(f"kernels: {kind_of(kernel.name).label}" for kernel in measured.kernels)
    counts["kernels"] = len(measured.kernels)
    for _, work in measured.launches:
        if work.name.startswith("Memcpy"):  # "Memcpy HtoD (Pinned -> Device)"
            counts[f"copies {work.name.split()[1]}{', pageable' * ('Pageable' in work.name)}"] += 1
        counts["fills"] += work.name.startswith("Memset")
    counts.update(kind for call in measured.calls if (kind := kind_of_call(call.name)) in COUNTED_CALLS)
    counts[RECORDS] = sum(call.name.startswith("cudaEventRecord") for call in measured.calls)
    return counts


def counts_on_phantom(record: Record) -> Counter[str]:
    counts = Counter(f"kernels: {kind_of(_name_of(call)).label}" for call in _kernels(record))
    counts["kernels"] = len(_kernels(record))
    for call in record["calls"]:
        if call[2] in ("cudaMemcpy", "cudaMemcpyAsync"):
            counts[f"copies {DIRECTIONS[call[5]]}{', pageable' * bool(call[6])}"] += 1
        counts["fills"] += call[2] == "cudaMemsetAsync"
    counts.update({kind: record["kinds"].get(kind, 0) for kind in COUNTED_CALLS})
    counts[RECORDS] = sum(call[2] == "cudaEventRecord" for call in record["calls"])
    return counts


def _kernels(record: Record) -> list[Any]:
    return [call for call in record["calls"] if call[2] in ("kernel", "gemm")]


def _name_of(call: Sequence[Any]) -> str:
    return str(call[2] if call[2] == "gemm" else call[9])


def compare_launches(measured: Mapping[str, Measured], records: Mapping[str, Record]) -> list[str]:
    """Returns lines: counts on the GPU and on the phantom, and where they differ."""
    gpu = {name: counts_on_gpu(each) for name, each in measured.items()}
    phantom = {name: counts_on_phantom(records[name]) for name in measured}
    if not any(count[RECORDS] for count in gpu.values()):  # the first session's profiler has not kept them
        for count in phantom.values():
            del count[RECORDS]
    whats = sorted({what for count in (*gpu.values(), *phantom.values()) for what, n in count.items() if n})
    rows = {what: [str(count[name][what]) for name in measured for count in (gpu, phantom)] for what in whats}
    lines = [*_table("a step", _both(measured, "phantom"), rows), ""]
    for name, each in measured.items():
        differs = first_difference(each, records[name])
        lines.append(f"- {name}: {differs or f'{len(each.kernels)} kernels, of the same kinds in the same order'}")
        if name != "plain" and "plain" in measured:
            added = [{what: of[name][what] - of["plain"][what] for what in whats} for of in (gpu, phantom)]
            others = ", ".join(what for what in whats if added[0][what] != added[1][what])
            told = f"other counts of {others}" if others else "as on the phantom"
            lines.append(f"- {name}, beyond the plain model: {told}")
        before = ", ".join(f"{n} before {label}" for label, n in each.fills_before().most_common())
        lines.append(f"- {name}, fills on the GPU: {before or 'none'}")
    return lines


def first_difference(measured: Measured, record: Record) -> str:
    """Returns where the first kernel stands that is not the phantom's, or "".

    Names are compared. But cuBLAS has names of its own for matrix products, and a GPU may choose another attention: for
    these the kind is.
    """
    ours = _kernels(record)
    for i, (kernel, call) in enumerate(zip(measured.kernels, ours, strict=False)):
        readable = record.get("names", {}).get(_name_of(call), _name_of(call))
        kinds = (kind_of(kernel.name), kind_of(_name_of(call)))
        has_other_names = kinds[0] == kinds[1] and kinds[0].label.startswith(("matrix", "attention", "sums"))
        if kernel.name != readable and not has_other_names:
            return f"kernel {i} differs: {kernel.name[:80]} on the GPU, {readable[:80]} on the phantom"
    if len(measured.kernels) != len(ours):
        return f"{len(measured.kernels)} kernels on the GPU, {len(ours)} on the phantom"
    return ""


# ---- times


def compare_kernels(measured: Mapping[str, Measured], records: Mapping[str, Record], machine: Machine) -> list[str]:
    """Returns lines: ms of each kind of kernel, as they were and by the prices."""
    columns: list[Mapping[str, float]] = []
    for name, each in measured.items():
        prices = Prices(machine, dict(records[name]["about"]))
        us: dict[str, float] = defaultdict(float)
        by_prices: dict[str, float] = defaultdict(float)
        for _, work in each.launches:
            us[kind_of(work.name).label if work.is_kernel else "copies and fills"] += work.us
            by_prices["copies and fills"] += 0.0 if work.is_kernel else machine.floor_us
        for call in _kernels(records[name]):
            *numbers, called = call[4:10]
            time = prices.gemm(*numbers) if call[2] == "gemm" else prices.kernel(called, *numbers)
            by_prices[kind_of(_name_of(call)).label] += time
        columns += (us, by_prices)
    labels = sorted({label for each in columns for label in each})
    labels.sort(key=lambda label: -max(each.get(label, 0.0) for each in columns))
    rows = {label: [f"{each.get(label, 0.0) / 1e3:.2f}" for each in columns] for label in labels}
    rows["all"] = [f"{sum(each.values()) / 1e3:.2f}" for each in columns]
    return _table("ms of a step", _both(measured, "prices"), rows)


def compare_gaps(measured: Mapping[str, Measured], machine: Machine) -> list[str]:
    """Returns lines: gaps between works of a stream, latency of launches, and how long calls of the host took."""
    times: dict[str, dict[str, list[float]]] = defaultdict(dict)
    for name, each in measured.items():
        queued, late = each.gaps_us()
        times[f"between two works of a stream (prices: {machine.gap_us})"][name] = queued
        times["from a launch to its work on a free stream"][name] = late
        for call in each.calls:
            times[call.name].setdefault(name, []).append(call.us)
    rows = {what: [_spread(of[name]) if of.get(name) else "" for name in measured] for what, of in times.items()}
    return _table("us, with the profiler on: median (a tenth to nine tenths), how many", measured, rows)


def _spread(times: Sequence[float]) -> str:
    ordered = sorted(times)
    low, high = ordered[len(ordered) // 10], ordered[len(ordered) * 9 // 10]
    return f"{statistics.median(ordered):.1f} ({low:.1f} to {high:.1f}), {len(ordered)}"


def compare_steps(
    rows: Iterable[Row], measured: Mapping[str, Measured], records: Mapping[str, Record], machine: Machine
) -> list[str]:
    """Returns lines: the step as measured on a wire that takes no time, and as the timeline predicts it.

    "Its calls": each takes as long as the median there, with the profiler on; the time between calls is that of the
    machine which recorded them. "As slow as it": the time between calls is stretched until the host takes as long as
    the least that was measured.
    """
    found = {row.quantity: row for row in rows if row.quantity in ("step ms", "ms until all is issued")}
    least = {what: {name: min(times) for name, times in row.rounds.items()} for what, row in found.items()}
    issued = least.get("ms until all is issued", {})
    told: dict[str, Mapping[str, float | None]] = {}
    if "step ms" in found:  # the first session has kept the median of the plain model alone
        told["measured, least"] = least["step ms"]
        told["measured, median"] = {"plain": found["step ms"].limit, **found["step ms"].values}
        told["measured, least until the host has issued all"] = issued
    told["measured: kernels, copies and fills"] = {name: each.busy_ms for name, each in measured.items()}

    def step_ms(name: str, machine: Machine) -> float:  # the host waits for the GPU before each step that is measured
        return float(timeline.replay(dict(records[name]), replace(machine, sync=True))["step"]) / 1e3

    def host_ms(name: str, machine: Machine) -> float:
        return float(timeline.replay(dict(records[name]), machine)["host"]) / 1e3

    of_host = {name: with_host_of(each, machine) for name, each in measured.items()}
    stretched = {}
    for name in issued.keys() & measured.keys():
        between_ms = records[name]["calls"][-1][0] / 1e6
        scale = 1 + max(0.0, issued[name] - host_ms(name, of_host[name])) / between_ms
        stretched[name] = replace(of_host[name], host_scale=scale)
    told["timeline: a host without cost"] = {name: step_ms(name, timeline.without_host(machine)) for name in measured}
    told["timeline: the host of its own prices"] = {name: step_ms(name, machine) for name in measured}
    told["timeline: this host, its calls"] = {name: step_ms(name, each) for name, each in of_host.items()}
    told["timeline: the same, until all is issued"] = {name: host_ms(name, each) for name, each in of_host.items()}
    told["timeline: this host, as slow as it"] = {name: step_ms(name, each) for name, each in stretched.items()}
    cells = {
        what: [f"{number:.1f}" if (number := values.get(name)) else "" for name in measured]
        for what, values in told.items()
    }
    return _table("ms", measured, cells)


def with_host_of(measured: Measured, machine: Machine) -> Machine:
    """Returns the machine with the median times of launches, and of calls about events, in these events."""
    launches = [call.us for call in measured.calls if "Launch" in call.name or "Mem" in call.name]
    events = [call.us for call in measured.calls if "Event" in call.name]
    launch_us = statistics.median(launches) if launches else machine.launch_us
    return replace(machine, launch_us=launch_us, event_us=statistics.median(events) if events else machine.event_us)


# ---- memory


def compare_memory(rows: Iterable[Row], ours: Iterable[Row]) -> list[str]:
    """Returns lines: GiB on the GPU and on the phantom."""
    counted = {(row.quantity, row.setting): row.values for row in ours}
    found = [row for row in rows if row.quantity.endswith("GiB")]
    if not found:
        return ["No memory was measured."]
    names, cells = [*found[0].values], {}
    for row in found:
        both = (row.values, counted.get((row.quantity, row.setting), {}))
        numbers = [f"{each[name]:.3f}" if name in each else "" for name in names for each in both]
        cells[f"{row.quantity}, {row.setting}"] = numbers
    return _table("what", _both(names, "phantom"), cells)


# ---- all


def _both(names: Iterable[str], other: str) -> list[str]:
    return [f"{name}, {where}" for name in names for where in ("GPU", other)]


def _table(title: str, columns: Iterable[str], rows: Mapping[str, Sequence[str]]) -> list[str]:
    head = [title, *columns]
    lines = [head, ["---"] * len(head), *([what, *cells] for what, cells in rows.items())]
    return [f"| {' | '.join(line)} |" for line in lines]


def report(folder: Path, phantom: Path, machine: Machine) -> str:
    """Returns the sections of a report."""
    rows, ours = read_rows(folder / "rows.jsonl"), read_rows(phantom / "rows.jsonl")
    lines = ["## Memory beside the phantom", "", *compare_memory(rows, ours)]
    for model, found in read_events(folder).items():
        paths = {name: phantom / f"{model}-{name}.json" for name in LIBRARIES}
        measured = {name: found[name] for name in LIBRARIES if name in found and paths[name].exists()}
        records = {name: json.loads(paths[name].read_text()) for name in measured}
        title = model.replace("-", " ")
        if not measured:
            lines += ["", f"## {title}: the phantom has counted no such step"]
            continue
        tokens = next(iter(records.values()))["about"]["tokens"]
        of_model = [row for row in rows if row.setting.startswith(f"{title}, {tokens} tokens")]
        lines += ["", f"## Launches of {title} beside the phantom", "", *compare_launches(measured, records)]
        lines += ["", f"## Kernels of {title} beside the prices", "", *compare_kernels(measured, records, machine)]
        lines += ["", f"## Gaps and the host's calls, {title}", "", *compare_gaps(measured, machine)]
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
            run(["-W", "ignore", "-m", "benchmarks.phantom.calls", "--memory", "--out", str(phantom)], SECONDS)
        print(report(args.folder, phantom, timeline.machine_of(args)))


if __name__ == "__main__":
    main()
