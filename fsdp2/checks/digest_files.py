"""Compares the files of `DigestLog`: `python -m fsdp2 diff RUN [RUN]`. It needs no ranks, and no torch."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

RECEIVED, GRADIENT, WEIGHT = "received weights", "gradient", "weight"
Header = Sequence[tuple[str, int, int]]
"""For each group: its name, and the indices of the shard and the replica that a rank holds."""


def path_of(folder: str | os.PathLike[str], rank: int, world_size: int) -> Path:
    """Returns the file of one rank. A run that goes on with other ranks has other files."""
    return Path(folder) / f"rank-{rank}-of-{world_size}.jsonl"


class _Part(NamedTuple):
    """The digest of what one rank holds of one kind of a group. `shard`, `replica`: which part it is."""

    shard: int
    replica: int
    digest: int


Parts = Mapping[int, _Part]
"""Rank -> its part."""
Run = dict[int, dict[tuple[str, str], dict[int, _Part]]]
"""Step -> (kind, group) -> parts, in the order in which a step computes them."""


class Difference(NamedTuple):
    """The first difference. `ranks`: those that hold it; empty if that can't be said."""

    group: str
    kind: str
    step: int
    ranks: Sequence[int]
    where: str

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        rank = f"rank{'s' * (len(self.ranks) > 1)} {ranks}" if ranks else "of all ranks together"
        return f"first differs: {self.group}, {self.kind}, step {self.step}, {rank} ({self.where})"


def read_run(folder: str | os.PathLike[str]) -> Run:
    """Returns the digests of a run. Where a step was recorded again, after a restart, the last record counts.

    Raises:
        ValueError: there are no such files.
    """
    run: dict[int, dict[tuple[str, str], dict[int, _Part]]] = {}
    sizes: dict[int, int] = {}
    for path in sorted(Path(folder).glob("rank-*-of-*.jsonl"), key=lambda path: path.stat().st_mtime):
        _, rank, _, size = path.stem.split("-")
        header: Header = []
        for line in path.read_text().splitlines():
            try:
                record = json.loads(line)
            except ValueError:  # the rank was ended while it wrote
                continue
            if "groups" in record:
                header = record["groups"]
                continue
            step = record.pop("step")
            if sizes.setdefault(step, int(size)) != int(size):
                sizes[step], run[step] = int(size), {}
            for kind, digests in record.items():
                for (group, shard, replica), digest in zip(header, digests, strict=True):
                    if digest is not None:
                        run.setdefault(step, {}).setdefault((kind, group), {})[int(rank)] = _Part(
                            shard, replica, digest
                        )
    if not run:
        raise ValueError(f"{folder}: expected files of fsdp2.DigestLog with a recorded step, found none")
    return {step: _in_order(run[step]) for step in sorted(run)}


def _in_order(found: dict[tuple[str, str], dict[int, _Part]]) -> dict[tuple[str, str], dict[int, _Part]]:
    """Returns what a step computes first first: backward computes the gradients of the last groups first."""
    order = {RECEIVED: 0, GRADIENT: 1, WEIGHT: 3}
    places = {key: i for i, key in enumerate(found)}

    def place(key: tuple[str, str]) -> tuple[int, int]:
        return order.get(key[0], 2), -places[key] if key[0] == GRADIENT else places[key]

    return {key: found[key] for key in sorted(found, key=place)}


def _wholes(kind: str, parts: Parts) -> dict[int, int]:
    """Returns a number for each copy of the whole: by rank of what each receives, else by replica."""
    if kind == RECEIVED:
        return {rank: part.digest for rank, part in parts.items()}
    sums: dict[int, int] = {}
    for part in parts.values():
        sums[part.replica] = (sums.get(part.replica, 0) + part.digest) % (1 << 64)
    return sums


def _apart_in(kind: str, parts: Parts) -> list[int]:
    """Returns the ranks of one run that do not hold what most ranks with the same part do; all of them, if there is no
    majority.
    """
    apart = []
    for shard in {part.shard for part in parts.values()} if kind != RECEIVED else (None,):
        alike = {rank: part.digest for rank, part in parts.items() if shard in (None, part.shard)}
        (usual, count), *others = Counter(alike.values()).most_common()
        if others:
            apart += [rank for rank, each in alike.items() if each != usual or others[0][1] == count]
    return sorted(apart)


def first_difference(one: Run, other: Run | None = None) -> Difference | None:
    """Returns where two runs part, or the ranks of one of them; None if nothing differs in the steps of both."""
    runs = [run for run in (one, other) if run is not None]
    for step in sorted(set.intersection(*(set(run) for run in runs))):
        for kind, group in one[step]:
            found = [run[step][kind, group] for run in runs if (kind, group) in run[step]]
            for number, parts in enumerate(found, 1):
                apart = _apart_in(kind, parts)
                if apart:
                    return Difference(group, kind, step, apart, f"ranks of run {number} hold different bits")
            if len(found) == 2 and {*_wholes(kind, found[0]).values()} != {*_wholes(kind, found[1]).values()}:
                ours, theirs = found
                are_cut_alike = {r: each[:2] for r, each in ours.items()} == {r: each[:2] for r, each in theirs.items()}
                ranks = [rank for rank in ours if ours[rank] != theirs[rank]] if are_cut_alike else []
                return Difference(group, kind, step, sorted(ranks), "the runs hold different bits")
    return None


def main(arguments: Sequence[str]) -> int:
    """Prints where runs part. Returns 0: nowhere; 1: there is a difference; 2: there is nothing to compare."""
    parser = argparse.ArgumentParser(prog="python -m fsdp2 diff", description=main.__doc__)
    parser.add_argument("run", help="folder of a fsdp2.DigestLog")
    parser.add_argument("other", nargs="?", help="that of another run; without it, ranks of one run are compared")
    given = parser.parse_args(arguments)
    try:
        runs = [read_run(each) for each in (given.run, given.other) if each is not None]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    steps = sorted(set.intersection(*(set(run) for run in runs)))
    if not steps:
        print("expected runs that have recorded some of the same steps, got none", file=sys.stderr)
        return 2
    found = first_difference(*runs)
    before = [step for step in steps if found is None or step < found.step]
    print(found or f"no difference in {len(steps)} recorded steps, {steps[0]} to {steps[-1]}")
    if found is not None:
        print(f"equal in {len(before)} recorded steps before" + (f", the last is {before[-1]}" if before else ""))
    return int(found is not None)
