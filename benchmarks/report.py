"""Defines rows of measurements, and formats them as Markdown. Nothing here measures."""

import os
import platform
import shutil
import statistics
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch


@dataclass(frozen=True)
class Row:
    """Holds one measured quantity in one setting, for each library; `rounds` only where time was measured.

    Args:
        bare: the value of the model without any library.
        limit: the least possible value.
        note: a line of text that stands below the table.
    """

    suite: str
    quantity: str
    setting: str
    values: dict[str, float]
    rounds: dict[str, list[float]] = field(default_factory=dict)
    bare: float | None = None
    limit: float | None = None
    note: str = ""


def timed_row(
    suite: str,
    quantity: str,
    setting: str,
    rounds: dict[str, list[float]],
    bare: float | None = None,
    limit: float | None = None,
) -> Row:
    """Returns a row of medians over rounds, which also keeps the rounds: a ratio is taken inside each."""
    medians = {name: statistics.median(times) for name, times in rounds.items()}
    return Row(suite, quantity, setting, medians, rounds, bare, limit)


def merge_rows(rows: Iterable[Row]) -> list[Row]:
    """Joins rows of one quantity and setting, which processes of different libraries, or several turns, have written.
    Rounds follow each other; the plain model's values and limits become medians.
    """
    same: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if row.values:
            same.setdefault((row.suite, row.quantity, row.setting), []).append(row)
    return [_merge(key, parts) for key, parts in same.items()]


def _merge(key: tuple[str, str, str], parts: Sequence[Row]) -> Row:
    rounds: dict[str, list[float]] = {}
    for part in parts:
        for name, times in part.rounds.items():
            rounds.setdefault(name, []).extend(times)
    values = {name: value for part in parts for name, value in part.values.items()}
    values.update({name: statistics.median(times) for name, times in rounds.items()})
    bare, limit = (
        statistics.median(found)
        if (found := [each for part in parts if (each := getattr(part, what)) is not None])
        else None
        for what in ("bare", "limit")
    )
    return Row(*key, values, rounds, bare, limit, "; ".join(dict.fromkeys(part.note for part in parts if part.note)))


def _format(value: float | None) -> str:
    if value is None:
        return "-"
    if value == 0 or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.2f}" if abs(value) >= 0.01 else f"{value:.0e}"


def _format_value(row: Row, name: str) -> str:
    """Formats a value; of a time, the median and, in brackets, the least and the most of all rounds."""
    times = row.rounds.get(name, ())
    spread = f" ({_format(min(times))} to {_format(max(times))})" if len(times) > 1 else ""
    return _format(row.values.get(name)) + spread


def _pairs(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields which libraries are compared: the first with each other one, but best only with best."""
    for name in names[1:]:
        ours = name.replace("torch", "fsdp2") if name.endswith("-best") else names[0]
        if ours in names and ours != name:
            yield ours, name


def _format_ratio(row: Row, ours: str, theirs: str) -> str:
    if ours in row.rounds and theirs in row.rounds:
        # Those of processes that took turns met about the same disturbance.
        ratios = [mine / other for mine, other in zip(row.rounds[ours], row.rounds[theirs], strict=True)]
        return f"{statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"
    if ours in row.values and row.values.get(theirs):
        return f"{row.values[ours] / row.values[theirs]:.2f}x"
    return "-"


def _format_distance(value: float | None, limit: float | None) -> str:
    """Formats the measured value divided by the limit: 1 is perfect."""
    if value is None or limit is None or (limit == 0 and value != 0):
        return "-"
    return "1.00" if value == limit else f"{value / limit:.2f}"


def format_table(rows: Sequence[Row], names: Sequence[str]) -> str:
    """Formats one Markdown table, padded for terminals: values, then ratios. Columns without a number are left out."""
    pairs = [*_pairs(names)]
    ratios, distances = [f"{ours} / {name}" for ours, name in pairs], [f"{name} / limit" for name in names]
    header = ["what", "setting", *names, *ratios, "bare", "limit", *distances]
    cells = [header]
    for row in rows:
        values = [_format_value(row, name) for name in names]
        ratios = [_format_ratio(row, ours, name) for ours, name in pairs]
        distances = [_format_distance(row.values.get(name), row.limit) for name in names]
        numbers = [*values, *ratios, _format(row.bare), _format(row.limit), *distances]
        cells.append([row.quantity, row.setting, *numbers])
    columns = [column for column in zip(*cells, strict=True) if any(cell != "-" for cell in column[1:])]
    widths = [max(map(len, column)) for column in columns]
    padded = [[cell.ljust(width) for cell in column] for column, width in zip(columns, widths, strict=True)]
    lines = [f"| {' | '.join(line)} |" for line in zip(*padded, strict=True)]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def describe_machine(gpu: str | None = None) -> Iterator[str]:
    """Yields facts of the machine. `gpu`: the name of its GPU, if that is not to be asked of CUDA in this process."""
    cpu = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "?")
    memory = next((int(line.split()[1]) / 2**20 for line in _lines("/proc/meminfo") if "MemTotal" in line), 0.0)
    if gpu is None:
        gpu = f"GPU {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "no GPU"
    yield f"CPU {cpu or platform.processor()}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB; {gpu}"
    yield f"load average at the start {os.getloadavg()[0]:.1f} (the machine is shared; other jobs may have run)"
    yield f"Python {platform.python_version()}, torch {torch.__version__}, OMP_NUM_THREADS=1"
    yield f"commit {_commit()}"


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def _commit() -> str:
    here = Path(__file__).parent
    if shutil.which("git") is None:
        return "unknown: there is no git"
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True)
    dirty = subprocess.run(["git", "status", "--porcelain"], cwd=here, capture_output=True, text=True).stdout
    return (head.stdout.strip() if head.returncode == 0 else "none yet") + (" with local changes" if dirty else "")
