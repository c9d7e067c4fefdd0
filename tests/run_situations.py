"""Runs the table of situations (tests/situations) on fsdp2 and on torch's FSDP2, prints it, and writes a dated report.

    python tests/run_situations.py
    python tests/run_situations.py --only teacher_that_follows batch_norm --report ""

Each program runs in its own launch, which is ended after some seconds.
"""

import argparse
import datetime
import re
import sys
from collections import Counter
from pathlib import Path

import torch
from tqdm import tqdm

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from outcomes import KINDS, LIBRARIES, Outcome, Situation, outcome_of  # noqa: E402
from situations import SITUATIONS  # noqa: E402

Row = dict[str, Outcome | None]


def main() -> int:
    options = parse()
    torch.set_num_threads(1)
    chosen = [s for s in SITUATIONS if not options.only or s.name in options.only]
    rows = {situation: run(situation) for situation in tqdm(chosen, leave=False, disable=None)}
    text = report(rows)
    print(text)
    if options.report:
        options.report.write_text(text)
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run the table of situations on fsdp2 and on torch's FSDP2.")
    today = ROOT / "benchmarks" / "results" / f"{datetime.date.today()}-situations.md"
    parser.add_argument("--only", nargs="+", default=(), metavar="NAME", help="functions in tests/situations")
    parser.add_argument(
        "--report",
        type=lambda text: Path(text) if text else None,
        default=today,
        metavar="FILE",
        help="what to write; '' for nothing (%(default)s)",
    )
    return parser.parse_args()


def run(situation: Situation) -> Row:
    return {
        name: None if situation.only_ours and name != "fsdp2" else outcome_of(situation, library)
        for name, library in LIBRARIES.items()
    }


def report(rows: dict[Situation, Row]) -> str:
    summary = ["| | " + " | ".join(KINDS) + " |", "|---|" + "---|" * len(KINDS)]
    for name in LIBRARIES:
        counts = Counter(outcome.kind for row in rows.values() if (outcome := row[name]))
        summary.append(f"| {name} | " + " | ".join(str(counts[kind]) for kind in KINDS) + " |")
    table = ["| situation | " + " | ".join(LIBRARIES) + " |", "|---|" + "---|" * len(LIBRARIES)]
    table += [f"| {s.title} | " + " | ".join(map(cell, row.values())) + " |" for s, row in rows.items()]
    texts = [
        f"- {s.title}\n" + "".join(f"  - {name}: {message(o)}\n" for name, o in row.items() if o and o.text)
        for s, row in rows.items()
        if any(o and o.text for o in row.values())
    ]
    return (
        "\n".join([HEAD.format(date=datetime.date.today(), torch=torch.__version__), *summary, "", *table, "", TEXTS])
        + "\n"
        + "\n".join(texts)
    )


HEAD = """# Situations, {date}

How the programs of our list of known traps (`tests/situations/`) end, with fsdp2 and with torch {torch}'s FSDP2, on
gloo and CPU, 2 ranks, 4 for HSDP. EXACT: every value that the program shows equals that of plain training on the whole
batch. LOUD: an error on every rank that names a parameter, a module or a setting, and says what to do. CRYPTIC: an
error that does not. SILENT: no error, and other values. HANG: no end. A blank: the program uses what torch does not
have.
Command: `python tests/run_situations.py`.
"""
TEXTS = """## What was raised, or differed first
"""


def cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return ""
    return outcome.kind + (" (warned)" if outcome.warned and outcome.kind == "SILENT" else "")


def message(outcome: Outcome) -> str:
    text = " ".join(outcome.text.split()).replace("](", "]\\(")  # no link of Markdown
    text = re.sub(r"/\S*/(?=site-packages/)", "", text)  # no folder of this machine
    return f"{outcome.kind}: {text[:300]}" + ("..." if len(text) > 300 else "")


if __name__ == "__main__":
    sys.exit(main())
