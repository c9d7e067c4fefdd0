"""Looks up the numbers that README.md and benchmarks/README.md state in the dated reports that they come from.

    python -m benchmarks.claims

It prints each number, its report and the line there that fits best, and fails if a number is in no report that its
paragraph or item, or else its section, links to. Looked up are numbers with decimals, and those of ms, us, GiB and
tokens/s, where a report is linked; and all ratios (0.81x). Each must be a number of the report, rounded.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .jobs import ROOT

PAGES = ("README.md", "benchmarks/README.md")
LINK = re.compile(r"\]\(([^)\s]*results/[\w.-]+\.md)[^)]*\)")
STATED = re.compile(r"(?<![\w.,:/-])(\d[\d,]*(?:\.\d+)?)(?=x\b|\b)")
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?")
UNIT = re.compile(r"x\b| ?(?:ms|us|GiB|tokens/s)\b")


class Claim(NamedTuple):
    """A number of a page. `text` is its paragraph, or its row and the head of its table."""

    page: str
    number: str
    text: str
    reports: tuple[Path, ...]


class Line(NamedTuple):
    report: str
    number: int
    text: str


def find_claims(page: str) -> Iterator[Claim]:
    """Yields the numbers of a page that links to reports."""
    path = ROOT / page
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    for section in re.split(r"^#+ .*$", text, flags=re.M):
        of_section = _reports(path, section)
        for block in re.split(r"\n\n|\n(?=- )", section):
            if not block.strip():
                continue
            reports = _reports(path, block) or of_section
            lines = block.strip().splitlines()
            is_table = block.lstrip().startswith("|")
            for words in [f"{lines[0]} {line}" for line in lines[2:]] if is_table else [block]:
                stated = words.removeprefix(lines[0]) if is_table else words
                for number in _stated(LINK.sub("]", stated), is_measured=bool(reports)):
                    yield Claim(page, number, words, reports)


def _stated(text: str, is_measured: bool) -> Iterator[str]:
    """Yields the numbers to look up; where no report is linked, ratios only."""
    for found in STATED.finditer(text):
        of_report = is_measured and ("." in found[1] or UNIT.match(text, found.end()))
        is_version = re.search(r"(?:torch|Python|NCCL|CUDA|Llama|to) $", text[: found.start()]) and found[1][0] in "23"
        if (of_report and not is_version) or ("." in found[1] and text[found.end() :].startswith("x")):
            yield found[1]


def _reports(path: Path, text: str) -> tuple[Path, ...]:
    return tuple(dict.fromkeys((path.parent / link).resolve() for link in LINK.findall(text)))


def find_source(claim: Claim) -> Line | None:
    """Returns the line of a report that has the number and shares most words with the claim."""
    words = set(re.findall(r"[A-Za-z]{2,}|\d+", claim.text))
    digits = len(claim.number.partition(".")[2])
    value, found = float(claim.number.replace(",", "")), []
    for report in claim.reports:
        for index, line in enumerate(report.read_text().splitlines(), start=1):
            numbers = (each.replace(",", "") for each in NUMBER.findall(line))
            if any(abs(float(each) - value) <= 0.5 * 10**-digits + 1e-9 for each in numbers):
                shared = len(words & set(re.findall(r"[A-Za-z]{2,}|\d+", line)))
                found.append((shared, Line(report.name, index, line)))
    return max(found, key=lambda each: each[0])[1] if found else None


def main() -> int:
    wrong = 0
    for page in PAGES:
        for claim in find_claims(page):
            line = find_source(claim)
            wrong += line is None
            told = f"{line.report}:{line.number}: {line.text.strip()[:150]}" if line else "IN NO REPORT"
            print(f"{page}: {claim.number}: {told}" + ("" if line else f" ({' '.join(claim.text.split())[:150]})"))
    print(f"{wrong} numbers are in no report" if wrong else "each number is in its report")
    return bool(wrong)


if __name__ == "__main__":
    raise SystemExit(main())
