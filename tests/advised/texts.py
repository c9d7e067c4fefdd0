"""Finds the sentences of advice in the package's source: all strings but docstrings, with `{}` for what is put in."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parents[2] / "fsdp2"
VERBS = frozenset(
    """add apply ask assign average broadcast build call cast change checkpoint choose clear compute convert copy create
    detach differentiate distribute divide end exchange finish fix flatten freeze gather give have initialise install
    keep leave load look make materialise merge move pad pass plan prune put read register remove rename repeat replace
    reshard resize run save say set shard slice start step store take tie transpose try unshard untie use wait wrap
    write""".split()  # noqa: SIM905
)
# Sentences that begin like advice, and are none: reports of what happens.
NOT_ADVICE = ("step peak",)
# Modules whose strings are parts of tables and names.
TABLES = (
    "planning/table.py",
    "tools/timeline.py",
)
_SENTENCES = re.compile(r"(?<=[.?!])\s+(?=[A-Z`{]|set_)")
# A verb at the beginning of a sentence, perhaps behind "On every rank, "; and one behind a colon or semicolon, perhaps
# with a condition between them.
_FIRST = re.compile(r"\s*(?:(?:On|If|After|Where|To|With|For|Else)\b[^.;]*?, (?:or |then )?)?([A-Za-z]+(?:-[a-z]+)*)\b")
_LATER = re.compile(r"[;:] (?:if [^.;:]*?, |or |else |then )?([a-z]+)\b")


class Sentence(NamedTuple):
    """Is one sentence of `whole`, from `start` on."""

    text: str
    file: str
    line: int
    whole: str
    start: int

    def is_claimed(self, claim: str) -> bool:
        """Returns True if a part of the whole text that overlaps the sentence is what `claim` says."""
        pattern = ".*?".join(map(re.escape, claim.split("{}")))
        spans = (match.span() for match in re.finditer(pattern, self.whole, re.DOTALL))
        return any(start < self.start + len(self.text) and end > self.start for start, end in spans)


def sentences() -> Iterator[Sentence]:
    """Yields each sentence of advice in the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        if file not in TABLES:
            for line, text in strings_in(path.read_text()):
                start = 0
                for sentence in _SENTENCES.split(text):
                    start = text.index(sentence, start)
                    if is_advice(sentence):
                        yield Sentence(sentence, file, line, text, start)
                    start += len(sentence)


def strings_in(source: str) -> Iterator[tuple[int, str]]:
    """Yields (line, text) of the strings in a module, without docstrings and the formats of f-strings."""
    tree = ast.parse(source)
    left: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            left.add(id(node.value))
        elif isinstance(node, ast.JoinedStr):
            for value in node.values:
                left.add(id(value))
                if isinstance(value, ast.FormattedValue) and value.format_spec is not None:
                    left.update(map(id, ast.walk(value.format_spec)))
    for node in ast.walk(tree):
        if id(node) in left:
            continue
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(each.value if isinstance(each, ast.Constant) else "{}" for each in node.values)  # type: ignore[misc]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def is_advice(sentence: str) -> bool:
    """Returns True if a sentence, or a clause of it, begins with a verb that says what to do."""
    if " " not in sentence.strip() or sentence.strip().startswith(NOT_ADVICE):
        return False
    first = _FIRST.match(sentence)
    starts = first is not None and first[1].lower() in VERBS and (first[1][0].isupper() or first.start(1) > 1)
    return starts or any(match[1] in VERBS for match in _LATER.finditer(sentence))
