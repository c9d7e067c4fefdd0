"""Replays recorded calls on a model of a GPU: what a step would take, and what the compute stream would wait for.

    python -m phantom.run -m phantom.record --out FOLDER ...      (writes FOLDER/LIBRARY.json)
    python -m phantom.timeline FOLDER [options]                   (any Python with torch)

The host issues the calls at its measured times, plus a cost of the driver. A stream runs its work in order; events and
waits order streams; a group of NCCL calls on one communicator is one kernel of its stream. Steps follow each other
without a pause; the third is reported. What it doesn't know: README.md.
"""

import argparse
import json
import pathlib
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from . import models

ITEM = {0: 1, 1: 1, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2}  # of NCCL's dtypes


@dataclass(frozen=True)
class Machine:
    host_scale: float = 1.0  # of the measured host times
    launch_us: float = 2.0  # the driver's time for a kernel or copy
    event_us: float = 0.5  # for an event recorded, waited for, made or asked
    nccl_us: float = 5.0  # for a group of collectives,
    nccl_op_us: float = 1.0  # and for each of them
    latency_us: float = 0.0  # of a group of collectives; 0: 20 up to 8 ranks, else 60
    bandwidth: float = 0.0  # GB/s, (N - 1) / N of the bytes take bytes / bandwidth; 0: 370 up to 8 ranks, else 45
    flops: float = 0.6 * 989e12
    fp32_flops: float = 0.6 * 67e12
    attention: float = 0.4 * 989e12
    memory: float = 0.8 * 3.35e12  # bytes per second
    strided: float = 0.5  # of it, for copies between differently strided tensors
    pcie: float = 50e9
    floor_us: float = 2.5  # no kernel takes less
    wait_us: float = 0.0  # a stream's own time for a wait on another stream's event
    contention: float = 0.0  # by what fraction computing slows down while a collective runs,
    copy_contention: float = 1.0  # and while a copy runs on another stream; 1: they take turns at the memory
    parallel_comm: bool = False  # collectives of one communicator on two streams overlap, each at full bandwidth
    sync: bool = False  # the host waits for the GPU at the end of each step

    def for_ranks(self, n: int) -> "Machine":
        return replace(
            self,
            latency_us=self.latency_us or (20 if n <= 8 else 60),
            bandwidth=self.bandwidth or (370 if n <= 8 else 45),
        )


# ---- prices


