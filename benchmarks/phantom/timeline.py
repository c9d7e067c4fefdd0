"""Replays recorded calls on a model of a GPU: what a step would take, and what the compute stream would wait for.

    python -m benchmarks.phantom.run -m benchmarks.phantom.record --out FOLDER ...      (writes FOLDER/LIBRARY.json)
    python -m benchmarks.phantom.timeline FOLDER [options]                   (any Python with torch)

The host issues the calls at its measured times, plus a cost of the driver. A stream runs its work in order; events and
waits order streams; a group of NCCL calls on one communicator is one kernel of its stream. Steps follow each other
without a pause; the third is reported. What it doesn't know: README.md.
"""

import argparse
import json
import pathlib
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import zip_longest
from typing import Any

from . import models
from .prices import ITEM, OTHER, Machine, Prices, Ring, kind_of


@dataclass
class Work:
    start: float
    end: float
    stream: int
    what: str  # "compute", "gather", "reduce", "collective", "copy"
    cause: "Work | None"  # whose end let it start; None: the host issued it then
    step: int = 0
    name: str = ""
    phase: str = ""  # of the step, in which the host issued it


@dataclass
class Queue:
    """A stream or a communicator: when it will have done what was issued, and the last of it."""

    ready: float = 0.0
    by: Work | None = None


@dataclass(frozen=True)
class Collective:
    kind: str
    stream: int
    nbytes: int
    comm: int
    ranks: int


MOST_REPLAYS, CLOSE_US = 60, 1.0
NAMES = {"ncclAllGather": "gather", "ncclReduceScatter": "reduce"}  # all others: "collective"
P2P = "p2p "  # begins the marks of stages.MarkedBatch
OF_ORDER = ("ncclCommInit", "ncclCommSplit", "ncclGroupStart", "ncclGroupEnd")


