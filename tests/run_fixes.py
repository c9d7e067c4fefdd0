"""Counts the situations (situations.py) with a wrong outcome without each fix for sharded parameters, and without all.

    python tests/run_fixes.py          about half an hour: each program runs in its own launch

It prints a Markdown table, and writes it to a dated report. The numbers are in `python -m fsdp2 fixes`.
"""

import datetime
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from tqdm import tqdm

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import fsdp2  # noqa: E402
from fsdp2.dtensor.table import FIXES  # noqa: E402
from outcomes import Situation, outcome_of  # noqa: E402
from situations import SITUATIONS  # noqa: E402


def find_wrong(situations: Sequence[Situation], names: Sequence[str]) -> list[tuple[Situation, str]]:
    """Returns the situations with a wrong outcome without the fixes of these names (none: all), and the outcome."""
    fsdp2.dtensor_fixes(False, *names)
    try:
        found = []
        for situation in tqdm(situations, desc=", ".join(names) or "all", leave=False, disable=None):
            outcome = outcome_of(situation, fsdp2)
            if (outcome.kind, situation.says in outcome.text) != (situation.ends, True):
                found.append((situation, outcome.kind))
        return found
    finally:
        fsdp2.dtensor_fixes(True)


def main() -> None:
    torch.set_num_threads(1)
    today = datetime.date.today()
    without_all = find_wrong(SITUATIONS, ())
    lines = [f"# Situations without the fixes, {today}, torch {torch.__version__}", ""]
    kinds = [kind for _, kind in without_all]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    lines += [f"Without all, {len(without_all)} of {len(SITUATIONS)} end wrong: {counts}.", ""]
    lines += ["| without | end wrong | how, and which |", "|---|---|---|"]
    for fix in FIXES:
        if fix.attach is not None or fix.patch is not None:
            wrong = find_wrong([situation for situation, _ in without_all], [fix.name])
            which = ", ".join(f"{kind} {situation.name}" for situation, kind in wrong)
            lines.append(f"| {fix.name} | {len(wrong)} | {which} |")
            print(lines[-1], flush=True)
    report = "\n".join(lines) + "\n"
    (ROOT / "benchmarks" / "results" / f"{today}-fixes.md").write_text(report)
    print(report)


if __name__ == "__main__":
    main()