class Prices:
    def __init__(self, machine: Machine, about: dict[str, Any]) -> None:
        self.machine, self.fp32 = machine, about["fp32"]
        self.shape, self.tokens = models.SHAPES[about["model"]], about["tokens"] * about["rows"]
        self._bytes: dict[tuple[Any, ...], float] = {}
        self.guessed: Counter[str] = Counter()

    def gemm(self, m: int, n: int, k: int, batch: int, dtype: int) -> float:
        if not m:
            self.guessed["matrix product of unknown size"] += 1
        flops = 2.0 * m * n * k * max(batch, 1)
        item = 4 if dtype == 0 else 2
        nbytes = item * max(batch, 1) * (m * n + m * k + k * n)
        rate = self.machine.fp32_flops if dtype == 0 else self.machine.flops
        return max(flops / rate * 1e6, nbytes / self.machine.memory * 1e6, self.machine.floor_us)

    def collective(self, kind: str, count: int, dtype: int, ranks: int) -> float:
        """Returns the time of its bytes, without latency, in us."""
        nbytes = count * ITEM.get(dtype, 4)
        if kind in ("ncclAllGather", "ncclReduceScatter", "ncclAlltoAll"):  # count: of one rank, or for one rank
            moved = nbytes * (ranks - 1)
        elif kind == "ncclAllReduce":
            moved = 2 * nbytes * (ranks - 1) / ranks
        elif kind == "ncclRecv":  # both directions of a link work at once; what is sent counts
            moved = 0.0
        else:
            moved = nbytes
        return moved / (self.machine.bandwidth * 1e9) * 1e6 if ranks > 1 else 0.0

    def copy(self, nbytes: int, direction: int) -> float:
        rate = self.machine.memory / 2 if direction == 3 else self.machine.pcie
        return max(nbytes / rate * 1e6, self.machine.floor_us)

    def kernel(self, name: str, x: int, y: int, z: int, threads: int, n: int) -> float:
        m = self.machine
        if (flops := self._attention(name, x, y, z)) is not None:
            return max(flops / m.attention * 1e6, m.floor_us)
        key = (name, x, y, z, threads, n)
        if key not in self._bytes:
            self._bytes[key] = self._bytes_of(name, x * y * z, threads, n)
        return max(self._bytes[key] / m.memory * 1e6, m.floor_us)

    @staticmethod
    def _attention(name: str, x: int, y: int, z: int) -> float | None:
        found = re.search(r"flash_(fwd_kernel|bwd_dq_dk_dv).*?traitsILi(\d+)ELi(\d+)ELi(\d+)", name)
        if not found:
            return None
        forward, head, rows, columns = found[1] == "fwd_kernel", int(found[2]), int(found[3]), int(found[4])
        length = x * (rows if forward else columns)
        return 4.0 * length**2 / 2 * head * y * z * (1 if forward else 2.5)  # causal

    def _bytes_of(self, name: str, grid: int, threads: int, n: int) -> float:
        item = 2 if "BFloat16" in name else 4
        tokens, dim = self.tokens, self.shape.dim
        if "elementwise_kernel" in name and n:
            arrays = re.search(r"arrayIPcLm(\d)E", name)
            if "copy_kernel" in name:
                moved = n * (8 if self.fp32 else 6)
            else:
                moved = n * item * (int(arrays[1]) if arrays else 2)
            return moved / (self.machine.strided if "18elementwise_kernelI" in name else 1)
        if "multi_tensor_apply" in name:
            if "CopyFunctor" in name:
                both = re.search(r"CopyFunctorI(f|N3c108BFloat16E)(f|N3c108BFloat16E|S\w*_)", name)
                return n * (6 if both and ("f" in both.groups()) and "BFloat16" in name else 2 * item)
            lists = re.search(r"TensorListMetadataILi(\d)E", name)
            return n * 4 * 7 if "Adam" in name else n * item * (int(lists[1]) if lists else 2)
        if "split_with_sizes" in name:
            return 2 * n
        if "chunk_cat" in name:
            return grid * threads * 16 * (1.5 if "kernelIfN3c108BFloat16E" in name else 2)
        if "layer_norm" in name:
            return grid * dim * item * (3 if "grad" in name else 2)
        if "GammaBetaBackward" in name:
            return tokens * dim * item * 2
        if "SoftMaxForward" in name:
            return grid * self.shape.vocab * 4 * 2
        if "SoftMaxBackward" in name:
            return grid * self.shape.vocab * 4 * 3
        if "gather_kernel" in name or "EmbeddingBackward" in name:
            return tokens * dim * item * 2
        if "reduce_kernel" in name:
            return tokens * dim * item * 1.25
        if "flash_bwd_dot_do_o" in name or "flash_bwd_convert_dq" in name:
            return tokens * dim * 6
        if "radix_sort" in name or "scan" in name or "nll_loss" in name or "unique" in name:
            return 0
        self.guessed[name[:100]] += 1
        return grid * threads * 4 * 2 * item  # four elements of two operands a thread


# ---- replay


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
class Stream:
    ready: float = 0.0
    by: Work | None = None


