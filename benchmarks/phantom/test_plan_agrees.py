"""Tests that `fsdp2.plan` takes the setting for the best that is the fastest in the timeline of recorded calls.

Both are models with the same prices; no collective was measured on a GPU. At night only: it records the steps of all
cases on the phantom.
"""

from pathlib import Path

import pytest

from benchmarks.phantom import agree, install
from helpers import NIGHTLY

pytestmark = [
    pytest.mark.skipif(not NIGHTLY, reason="it fetches torch's CUDA build: run with FSDP2_NIGHTLY=1"),
    pytest.mark.timeout(1500),
]


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        install.install()
    except install.UnavailableError as error:
        pytest.skip(f"there is no phantom GPU here: {error}")
    out = tmp_path_factory.mktemp("recordings")
    agree.record(out, agree.CASES)
    return out


@pytest.mark.parametrize("case", agree.CASES, ids=lambda case: case.name)
def test_the_star_is_the_fastest_in_the_timeline(case: agree.Case, recordings: Path) -> None:
    """And both see the same launches, and no setting's time, in that of the default, differs by more than 15 %."""
    found = agree.compare(recordings, case)
    assert found.agrees, agree.table([found])
    off = {setting: found.off_by(setting) for setting in case.settings}
    assert all(1 / agree.SIMILAR < each < agree.SIMILAR for each in off.values()), agree.table([found])
    assert all(predicted == recorded for predicted, recorded in found.launches.values()), found.launches
