"""Tests that what the READMEs name exists, and that the READMEs name what exists."""

import ast
import functools
import inspect
import re
from collections import Counter
from pathlib import Path

import pytest

import fsdp2
from documents import GUIDES, PATHS, ROOT, SHARED_LINES, anchors, code_blocks, snippets, table_rows, tables_of_guides
from fsdp2.module import public_methods
from list_modules import FOLDERS as MODULE_FOLDERS
from list_modules import LIST, ROOMS, list_modules

ARCHITECTURE = (ROOT / "fsdp2" / "README.md").read_text()
FOR_USERS = "\n".join(path.read_text() for path in (ROOT / "README.md", ROOT / "examples" / "README.md", *GUIDES))
BEHAVIOURS = ROOT / "tests" / "BEHAVIOURS.md"
TEXTS = {str(path.relative_to(ROOT)): path.read_text() for path in (*PATHS, BEHAVIOURS)}
PROSE = {file: re.sub(r"```.*?```", "", text, flags=re.DOTALL) for file, text in TEXTS.items()}
REPORTS = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "benchmarks" / "results").glob("*.md")}
TESTS = {path.name: path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("test_*.py")}


def named(pattern: str, texts: dict[str, str] = TEXTS) -> list[tuple[str, str]]:
    return sorted({(file, name) for file, text in texts.items() for name in re.findall(pattern, text)})


@functools.cache
def names_in(file: Path) -> set[str]:
    """Returns tests, and functions and classes that something in the file uses: a check that nobody runs is no test."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    defined = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return {n.name for n in defined if n.name.startswith("test_") or n.name in used or n.decorator_list}


def test_tests_that_are_named_exist() -> None:
    """A file without tests counts as none; so does a function that no test runs."""
    without_headings = {file: re.sub(r"^#.*$", "", text, flags=re.M) for file, text in TEXTS.items()}
    found = named(r"\btest_\w+\.py(?:::\w+)?", without_headings)
    assert len(found) > 200
    parts = [(file, *name.partition("::")) for file, name in found]
    missing = [each for each in parts if each[1] not in TESTS or each[3] not in {"", *names_in(TESTS[each[1]])}]
    assert missing == []


def test_guides_link_the_lines_that_their_snippets_share() -> None:
    """Above the first snippet: a reader of one guide alone would get a NameError."""
    with_snippets = [path for path in GUIDES if code_blocks(path)]
    assert [each.name for each in with_snippets if SHARED_LINES not in each.read_text().split("```python")[0]] == []


def test_each_behaviour_has_a_test_or_a_reason() -> None:
    rows = [row for rows in table_rows(BEHAVIOURS).values() for row in rows]
    assert len(rows) > 90
    named = re.compile(r"`(?:unit|trace|ranks|cuda)/test_\w+\.py|not offered: .{20}")
    assert [row for row in rows if not row[0] or not named.search(row[1])] == []


def test_each_file_of_tests_has_tests() -> None:
    assert [name for name, path in TESTS.items() if not re.search(r"^ *def test_", path.read_text(), re.M)] == []


def test_files_that_are_named_exist() -> None:
    found = named(r"(?<![\w./-])(?:examples|benchmarks|tests)/[a-z0-9_./-]+\.\w+")
    assert len(found) > 20
    folders = {file: (ROOT, (ROOT / file).parent) for file in TEXTS}
    assert [each for each in found if not any((folder / each[1]).is_file() for folder in folders[each[0]])] == []


@pytest.mark.parametrize(("file", "link"), named(r"\]\(([^)]+)\)", PROSE | REPORTS))
def test_a_link_leads_somewhere(file: str, link: str) -> None:
    name, _, anchor = link.partition("#")
    assert not link.startswith("http"), "a link that no test follows"
    target = ((ROOT / file).parent / name).resolve() if name else ROOT / file
    assert target.exists()
    if anchor:
        assert anchor in anchors(target)


def test_the_list_of_guides_has_every_page() -> None:
    """In lines that examples/site/conf.py makes the navigation of."""
    listed = re.findall(r"^- \[[^\]]+\]\(guides/([\w-]+\.md)\)", TEXTS["examples/README.md"], re.M)
    assert {*listed} == {path.name for path in GUIDES}


def test_headings_of_snippets_differ() -> None:
    """Tests find snippets by the heading above them. `tables_of_guides` asserts the same of tables."""
    found = {(block.heading, block.file) for block in snippets()}
    assert sorted(heading for heading, _ in found) == sorted({heading for heading, _ in found})
    assert tables_of_guides()


def test_tables_for_users_name_no_tests() -> None:
    rows = [line for line in FOR_USERS.splitlines() if line.startswith("|")]
    assert [row for row in rows if re.search(r"\btest_\w+", row)] == []


def test_the_public_api_is_small() -> None:
    assert len(TEXTS["README.md"].splitlines()) < 200


def test_outcomes_of_situations_agree() -> None:
    """In README.md, in words; in tests/README.md; and in the newest report, which both name."""
    report = max((ROOT / "benchmarks" / "results").glob("*-situations.md"))
    rows = next(iter(table_rows(report).values()))
    outcomes = {row[0]: [int(cell) for cell in row[1:6]] for row in rows[:2]}
    tested = {row[0]: row[1:6] for row in table_rows(ROOT / "tests" / "README.md")["Tests"] if len(row) == 6}
    names = {"fsdp2": "fsdp2", "torch": "torch 2.13"}
    assert outcomes == {name: [*map(int, tested[title])] for name, title in names.items()}
    (exact, loud, *_), theirs = outcomes.values()
    pairs = Counter((ours, torchs) for _, ours, torchs in rows[2:])
    silent, warned = ({ours: pairs[ours, kind] for ours in ("EXACT", "LOUD")} for kind in ("SILENT", "SILENT (warned)"))
    assert sum(silent.values()) + sum(warned.values()) == theirs[3]
    text = " ".join(TEXTS["README.md"].split())
    assert f"a list of {exact + loud} known traps" in text
    assert f"fsdp2 trains {exact} of them exactly, and refuses {loud}" in text
    has = f"torch 2.13's FSDP2 has all functions for {sum(theirs)}"
    assert f"{has}: it trains {theirs[0]} exactly; {theirs[3]} end with another result and no error" in text
    ours = f"fsdp2 trains {silent['EXACT'] + warned['EXACT']} and refuses {silent['LOUD'] + warned['LOUD']}"
    assert f"Of these {theirs[3]}, {ours}, and torch warns in {sum(warned.values())}" in text
    assert report.name in text
    assert report.name in TEXTS["tests/README.md"]


def test_ci_runs_the_command_of_the_readme() -> None:
    """Word for word: a reader who copies it gets what CI has tried."""
    (command,) = (block.source for block in code_blocks(ROOT / "README.md", "") if "pytest" in block.source)
    assert command in (ROOT / ".ci" / "run").read_text()


def test_public_functions_are_named() -> None:
    arguments = [*inspect.signature(fsdp2.fully_shard).parameters]
    names = {*fsdp2.__all__, *public_methods(), *arguments}
    assert sorted(name for name in names if not re.search(rf"\b{name}\b", FOR_USERS)) == []


def rows_below(heading: str) -> list[list[str]]:
    """Returns the cells of each row of the table in the architecture's README that has this heading."""
    table = ARCHITECTURE.partition(f"| {heading} |")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in table.splitlines()[2:]]