def replay(record: dict[str, Any], machine: Machine, steps: int = 3) -> dict[str, Any]:
    """Returns times in us, and counts of the last step."""
    about = record["about"]
    machine = machine.for_ranks(about["ranks"] if about["replicas"] == 1 else about["ranks"] * about["replicas"])
    prices = Prices(machine, about)
    streams: dict[int, Stream] = defaultdict(Stream)
    events: dict[int, tuple[float, Work | None]] = {}
    comms: dict[int, Stream] = defaultdict(Stream)  # NCCL lets no two kernels of a communicator run at once
    works: list[Work] = []
    busy_until = 0.0  # of collectives, for contention
    beside: list[tuple[float, float]] = []  # when copies on other streams run
    host, ends, host_ends, counts = 0.0, [0.0], [0.0], Counter()
    host_stalled = 0.0

    phase = ""

    def issue(stream: int, what: str, duration: float, step: int, name: str) -> None:
        nonlocal busy_until
        s = streams[stream]
        start, cause = (s.ready, s.by) if s.ready >= host else (host, None)
        if machine.contention and what == "compute" and busy_until > start:
            slow = 1 + machine.contention
            together = min(duration * slow, busy_until - start)
            duration = together + max(0.0, duration - together / slow)
        if machine.copy_contention and what == "compute":
            beside[:] = sorted(each for each in beside if each[1] > start)
            for first, last in beside:
                overlap = min(start + duration, last) - max(start, first)
                if overlap > 0:
                    duration += overlap * machine.copy_contention
        work = Work(start, start + duration, stream, what, cause, step, name, phase)
        works.append(work)
        s.ready, s.by = work.end, work
        if what in ("gather", "reduce", "collective"):
            busy_until = max(busy_until, work.end)
        if what == "copy" and name != "memcpy":
            beside.append((work.start, work.end))
        if step == steps - 1:
            counts[what] += 1
            counts["us " + what + ("" if stream else " on compute stream")] += work.end - work.start

    for step in range(steps):
        before = 0
        depth, group, phase = 0, [], ""
        for ns, _, kind, stream, a, b, c, d, e, name in record["calls"]:
            host += (ns - before) / 1e3 * machine.host_scale
            before = ns
            if kind == "kernel":
                host += machine.launch_us
                issue(stream, "compute" if stream == 0 else "copy", prices.kernel(name, a, b, c, d, e), step, name)
            elif kind == "gemm":
                host += machine.launch_us
                issue(stream, "compute", prices.gemm(a, b, c, d, e), step, f"gemm {a} {b} {c}")
            elif kind == "cudaMemcpyAsync" or kind == "cudaMemcpy":
                host += machine.launch_us
                issue(stream, "compute" if stream == 0 else "copy", prices.copy(a, b), step, "memcpy")
                if kind == "cudaMemcpy" or (c and b == 2):
                    stalled = max(0.0, streams[stream].ready - host)
                    host, host_stalled = host + stalled, host_stalled + stalled
            elif kind == "cudaMemsetAsync":
                host += machine.launch_us
                issue(
                    stream,
                    "compute" if stream == 0 else "copy",
                    max(a / machine.memory * 1e6, machine.floor_us),
                    step,
                    "memset",
                )
            elif kind == "cudaEventRecord":
                host += machine.event_us
                s = streams[stream]
                events[a] = (s.ready, s.by) if s.ready >= host else (host, None)
                counts["records"] += step == steps - 1
            elif kind == "cudaStreamWaitEvent":
                host += machine.event_us
                s, (time, by) = streams[stream], events.get(a, (0.0, None))
                counts["waits"] += step == steps - 1
                if time > s.ready:
                    s.ready, s.by = time, by
                s.ready += machine.wait_us
            elif kind == "mark":
                phase = name
            elif kind == "ncclGroupStart":
                depth += 1
            elif kind == "ncclGroupEnd":
                depth -= 1
            elif kind.startswith("nccl") and kind != "ncclCommInit" and kind != "ncclCommSplit":
                group.append((kind, stream, a, b, d, e))
            elif kind in ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"):
                until = max((s.ready for s in streams.values()), default=0.0)
                if kind == "cudaStreamSynchronize":
                    until = streams[stream].ready
                elif kind == "cudaEventSynchronize":
                    until = events.get(a, (0.0, None))[0]
                stalled = max(0.0, until - host)
                host, host_stalled = host + stalled, host_stalled + stalled
                counts["synchronisations"] += step == steps - 1
            elif kind in ("cudaEventCreate", "cudaEventQuery"):
                host += machine.event_us
            if group and depth == 0:
                by_comm: dict[tuple[int, int], list[Any]] = defaultdict(list)
                for each in group:
                    by_comm[each[4], each[1]].append(each)
                for (comm, on), members in by_comm.items():
                    host += machine.nccl_us + machine.nccl_op_us * len(members)
                    time = machine.latency_us + sum(prices.collective(k, n, t, r) for k, _, n, t, _, r in members)
                    kinds = {k for k, *_ in members}
                    what = (
                        "gather"
                        if kinds == {"ncclAllGather"}
                        else "reduce"
                        if kinds == {"ncclReduceScatter"}
                        else "collective"
                    )
                    if not machine.parallel_comm:
                        s, order = streams[on], comms[comm]
                        if order.ready > s.ready:
                            s.ready, s.by = order.ready, order.by
                    issue(on, what, time, step, f"{what} of {len(members)}")
                    comms[comm].ready, comms[comm].by = streams[on].ready, streams[on].by
                    counts[f"{what} operations"] += (step == steps - 1) * len(members)
                group = []
        if machine.sync:
            host = max(host, *(s.ready for s in streams.values()))
        ends.append(max(streams[0].ready, host if machine.sync else 0.0))
        host_ends.append(host)
    result = breakdown(works, ends[-2], ends[-1])
    result |= {
        "step": ends[-1] - ends[-2],
        "first step": ends[1],
        "host": host_ends[-1] - host_ends[-2],
        "host stalled": host_stalled,
        "counts": dict(counts),
        "guessed": dict(prices.guessed),
    }
    result["launches"] = sum(counts[k] for k in ("compute", "copy", "gather", "reduce", "collective"))
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
    operations = kinds["ncclAllGather"] + kinds["ncclReduceScatter"]
    lost = issued - counts["compute"] - counts["copy"]
    lost += operations - counts["gather operations"] - counts["reduce operations"]
    fast = replace(machine, host_scale=0.0, launch_us=0.0, event_us=0.0, nccl_us=0.0, nccl_op_us=0.0)
    free = replay(record, replace(fast, bandwidth=1e12, latency_us=1e-9))
    late = replay(record, replace(fast, bandwidth=1e12, latency_us=1000.0))
    return {
        "parts / step": parts / result["step"],
        "lost": lost,
        "waits, host free": replay(record, fast)["host-bound"],
        "exposed, wire free": free["exposed gather"] + free["exposed reduce"],
        "late step / free step": late["step"] / free["step"],
        "collectives": free["counts"].get("gather", 0) + free["counts"].get("reduce", 0),
    }


