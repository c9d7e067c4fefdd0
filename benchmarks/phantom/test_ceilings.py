"""Tests the table of what a step takes at most, without a phantom."""

from pathlib import Path

import one_of_many
from benchmarks.phantom import ceilings
from benchmarks.phantom.ceilings import Case, Numbers

OURS, THEIRS = Case("1B, HSDP 2 x 4"), Case("1B, HSDP 2 x 4", "torch")


def numbers(**changed: float) -> Numbers:
    """A line of the table: 100 of everything, but what is changed, by column."""
    return tuple(changed.get(column.split()[0], 100.0) for column in ceilings.QUANTITIES)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    table = {OURS: numbers(peak=7758.12), THEIRS: numbers(waits=0.0), Case("a name (of its own)"): numbers()}
    ceilings.write(table, tmp_path / "table")
    assert ceilings.read(tmp_path / "table") == table


def test_the_table_has_all_cases() -> None:
    cases = {case.name for case in ceilings.read()}
    assert set(ceilings.STEPS) <= cases
    assert len(set(one_of_many.WAYS) - cases) == 1, "conditional modules, whose consensus no rank answers"
    assert all(numbers[-1] == 0 for numbers in ceilings.read().values()), "deleted models leave nothing"


def test_more_is_told_and_less_is_not() -> None:
    table = {OURS: numbers(), THEIRS: numbers()}
    assert not ceilings.exceeded({OURS: numbers(waits=99.0, peak=100.9), THEIRS: numbers()}, table)
    (told,) = ceilings.exceeded({OURS: numbers(waits=101.0)}, table)
    assert told == "1B, HSDP 2 x 4: 101 stream waits, expected at most 100"
    (told,) = ceilings.exceeded({OURS: numbers(peak=101.1)}, table)
    assert "101.1 peak allocated" in told
    assert ceilings.exceeded({THEIRS: numbers(waits=99.0)}, table), "torch's must be as they are"
    assert not ceilings.exceeded({THEIRS: numbers(events=99.0)}, table), "how many are made depends on a thread's time"
    assert ceilings.exceeded({Case("new"): numbers()}, table) == ["new: not in ceilings.txt"]


def test_counts_become_lines() -> None:
    line = dict(zip(ceilings.QUANTITIES, ceilings.numbers_of({"kernels": 7, "peak allocated GiB": 1.5}), strict=True))
    assert (line["kernels"], line["peak MiB"], line["host waits"]) == (7, 1536, 0)
