"""Reads the Markdown files of the repository: code blocks and tables, each under its heading."""

import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("examples", "fsdp2", "benchmarks", "tests")
GUIDES = sorted((ROOT / "examples" / "guides").glob("*.md"))
SHARED = ROOT / "examples" / "README.md"
SHARED_LINES = "../README.md#lines-that-all-snippets-share"
PATHS = [
    ROOT / "README.md",
    *(ROOT / folder / "README.md" for folder in FOLDERS),
    *GUIDES,
    ROOT / "fsdp2" / "ARCHITECTURE.md",
    ROOT / "benchmarks" / "PROTOCOL.md",
]


class Code(NamedTuple):
    """Is a fenced block. `line`: the line of the file where the code begins, so that tracebacks lead there."""

    heading: str
    language: str
    source: str
    file: str
    line: int

    def compiled(self) -> object:
        return compile("\n" * (self.line - 1) + self.source, self.file, "exec")


CLIENTS = ("transformers", "accelerate", "peft", "trl", "bitsandbytes", "lightning", "timm", "open_clip")
"""Libraries that snippets import, and that tests/clients has."""


def results() -> dict[str, tuple[str, ...]]:
    """Returns public function -> the classes of its results, as the settings of the documentation site list them."""
    found: dict[str, tuple[str, ...]] = runpy.run_path(str(ROOT / "examples" / "site" / "conf.py"))["RESULTS"]
    return found


def clients_of(block: Code) -> set[str]:
    return set(re.findall(rf"^(?:from|import) ({'|'.join(CLIENTS)})\b", block.source, re.M))


def sections(path: Path) -> Iterator[tuple[str, int, str, bool]]:
    """Yields each line with the heading above it, its number, and True if it is in a fenced block."""
    heading, fenced = "", False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        is_fence = line.startswith("```")
        if not fenced and line.startswith("#"):
            heading = line.lstrip("# ")
        yield heading, number, line, fenced and not is_fence
        fenced ^= is_fence


def code_blocks(path: Path, language: str = "python") -> list[Code]:
    blocks: list[Code] = []
    opened = ""
    for heading, number, line, fenced in sections(path):
        if fenced:
            blocks[-1] = blocks[-1]._replace(source=f"{blocks[-1].source}{line}\n")
        elif line.startswith("```"):
            opened = "" if opened else line
            if opened:
                blocks.append(Code(heading, line[3:], "", path.name, number + 1))
    return [block for block in blocks if block.language == language]


def snippets(language: str = "python") -> list[Code]:
    """Returns the code of all guides."""
    return [block for path in GUIDES for block in code_blocks(path, language)]


def shared_lines() -> Code:
    """Returns the code after which each snippet of the guides runs."""
    (block,) = code_blocks(SHARED)
    return block


def table_rows(path: Path) -> dict[str, list[list[str]]]:
    """Returns heading -> the rows of all tables under it, cell by cell, without their heads."""
    rows: dict[str, list[list[str]]] = {}
    tables: dict[str, list[list[str]]] = {}
    for heading, _, line, fenced in sections(path):
        if line.startswith("|") and not fenced:
            tables.setdefault(heading, []).append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    for heading, lines in tables.items():
        for i, cells in enumerate(lines):
            is_rule = all(re.fullmatch(r":?-+:?", cell) for cell in cells)
            is_head = i + 1 < len(lines) and all(re.fullmatch(r":?-+:?", cell) for cell in lines[i + 1])
            if not is_rule and not is_head:
                rows.setdefault(heading, []).append(cells)
    return rows


def tables_of_guides() -> dict[str, list[list[str]]]:
    """Returns heading -> the rows of all tables under it. No two guides have the same heading above a table."""
    found: dict[str, list[list[str]]] = {}
    for path in GUIDES:
        rows = table_rows(path)
        assert not found.keys() & rows.keys(), path.name
        found |= rows
    return found


def error_messages() -> list[str]:
    """Returns the headings of the page of errors that are parts of messages."""
    headings = dict.fromkeys(heading for heading, *_ in sections(ROOT / "examples" / "guides" / "errors.md"))
    return [heading.strip("`") for heading in headings if heading.startswith("`")]


def anchors(path: Path) -> set[str]:
    """Returns the anchors to which links may point, as GitHub names headings."""
    headings = {heading for heading, *_ in sections(path) if heading}
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