class Replay:
    """Runs the calls of one step several times, and keeps what ran when.

    `lasts`: how long the bytes of each collective pass, in the order of issue. Those beyond have the links alone.
    """

    def __init__(self, record: dict[str, Any], machine: Machine, lasts: Sequence[float] = ()) -> None:
        self.lasts = lasts
        self.about, self.calls, self.machine = record["about"], record["calls"], machine
        # Records without communicators: the ranks of each are in a row.
        self.members = {int(comm): ranks for comm, ranks in record.get("comms", {}).items()}
        self.rings: dict[tuple[int, int], Ring] = {}
        self.prices = Prices(machine, self.about)
        self.streams: dict[int, Queue] = defaultdict(Queue)
        self.comms: dict[int, Queue] = defaultdict(Queue)  # NCCL lets no two kernels of a communicator run at once
        # When the bytes of each collective begin to pass, and how long each link would be busy with them alone.
        self.sent: list[tuple[float, dict[str, float]]] = []
        self.events: dict[int, tuple[float, Work | None]] = {}
        self.works: list[Work] = []
        self.communicates_until = 0.0
        self.beside: list[tuple[float, float]] = []  # when copies on other streams run
        self.host = self.host_stalled = 0.0
        self.counts: Counter[str] = Counter()  # of the last step
        self.phase, self.turn, self.is_counted = "", 0, False
        self.number: Counter[str] = Counter()  # of the collectives of a step, by kind
        self.depth, self.group = 0, list[Collective]()

    def step(self, is_counted: bool) -> None:
        for _ in self.run(is_counted):
            pass  # stages of a pipeline have each input when they need it

    def run(self, is_counted: bool) -> Iterator[str]:
        """Runs a step, and yields the marks of sends and receives between stages of a pipeline."""
        before, self.phase, self.depth, self.group = 0, "", 0, []
        self.is_counted = is_counted
        self.number.clear()
        for ns, _, kind, stream, *numbers, name in self.calls:
            self.host += (ns - before) / 1e3 * self.machine.host_scale
            before = ns
            if kind == "mark" and name.startswith(P2P):
                yield name
                continue
            self._call(kind, stream, numbers, name)
            if self.group and self.depth == 0:
                self._communicate()
        if self.machine.sync:
            self.host = max(self.host, *(s.ready for s in self.streams.values()))
        self.turn += 1

    def _call(self, kind: str, stream: int, numbers: list[int], name: str) -> None:
        m = self.machine
        a, b, c, d, e = numbers
        on_device = {
            "kernel": lambda: (self.prices.kernel(name, a, b, c, d, e), name),
            "gemm": lambda: (self.prices.gemm(a, b, c, d, e), f"gemm {a} {b} {c}"),
            "cudaMemcpyAsync": lambda: (self.prices.copy(a, b), "memcpy"),
            "cudaMemcpy": lambda: (self.prices.copy(a, b), "memcpy"),
            "cudaMemsetAsync": lambda: (self.prices.fill(a), "memset"),
        }
        if kind in on_device:
            self.host += m.launch_us
            duration, name = on_device[kind]()
            duration += m.gap_us
            self._issue(stream, "compute" if stream == 0 or kind == "gemm" else "copy", duration, name)
            if kind == "cudaMemcpy" or (kind == "cudaMemcpyAsync" and c and b == 2):
                self._stall(self.streams[stream].ready)
        elif kind == "cudaEventRecord":
            self.host += m.event_us
            self.events[a] = self._next(stream)
            self.counts["records"] += self.is_counted
        elif kind == "cudaStreamWaitEvent":
            self.host += m.event_us
            queue, (time, by) = self.streams[stream], self.events.get(a, (0.0, None))
            self.counts["waits"] += self.is_counted
            if time > queue.ready:
                queue.ready, queue.by = time, by
            queue.ready += m.wait_us
        elif kind == "mark":
            self.phase = name
            if name == "optimizer" and m.optimizer and not self.about.get("optimizer"):
                self.host += m.launch_us
                self._issue(0, "compute", self.prices.optimizer(elements_of_shard(self.about)), "optimizer")
        elif kind in ("ncclGroupStart", "ncclGroupEnd"):
            self.depth += 1 if kind == "ncclGroupStart" else -1
        elif kind.startswith("nccl") and kind not in OF_ORDER:
            self.group.append(Collective(kind, stream, a * ITEM.get(b, 4), d, e))
        elif kind in ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"):
            until = max((s.ready for s in self.streams.values()), default=0.0)
            if kind == "cudaStreamSynchronize":
                until = self.streams[stream].ready
            elif kind == "cudaEventSynchronize":
                until = self.events.get(a, (0.0, None))[0]
            self._stall(until)
            self.counts["synchronisations"] += self.is_counted
        elif kind in ("cudaEventCreate", "cudaEventQuery"):
            self.host += m.event_us

    def _stall(self, until: float) -> None:
        stalled = max(0.0, until - self.host)
        self.host += stalled
        self.host_stalled += stalled

    def _next(self, stream: int) -> tuple[float, Work | None]:
        """Returns when the stream can begin what is issued now, and what it waits for until then."""
        queue = self.streams[stream]
        return (queue.ready, queue.by) if queue.ready >= self.host else (self.host, None)

    def _issue(self, stream: int, what: str, duration: float, name: str) -> None:
        m = self.machine
        start, _ = self._next(stream)
        if m.contention and what == "compute" and self.communicates_until > start:
            slow = 1 + m.contention
            together = min(duration * slow, self.communicates_until - start)
            duration = together + max(0.0, duration - together / slow)
        if m.copy_contention and what == "compute":
            self.beside = sorted(each for each in self.beside if each[1] > start)
            for first, last in self.beside:
                overlap = min(start + duration, last) - max(start, first)
                if overlap > 0:
                    duration += overlap * m.copy_contention
        work = self._run(stream, what, start + duration, name)
        if what == "copy" and name != "memcpy":
            self.beside.append((work.start, work.end))

    def _run(self, stream: int, what: str, end: float, name: str) -> Work:
        start, cause = self._next(stream)
        work = Work(start, end, stream, what, cause, self.turn, name, self.phase)
        self.works.append(work)
        self.streams[stream] = Queue(end, work)
        if self.is_counted:
            self.counts[what] += 1
            self.counts["us " + what + ("" if stream else " on compute stream")] += end - start
        return work

    def _communicate(self) -> None:
        """Issues a group of collectives: one kernel for those of a communicator on a stream."""
        m = self.machine
        kernels: dict[tuple[int, int], list[Collective]] = defaultdict(list)
        for each in self.group:
            kernels[each.comm, each.stream].append(each)
        self.group = []
        for (comm, stream), members in kernels.items():
            self.host += m.nccl_us + m.nccl_op_us * len(members)
            ring = self._ring(comm, members[0].ranks)
            kinds = {each.kind for each in members}
            what = NAMES.get(kinds.pop(), "collective") if len(kinds) == 1 else "collective"
            latency = max(ring.latency(m, each.kind) for each in members)
            busy: Counter[str] = Counter()
            for each in members:
                busy.update(ring.busy(m, each.kind, each.nbytes))
            if not m.parallel_comm:
                queue, order = self.streams[stream], self.comms[comm]
                if order.ready > queue.ready:
                    queue.ready, queue.by = order.ready, order.by
            begin = self._next(stream)[0] + latency
            index = len(self.sent)
            end = begin + (self.lasts[index] if index < len(self.lasts) else max(busy.values(), default=0.0))
            self.sent.append((begin, busy))
            self.number[what] += 1
            label = f"{what} {self.number[what]} ({sum(each.nbytes for each in members) / 1e6:.1f} MB of a rank)"
            work = self._run(stream, what, end, label)
            self.comms[comm] = Queue(work.end, work)
            self.communicates_until = max(self.communicates_until, work.end)
            if self.is_counted:
                self.counts[f"{what} operations"] += len(members)
                self.counts["us latency"] += latency
                self.counts["us bytes"] += max(busy.values(), default=0.0)

    def _ring(self, comm: int, size: int) -> Ring:
        if (comm, size) not in self.rings:
            self.rings[comm, size] = Ring.of(self.members.get(comm, range(size)), self.machine)
        return self.rings[comm, size]


