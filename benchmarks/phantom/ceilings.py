"""Holds what a step takes at most on the phantom, in one table, `ceilings.txt`, and counts it again:

    PYTHONPATH=tests:. python -m benchmarks.phantom.ceilings           lowers what has become less, says what is more
    PYTHONPATH=tests:. python -m benchmarks.phantom.ceilings --all     writes what is counted, more or less
    PYTHONPATH=tests:. python -m benchmarks.phantom.ceilings "8B, N=64"   some cases only

A line is a case: models of real sizes with fsdp2 and with torch's FSDP2 (`compare`), and a small model trained in each
of the ways of `one_of_many` (`over_nccl`). torch's are no ceilings: they must be as they are, or the phantom counts
otherwise than it did.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from .run import run

PATH = Path(__file__).with_suffix(".txt")
# Column -> what `compare.count` calls it.
QUANTITIES = {
    "kernels": "kernels",
    "gathers": "all-gathers: launches",
    "of": "all-gathers: operations",
    "reductions": "reduce-scatters: launches",
    "of ": "reduce-scatters: operations",
    "all-reduces": "all-reduces: launches",
    "waits": "stream waits",
    "records": "event records",
    "events": "events made",
    "host waits": "host waits",
    "HtoD": "copies HtoD",
    "DtoH": "copies DtoH",
    "HtoD pageable": "copies HtoD pageable",
    "DtoH pageable": "copies DtoH pageable",
    "cudaMalloc": "cudaMalloc",
    "peak MiB": "peak allocated GiB",
    "reserved MiB": "peak reserved GiB",
    "left MiB": "left GiB",
}
# Case -> options of `compare`.
STEPS = {
    "1B, N=8": "--model 1B --layers 2 --ranks 8",
    "1B, N=8, fp32": "--model 1B --layers 2 --ranks 8 --fp32",
    "1B, N=512": "--model 1B --layers 2 --ranks 512",
    "8B, N=64": "--model 8B --layers 2 --ranks 64",
    "experts, N=64": "--model moe --layers 2 --ranks 64",
    "expert modules, N=64": "--model moe-modules --layers 2 --ranks 64",
    "GPT-2, N=8": "--model gpt2 --layers 2 --ranks 8 --tokens 1024",
    "GPT-2, N=64": "--model gpt2 --layers 2 --ranks 64 --tokens 1024",
    "1B, HSDP 2 x 4": "--model 1B --layers 2 --ranks 4 --replicas 2",
    "1B, N=8, offloaded": "--model 1B --layers 2 --ranks 8 --offload",
    "1B, N=8, recomputed, 512 tokens": "--model 1B --layers 2 --ranks 8 --checkpoint --tokens 512",
}
LIBRARIES = ("fsdp2", "torch")
SLACK = 0.01  # of bytes
# Columns that are shown and no ceilings: torch makes a new event while NCCL's watchdog has given none back.
UNSTEADY = {"events"}
Numbers = tuple[float, ...]


@dataclass(frozen=True, order=True)
class Case:
    name: str
    library: str = "fsdp2"

    def __str__(self) -> str:
        return self.name if self.library == "fsdp2" else f"{self.name} ({self.library})"

    @classmethod
    def of(cls, text: str) -> "Case":
        name, _, library = text.removesuffix(")").rpartition(" (")
        return cls(name, library) if library in LIBRARIES and name else cls(text)


def read(path: Path = PATH) -> dict[Case, Numbers]:
    rows = [[cell.strip() for cell in line.split("|")] for line in path.read_text().splitlines()[1:]]
    return {Case.of(name): tuple(map(float, numbers)) for name, *numbers in rows}


def write(table: Mapping[Case, Numbers], path: Path = PATH) -> None:
    rows = [["", *(column.strip() for column in QUANTITIES)]]
    rows += [[str(case), *(f"{number:g}" for number in numbers)] for case, numbers in table.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (" | ".join(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)) for row in rows)
    names = (row[0].ljust(widths[0]) for row in rows)
    path.write_text("".join(f"{name} | {line}\n" for name, line in zip(names, lines, strict=True)))


def numbers_of(count: Mapping[str, float]) -> Numbers:
    """Returns a line of the table, from what `compare.count` has returned."""
    found = ((column, count.get(what, 0)) for column, what in QUANTITIES.items())
    return tuple(round(number * 1024, 2) if "MiB" in column else number for column, number in found)


def count_step(name: str) -> dict[Case, Numbers]:
    """Counts a step of fsdp2 and of torch's FSDP2, in processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "counts.json"
        run(
            ["-W", "ignore", "-m", "benchmarks.phantom.compare", *STEPS[name].split(), "--json", str(path), *LIBRARIES],
            900,
        )
        counts = json.loads(path.read_text())
    return {Case(name, library): numbers_of(counts[library]) for library in LIBRARIES}


def count_ways(names: Sequence[str] = ()) -> dict[Case, Numbers]:
    """Counts a step in each way to train.

    Raises:
        RuntimeError: a way fails, or its deleted model leaves bytes on the device.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "counts.json"
        # These would be nearly all of the memory of a small model.
        no_workspaces = {"CUBLAS_WORKSPACE_CONFIG": ":0:0", "CUBLASLT_WORKSPACE_SIZE": "0"}
        run(["-W", "ignore", "-m", "benchmarks.phantom.over_nccl", "--json", str(path), *names], 900, **no_workspaces)
        return {Case(name): numbers_of(count) for name, count in json.loads(path.read_text()).items()}


def exceeded(found: Mapping[Case, Numbers], table: Mapping[Case, Numbers]) -> list[str]:
    """Returns what is more than the table says, of torch's what is other than it says, and cases without a line."""
    told = []
    for case, numbers in found.items():
        if case not in table:
            told.append(f"{case}: not in {PATH.name}")
            continue
        for column, number, expected in zip(QUANTITIES, numbers, table[case], strict=True):
            if column in UNSTEADY:
                continue
            slack = SLACK * expected if "MiB" in column else 0
            if number > expected + slack:
                told.append(f"{case}: {number:g} {name_of(column)}, expected at most {expected:g}")
            elif case.library == "torch" and number < expected - slack:
                told.append(f"{case}: {number:g} {name_of(column)}, expected {expected:g}")
    return told


def name_of(column: str) -> str:
    return QUANTITIES[column].replace("GiB", "MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="also write what has become more")
    parser.add_argument("cases", nargs="*", help="default: all")
    args = parser.parse_args()
    table = read() if PATH.exists() else {}
    found: dict[Case, Numbers] = {}
    for name in args.cases or STEPS:
        if name in STEPS:
            found |= count_step(name)
    ways = [name for name in args.cases if name not in STEPS]
    if ways or not args.cases:
        found |= count_ways(ways)
    print("\n".join(exceeded(found, table)))
    for case, numbers in found.items():
        lower = numbers if args.all or case not in table else tuple(map(min, numbers, table[case]))
        table[case] = lower
    if not args.cases:
        table = {case: table[case] for case in found}  # in their order, without cases that are no more
    write(table)


if __name__ == "__main__":
    main()
