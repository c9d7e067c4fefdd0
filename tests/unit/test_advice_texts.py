"""Tests that each sentence of advice in the package has a program that follows it (tests/advised)."""

import pytest

from advised import ELSEWHERE, ENTRIES
from advised.registry import Entry, is_part
from advised.texts import is_advice, sentences, strings_in

TESTS = __import__("pathlib").Path(__file__).resolve().parents[1]


def test_each_sentence_is_followed_by_a_program() -> None:
    claims = [claim for entry in ENTRIES for claim in entry.claims] + [*ELSEWHERE]
    alone = [s for s in sentences() if not any(s.is_claimed(claim) for claim in claims)]
    assert not alone, "no program of tests/advised follows:\n" + "\n".join(f"{s.file}:{s.line}: {s.text}" for s in alone)