def link_events(before: list[list[Any]], step: list[list[Any]]) -> None:
    """Numbers the events of a step by their records, in place, so that its calls can be replayed again and again.

    A wait gets the number of the record that it waits for, in this step or in the one before, which makes the same
    calls: forward waits for an optimizer's step that was issued before it. Waits for older records stay as they are.

    Raises:
        RuntimeError: the steps record different numbers of events.
    """
    numbers: dict[int, int] = {}
    counts = []
    for calls in (before, step):
        count = 0
        for call in calls:
            kind, event = call[2], call[4]
            if kind == "cudaEventRecord":
                numbers[event] = count
                count += 1
            if calls is step and kind in ("cudaEventRecord", "cudaStreamWaitEvent", "cudaEventSynchronize"):
                call[4] = numbers.get(event, -1 - event)
        counts.append(count)
    if counts[0] != counts[1]:
        raise RuntimeError(f"expected two steps that record as many events, got {counts}")


def shared(sent: Sequence[tuple[float, dict[str, float]]]) -> list[float]:
    """Returns how long the bytes of each collective pass, given when they begin. Those that pass a link at the same
    time share it equally.
    """
    ends = [begin for begin, _ in sent]
    for link in {link for _, busy in sent for link in busy}:
        waiting = sorted(
            ((begin, i, busy[link]) for i, (begin, busy) in enumerate(sent) if busy.get(link)), reverse=True
        )
        passing: dict[int, float] = {}
        now = 0.0
        while waiting or passing:
            least = min(passing, key=passing.__getitem__) if passing else None
            step = passing[least] * len(passing) if least is not None else float("inf")
            if waiting and waiting[-1][0] - now <= step:
                step, least = waiting[-1][0] - now, None
            passing = {i: left - step / len(passing) for i, left in passing.items()}
            now += step
            if least is None:
                _, i, time = waiting.pop()
                passing[i] = time
            else:
                del passing[least]
                ends[least] = max(ends[least], now)
    return [end - begin for end, (begin, _) in zip(ends, sent, strict=True)]


