"""Runs the programs of tests/advised, each of which follows what an error advises."""

import pytest

from advised import ENTRIES
from helpers import run_checks

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("ranks", sorted({entry.ranks for entry in ENTRIES if entry.ranks}))
def test_advice_is_right_to_the_letter(ranks: int) -> None:
    run_checks(ranks, [(entry.name, entry.run) for entry in ENTRIES if entry.ranks == ranks], timeout=150)
