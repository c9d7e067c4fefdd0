"""Tests that each sentence of advice in the package has a program that follows it (tests/situations, tests/advised)."""

import ast
from pathlib import Path

import pytest

from advised import ELSEWHERE, ENTRIES
from advised.registry import Entry, compared, heard, refused, same
from advised.texts import is_advice, sentences, strings_in
from outcomes import is_part
from situations import SITUATIONS

ROOT = Path(__file__).resolve().parents[2]
CLAIMS = [claim for entry in ENTRIES for claim in entry.claims] + [*ELSEWHERE]
CLAIMS += [claim for situation in SITUATIONS for claim in situation.advises]
SENTENCES = [*sentences()]


def test_each_sentence_is_followed_by_a_program() -> None:
    alone = [each for each in SENTENCES if not any(each.is_claimed(claim) for claim in CLAIMS)]
    text = "\n".join(f"{each.file}:{each.line}: {each.text}" for each in alone)
    assert not alone, f"no program of tests/situations or tests/advised follows:\n{text}"


def test_each_claim_is_of_a_sentence() -> None:
    """The texts of the package, and no others: a claim that is out of date would hold nothing."""
    texts = [text for path in (ROOT / "fsdp2").rglob("*.py") for _, text in strings_in(path.read_text())]
    strange = [claim for claim in CLAIMS if not any(is_part(claim, text) for text in texts)]
    assert not strange, f"no text of fsdp2 has these: {strange}"


@pytest.mark.parametrize("place", sorted({*ELSEWHERE.values()}))
def test_programs_that_stand_elsewhere_are_there(place: str) -> None:
    path, name = place.split("::")
    functions = {node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if hasattr(node, "name")}
    assert name in functions


@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if not entry.ranks], ids=lambda entry: entry.name)
def test_advice_that_needs_no_ranks(entry: Entry) -> None:
    entry.run()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("expected a bool, got 3", False),
        ("Call step() first.", True),
        ("On every rank, call step() first.", True),
        ("If ranks differ, call step() first.", True),
        ("names: got 3; pass all of them", True),
        ("it is uneven: if it matters, pad it", True),
        ("The step was left out.", False),
        ("Calls of a module", False),
    ],
)
def test_what_is_advice(text: str, expected: bool) -> None:
    assert is_advice(text) == expected


def test_strings_of_a_module() -> None:
    source = '"""No."""\ndef f(x):\n    "no"\n    raise ValueError(f"{x:>3}: Call g() " "twice. Or not." + "Use h.")\n'
    assert [text for _, text in strings_in(source)] == ["{}: Call g() twice. Or not.", "Use h."]


def test_programs_that_prove_nothing_fail() -> None:
    import torch

    def follows_another() -> None:
        refused(lambda: int("x"))
        same(torch.ones(1), torch.ones(1))

    def compares_nothing() -> None:
        refused(lambda: int("Call it"))

    with pytest.raises(AssertionError, match=r"expected .*Call it"):
        Entry(follows_another, ("Call it",), 0).run()
    with pytest.raises(AssertionError, match="compared nothing"):
        Entry(compares_nothing, ("Call it",), 0).run()
    heard.clear()
    compared.clear()