@lru_cache
def _elements(model: str, layers: int) -> int:
    return sum(param.numel() for param in models.make(model, layers)[0].parameters())


def elements_of_shard(about: dict[str, Any]) -> float:
    return _elements(about["model"], about["layers"]) / about["ranks"]


def replay(record: dict[str, Any], machine: Machine, steps: int = 3) -> dict[str, Any]:
    """Returns times in us, and counts of the last step.

    When collectives pass a link together depends on how long each takes. So it is replayed until both agree.
    """
    lasts: list[float] = []
    for _ in range(1 if machine.own_links else MOST_REPLAYS):
        run = Replay(record, machine, lasts)
        ends, host_ends = [0.0], [0.0]
        for step in range(steps):
            run.step(step == steps - 1)
            ends.append(max(run.streams[0].ready, run.host if machine.sync else 0.0))
            host_ends.append(run.host)
        found = shared(run.sent)
        off = max((abs(a - b) for a, b in zip_longest(found, lasts, fillvalue=0.0)), default=0.0)
        if off < CLOSE_US:
            break
        lasts = found
    result = breakdown(run.works, ends[-2], ends[-1])
    result |= {
        "step": ends[-1] - ends[-2],
        "first step": ends[1],
        "host": host_ends[-1] - host_ends[-2],
        "host stalled": run.host_stalled,
        "counts": dict(run.counts),
        "guessed": dict(run.prices.guessed),
    }
    result["launches"] = sum(run.counts[k] for k in ("compute", "copy", "gather", "reduce", "collective"))
    return result


def breakdown(works: list[Work], begin: float, end: float) -> dict[str, Any]:
    """Divides the compute stream's time between `begin` and `end` by what it did or waited for.

    An idle time is followed backwards from the work that ended it: to a collective, a copy on another stream, or the
    host, and from there on to what let that start. `idle`: each of these times.
    """
    out: Counter[str] = Counter()
    phases: Counter[str] = Counter()
    idle = []

    def wait(cause: Work | None, until: float, since: float, before: str, phase: str) -> None:
        parts: Counter[str] = Counter()
        follow(cause, until, since, parts)
        out.update(parts)
        phases.update({f"{phase}: {what}": time for what, time in parts.items()})
        idle.append((until - since, since - begin, phase, cause.name if cause else "host", before, dict(parts)))

    last = begin
    compute = [w for w in works if w.stream == 0 and w.end > begin]
    for work in compute:
        if work.start >= end:
            break
        if work.start > last:
            wait(work.cause, min(work.start, end), last, work.name, work.phase)
        busy = max(0.0, min(work.end, end) - max(work.start, begin))
        out["busy"] += busy
        phases[f"{work.phase}: busy"] += busy
        last = max(last, work.end)
    if end > last:  # it waits for the last reductions: what ends then is their end
        wait(max((w for w in works if w.end <= end + 1e-6), key=lambda w: w.end), end, last, "the end", "end")
    return {
        "busy": out["busy"],
        "exposed gather": out["gather"],
        "exposed reduce": out["reduce"],
        "exposed other": out["collective"],
        "exposed copy": out["copy"],
        "host-bound": out["host"],
        "idle": sorted(idle, key=lambda i: -i[0]),
        "phases": dict(phases),
    }


def follow(work: Work | None, until: float, since: float, out: Counter[str]) -> None:
    while until > since:
        if work is None:
            out["host"] += until - since
            return
        begin = max(since, min(work.start, until))
        out["copy" if work.what == "compute" else work.what] += until - begin
        until, work = begin, work.cause


