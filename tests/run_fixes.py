"""Counts the situations (situations.py) with a wrong outcome without each fix for sharded parameters, and without all.

    python tests/run_fixes.py          about half an hour: each program runs in its own launch
    python tests/run_fixes.py NAME ... the rows of these fixes; the others are copied from the newest report

It prints a Markdown table, and writes it to a dated report. The numbers are in `python -m fsdp2 fixes`.
"""

import argparse
import datetime
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import fsdp2  # noqa: E402
from fsdp2.dtensor.table import FIXES  # noqa: E402
from outcomes import HANG, PATIENCE_S, Situation, outcome_of  # noqa: E402
from situations import SITUATIONS  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"


def find_wrong(situations: Sequence[Situation], names: Sequence[str]) -> list[tuple[Situation, str]]:
    """Returns the situations with a wrong outcome without the fixes of these names (none: all), and the outcome."""
    fsdp2.dtensor_fixes(False, *names)
    try:
        found = []
        for situation in tqdm(situations, desc=", ".join(names) or "all", leave=False, disable=None):
            outcome = outcome_of(situation, fsdp2)
            if outcome.kind == HANG:  # or the machine is slow
                outcome = outcome_of(situation, fsdp2, 4 * PATIENCE_S)
            if (outcome.kind, situation.says in outcome.text) != (situation.ends, True):
                found.append((situation, outcome.kind))
        return found
    finally:
        fsdp2.dtensor_fixes(True)


def count(names: Sequence[str], others: Sequence[str]) -> None:
    """Writes a report of today: rows of the fixes `names`, and those of `others` as the newest report has them."""
    newest = max(RESULTS.glob("*-fixes.md")) if others else None
    rows = dict(re.findall(r"^\| ([a-z0-9-]+) (\|.*)$", newest.read_text(), re.M)) if newest else {}
    today = datetime.date.today()
    without_all = find_wrong(SITUATIONS, ())
    lines = [f"# Situations without the fixes, {today}, torch {torch.__version__}", ""]
    kinds = [kind for _, kind in without_all]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    lines += [f"Without all, {len(without_all)} of {len(SITUATIONS)} end wrong: {counts}.", ""]
    if newest:
        lines += [f"Counted again: {', '.join(names)}. The other rows are those of {newest.name}.", ""]
    lines += ["| without | end wrong | how, and which |", "|---|---|---|"]
    for fix in FIXES:
        if fix.name in names:
            wrong = find_wrong([situation for situation, _ in without_all], [fix.name])
            which = ", ".join(f"{kind} {situation.name}" for situation, kind in wrong)
            rows[fix.name] = f"| {len(wrong)} | {which} |"
            print(f"| {fix.name} {rows[fix.name]}", flush=True)
        if fix.name in rows:
            lines.append(f"| {fix.name} {rows[fix.name]}")
    report = "\n".join(lines) + "\n"
    (RESULTS / f"{today}-fixes.md").write_text(report)
    print(report)


def main() -> None:
    switched = [fix.name for fix in FIXES if fix.attach is not None or fix.patch is not None]
    parser = argparse.ArgumentParser(description="Count the situations with a wrong outcome without each fix.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="count only these again (default: all fixes)")
    names = parser.parse_args().names
    if unknown := {*names} - {*switched}:
        parser.error(f"no fixes: {', '.join(sorted(unknown))}. There are {', '.join(switched)}")
    torch.set_num_threads(1)
    count(names or switched, [name for name in switched if names and name not in names])


if __name__ == "__main__":
    main()