def files_of(folder: str) -> dict[str, Path]:
    """Returns the Python files of a folder of the package (`fsdp2`: those at the top), by their paths in it."""
    top = ROOT / "fsdp2"
    paths = top.glob("*.py") if folder == "fsdp2" else (top / folder).rglob("*.py")
    return {path.relative_to(top if folder == "fsdp2" else top / folder).as_posix(): path for path in paths}


def test_the_list_of_modules_is_of_their_docstrings() -> None:
    """`python tests/list_modules.py` makes it."""
    assert LIST.read_text() == list_modules()
    assert {path.parent.name for path in (ROOT / "fsdp2").glob("*/__init__.py")} == {*MODULE_FOLDERS}


def test_functions_of_the_walk_exist() -> None:
    """Those that are named as `Class.method`, or with a file behind: `function` (`file.py`)."""
    walk = ARCHITECTURE.partition("## The walk")[2].partition("\n## ")[0]
    folders = ("engine", *ROOMS)
    trees = {name: ast.parse(path.read_text()) for each in folders for name, path in files_of(each).items()}
    tops = {name: {getattr(node, "name", None): node for node in tree.body} for name, tree in trees.items()}
    classes = {name: node for top in tops.values() for name, node in top.items() if isinstance(node, ast.ClassDef)}
    for owner, method in re.findall(r"`([A-Z]\w+)\.(\w+)`", walk):
        assert method in {getattr(node, "name", None) for node in classes[owner].body}, f"{owner}.{method}"
    for name, file in re.findall(r"`([\w.]+)` \(`(\w+\.py)`\)", walk):
        own = {getattr(node, "name", None) for node in ast.walk(trees[file])}
        assert name.rpartition(".")[2] in own, f"{name} ({file})"


def test_the_glossary_is_short() -> None:
    terms = [term for term, _ in rows_below("term")]
    assert 0 < len(terms) <= 25
    assert len({*terms}) == len(terms)