# ---- report

ROWS = ("step", "busy", "exposed gather", "exposed reduce", "exposed other", "exposed copy", "host-bound", "host")


def table(results: dict[str, dict[str, Any]]) -> str:
    names = list(results)
    lines = ["| ms | " + " | ".join(names) + (" | fsdp2/torch |" if {"fsdp2", "torch"} <= set(names) else " |")]
    lines.append("|---" * (lines[0].count("|") - 1) + "|")

    def add(label: str, values: dict[str, float], form: str) -> None:
        cells = [form.format(values[n]) for n in names]
        if {"fsdp2", "torch"} <= set(names):
            cells.append(f"{values['fsdp2'] / values['torch']:.2f}" if values["torch"] > 1e-9 else "")
        lines.append(f"| {label} | " + " | ".join(cells) + " |")

    for row in ROWS:
        add(row, {n: results[n][row] / 1e3 for n in names}, "{:.2f}")
    for row in ("launches",):
        add(row, {n: results[n][row] for n in names}, "{:.0f}")
    for row in ("gather", "reduce", "waits", "records", "copy"):
        add(
            row + ("s" if row in ("gather", "reduce") else ""),
            {n: results[n]["counts"].get(row, 0) for n in names},
            "{:.0f}",
        )
    for row in ("us gather", "us reduce", "us copy"):
        add("ms of " + row[3:], {n: results[n]["counts"].get(row, 0) / 1e3 for n in names}, "{:.2f}")
    return "\n".join(lines)


def without_host(machine: Machine) -> Machine:
    """Returns the machine with a host that takes no time, as when a CUDA graph is replayed."""
    return replace(machine, host_scale=0.0, launch_us=0.0, event_us=0.0, nccl_us=0.0, nccl_op_us=0.0)


def check(record: dict[str, Any], machine: Machine) -> dict[str, float]:
    """Replays cases whose answer is known, and returns what they give.

    Returns:
        "parts / step": 1, as all times of the compute stream add up to a step. "lost": 0 kernels, copies and operations
        of collectives were issued and did not run. "waits, host free": 0 us host-bound. "exposed, wire free": 0 us.
        "late step / free step", at 1 ms for each collective and no bytes, and "collectives".
    """
    result = replay(record, machine)
    exposed = ("exposed gather", "exposed reduce", "exposed other", "exposed copy")
    parts = sum(result[part] for part in ("busy", *exposed, "host-bound"))
    kinds, counts = Counter(call[2] for call in record["calls"]), Counter(result["counts"])
    issued = sum(kinds[kind] for kind in ("kernel", "gemm", "cudaMemcpyAsync", "cudaMemcpy", "cudaMemsetAsync"))
    issued += bool(machine.optimizer and not record["about"].get("optimizer") and kinds["mark"])
    operations = kinds["ncclAllGather"] + kinds["ncclReduceScatter"]
    lost = issued - counts["compute"] - counts["copy"]
    lost += operations - counts["gather operations"] - counts["reduce operations"]
    fast = without_host(machine)
    fast_wire = replace(fast, nvlink=1e12, card=1e12)
    free = replay(record, replace(fast_wire, latency=0.0))
    late = replay(record, replace(fast_wire, base_us=1000.0, inside_us=0.0, between_us=0.0))
    return {
        "parts / step": parts / result["step"],
        "lost": lost,
        "waits, host free": replay(record, fast)["host-bound"],
        "exposed, wire free": free["exposed gather"] + free["exposed reduce"],
        "late step / free step": late["step"] / free["step"],
        "collectives": free["counts"].get("gather", 0) + free["counts"].get("reduce", 0),
    }