def sweep(records: dict[str, dict[str, Any]], machine: Machine, latencies: Sequence[float]) -> str:
    """Returns a line for each latency of a collective, in us."""
    lines = []
    for latency in latencies:
        steps = {name: replay(record, replace(machine, latency_us=latency)) for name, record in records.items()}
        cells = []
        for name, step in steps.items():
            exposed = (step["exposed gather"] + step["exposed reduce"]) / 1e3
            cells.append(
                f"{name} {step['step'] / 1e3:.2f} ms (exposed {exposed:.2f}, host {step['host-bound'] / 1e3:.2f})"
            )
        if {"fsdp2", "torch"} <= set(steps):
            cells.append(f"ratio {steps['fsdp2']['step'] / steps['torch']['step']:.3f}")
        lines.append(f"latency {latency:g} us: {', '.join(cells)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("libraries", nargs="*", help="default: all files of the folder")
    parser.add_argument("--check", action="store_true", help="checks the replay itself")
    parser.add_argument("--sweep", default="", help="latencies in us, as 5,20,60: one line each")
    parser.add_argument(
        "--idle", type=int, default=0, help="show the longest times that the compute stream is idle, and the phases"
    )
    parser.add_argument("--kernels", type=int, default=0, help="show so many kinds of kernels that take longest")
    for field in fields(Machine):
        name = "--" + field.name.replace("_", "-")
        parser.add_argument(name, action="store_true") if field.default is False else parser.add_argument(
            name, type=float, default=field.default
        )
    args = parser.parse_intermixed_args()
    machine = Machine(**{f.name: getattr(args, f.name) for f in fields(Machine)})
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
        print(sweep(records, machine, [*map(float, args.sweep.split(","))]))
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
            prices, sums, number = (
                Prices(machine.for_ranks(record["about"]["ranks"]), record["about"]),
                Counter(),
                Counter(),
            )
            for _, _, kind, stream, a, b, c, d, e, called in record["calls"]:
                if kind in ("kernel", "gemm"):
                    key = f"{stream} {called[:150]}"
                    sums[key] += (
                        prices.kernel(called, a, b, c, d, e) if kind == "kernel" else prices.gemm(a, b, c, d, e)
                    )
                    number[key] += 1
            print(
                name, *(f"{us / 1e3:8.3f} ms {number[k]:5} {k}" for k, us in sums.most_common(args.kernels)), sep="\n  "
            )


if __name__ == "__main__":
    main()