def sweep(records: dict[str, dict[str, Any]], machine: Machine, field: str, values: Sequence[float]) -> str:
    """Returns a line for each value of a field of the machine."""
    lines = []
    for value in values:
        changed = replace(machine, **{field: type(getattr(machine, field))(value)})
        steps = {name: replay(record, changed) for name, record in records.items()}
        cells = []
        for name, step in steps.items():
            exposed = (step["exposed gather"] + step["exposed reduce"]) / 1e3
            cells.append(
                f"{name} {step['step'] / 1e3:.2f} ms (exposed {exposed:.2f}, host {step['host-bound'] / 1e3:.2f})"
            )
        if {"fsdp2", "torch"} <= set(steps):
            cells.append(f"ratio {steps['fsdp2']['step'] / steps['torch']['step']:.3f}")
        lines.append(f"{field} {value:g}: {', '.join(cells)}")
    return "\n".join(lines)


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Adds an option for each field of the machine."""
    for field in fields(Machine):
        name = "--" + field.name.replace("_", "-")
        if isinstance(field.default, bool):
            parser.add_argument(name, action="store_true")
        else:
            parser.add_argument(name, type=type(field.default), default=field.default)


def machine_of(args: argparse.Namespace) -> Machine:
    return Machine(**{field.name: getattr(args, field.name) for field in fields(Machine)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("libraries", nargs="*", help="default: all files of the folder")
    parser.add_argument("--check", action="store_true", help="checks the replay itself")
    parser.add_argument(
        "--sweep", action="append", default=[], metavar="OPTION=VALUES", help="one line each, as latency=0.5,1,2"
    )
    parser.add_argument(
        "--idle", type=int, default=0, help="show the longest times that the compute stream is idle, and the phases"
    )
    parser.add_argument("--kernels", type=int, default=0, help="show so many kinds of kernels that take longest")
    add_machine(parser)
    args = parser.parse_intermixed_args()
    machine = machine_of(args)
    order = ["plain", "fsdp2", "torch"]
    found = args.libraries or sorted(
        (p.stem for p in args.folder.glob("*.json")), key=lambda n: order.index(n) if n in order else 9
    )
    records = {n: json.loads((args.folder / f"{n}.json").read_text()) for n in found}
    if args.check:
        for name, record in records.items():
            print(name, {what: round(number, 6) for what, number in check(record, machine).items()})
        return
    if args.sweep:
        for option in args.sweep:
            field, _, values = option.partition("=")
            print(sweep(records, machine, field.replace("-", "_"), [*map(float, values.split(","))]))
        return
    results = {n: replay(r, machine) for n, r in records.items()}
    print(next(iter(records.values()))["about"])
    print(table(results))
    guessed = Counter()
    for result in results.values():
        guessed.update(result["guessed"])
    for name, count in guessed.most_common(8):
        print(f"bytes guessed: {count} {name}", file=sys.stderr)
    if args.idle:
        for name, result in results.items():
            print(
                name,
                {k: round(v / 1e3, 2) for k, v in sorted(result["phases"].items())},
                f"{len(result['idle'])} idle times",
            )
            for time, at, phase, cause, before, parts in result["idle"][: args.idle]:
                print(
                    f"  {time:8.0f} us at {at / 1e3:7.2f} ms in {phase}, for {cause[:60]}, before {before[:70]}",
                    {k: round(v) for k, v in parts.items()},
                )
    if args.kernels:
        for name, record in records.items():
            prices, sums, number = Prices(machine, record["about"]), Counter(), Counter()
            for _, _, kind, stream, a, b, c, d, e, called in record["calls"]:
                if kind in ("kernel", "gemm"):
                    of_kind = kind_of(called if kind == "kernel" else kind).label
                    key = f"stream {stream}, {of_kind if of_kind != OTHER.label else called[:150]}"
                    sums[key] += (
                        prices.kernel(called, a, b, c, d, e) if kind == "kernel" else prices.gemm(a, b, c, d, e)
                    )
                    number[key] += 1
            print(
                name, *(f"{us / 1e3:8.3f} ms {number[k]:5} {k}" for k, us in sums.most_common(args.kernels)), sep="\n  "
            )


if __name__ == "__main__":
    main()
